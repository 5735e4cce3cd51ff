"""Curves as a small SVG: a few panels side by side, each with an axis from zero and one line for each curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT, MARGIN_X, MARGIN_Y = 420, 280, 64, 44
"""Of a panel, in pixels."""

COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1")


@dataclass(frozen=True, slots=True)
class Curve:
    """One line: its name, and points (x, y) with rising x."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture. `log`: x is drawn by its logarithm."""

    title: str
    x_axis: str
    y_axis: str
    curves: Sequence[Curve]
    log: bool = False


def draw(panels: Sequence[Panel]) -> str:
    """Return the SVG of panels side by side."""
    drawn = "".join(
        f'<g transform="translate({number * WIDTH} 0)">{_panel(panel)}</g>' for number, panel in enumerate(panels)
    )
    size = f'width="{WIDTH * len(panels)}" height="{HEIGHT}" viewBox="0 0 {WIDTH * len(panels)} {HEIGHT}"'
    style = 'font-family="sans-serif" font-size="11" fill="#333"'
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{ground}{drawn}</svg>\n'


def _panel(panel: Panel) -> str:
    xs = sorted({x for curve in panel.curves for x, _ in curve.points})
    y_most = _round_up(max(y for curve in panel.curves for _, y in curve.points))
    left, right, top, bottom = MARGIN_X, WIDTH - 20, MARGIN_Y, HEIGHT - MARGIN_Y

    def place_x(x: float) -> float:
        low, high, at = (math.log10(v) for v in (xs[0], xs[-1], x)) if panel.log else (0.0, xs[-1], x)
        return left + (at - low) / (high - low) * (right - left)

    def place_y(y: float) -> float:
        return bottom - y / y_most * (bottom - top)

    parts = [
        f'<text x="{left}" y="20" font-size="13" font-weight="bold">{escape(panel.title)}</text>',
        f'<text x="{(left + right) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(panel.x_axis)}</text>',
        f'<text x="14" y="{(top + bottom) / 2:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 14 {(top + bottom) / 2:.0f})">{escape(panel.y_axis)}</text>',
    ]
    for share in range(5):
        y = y_most * share / 4
        at = place_y(y)
        parts.append(f'<path d="M{left} {at:.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{y:g}</text>')
    shown_until = -math.inf
    for x in xs:
        at = place_x(x)
        if at - shown_until >= 18:
            parts.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{x:g}</text>')
            shown_until = at
    for number, curve in enumerate(panel.curves):
        colour = COLOURS[number % len(COLOURS)]
        places = [(place_x(x), place_y(y)) for x, y in curve.points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        parts.append(f'<text x="{left + 8}" y="{top + 2 + 15 * number}" fill="{colour}">{escape(curve.name)}</text>')
    return "".join(parts)


def _round_up(value: float) -> float:
    """Return the next number from `value` on that is 1, 2, 4 or 8 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 8, 10) if step * power >= value)
