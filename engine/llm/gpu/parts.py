"""The parts of `weftline.engine.llm.gpu.check`: each builds what it needs, compares or times it, and returns figures.

`Wrong` says what is wrong, `Skipped` why a part cannot be done here. They take the device and sizes from
arguments, so that tests run the comparing ones on a CPU with tiny numbers.
"""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
import time
from typing import Any

import torch

from weftline.engine.gpu_check.running import Skipped, Wrong
from weftline.engine.llm.gpu.attention import PagedOps
from weftline.engine.llm.gpu.capture import Capture, CudaCapture
from weftline.engine.llm.gpu.models import SHAPES, Decoding, build, build_fp8, config_of
from weftline.engine.llm.gpu.plain import PlainOps

BOUND_BYTES_S = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.0e12, "L40S": 8.64e11}
"""Nominal memory bandwidth by a part of the GPU's name, in bytes a second; from NVIDIA's data sheets."""
EXPECTED_TOKENS_S = {1: 284, 64: 11661}
"""What batches of 1 and 64 of Llama-3-8B in bfloat16 at 1024 tokens each can reach on an H200 by bandwidth."""
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""How far logits of a whole model may differ, relative to the largest."""
CUDA = torch.device("cuda:0")


def check_kernels(quick: bool) -> dict[str, Any]:
    """Run the kernels' own check."""
    command = [sys.executable, "-m", "weftline.engine.llm.kernels.gpu_check", *(["--random", "5"] if quick else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    try:
        found = json.loads(lines[-1])
    except (IndexError, ValueError):
        raise Wrong(f"no answer: {(done.stderr or done.stdout)[-600:]}") from None
    if found.get("skipped"):
        raise Skipped(found["skipped"])
    if found.get("wrong"):
        raise Wrong(f"{len(found['wrong'])} wrong: {json.dumps(found['wrong'])[:700]}")
    return {line["name"]: f"{line['rate']:.0f} {line['unit']} ({line['median_us']:.0f} us)" for line in found["times"]}


def check_fused(
    quick: bool, device: torch.device = CUDA, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
    ops: PagedOps | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Compare logits on the device, fused and unfused, with those of a CPU by torch's operations alone."""
    found: dict[str, Any] = {}
    cpu = torch.device("cpu")
    for shape in [name for name in SHAPES if name.startswith("small")][: 2 if quick else None]:
        for dtype in dtypes:
            model = build(shape, cpu, dtype)
            expected = _probed(Decoding(copy.deepcopy(model), cpu, 4, 256, None, PlainOps(), False))
            model = model.to(device)
            for fused in (False, True):
                decoding = Decoding(model, device, 4, 256, None, ops, fused)
                error = float((_probed(decoding) - expected).abs().max() / expected.abs().max())
                name = f"{shape} {str(dtype).removeprefix('torch.')} {'fused' if fused else 'unfused'}"
                if not error <= ALLOWED[dtype]:
                    raise Wrong(f"{name}: logits differ by {error:.1e}, at most {ALLOWED[dtype]:.1e} is right")
                found[name] = f"differs by {error:.1e} {decoding.report.split(chr(10))[0]}".rstrip()
    return found


def check_graphs(
    quick: bool, device: torch.device = CUDA, capture: Capture | None = None, ops: PagedOps | None = None
) -> dict[str, Any]:
    """Compare the tokens of graphs with those of rounds computed each time; lengths grow, batches are of many sizes."""
    found: dict[str, Any] = {}
    for batch in (1, 3) if quick else (1, 3, 8, 21):
        said = []
        for recorded in (False, True):
            capturing = (capture or CudaCapture(device)) if recorded else None
            decoding = Decoding(build("small", device, torch.float32), device, batch, 256, capturing, ops)
            decoding.read(_prompts(batch, 10, 60))
            said.append(decoding.decode(12 if quick else 100))
        if decoding.graphs.failures:
            raise Wrong(f"batch {batch}: not recorded: {decoding.graphs.failures}")
        if said[0] != said[1]:
            wrong = sum(a != b for a, b in zip(*said, strict=True))
            raise Wrong(f"batch {batch}: {wrong} of {batch} answers differ with graphs")
        found[f"batch {batch}"] = f"{len(said[0][0])} rounds the same"
    return found


def time_decode_8b(quick: bool) -> dict[str, Any]:
    """Time decoding at 1024 tokens each: as transformers' code runs, fused, and with graphs."""
    found: dict[str, Any] = {}
    model = build("llama-3-8b", CUDA, torch.bfloat16)
    weights = sum(weight.nbytes for weight in model.parameters()) - model.model.embed_tokens.weight.nbytes
    for batch in (1, 64):
        for name, fused, capture in (("unfused", False, None), ("fused", True, None), ("graphs", True, "cuda")):
            if not fused and "forward" in model.model.__dict__:
                continue  # fused for the first batch; it stays so
            decoding = Decoding(model, CUDA, batch, 1600, CudaCapture(CUDA) if capture else None, None, fused)
            steps = 20 if quick or name != "graphs" else 200
            rates = []
            for chained in (False, True):
                decoding.pretend(1024)
                decoding.chain(5)
                torch.cuda.synchronize()
                started = time.perf_counter()
                decoding.chain(steps) if chained else decoding.decode(steps)
                rates.append(batch * steps / (time.perf_counter() - started))
            bound = batch * _bandwidth() / (weights + batch * 1024 * _token_bytes("llama-3-8b"))
            expected = EXPECTED_TOKENS_S[batch]
            found[f"batch {batch} {name}"] = (
                f"{rates[0]:.0f} tok/s, {rates[1]:.0f} launched ahead (bound {bound:.0f}; {expected} on an H200)"
            )
            if decoding.graphs.failures:
                found[f"batch {batch} {name} failures"] = str(decoding.graphs.failures)
            del decoding
            torch.cuda.empty_cache()
    return found


def time_together_8b(quick: bool) -> dict[str, Any]:
    """Time 64 requests that come at once, 512 tokens in and 128 out, prompts included."""
    return _time_together(build("llama-3-8b", CUDA, torch.bfloat16), 64, 512, 16 if quick else 128)


def time_together_70b(quick: bool) -> dict[str, Any]:
    """Time 100 requests that come at once, 512 tokens in and 256 out, of a 70B model in fp8."""
    try:
        import torchao  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise Skipped("package torchao is not installed, which has the products in fp8") from None
    del torchao
    if torch.cuda.get_device_capability(CUDA) < (8, 9):
        raise Skipped("this GPU has no products in fp8")
    if torch.cuda.mem_get_info(CUDA)[1] < 110 << 30:
        raise Skipped("70 billion weights in fp8, and their pages, need a GPU with more than 110 GiB")
    return _time_together(build_fp8("llama-3.3-70b", CUDA), 100, 512, 16 if quick else 256)


def time_transformers_8b(quick: bool) -> dict[str, Any]:
    """Time transformers' continuous batching on the requests of `time_together_8b`."""
    from transformers import GenerationConfig

    model = build("llama-3-8b", CUDA, torch.bfloat16, "sdpa")
    tokens = 16 if quick else 128
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=tokens)
    prompts, rates = _prompts(64, 512, 512), []
    for _ in range(2):  # the first has what is done once
        started = time.perf_counter()
        results = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
        seconds = time.perf_counter() - started
        made = sum(len(result.generated_tokens) for result in results.values())
        rates.append(made / seconds)
    return {"64 requests, 512 in": f"{rates[1]:.0f} tok/s of answers, {rates[0]:.0f} the first time"}


def _time_together(model: Any, requests: int, prompt: int, tokens: int) -> dict[str, Any]:
    decoding = Decoding(model, CUDA, requests, prompt + 2 * tokens + 16, CudaCapture(CUDA))
    found: dict[str, Any] = {"fusion": decoding.report.splitlines()[0]}
    for again in (False, True):  # the first has compiling and recording
        torch.cuda.synchronize()
        started = time.perf_counter()
        decoding.read(_prompts(requests, prompt, prompt))
        read = time.perf_counter() - started
        decoding.chain(tokens - 1)
        seconds = time.perf_counter() - started
        name = f"{requests} requests, {prompt} in, {tokens} out{'' if again else ', the first time'}"
        found[name] = f"{requests * tokens / seconds:.0f} tok/s of answers; prompts took {read * 1000:.0f} ms"
    if decoding.graphs.failures:
        raise Wrong(f"not recorded: {decoding.graphs.failures}")
    return found


def _probed(decoding: Decoding) -> torch.Tensor:
    """Return the logits of some rounds, with the same tokens whatever the model would say; float64 on the host."""
    decoding.read(_prompts(4, 20, 90))
    rows = []
    for step in range(4):
        decoding.newest = [11 + step, 12, 13, 14 + step]
        rows.append(_logits(decoding))
    return torch.cat(rows).double()


def _logits(decoding: Decoding) -> torch.Tensor:
    """Compute a round without a graph and return its logits on the host."""
    kept: list[torch.Tensor] = []
    forward = decoding.graphs.forward

    def keeping(*given: Any) -> torch.Tensor:
        kept.append(forward(*given))
        return kept[0]

    decoding.graphs.forward = keeping
    decoding.launch().tokens()
    decoding.graphs.forward = forward
    return kept[0][: decoding.batch].float().cpu()


def _prompts(count: int, shortest: int, longest: int) -> list[list[int]]:
    rng = random.Random(9)
    return [[rng.randrange(3, 4000) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]


def _token_bytes(shape: str) -> int:
    """Return what a token's keys and values take in bfloat16."""
    config = config_of(shape)
    return int(2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim)


def _bandwidth() -> float:
    name = torch.cuda.get_device_name(CUDA)
    return next((rate for part, rate in BOUND_BYTES_S.items() if part in name), float("nan"))
