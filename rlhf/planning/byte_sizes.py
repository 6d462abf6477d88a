"""Sizes in bytes as readers of a plan see them: 79.2 GiB."""


def gib(size: int) -> str:
    """Return a size in GiB, small ones in MiB."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"
