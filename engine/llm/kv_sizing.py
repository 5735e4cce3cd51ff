"""KV cache size of an llm step alone on its GPU: the remainder after its largest round.

The plan of an unmeasured step does not know the memory that its weights and work leave for the KV cache. When a step is
the only unmeasured one on its GPU, it is measured at start, before CUDA graphs are recorded:

    1. the model opens with little KV memory, which is released
    2. the largest round is computed: all tokens and sequences that the limits allow, sampled from the whole vocabulary
    3. KV memory = the lesser of the step's budget and the free memory, less the work of such a round twice: for eager
       rounds, and for the memory pool of the graphs, which torch keeps separate

Too little memory refuses long prompts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.sampling.sampler import Row, Sampler
from weftline.engine.llm.schedule import RoundLimits, ScheduledChunk
from weftline.engine.llm.sequence import Sequence as SequenceState
from weftline.errors import ModelError
from weftline.nodes.contract import DeviceMemoryLimit
from weftline.nodes.out_of_memory import is_out_of_memory
from weftline.shm.device.growable import chunk_size, mapped_bytes

if TYPE_CHECKING:
    from weftline.engine.llm.engine import Engine

_log = logging.getLogger(__name__)

WORK_BYTES = 256 << 20
"""Reserve for cuBLAS workspaces per stream, kernels loaded later, and the graphs themselves."""
BLOCK_BYTES = 2 << 20
"""Granularity of CUDA allocations, for each layer's keys and values."""
LESS, TRIES = 0.97, 8
"""Factor and number of retries where memory is fragmented."""
USES = 2
"""Most pages, in multiples of all sequences of a round at full length."""


class Meter(Protocol):
    """Memory of a device as the framework and the driver report it, in bytes."""

    def free(self) -> int:
        """Return the free memory of the device, after freeing what the framework caches."""

    def held(self) -> int:
        """Return the memory held by this process."""

    def peak(self, compute: Callable[[], None]) -> int:
        """Return the peak memory of `compute` beyond what was held before."""


class TorchMeter:
    """A CUDA device as torch sees it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def held(self) -> int:
        mapped = mapped_bytes(f"cuda:{self._device.index or 0}")
        return int(torch.cuda.memory_reserved(self._device)) + mapped

    def peak(self, compute: Callable[[], None]) -> int:
        self.free()
        before = int(torch.cuda.memory_reserved(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)
        compute()
        torch.cuda.synchronize(self._device)
        return max(0, int(torch.cuda.max_memory_reserved(self._device)) - before)


def fill_device(runners: Sequence[Runner], limits: RoundLimits, room: DeviceMemoryLimit, meter: Meter) -> None:
    """Divide the free memory of a device among runners, in proportion to their KV memory, and never less than it.

    ModelError when not even that fits.
    """
    shares = [runner.pages * runner.page_bytes for runner in runners]
    work = max(meter.peak(lambda runner=runner: compute_largest(runner, limits)) for runner in runners)  # type: ignore[misc]
    for runner in runners:
        runner.release_pages()
    free = min(meter.free() - room.reserve_bytes, room.bytes - meter.held())
    tensors = [2 * runner.layers for runner in runners]
    rounding = sum(count * chunk_size(BLOCK_BYTES, free // count) for count in tensors)
    left = free - 2 * work - WORK_BYTES - rounding
    for runner, share in zip(runners, shares, strict=True):
        _bind(runner, max(share, left * share // sum(shares)) // runner.page_bytes, limits, free, work)


def keep_room(engine: Engine, room: DeviceMemoryLimit, meter: Meter) -> bool:
    """Release pages where less memory is free than planned; return whether that was needed.

    To be called after graphs are recorded: they may use more than a round's work. They are dropped then.
    """
    missing = max(room.reserve_bytes - meter.free(), meter.held() - room.bytes)
    if missing <= 0:
        return False
    runner = engine.runner
    pages = runner.pages - -(-(missing + runner.kv_rounding_bytes) // runner.page_bytes)
    _log.warning("CUDA graphs use %d bytes too many: %d pages instead of %d", missing, pages, runner.pages)
    engine.set_pages_at_wake(engine.resize(pages))
    return True


def compute_largest(runner: Runner, limits: RoundLimits) -> None:
    """Compute the largest round that the limits allow and sample its tokens; the result is discarded.

    All sequences share one page, whose content does not matter, so that their number needs no memory.
    Where memory runs out, rounds in service will be smaller (`weftline.nodes.out_of_memory`).
    """
    count = max(1, min(limits.sequences_max, limits.tokens_max))
    each, more = divmod(limits.tokens_max, count)
    sizes = [min(each + (at < more), runner.context_max) for at in range(count)]
    chunks = [ScheduledChunk(_dummy_sequence(runner, at, tokens), 0, tokens) for at, tokens in enumerate(sizes)]
    try:
        logits = runner.run_eagerly(chunks)
        if runner.head is None:
            sampler = Sampler(runner.ends, runner.vocabulary)
            sampler.pick(logits, [Row(chunk.sequence) for chunk in chunks])
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        _log.warning("no memory for a round of %d tokens: rounds will be smaller", limits.tokens_max)
    if runner.vision is not None:
        _compute_largest_pictures(runner)


def _compute_largest_pictures(runner: Runner) -> None:
    try:
        runner.vision.compute_largest(runner.context_max)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        _log.warning("no memory to encode the largest pictures: requests with such pictures will fail")


def _dummy_sequence(runner: Runner, order: int, tokens: int) -> SequenceState:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=order, logprobs=None if runner.head is not None else 1)
    made = SequenceState(order, [0] * tokens, tokens, tokens + 1, params, order)
    made.table.pages.extend([0] * -(-tokens // runner.page_tokens))
    return made


def _bind(runner: Runner, pages: int, limits: RoundLimits, free: int, work: int) -> None:
    longest = -(-runner.context_max // runner.page_tokens)
    pages = min(pages, USES * longest * limits.sequences_max)
    error: Any = None
    for _ in range(TRIES):
        if pages < 2:
            break
        try:
            runner.bind_pages(pages)
        except ModelError as refused:
            error, pages = refused, int(pages * LESS)
            continue
        return
    raise ModelError(
        f"{runner.device} has no room for KV memory: {max(0, free)} bytes are free beside the weights, and a round of "
        f"{limits.tokens_max} tokens of {limits.sequences_max} sequences takes {work}\n"
        "    fix: lower round_tokens_max or sequences_max, or keep the weights in fewer bits (weights)"
    ) from error
