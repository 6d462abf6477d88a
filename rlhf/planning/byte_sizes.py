"""Formats sizes in bytes: 79.2 GiB."""


def gib(size: int) -> str:
    """Return a size in GiB, small sizes in MiB."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"
