"""Latency against throughput as an SVG: two panels, TTFT and TPOT, each with P50 and P99, a mark a load.

Writes the picture itself, so that no drawing library is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from octavo.bench.report import Point

_WIDTH, _HEIGHT = 460, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 20, 44, 48
_NUM_TICKS = 5
_SERIES = (("p50", "#1b6ca8"), ("p99", "#c8553d"))
_STYLE = "text{font:12px sans-serif;fill:#333}.title{font-size:14px;font-weight:bold}.note{font-size:10px;fill:#666}"


def svg(points: Sequence[Point], title: str) -> str:
    """The picture. Raises ValueError where there is no point."""
    if not points:
        raise ValueError("there is no point to draw")
    panels = "".join(
        f'<g transform="translate({index * _WIDTH},24)">{_panel(points, name, key)}</g>'
        for index, (name, key) in enumerate((("TTFT", "ttft_ms"), ("TPOT", "tpot_ms")))
    )
    width, height = 2 * _WIDTH, _HEIGHT + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"<style>{_STYLE}</style><rect width='{width}' height='{height}' fill='white'/>"
        f'<text class="title" x="12" y="20">{escape(title)}</text>{panels}</svg>\n'
    )


def _panel(points: Sequence[Point], name: str, key: str) -> str:
    xs = [point.mean("output_tokens_per_s") or 0.0 for point in points]
    curves = {share: [point.mean(f"{key}.{share}") or 0.0 for point in points] for share, _ in _SERIES}
    x_top, y_top = nice_top(max(xs)), nice_top(max(max(values) for values in curves.values()))

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (_WIDTH - _LEFT - _RIGHT) * x / x_top
        return across, _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * y / y_top

    parts = [_axes(x_top, y_top, place(0, 0), place(x_top, y_top))]
    for row, (share, colour) in enumerate(_SERIES):
        marks = [place(x, y) for x, y in zip(xs, curves[share], strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in marks)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for point, (x, y) in zip(points, marks, strict=True):
            label = f"{point.load}: {name} {share}"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"><title>{label}</title></circle>')
            if row == 0:
                parts.append(f'<text class="note" x="{x + 5:.1f}" y="{y + 12:.1f}">{escape(str(point.load))}</text>')
        parts.append(f'<text x="{_LEFT + 60 * row}" y="30" style="fill:{colour}">{name} {share}</text>')
    return "".join(parts)


def _axes(x_top: float, y_top: float, origin: tuple[float, float], end: tuple[float, float]) -> str:
    (left, bottom), (right, top) = origin, end
    parts = [f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#333"/>']
    for tick in range(_NUM_TICKS + 1):
        share = tick / _NUM_TICKS
        x, y = left + (right - left) * share, bottom + (top - bottom) * share
        parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="#ddd"/>' if tick else "")
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{y_top * share:g}</text>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{x_top * share:g}</text>')
    middle = (left + right) / 2
    parts.append(f'<text x="{middle:.1f}" y="{bottom + 36}" text-anchor="middle">output tokens/s</text>')
    parts.append(f'<text x="8" y="{top - 8}">ms</text>')
    return "".join(parts)


def nice_top(value: float) -> float:
    """The least of 1, 2, 2.5, 5 times a power of ten that is not below the value; 1 for none."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= value * (1 - 1e-9))
