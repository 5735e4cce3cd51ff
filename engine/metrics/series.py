"""Table of all metric series: name, kind, labels, unit and meaning.

Base units only: seconds, bytes, ratios from 0 to 1. Label values come from the operator's files (models, steps,
workers, devices, names of the token file) or from a fixed list; clients cannot add any. Series of language models have
vLLM's names, labels and buckets, so that dashboards made for vLLM work here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ITEMS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)

# As vLLM has them (vllm/v1/metrics/loggers.py), so that quantiles of both can be compared.
FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
TOKEN_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
ANSWER_SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


@dataclass(frozen=True, slots=True)
class Series:
    """One series of the table.

    name:   as it is shown; a counter's ends in `_total`.
    unit:   of its values, in words.
    about:  help text: a phrase, and a remark after a semicolon.
    bounds: of a histogram's buckets, without the infinite one.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    unit: str
    about: str
    bounds: tuple[float, ...] = ()


def _counter(name: str, labels: str, unit: str, about: str) -> Series:
    return Series(name, "counter", tuple(labels.split()), unit, about)


def _gauge(name: str, labels: str, unit: str, about: str) -> Series:
    return Series(name, "gauge", tuple(labels.split()), unit, about)


def _histogram(name: str, labels: str, unit: str, about: str, bounds: tuple[float, ...]) -> Series:
    return Series(name, "histogram", tuple(labels.split()), unit, about, bounds)


BUILD = _gauge("weftline_build_info", "version python", "", "always 1; the labels are the versions")
MODEL_READY = _gauge("weftline_model_ready", "model", "0 or 1", "1 if every step of the model is ready")
MODEL_VERSION = _gauge("weftline_model_version", "model", "", "number of the serving version")

REQUESTS = _counter("weftline_requests_total", "model protocol status", "requests",
    "ended requests by gRPC status name; `model` is empty for a model that is not served")  # fmt: skip
DURATION = _histogram("weftline_request_duration_seconds", "model outcome", "seconds",
    "time from a request's arrival to its outputs; `outcome` is `ok` or `failed`", SECONDS)  # fmt: skip
FIRST_PIECE = _histogram("weftline_request_first_piece_seconds", "model", "seconds",
    "time from a request's arrival to the first chunk of a streamed response", SECONDS)  # fmt: skip
PIECES = _counter("weftline_request_pieces_total", "model", "chunks", "chunks of streamed responses")
RECEIVED = _counter("weftline_request_received_bytes_total", "model", "bytes", "bytes of request messages")
CALLERS = _counter("weftline_caller_requests_total", "caller status", "requests",
    "ended requests by the caller's name in the token file")  # fmt: skip
IN_FLIGHT = _gauge("weftline_requests_in_flight", "model", "requests", "admitted requests that have not ended")
SLO_LATENCY = _gauge("weftline_slo_latency_objective_seconds", "model", "seconds",
    "`slo.latency_p99_ms`: objective for the p99 latency")  # fmt: skip
SLO_P99 = _gauge("weftline_slo_latency_recent_seconds", "model", "seconds",
    "p99 latency of the last 1000 responses; only for models with an objective")  # fmt: skip
SLO_ANSWERS = _counter("weftline_slo_answers_total", "model", "requests",
    "responses that were compared with the objective; since the model was loaded")  # fmt: skip
SLO_OVER = _counter("weftline_slo_answers_over_total", "model", "requests",
    "responses that took longer than the objective; since the model was loaded")  # fmt: skip

STEP_ITEMS = _counter("weftline_step_items_total", "model step outcome", "items",
    "ended items of a step; `outcome` is `ok`, `failed`, `lost` or `skipped`")  # fmt: skip
STEP_QUEUE = _histogram("weftline_step_queue_seconds", "model step outcome", "seconds",
    "queue time: from complete inputs to dispatch", SECONDS)  # fmt: skip
STEP_RUN = _histogram("weftline_step_run_seconds", "model step outcome", "seconds",
    "run time: from dispatch to the result, including messages", SECONDS)  # fmt: skip
STEP_NODE = _histogram("weftline_step_node_seconds", "model step outcome", "seconds",
    "duration of the node's call on the item's batch", SECONDS)  # fmt: skip
STEP_BATCH = _histogram("weftline_step_batch_items", "model step", "items",
    "batch size of an item's call; observed once for each item, not for each call", ITEMS)  # fmt: skip
STEP_CALLS = _counter("weftline_step_calls_total", "model step", "calls",
    "calls of a step, as the sum of 1 / batch size over items; items / calls is the mean batch size")  # fmt: skip
STEP_WAITING = _gauge("weftline_step_queue_depth", "model step", "items", "items that wait in the step's queue")
STEP_ITEMS_MAX = _gauge("weftline_step_batch_items_max", "model step", "items",
    "current largest batch; less than `batch.items_max` after an out-of-memory error")  # fmt: skip
STEP_OUT_OF_MEMORY = _counter("weftline_step_out_of_memory_total", "model step", "dispatches",
    "batches that failed with an out-of-memory error; since the model was loaded")  # fmt: skip
STEP_DEPLOYMENT = _gauge("weftline_step_deployment_info", "model step deployment", "",
    "always 1; steps with one `deployment` share what is loaded, and its queue, workers and figures come once: for the "
    "first of them, whose `model.step` this is")  # fmt: skip
STEP_WORKERS = _gauge("weftline_step_workers", "model step", "workers", "configured instances of a step")
STEP_WORKERS_READY = _gauge("weftline_step_workers_ready", "model step", "workers", "instances that are ready")
STEP_WORKERS_ASLEEP = _gauge("weftline_step_workers_asleep", "model step", "workers", "instances that sleep")
STEP_SLEPT = _counter(
    "weftline_step_sleeps_total", "model step", "times", "times a step went to sleep; since the model was loaded"
)
STEP_WOKEN = _counter(
    "weftline_step_wakes_total", "model step", "times", "times a step woke up; since the model was loaded"
)
STEP_WAKE = _gauge("weftline_step_wake_seconds", "model step", "seconds",
    "duration of the last wake-up, until an instance was ready")  # fmt: skip
DEVICE_LEFT = _gauge("weftline_device_left_bytes", "model device", "bytes",
    "memory of a GPU that was left, without the reserve, when all steps were open")  # fmt: skip
DEVICE_WORKER = _gauge("weftline_device_worker_bytes", "model device worker", "bytes",
    "GPU memory of a worker when its steps were open, without its context")  # fmt: skip
DEVICE_STEP = _gauge("weftline_device_step_bytes", "model device step moment", "bytes",
    "GPU memory of a step's instance; `moment` is `open` or `peak`")  # fmt: skip

GPU_INFO = _gauge("weftline_gpu_info", "gpu uuid device name", "",
    "always 1; `device` is the GPU's name in pipelines")  # fmt: skip
GPU_BUSY = _gauge("weftline_gpu_utilization_ratio", "gpu uuid", "ratio",
    "share of the driver's last sampling period in which a kernel ran")  # fmt: skip
GPU_MEMORY_BUSY = _gauge("weftline_gpu_memory_utilization_ratio", "gpu uuid", "ratio",
    "share of the same period in which memory was read or written")  # fmt: skip
GPU_TOTAL = _gauge("weftline_gpu_memory_total_bytes", "gpu uuid", "bytes", "memory of the GPU")
GPU_USED = _gauge("weftline_gpu_memory_used_bytes", "gpu uuid", "bytes", "memory in use by all processes")
GPU_PLANNED = _gauge("weftline_gpu_memory_planned_bytes", "gpu uuid model owner what", "bytes",
    "memory that the plan reserves for a step or a worker; `what` is as in weftline plan")  # fmt: skip
GPU_HELD = _gauge("weftline_gpu_memory_held_bytes", "gpu uuid model owner what", "bytes",
    "memory held by this server; `what` is `arena` (of a worker), `open`, `peak` or `kv` (of a step's instance)",
)  # fmt: skip
GPU_PROCESS = _gauge("weftline_gpu_memory_process_bytes", "gpu uuid model worker", "bytes",
    "memory of a worker process with its context; missing where the driver hides its pid")  # fmt: skip
GPU_OTHERS = _gauge("weftline_gpu_memory_others_bytes", "gpu uuid", "bytes",
    "memory in use by other processes, and by contexts of workers whose pid is hidden")  # fmt: skip
GPU_POWER = _gauge("weftline_gpu_power_watts", "gpu uuid", "watts", "power draw")
GPU_POWER_LIMIT = _gauge("weftline_gpu_power_limit_watts", "gpu uuid", "watts", "current power limit")
GPU_TEMPERATURE = _gauge("weftline_gpu_temperature_celsius", "gpu uuid", "degrees Celsius", "temperature of the chip")
GPU_THROTTLED = _gauge("weftline_gpu_throttled", "gpu uuid reason", "0 or 1",
    "1 if clocks are throttled for this NVML reason, such as `sw_power_cap`; without idleness")  # fmt: skip
GPU_ECC = _counter("weftline_gpu_ecc_errors_total", "gpu uuid kind", "errors",
    "ECC errors since the driver was loaded; `kind` is `corrected` or `uncorrected`")  # fmt: skip

STEP_OUTPUT_DROPPED = _counter("weftline_step_output_dropped_bytes_total", "model step", "bytes",
    "output of a step that was dropped above its limit; since the model was loaded")  # fmt: skip

DISPATCHES = _counter(
    "weftline_dispatches_total", "model", "dispatches", "batches that an engine dispatched; since it was started"
)
DISPATCHED = _counter(
    "weftline_dispatched_items_total", "model", "items", "items that an engine dispatched; since it was started"
)
DEATHS = _counter("weftline_worker_deaths_total", "model step cause", "deaths",
    "worker deaths by step (that it ran, or all of its steps; `others`: of other models of the engine) and cause; "
    "since the engine was started")  # fmt: skip
RESTARTS = _counter(
    "weftline_worker_restarts_total", "model", "starts", "worker restarts of an engine; since it was started"
)
RETRIED = _counter("weftline_items_retried_total", "model", "items", "retried items; since the model was loaded")
QUARANTINED = _counter("weftline_inputs_quarantined_total", "model", "inputs",
    "inputs that killed workers and are now refused; since the model was loaded")  # fmt: skip
LATE = _counter("weftline_items_late_total", "model", "items",
    "items not started: they could not meet their deadline or timeout_ms; since the model was loaded")  # fmt: skip
STALE = _counter("weftline_stale_messages_total", "model", "messages",
    "dropped worker messages about tasks that had ended; since the engine was started")  # fmt: skip
ARENA_QUARANTINED = _gauge("weftline_arena_quarantined_bytes", "model", "bytes",
    "device memory of dead workers' reads, unusable until its owner has synchronized")  # fmt: skip
UNFINISHED = _gauge("weftline_dispatches_unfinished", "model", "dispatches",
    "answered batches whose device work is not finished")  # fmt: skip
COPIED = _counter("weftline_copied_bytes_total", "model where", "bytes",
    "tensor bytes copied; `where` is `in`, `between` (of the whole engine) or `out` of shared memory; since the model "
    "was loaded",
)  # fmt: skip
ARENA_SIZE = _gauge("weftline_arena_size_bytes", "model", "bytes", "shared memory of all arenas of the engine")
ARENA_LEASED = _gauge("weftline_arena_leased_bytes", "model", "bytes", "shared memory in use")
ARENA_BLOCKS = _gauge("weftline_arena_leased_blocks", "model", "blocks", "leased blocks")
ARENA_STALE = _counter("weftline_arena_stale_leases_total", "model", "leases",
    "releases of leases that had ended; since the engine was started")  # fmt: skip
KV_TOTAL = _gauge("weftline_kv_total_bytes", "model device", "bytes", "KV memory shared by the llm steps of a device")
KV_UNASSIGNED = _gauge("weftline_kv_unassigned_bytes", "model device", "bytes", "KV memory that is assigned to no step")
KV_HELD = _gauge("weftline_kv_held_bytes", "model device instance", "bytes", "KV memory assigned to an instance")
KV_USED = _gauge("weftline_kv_used_bytes", "model device instance", "bytes", "KV memory that an instance uses")
NODE_FIGURE = _gauge("weftline_node_figure", "model step worker figure", "set by the node",
    "value of `Node.figures` that has no series of its own")  # fmt: skip

WORKER_RESIDENT = _gauge("weftline_worker_resident_memory_bytes", "model worker", "bytes",
    "memory of a worker process, with the shared memory that it has touched")  # fmt: skip
WORKER_CPU = _counter("weftline_worker_cpu_seconds_total", "model worker", "seconds", "processor time of the process")
WORKER_FDS = _gauge("weftline_worker_open_fds", "model worker", "descriptors",
    "open descriptors of the process; usually visible to root only")  # fmt: skip
INGRESS_RESIDENT = _gauge("weftline_ingress_resident_memory_bytes", "process", "bytes",
    "memory of an ingress process")  # fmt: skip
LOG_DROPPED = _counter("weftline_log_lines_dropped_total", "process", "lines",
    "dropped lines of the log, of `engine` or an ingress process: standard error was not read")  # fmt: skip
INGRESS_CPU = _counter("weftline_ingress_cpu_seconds_total", "process", "seconds", "processor time of the process")
INGRESS_FDS = _gauge("weftline_ingress_open_fds", "process", "descriptors",
    "open descriptors of the process, including connections; missing without permission")  # fmt: skip

LLM_RUNNING = _gauge("vllm:num_requests_running", "model_name engine", "requests", "sequences that generate now")
LLM_WAITING = _gauge("vllm:num_requests_waiting", "model_name engine", "requests", "sequences that wait to start")
LLM_KV_USAGE = _gauge("vllm:kv_cache_usage_perc", "model_name engine", "ratio",
    "share of KV pages used by requests; cached pages count as free, as in vLLM")  # fmt: skip
LLM_PREFIX_QUERIES = _counter("vllm:prefix_cache_queries_total", "model_name engine", "tokens",
    "tokens of joining sequences")  # fmt: skip
LLM_PREFIX_HITS = _counter(
    "vllm:prefix_cache_hits_total", "model_name engine", "tokens", "prompt tokens found in the prefix cache"
)
LLM_PREEMPTIONS = _counter("vllm:num_preemptions_total", "model_name engine", "preemptions",
    "sequences preempted for lack of pages")  # fmt: skip
LLM_PROMPT = _counter("vllm:prompt_tokens_total", "model_name engine", "tokens", "prompt tokens, including cached ones")
LLM_GENERATED = _counter("vllm:generation_tokens_total", "model_name engine", "tokens", "generated tokens")
LLM_SUCCESS = _counter("vllm:request_success_total", "model_name engine finished_reason", "answers",
    "ended sequences; `finished_reason` is `stop`, `length`, `abort` or `error`")  # fmt: skip
LLM_DRAFTED = _counter("vllm:spec_decode_num_draft_tokens_total", "model_name engine", "tokens",
    "draft tokens proposed by speculation")  # fmt: skip
LLM_ACCEPTED = _counter("vllm:spec_decode_num_accepted_tokens_total", "model_name engine", "tokens",
    "draft tokens that were accepted")  # fmt: skip

LLM_FIRST_TOKEN = _histogram("vllm:time_to_first_token_seconds", "model_name", "seconds",
    "from a request's arrival to its first piece; of streamed answers", FIRST_TOKEN_SECONDS)  # fmt: skip
LLM_INTER_TOKEN = _histogram("vllm:inter_token_latency_seconds", "model_name", "seconds",
    "between two tokens of a streamed answer; each gap counts, with the answer's mean", TOKEN_SECONDS)  # fmt: skip
LLM_OUTPUT_TOKEN = _histogram("vllm:time_per_output_token_seconds", "model_name", "seconds",
    "the same under an earlier name of vLLM", TOKEN_SECONDS)  # fmt: skip
LLM_REQUEST_TOKEN = _histogram("vllm:request_time_per_output_token_seconds", "model_name", "seconds",
    "mean time between two tokens of a streamed response", TOKEN_SECONDS)  # fmt: skip
LLM_E2E = _histogram("vllm:e2e_request_latency_seconds", "model_name", "seconds",
    "time from a request's arrival to the end of its response", ANSWER_SECONDS)  # fmt: skip
LLM_REQUEST_PROMPT = _histogram(
    "vllm:request_prompt_tokens", "model_name", "tokens", "prompt tokens of a request", TOKENS
)
LLM_REQUEST_GENERATED = _histogram("vllm:request_generation_tokens", "model_name", "tokens",
    "generated tokens of a request, over all its choices", TOKENS)  # fmt: skip

REQUEST_SERIES = (
    REQUESTS, DURATION, FIRST_PIECE, PIECES, RECEIVED, CALLERS, IN_FLIGHT, SLO_LATENCY, SLO_P99, SLO_ANSWERS, SLO_OVER,
)  # fmt: skip
STEP_SERIES = (
    STEP_ITEMS, STEP_QUEUE, STEP_RUN, STEP_NODE, STEP_BATCH, STEP_CALLS, STEP_WAITING, STEP_WORKERS, STEP_WORKERS_READY,
    STEP_DEPLOYMENT, STEP_WORKERS_ASLEEP, STEP_SLEPT, STEP_WOKEN, STEP_WAKE, STEP_ITEMS_MAX, STEP_OUT_OF_MEMORY,
    STEP_OUTPUT_DROPPED, NODE_FIGURE,
)  # fmt: skip
ENGINE_SERIES = (
    BUILD, MODEL_READY, MODEL_VERSION, DISPATCHES, DISPATCHED, RETRIED, LATE, STALE, DEATHS, RESTARTS, QUARANTINED,
    COPIED, UNFINISHED, ARENA_SIZE, ARENA_LEASED, ARENA_QUARANTINED, ARENA_BLOCKS, ARENA_STALE, KV_TOTAL, KV_UNASSIGNED,
    KV_HELD, KV_USED, DEVICE_LEFT, DEVICE_WORKER, DEVICE_STEP,
)  # fmt: skip
GPU_SERIES = (
    GPU_INFO, GPU_BUSY, GPU_MEMORY_BUSY, GPU_TOTAL, GPU_USED, GPU_PLANNED, GPU_HELD, GPU_PROCESS, GPU_OTHERS, GPU_POWER,
    GPU_POWER_LIMIT, GPU_TEMPERATURE, GPU_THROTTLED, GPU_ECC,
)  # fmt: skip
PROCESS_SERIES = (
    WORKER_RESIDENT, WORKER_CPU, WORKER_FDS, INGRESS_RESIDENT, INGRESS_CPU, INGRESS_FDS, LOG_DROPPED,
)  # fmt: skip
LLM_SERIES = (
    LLM_RUNNING, LLM_WAITING, LLM_KV_USAGE, LLM_PREFIX_QUERIES, LLM_PREFIX_HITS, LLM_PREEMPTIONS, LLM_PROMPT,
    LLM_GENERATED, LLM_SUCCESS, LLM_DRAFTED, LLM_ACCEPTED, LLM_FIRST_TOKEN, LLM_INTER_TOKEN, LLM_OUTPUT_TOKEN,
    LLM_REQUEST_TOKEN, LLM_E2E, LLM_REQUEST_PROMPT, LLM_REQUEST_GENERATED,
)  # fmt: skip
ALL = (*REQUEST_SERIES, *STEP_SERIES, *ENGINE_SERIES, *GPU_SERIES, *PROCESS_SERIES, *LLM_SERIES)
"""Every series of ours. The server's own process has `process_*` of prometheus_client besides."""
