"""SVG plots of the report, drawn by matplotlib.

Equal figures produce equal bytes. Text is kept as text in the page's font, and colours are the page's variables, so
that one drawing works in light and dark mode. A plot without data is ''.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from weftline.engine.jobs.progress import BUCKETS_PER_DECADE, RatePoint, bucket_of
from weftline.engine.jobs.report.text import one_line
from weftline.errors import MissingPackage

WIDTH_IN = 5.2
"""Of every plot: 374 points, so that text of 9 points can be read on a phone."""

FONT_POINTS = 9
PANEL_IN, AXIS_IN = 0.62, 0.55
"""Height of one histogram or bar group, and of the axis below all of them."""

PANELS_MAX = 12
"""Most steps, outputs and kinds of errors in one plot; a table has them all."""

POINTS_MAX = 400
NAME_CHARS_MAX = 22

LATENCY_BUCKETS, LENGTH_BUCKETS = 2, 4
"""Buckets of the tally per bar: 10 and 5 bars a decade, as lengths are integers."""

_COLOURS = {"ink": "#0a0b01", "soft": "#0a0b02", "grid": "#0a0b03", "one": "#0a0b04", "two": "#0a0b05"}
"""Placeholders of the page's colour variables."""

_STYLE = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": FONT_POINTS,
    "text.parse_math": False, "text.usetex": False, "axes.titlesize": FONT_POINTS, "axes.linewidth": 0.8,
    "text.color": _COLOURS["ink"], "axes.labelcolor": _COLOURS["ink"], "axes.edgecolor": _COLOURS["soft"],
    "xtick.color": _COLOURS["soft"], "ytick.color": _COLOURS["soft"], "grid.color": _COLOURS["grid"],
    "xtick.labelcolor": _COLOURS["ink"], "ytick.labelcolor": _COLOURS["ink"],
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "axes.formatter.useoffset": False, "axes.formatter.limits": (-4, 9), "grid.linewidth": 0.7,
}  # fmt: skip

Histogram = Mapping[int, int]
"""Counts by the tally's buckets."""


def throughput(rates: Sequence[RatePoint]) -> str:
    """Return rows/s over the time of this run."""
    points = _thinned([one for one in rates if math.isfinite(one.elapsed_s) and math.isfinite(one.rows_per_s)])
    if not points:
        return ""
    unit, size_s = _time_unit(points[-1].elapsed_s)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        x, y = [one.elapsed_s / size_s for one in points], [one.rows_per_s for one in points]
        axes.fill_between(x, y, color=_COLOURS["one"], alpha=0.18, linewidth=0)
        axes.plot(x, y, color=_COLOURS["one"], linewidth=1.6, marker="o" if len(points) < 3 else "")
        axes.set_xlabel(f"time ({unit})")
        axes.set_ylabel("rows/s")
        axes.set_ylim(0, max(*y, 1e-9) * 1.08)
        axes.set_xlim(0, max(*x, 1e-9) * 1.02)
        axes.grid(axis="y")

    return _svg("throughput", 2.3, draw)


def latencies(steps: Mapping[str, Histogram]) -> str:
    """Return a histogram per step of the time from dispatch to result."""
    return _histograms("latency", steps, "time of an item (ms)", LATENCY_BUCKETS)


def lengths(outputs: Mapping[str, Histogram]) -> str:
    """Return a histogram per text output of its length, without empty texts."""
    empty = bucket_of(0)
    entries = {name: {bucket: n for bucket, n in counts.items() if bucket > empty} for name, counts in outputs.items()}
    return _histograms("lengths", entries, "length (characters)", LENGTH_BUCKETS)


def utilisation(steps: Sequence[tuple[str, float, float]]) -> str:
    """Return a bar for each (step, utilisation, busy seconds)."""
    entries = [(name, share, busy_s) for name, share, busy_s in steps if math.isfinite(share)]
    entries = sorted(entries, key=lambda one: -one[1])[:PANELS_MAX]
    texts = [f"{share:.0%}".replace("%", " %") + f", {busy_s:.3g} s" for _, share, busy_s in entries]
    return _bars("utilisation", [one[0] for one in entries], [one[1] * 100 for one in entries], texts, 100.0,
                 "utilisation of an instance (%)")  # fmt: skip


def errors(kinds: Sequence[tuple[str, int]]) -> str:
    """Return a bar for each (name of a kind, error rows)."""
    entries = kinds[:PANELS_MAX]
    values = [float(count) for _, count in entries]
    return _bars("errors", [one[0] for one in entries], values, [str(one[1]) for one in entries], 1.0, "error rows")


def _histograms(name: str, all_counts: Mapping[str, Histogram], label: str, together: int) -> str:
    entries = {one: _merged(counts, together) for one, counts in all_counts.items() if any(counts.values())}
    entries = dict(list(entries.items())[:PANELS_MAX])
    if not entries:
        return ""
    low = min(min(counts) for counts in entries.values()) - 1
    high = max(max(counts) for counts in entries.values())
    pad = max(0, 6 - (high - low)) / 2
    per_decade = BUCKETS_PER_DECADE / together

    def draw(figure: Any) -> None:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

        panels = figure.subplots(len(entries), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (one, counts) in zip(panels, entries.items(), strict=True):
            edges = [10 ** (bucket / per_decade) for bucket in range(low, high + 1)]
            values = [counts.get(bucket, 0) for bucket in range(low + 1, high + 1)]
            axes.stairs(values, edges, fill=True, color=_COLOURS["one"])
            axes.set_xscale("log")
            axes.set_yticks([])
            axes.spines["left"].set_visible(False)
            axes.grid(axis="x")
            items = sum(values)
            axes.set_title(f"{_name(one)}  ({items})", loc="left", pad=2)
        panels[-1].set_xlim(10 ** ((low - pad - 0.3) / per_decade), 10 ** ((high + pad + 0.3) / per_decade))
        panels[-1].set_xlabel(label)
        decades = (high - low + 2 * pad) / per_decade
        subs = (1.0,) if decades > 3 else (1.0, 2.0, 5.0)
        panels[-1].xaxis.set_major_locator(LogLocator(subs=subs, numticks=9))
        panels[-1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panels[-1].xaxis.set_minor_locator(NullLocator())

    return _svg(name, AXIS_IN + PANEL_IN * max(len(entries), 2) * 1.15, draw)


def _bars(
    name: str, names: Sequence[str], values: Sequence[float], texts: Sequence[str], at_least: float, label: str
) -> str:
    if not names:
        return ""

    def draw(figure: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        places = range(len(names))
        axes.barh(places, values, color=_COLOURS["one"], height=0.6)
        axes.set_yticks(places, [_name(one) for one in names])
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        most = max(*values, at_least)
        axes.set_xlim(0, most)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.grid(axis="x")
        for place, value, text in zip(places, values, texts, strict=True):
            inside = value > 0.6 * most
            axes.annotate(text, (value, place), (-4 if inside else 4, 0), textcoords="offset points", va="center",
                          ha="right" if inside else "left", color="white" if inside else _COLOURS["ink"])  # fmt: skip

    return _svg(name, AXIS_IN + 0.27 * max(len(names), 2), draw)


def _svg(name: str, height_in: float, draw: Callable[[Any], None]) -> str:
    """Return a drawing as an svg element whose ids begin with `name`; MissingPackage without matplotlib."""
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingPackage("matplotlib", "batch") from None
    with (
        matplotlib.rc_context({**matplotlib.rcParamsDefault, **_STYLE, "svg.hashsalt": name}),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", UserWarning)  # glyphs missing in its font exist in the page's fonts
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        FigureCanvasSVG(figure)
        figure.patch.set_visible(False)
        draw(figure)
        for axes in figure.axes:
            axes.patch.set_visible(False)
        text = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=nothing)
    return _for_page(text.getvalue(), name)


def _for_page(svg: str, name: str) -> str:
    """Return the svg element with the page's colours and font, and unique ids."""
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r'\b(id="|href="#|url\(#)', lambda match: f"{match[1]}{name}-", svg)
    svg = re.sub(r'^<svg([^>]*?) width="[^"]*"', r"<svg\1", svg, count=1)
    svg = re.sub(r'^<svg([^>]*?) height="[^"]*"', r"<svg\1", svg, count=1)
    for variable, colour in _COLOURS.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return svg.replace("'DejaVu Sans'", "var(--font)")


def _merged(counts: Histogram, together: int) -> dict[int, int]:
    """Merge `together` buckets into one; bucket b holds values up to 10 ** (b * together / per decade)."""
    merged: dict[int, int] = {}
    for bucket, count in counts.items():
        wide = -(-bucket // together)
        merged[wide] = merged.get(wide, 0) + count
    return merged


def _thinned(points: Sequence[RatePoint]) -> list[RatePoint]:
    """Return at most POINTS_MAX points, neighbours as their mean."""
    size = max(1, math.ceil(len(points) / POINTS_MAX))
    groups = [[one for _, one in group] for _, group in groupby(enumerate(points), lambda pair: pair[0] // size)]
    return [
        RatePoint(group[-1].elapsed_s, sum(one.rows_per_s for one in group) / len(group)) if size > 1 else group[0]
        for group in groups
    ]


def _time_unit(seconds: float) -> tuple[str, float]:
    return ("s", 1.0) if seconds < 300 else ("min", 60.0) if seconds < 3 * 3600 else ("h", 3600.0)


def _name(text: str) -> str:
    """Shorten a name for an axis to its start and end."""
    half = NAME_CHARS_MAX // 2
    short = text if len(text) <= NAME_CHARS_MAX else f"{text[:half]}…{text[-half:]}"
    return one_line(short, 10 * NAME_CHARS_MAX)
