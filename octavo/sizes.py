"""Byte sizes as people write and read them; knows no option and no process."""

from __future__ import annotations

import math
import re

_BYTE_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_bytes(text: str) -> int:
    """Bytes from text such as `2GiB`, `500 MB` or `1073741824`.

    Raises ValueError for anything else; a bare `2G` is refused, for it is read both ways.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _BYTE_UNITS:
        raise ValueError(f"{text!r} is not a size; write a number with a unit, as in 2GiB, 500MB or 1073741824")
    num_bytes = float(match[1]) * _BYTE_UNITS[match[2].upper()]
    if math.isinf(num_bytes):
        raise ValueError("a size of so many digits is none that any machine has")
    return round(num_bytes)


def format_bytes(num_bytes: float) -> str:
    """Bytes as people read them: `1.50 GiB`."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"
