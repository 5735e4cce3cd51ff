"""Generator of the reference page of metrics: `python -m weftline.engine.metrics.reference`.

Series come from the table that `/metrics` is written from. What attributes of spans mean is stated here; a test holds
that a span has these and no others.
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
    "process_start_time_seconds": ("gauge", "seconds", "when it started, since the epoch"),
    "process_cpu_seconds_total": ("counter", "seconds", "its processor time"),
    "process_open_fds": ("gauge", "descriptors", "its open descriptors"),
    "process_max_fds": ("gauge", "descriptors", "most that it may have"),
}
"""Of prometheus_client: (kind, unit, meaning)."""

REQUEST_SPAN: Mapping[str, str] = {
    "weftline.model": "the model, as the client named it",
    "weftline.version": "the version that answered; 0 when none did",
    "weftline.door": "`grpc`, `grpc-stream` or `http`",
    "weftline.status": "gRPC status name",
    "weftline.request_id": "the client's name for the request, if it gave one",
    "weftline.caller": "name in the token file, with tokens",
    "weftline.request_bytes": "size of the message it came in",
    "weftline.pieces": "pieces of a streamed answer",
    "weftline.steps_left_out": f"steps that are not shown: there were more than {SPANS_MAX}",
    "gen_ai.operation.name": "`generate_content` or `embeddings`; this and the following of language models only",
    "gen_ai.provider.name": "`weftline`",
    "gen_ai.request.model": "the model again",
    "gen_ai.usage.input_tokens": "tokens of the prompt",
    "gen_ai.usage.output_tokens": "tokens of the answer",
    "gen_ai.response.finish_reasons": "why the answer ended: `stop` or `length`",
    "gen_ai.latency.time_to_first_token": "of a streamed answer, in seconds",
}
STEP_SPAN: Mapping[str, str] = {
    "weftline.step": "the step",
    "weftline.outcome": "`ok`, `failed`, `lost` (its worker died, or it took too long) or `skipped`",
    "weftline.worker": "the process that ran it",
    "weftline.batch": "how many items shared the call",
    "weftline.attempt": "1, or more when it was tried again",
    "weftline.queue_seconds": "how long it had waited before the span begins",
    "weftline.batch_wait_seconds": "the part of that in which it waited for company",
    "weftline.node_seconds": "the part of the span that was spent in the node",
    "weftline.element": "of a `map:` step, which element of the list",
}

_INTRO = f"""\
# Metrics and traces

<!-- Written by `{COMMAND}`; do not edit by hand. -->

`GET /metrics` at the HTTP door answers in Prometheus' text format. A dashboard for Grafana is
[examples/deploy/grafana/weftline.json](../../examples/deploy/grafana/weftline.json).

- Units are seconds, bytes, and ratios from 0 to 1. A histogram `x` is shown as `x_bucket`, `x_sum` and `x_count`.
- Labels have values that the operator wrote, or a fixed few. Nothing that a client sends becomes a label: requests
  that name no served model count under an empty `model`.
- `model` is a pipeline or an exposed step, as clients name it.
- Counters whose meaning ends in "since it was loaded" begin again at 0 when a model is loaded again, which `rate()` and
  `increase()` know how to read. So do those of a worker that was started again.
- Requests count when they end. What is said of steps comes from the timings of those requests.

"""

_GPUS = f"""\
## GPUs

Read through NVML, at most once in {SAMPLE_S:g} s, when the figures are requested. They are of the GPUs that this
server may use (`CUDA_VISIBLE_DEVICES`). `gpu` is the number that `nvidia-smi` gives a GPU, `uuid` its UUID. Without a
driver there are none of these series, and what a GPU does not support is left out; a part of one (MIG) has no load.
What a step holds is what was measured when it was open, of its largest instance.

"""

_LLM = """\
## Language models

Names, labels and buckets are vLLM's, so that dashboards made for vLLM show this server too. `model_name` is the model
as clients name it; `engine` is the worker that runs the engine, by name. What engines count comes with their
heartbeats, once a second. The histograms are of whole requests, have no `engine`, and count requests whose pipeline
gives the llm step's `usage` out.

"""

_SPANS = f"""\
## Spans

With `otlp: http://host:4317` in the configuration, every request becomes a span of kind SERVER, and every step that it
ran one of kind INTERNAL below it. They are made when the request has ended, and sent every {SEND_EVERY_S:g} s; when a
collector is slow or gone, {QUEUE_MAX:,} wait and the others are dropped. It needs `weftline[trace]`.

A `traceparent` header (W3C Trace Context) that comes with a request makes its span a child of the caller's, and its
sampling flag decides whether it is recorded; one that is malformed is ignored. The answer carries the `traceparent` of
the request's own span. A span has the status ERROR where the server failed: UNKNOWN, DEADLINE_EXCEEDED, UNIMPLEMENTED,
INTERNAL, UNAVAILABLE, DATA_LOSS. No value of a request is in a span.

"""


def metrics_reference() -> str:
    """Return the page, in Markdown."""
    parts = [
        _INTRO,
        "## Requests\n\n" + _table(series.REQUEST_SERIES),
        "\n## Steps\n\n" + _table(series.STEP_SERIES),
        f"\nA node of your own shows figures by defining `figures()`: at most {FIGURES_MAX} finite numbers by name.\n",
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
