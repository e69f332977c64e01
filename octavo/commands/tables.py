"""Tables and counts for terminals. Knows cells, widths and plurals."""

from __future__ import annotations

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, each column as wide as its widest cell."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def counted(number: int, noun: str) -> str:
    """`1 router`, `2 routers`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
