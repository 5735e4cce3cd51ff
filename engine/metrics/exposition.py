"""Text exposition of metrics: Prometheus format 0.0.4 and OpenMetrics 1.0.

Replaces the writer of prometheus_client: a scrape shares the interpreter with the runtime, and this writer is ten times
as fast. That one also changes names with a colon, such as vLLM's, in OpenMetrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from weftline.engine.metrics.histogram import Histogram
from weftline.engine.metrics.requests import Sample
from weftline.engine.metrics.series import Series

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def exposition(table: Sequence[Series], samples: Iterable[Sample], *, openmetrics: bool = False) -> str:
    """Return the series of the table that have samples, in its order; OpenMetrics without the line that ends it."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample[0].name, []).append(sample)
    return "".join(line for one in table if one.name in found for line in _series(one, found[one.name], openmetrics))


def _series(one: Series, samples: Sequence[Sample], openmetrics: bool) -> Iterator[str]:
    name = one.name.removesuffix("_total") if openmetrics and one.kind == "counter" else one.name
    yield f"# HELP {name} {one.about}\n# TYPE {name} {one.kind}\n"
    bounds = [*map(repr, one.bounds), "+Inf"]
    for _, values, value in samples:
        labels = ",".join(
            f'{label}="{written.translate(_ESCAPES)}"' for label, written in zip(one.labels, values, strict=True)
        )
        if not isinstance(value, Histogram):
            yield f"{one.name}{{{labels}}} {value}\n" if labels else f"{one.name} {value}\n"
            continue
        cumulative = value.cumulative
        for bound, count in zip(bounds, cumulative, strict=True):
            yield f'{one.name}_bucket{{{labels},le="{bound}"}} {count}\n'
        yield f"{one.name}_sum{{{labels}}} {value.sum}\n{one.name}_count{{{labels}}} {cumulative[-1]}\n"
