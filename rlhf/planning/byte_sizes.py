"""Sizes in bytes as people write and read them: 80GB, 79.2 GiB."""

import re

UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
BINARY = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(text: str) -> int:
    """Bytes of `80GB`, `79.2GiB`, `512M` or a plain number. Raises ValueError for anything else, and for nothing."""
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d*)?)\s*([KMGT]?)(i?)B?\s*", text, flags=re.I)
    if found is None or (found[3] and not found[2]):
        raise ValueError(f"{text} is no size such as 80GB or 79.2GiB")
    unit = found[2].upper()
    size = int(float(found[1]) * (BINARY[unit] if found[3] else UNITS[unit]))
    if size <= 0:
        raise ValueError(f"{text} is no size such as 80GB or 79.2GiB")
    return size


def gib(size: int) -> str:
    """A size in GiB, small ones in MiB."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"
