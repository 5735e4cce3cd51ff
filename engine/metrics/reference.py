"""Generator of the reference page of metrics: `python -m weftline.engine.metrics.reference`.

Series come from the table that `/metrics` is written from. Attributes of spans are described here; a test compares
them with real spans.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from weftline.engine.metrics import series
from weftline.engine.metrics.gpus import SAMPLE_S
from weftline.engine.metrics.series import Series
from weftline.engine.metrics.spans import SPANS_MAX
from weftline.engine.metrics.traces import QUEUE_MAX, SEND_EVERY_S
from weftline.engine.protocol.figures import FIGURES_MAX

PAGE = Path("docs/reference/metrics.md")
COMMAND = "python -m weftline.engine.metrics.reference"

PROCESS: Mapping[str, tuple[str, str, str]] = {
    "process_virtual_memory_bytes": ("gauge", "bytes", "address space of the server's process"),
    "process_resident_memory_bytes": ("gauge", "bytes", "memory of the server's process"),
    "process_start_time_seconds": ("gauge", "seconds", "start time, since the epoch"),
    "process_cpu_seconds_total": ("counter", "seconds", "processor time of the server's process"),
    "process_open_fds": ("gauge", "descriptors", "open descriptors of the server's process"),
    "process_max_fds": ("gauge", "descriptors", "largest number of descriptors"),
}
"""Of prometheus_client: (kind, unit, meaning)."""

REQUEST_SPAN: Mapping[str, str] = {
    "weftline.model": "model name in the request",
    "weftline.version": "version that ran the request; 0 for none",
    "weftline.protocol": "`grpc`, `grpc-stream` or `http`",
    "weftline.status": "gRPC status name",
    "weftline.request_id": "request id of the client, if present",
    "weftline.caller": "caller's name in the token file, with tokens",
    "weftline.request_bytes": "size of the request message",
    "weftline.pieces": "chunks of a streamed response",
    "weftline.steps_left_out": f"number of steps without a span, above {SPANS_MAX} steps",
    "gen_ai.operation.name": "`generate_content` or `embeddings`; this and the following for language models only",
    "gen_ai.provider.name": "`weftline`",
    "gen_ai.request.model": "the same as `weftline.model`",
    "gen_ai.usage.input_tokens": "tokens of the prompt",
    "gen_ai.usage.output_tokens": "generated tokens",
    "gen_ai.response.finish_reasons": "end of generation: `stop`, `length` or `tool_calls`",
    "gen_ai.latency.time_to_first_token": "of a streamed response, in seconds",
}
STEP_SPAN: Mapping[str, str] = {
    "weftline.step": "name of the step",
    "weftline.outcome": "`ok`, `failed`, `lost` (its worker died, or it took too long) or `skipped`",
    "weftline.worker": "name of the worker process",
    "weftline.batch": "items in the batch",
    "weftline.attempt": "1, or more for a retry",
    "weftline.queue_seconds": "queue time before the span",
    "weftline.batch_wait_seconds": "part of the queue time spent waiting for a fuller batch",
    "weftline.node_seconds": "part of the span spent in the node",
    "weftline.element": "index of the list element, for a `map:` step",
}

_INTRO = f"""\
# Metrics and traces

<!-- Written by `{COMMAND}`; do not edit by hand. -->

`GET /metrics` of the HTTP server returns Prometheus' text format. A dashboard for Grafana is
[examples/deploy/grafana/weftline.json](../../examples/deploy/grafana/weftline.json).

- Units are seconds, bytes, and ratios from 0 to 1. A histogram `x` is shown as `x_bucket`, `x_sum` and `x_count`.
- Label values come from the operator's files or from a fixed list. Clients cannot add any: requests for a model that is
  not served count under an empty `model`.
- `model` is a pipeline or an exposed step, as clients name it.
- Models of a server may share an engine. Series of the engine come once, under the first of its models by name; their
  steps and workers may be those of its other models.
- Counters "since the model was loaded" reset to 0 when a model is reloaded, and counters of a worker when it is
  restarted. `rate()` and `increase()` handle resets.
- Requests count when they end. Series of steps are computed from the timings of those requests.

"""

_GPUS = f"""\
## GPUs

Read through NVML at a scrape, at most once in {SAMPLE_S:g} s, for the GPUs that this server may use
(`CUDA_VISIBLE_DEVICES`). `gpu` is the number of the GPU in `nvidia-smi`, `uuid` its UUID. Without a driver these series
are missing, as are values that a GPU does not support; a MIG device has no utilization. The memory of a step is that of
its largest instance, measured when it was open.

"""

_LLM = """\
## Language models

Names, labels and buckets are vLLM's, so that dashboards made for vLLM work here. `model_name` is the model as clients
name it; `engine` is the name of the worker that runs the engine. Counters of engines are updated once a second, with
heartbeats. The histograms are of whole requests, have no `engine`, and count requests of pipelines with the llm step's
`usage` among their outputs.

"""

_SPANS = f"""\
## Spans

With `otlp: http://host:4317` in the configuration, every request has a span of kind SERVER, with a child span of kind
INTERNAL for every step that ran. Spans are created when the request has ended, and sent every {SEND_EVERY_S:g} s. When
the collector is slow or down, {QUEUE_MAX:,} spans are queued and further ones dropped. Requires `weftline[trace]`.

With a `traceparent` header (W3C Trace Context) the span is a child of the caller's span, and the header's sampling flag
decides whether it is recorded. A malformed header is ignored. The response has the `traceparent` of the request's span.
A span has the status ERROR where the server failed: UNKNOWN, DEADLINE_EXCEEDED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE,
DATA_LOSS. No value of a request is in a span.

"""


def metrics_reference() -> str:
    """Return the page, in Markdown."""
    parts = [
        _INTRO,
        "## Requests\n\n" + _table(series.REQUEST_SERIES),
        "\n## Steps\n\n" + _table(series.STEP_SERIES),
        f"\nA node exports its own values by defining `figures()`: at most {FIGURES_MAX} finite numbers by name.\n",
        "\n## The engine\n\n" + _table(series.ENGINE_SERIES),
        "\n" + _GPUS + _table(series.GPU_SERIES),
        "\n## Processes\n\n" + _table(series.PROCESS_SERIES),
        "".join(f"| `{name}` | {kind} |  | {unit} | {about} |\n" for name, (kind, unit, about) in PROCESS.items()),
        "\n" + _LLM + _table(series.LLM_SERIES),
        "\n" + _SPANS + "### `infer MODEL`, a request\n\n" + _attributes(REQUEST_SPAN),
        "\n### Named after the step: an item of it\n\n" + _attributes(STEP_SPAN),
    ]
    return "".join(parts)


def _table(listed: Sequence[Series]) -> str:
    rows = ["| name | kind | labels | unit | meaning |", "|---|---|---|---|---|"]
    for one in listed:
        labels = ", ".join(f"`{name}`" for name in one.labels)
        rows.append(f"| `{one.name}` | {one.kind} | {labels} | {one.unit} | {one.about} |")
    return "\n".join(rows) + "\n"


def _attributes(listed: Mapping[str, str]) -> str:
    return "\n".join(_rows(listed.items())) + "\n"


def _rows(listed: Iterable[tuple[str, str]]) -> Iterable[str]:
    yield from ("| attribute | meaning |", "|---|---|")
    yield from (f"| `{name}` | {about} |" for name, about in listed)


def main() -> None:
    """Write the page under the current folder, the root of the repository."""
    if not PAGE.parent.is_dir():
        sys.exit(f"there is no folder {PAGE.parent} here; run `{COMMAND}` at the root of the repository")
    PAGE.write_text(metrics_reference(), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
