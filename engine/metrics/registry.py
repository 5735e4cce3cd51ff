"""Metrics registry of a server: collects all series for `/metrics`.

    metrics = Metrics(backend.sessions)
    backend = LocalBackend(repository, served, observers=[metrics], metrics=metrics.render)

Every ended request is recorded (a few microseconds each). Queues, memory and workers are read from the open sessions at
each scrape. The registry is not shared with other libraries, nor with a second server of the same process.

The text is written here, in Prometheus format 0.0.4: a scrape shares the interpreter with the runtime, and this writer
is ten times as fast as that of prometheus_client.
"""

from __future__ import annotations

import logging
import platform
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from weftline.engine.metrics import series, snapshots
from weftline.engine.metrics.gpus import GpuSampler
from weftline.engine.metrics.requests import Histogram, RequestMetrics, Sample
from weftline.engine.metrics.series import Series
from weftline.engine.metrics.snapshots import StatsSource, usage_of
from weftline.engine.serving.backend import Record

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_log = logging.getLogger("weftline.metrics")


class Metrics:
    """Request observer and renderer of `/metrics`. Thread-safe.

    sessions: returns the open sessions by model; called at each scrape.
    callers:  names of the token file, with a series each.
    ingress:  returns the pids of the ingress processes by name; called at each scrape.
    log_dropped: returns the dropped lines of the log of each process by name, likewise.
    version:  of Weftline, for `weftline_build_info`.
    """

    content_type = CONTENT_TYPE

    def __init__(
        self,
        sessions: Callable[[], Mapping[str, StatsSource]],
        *,
        callers: Collection[str] = (),
        ingress: Callable[[], Mapping[str, int]] = dict,
        log_dropped: Callable[[], Mapping[str, int]] = dict,
        version: str = "",
    ) -> None:
        self._sessions = sessions
        self._ingress = ingress
        self._log_dropped = log_dropped
        self._version = version
        self._lock = threading.Lock()
        self._requests = RequestMetrics(callers)
        self._gpus = GpuSampler()
        self._process = CollectorRegistry(auto_describe=False)  # of this process alone
        ProcessCollector(registry=self._process)

    def __call__(self, record: Record) -> None:
        """Record an ended request."""
        with self._lock:
            self._requests.take(record)

    def render(self) -> bytes:
        """Return all series in Prometheus' text format, of type `content_type`."""
        return exposition(series.ALL, self._samples()).encode() + generate_latest(self._process)

    def _samples(self) -> list[Sample]:
        out: list[Sample] = [(series.BUILD, (self._version, platform.python_version()), 1.0)]
        with self._lock:
            out += self._requests.samples()
        shown = snapshots.Shown()
        for model, session in sorted(self._sessions().items()):
            try:
                out += list(snapshots.samples(model, session, usage_of, shown))
            except Exception:
                _log.exception("cannot read the metrics of model %s; this scrape lacks them", model)
        out += snapshots.ingress_samples(self._ingress(), usage_of)
        out += [(series.LOG_DROPPED, (process,), lines) for process, lines in self._log_dropped().items()]
        try:
            out += list(snapshots.gpu_samples(self._gpus.gpus(), self._sessions()))
        except Exception:
            _log.exception("cannot read the metrics of GPUs; this scrape lacks them")
        return out


_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def exposition(table: Sequence[Series], samples: Iterable[Sample]) -> str:
    """Return the series of the table that have samples, in its order."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample[0].name, []).append(sample)
    return "".join(line for one in table if one.name in found for line in _series(one, found[one.name]))


def _series(one: Series, samples: Sequence[Sample]) -> Iterator[str]:
    yield f"# HELP {one.name} {one.about}\n# TYPE {one.name} {one.kind}\n"
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
