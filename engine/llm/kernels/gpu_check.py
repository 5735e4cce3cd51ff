"""Kernel checks and attention timings on a GPU.

    python -m weftline.engine.llm.kernels.gpu_check [--random 40]

Prints what failed, a table of times, and one line of JSON with all of it; ends with 1 when a check failed, and with 0
and the reason where there is no GPU to check. Needs torch, triton and numpy.

Times are of a captured CUDA graph of 8 calls on different pages, so that neither launches nor caches flatter them:
median, and the range of the middle 60 %. Beside decoding stands what a copy of 1 GiB reaches on the same GPU, beside
prompts torch's own attention of the same size, without pages.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from weftline.engine.llm.kernels.availability import available

HEADS, KV_HEADS, WIDTH, PAGE = 32, 8, 128, 16
CALLS = 8
"""Calls in a captured graph, each on pages of its own where memory allows."""
MEMORY_BYTES = 24 << 30
"""Most memory for the pages of one measurement."""


@dataclass(frozen=True, slots=True)
class KernelTiming:
    """A timing; rate: GB/s of keys and values read (decode) or TFLOP/s of both products (prefill)."""

    name: str
    median_us: float
    low_us: float
    high_us: float
    rate: float
    unit: str


def run_checks(device: torch.device, random_rounds: int) -> dict[str, str]:
    """Run all checks; return the failures by name."""
    from weftline.engine.llm.kernels.checks import all_checks

    wrong = {}
    for check in all_checks(device, random_rounds):
        try:
            error = check.error()
            if not error <= check.allowed:
                wrong[check.name] = f"off by {error:.3g}, at most {check.allowed:.3g} is right"
        except Exception as problem:  # one kernel that fails to compile must not hide what the others do
            wrong[check.name] = f"{type(problem).__name__}: {problem}"[:500]
    try:
        error = graph_error(device)
        if not error <= 3e-2:
            wrong["one graph for rounds of different lengths"] = f"off by {error:.3g}"
    except Exception as problem:
        wrong["one graph for rounds of different lengths"] = f"{type(problem).__name__}: {problem}"[:500]
    return wrong


def graph_error(device: torch.device) -> float:
    """Replay one captured attention graph for rounds of other lengths; return the largest error."""
    from weftline.engine.llm.kernels import reference
    from weftline.engine.llm.kernels.paged_attention import paged_attention

    rows, pages_max = 40, 64
    query = torch.randn(rows, 8, 64, dtype=torch.bfloat16, device=device)
    keys, values = (torch.randn(2, 5 * pages_max * PAGE, 64, dtype=torch.bfloat16, device=device) for _ in range(2))
    tables = torch.randperm(5 * pages_max, device=device).int().reshape(5, pages_max)
    row_starts = torch.tensor([0, 1, 2, 3, 4, 5], dtype=torch.int32, device=device)
    starts = torch.zeros(5, dtype=torch.int32, device=device)
    given = (query, keys, values, tables, row_starts, starts, PAGE, 0.125)
    paged_attention(*given)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(*given)
    worst = 0.0
    for counts, before in (((1, 1, 1, 1, 1), (9, 900, 0, 300, 17)), ((33, 1, 0, 5, 0), (70, 1000, 0, 800, 0))):
        row_starts.copy_(torch.tensor([0, *counts]).cumsum(0).int())
        starts.copy_(torch.tensor(before, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize(device)
        used = sum(counts)
        worst = max(worst, reference.difference(out[:used], reference.attention(*given)[:used]))
    return worst


def time_us(call: Callable[[int], object], bytes_each: int) -> tuple[float, float, float]:
    """Return (median, low, high) microseconds per `call(i)` in one captured graph."""
    import triton  # type: ignore[import-untyped]

    copies = max(1, min(CALLS, MEMORY_BYTES // max(bytes_each, 1)))
    for i in range(copies):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(i % copies)
    found = triton.testing.do_bench(graph.replay, quantiles=[0.5, 0.2, 0.8])
    median, low, high = (1000 * ms / CALLS for ms in found)
    return median, low, high


def time_copy(device: torch.device) -> KernelTiming:
    """Measure the memory bandwidth of this GPU by a copy of 1 GiB."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = time_us(lambda i: target.copy_(source), 0)
    return KernelTiming("copy of 1 GiB", *times, 2 * source.numel() / times[0] / 1e3, "GB/s")


def _pages(device: torch.device, slots: int, dtype: torch.dtype, copies: int) -> list[tuple[Tensor, Tensor]]:
    made = []
    for _ in range(copies):
        one = torch.randn(2, KV_HEADS, slots, WIDTH, dtype=torch.bfloat16, device=device).to(dtype)
        made.append((one[0], one[1]))
    return made


def time_decode(device: torch.device, batch: int, context: int, page_dtype: torch.dtype) -> KernelTiming:
    """Time decode attention of `batch` sequences of `context` tokens, with pages in random order."""
    from weftline.engine.llm.kernels.paged_attention import paged_attention

    each = -(-context // PAGE)
    slots = batch * each * PAGE
    bytes_each = 2 * KV_HEADS * slots * WIDTH * page_dtype.itemsize
    copies = max(1, min(CALLS, MEMORY_BYTES // bytes_each))
    pages = _pages(device, slots, page_dtype, copies)
    query = torch.randn(batch, HEADS, WIDTH, dtype=torch.bfloat16, device=device)
    tables = torch.randperm(batch * each, device=device).int().reshape(batch, each)
    row_starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    starts = torch.full((batch,), context - 1, dtype=torch.int32, device=device)
    scale = torch.ones(KV_HEADS, device=device) if page_dtype.itemsize == 1 else None

    def call(i: int) -> Tensor:
        at = (*pages[i], tables, row_starts, starts, PAGE, WIDTH**-0.5)
        return paged_attention(query, *at, key_scale=scale, value_scale=scale)

    times = time_us(call, bytes_each)
    name = f"decode {batch} x {context}, pages of {str(page_dtype).removeprefix('torch.')}"
    return KernelTiming(name, *times, bytes_each / times[0] / 1e3, "GB/s")


def time_prefill(device: torch.device, batch: int, length: int) -> list[KernelTiming]:
    """Time prefill attention of `batch` prompts of `length` tokens, paged and torch's own."""
    from weftline.engine.llm.kernels.paged_attention import paged_attention

    each = -(-length // PAGE)
    (keys, values), *_ = _pages(device, batch * each * PAGE, torch.bfloat16, 1)
    query = torch.randn(batch * length, HEADS, WIDTH, dtype=torch.bfloat16, device=device)
    tables = torch.randperm(batch * each, device=device).int().reshape(batch, each)
    row_starts = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)
    starts = torch.zeros(batch, dtype=torch.int32, device=device)
    work = 4 * HEADS * WIDTH * batch * length * (length + 1) / 2
    ours = time_us(
        lambda i: paged_attention(query, keys, values, tables, row_starts, starts, PAGE, WIDTH**-0.5), MEMORY_BYTES
    )
    q = query.reshape(batch, length, HEADS, WIDTH).transpose(1, 2)
    k, v = (t[:, : batch * length].reshape(KV_HEADS, batch, length, WIDTH).transpose(0, 1) for t in (keys, values))
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1).contiguous() for t in (k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    peer = time_us(lambda i: attend(q, k, v, is_causal=True), MEMORY_BYTES)
    return [
        KernelTiming(f"prefill {batch} x {length}", *ours, work / ours[0] / 1e6, "TFLOP/s"),
        KernelTiming(f"prefill {batch} x {length}, torch without pages", *peer, work / peer[0] / 1e6, "TFLOP/s"),
    ]


def main(arguments: list[str]) -> int:
    """Run all checks and timings, print them, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m weftline.engine.llm.kernels.gpu_check")
    parser.add_argument("--random", type=int, default=40, help="random rounds on top of the chosen ones")
    options = parser.parse_args(arguments)
    reason = available("cuda")
    if reason is not None:
        print(f"skipped: {reason}")
        print(json.dumps({"skipped": reason}))
        return 0
    import triton

    device = torch.device("cuda", torch.cuda.current_device())
    versions = {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__, "triton": triton.__version__}
    print(*versions.values(), sep=", ")
    wrong = run_checks(device, options.random)
    for name, what in wrong.items():
        print(f"WRONG {name}: {what}")
    print(f"{len(wrong)} checks failed" if wrong else "all checks passed")
    lines = [time_copy(device)]
    for page_dtype in (torch.bfloat16, torch.float8_e4m3fn):
        for context in (1024, 8192):
            lines += [time_decode(device, batch, context, page_dtype) for batch in (1, 32, 64)]
    for batch, length in ((1, 8192), (8, 2048)):
        lines += time_prefill(device, batch, length)
    for line in lines:
        spread = f"({line.low_us:.1f} to {line.high_us:.1f})"
        print(f"{line.name:<44} {line.median_us:>10.1f} us {spread:<22} {line.rate:>8.1f} {line.unit}")
    print(json.dumps({**versions, "wrong": wrong, "times": [asdict(line) for line in lines]}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
