"""The part of `weftline.engine.llm.gpu.check` about sleep: what a device gets back, and that nothing is said otherwise.

Takes the device from its arguments, so that a test runs it on a CPU, where nothing is weighed.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from weftline.engine.gpu_check.running import Skipped, Wrong
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.gpu.models import build
from weftline.engine.llm.loading import RunnerOptions
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.quantised import weight_bytes
from weftline.engine.llm.runner import Runner

CUDA = torch.device("cuda:0")
KV_BYTES = 256 << 20
LEAST_SHARE = 0.9
"""At least this part of weights and pages together has to be free on the device while a model sleeps."""
MIB = 1 << 20


def check_sleep(quick: bool, device: torch.device = CUDA, kv_bytes: int = KV_BYTES) -> dict[str, Any]:
    """Have models answer, sleep and wake; their answers stay, and the device has their memory meanwhile."""
    found, tokens = dict[str, Any](), 8 if quick else 100
    for shape in ("small",) if quick else ("small", "small-gemma2", "llama-3-8b"):
        dtype = torch.float32 if shape.startswith("small") else torch.bfloat16
        engine = Engine(Runner(build(shape, device, dtype), RunnerOptions(str(device), kv_bytes=kv_bytes)))
        held = weight_bytes(engine.runner.model) + engine.runner.pages * engine.runner.page_bytes
        first = _said(engine, tokens)
        if _said(engine, tokens) != first:
            raise Skipped(f"{shape}: its answers differ without a sleep already")
        for turn in range(2):
            before, began = _free(device), time.perf_counter()
            engine.sleep()
            given, slept = _free(device) - before, time.perf_counter()
            engine.wake()
            _settle(device)
            awake = time.perf_counter()
            if _said(engine, tokens) != first:
                raise Wrong(f"{shape}: it answers otherwise after sleep {turn + 1}")
            if device.type == "cuda" and given < LEAST_SHARE * held:
                raise Wrong(f"{shape}: the device got {given / MIB:.0f} MiB back of {held / MIB:.0f}")
            times = f"asleep in {(slept - began) * 1e3:.0f} ms, awake in {(awake - slept) * 1e3:.0f} ms"
            found[f"{shape}, sleep {turn + 1}"] = f"{given / MIB:.0f} of {held / MIB:.0f} MiB given back, {times}"
        engine.close()
    return found


def _said(engine: Engine, tokens: int) -> list[list[int]]:
    engine.clear_prefixes()
    prompts = [[5 + at] * (9 * at + 3) for at in range(4)]
    return engine.generate(prompts, SamplingParams(tokens_max=tokens, ignore_eos=True))


def _free(device: torch.device) -> int:
    """Return what the device has free when torch keeps nothing for later."""
    _settle(device)
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
