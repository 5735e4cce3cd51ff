"""GPU check parts below the engine: kernels, fused models, graphs and round times.

Each builds what it needs, compares or times it, and returns figures or a whole outcome. `Wrong` says what is wrong,
`Skipped` why a part cannot be done here. On a fake (`Setup.fake`) the comparing ones run on a CPU with tiny models.
Those that drive the engine are in `weftline.gpu_check.llm_engine`.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import torch

from weftline.engine.llm.fusion.fuse import fuse
from weftline.engine.llm.gpu.models import Decoding, Setup, made_prompts, token_bytes
from weftline.gpu_check.outcomes import RIGHT, CheckOutcome, Skipped, Wrong, judged

H200_COPY_BYTES_S = 4.3e12
"""Rate of a copy on the H200 of the bars, bytes read and written; bars of other cards are scaled by it."""
DECODE_TOKENS_S = {1: 241.0, 64: 8160.0}
"""Bars of that H200: tokens a second of Llama-3-8B in bfloat16, by the number of sequences of CONTEXT tokens."""
CONTEXT = 1024
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""How far logits of a whole model may differ, relative to the largest."""
COPY_BYTES = 1 << 30
PROFILED_ROUNDS = 10
NAMES_SHOWN = 8
RANDOM_ROUNDS, RANDOM_ROUNDS_FULL = 5, 40


def need_card(setup: Setup, what: str) -> None:
    """Raise Skipped on a fake."""
    if setup.fake:
        raise Skipped(f"a fake cannot show it: {what}")


def check_kernels(setup: Setup) -> dict[str, Any]:
    """Run the kernels' own check."""
    need_card(setup, "Triton kernels run on a GPU only; tests run them in Triton's interpreter")
    rounds = RANDOM_ROUNDS_FULL if setup.full else RANDOM_ROUNDS
    command = [sys.executable, "-m", "weftline.engine.llm.kernels.gpu_check", "--random", str(rounds)]
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


def check_fused(setup: Setup) -> dict[str, Any]:
    """Compare small Llama and Qwen3 models, fused and unfused, with a CPU's; see `compare_fused`."""
    return compare_fused(setup, ("small", "small-qwen3"))


def check_families(setup: Setup) -> dict[str, Any]:
    """Do the same for the other families of SHAPES."""
    return compare_fused(setup, ("small-gemma2", "small-mistral"))


def compare_fused(setup: Setup, shapes: tuple[str, ...]) -> dict[str, Any]:
    """Compare logits on the device, fused and unfused, with those of a CPU by torch's operations alone.

    Wrong also when less is fused on the device than on a CPU in float32: it would be right and slow.
    """
    found: dict[str, Any] = {}
    cpu = Setup(torch.device("cpu"), fake=True)
    for shape in shapes:
        for dtype in (torch.float32,) if setup.fake else (torch.float32, torch.bfloat16):
            here = Setup(cpu.device, setup.fake)
            model = here.build(shape, dtype)
            fusible = fuse(here.build(shape, torch.float32)).counts
            expected = _probed(Decoding(copy.deepcopy(model), cpu.device, 4, 256, None, cpu.ops, False))
            model = model.to(setup.device)
            for fused in (False, True):
                decoding = Decoding(model, setup.device, 4, 256, None, setup.ops, fused)
                error = float((_probed(decoding) - expected).abs().max() / expected.abs().max())
                name = f"{shape} {str(dtype).removeprefix('torch.')} {'fused' if fused else 'unfused'}"
                if not error <= ALLOWED[dtype]:
                    raise Wrong(f"{name}: logits differ by {error:.1e}, at most {ALLOWED[dtype]:.1e} is right")
                if fused:
                    check_fusion(name, decoding.report, fusible)
                found[name] = f"differs by {error:.1e} {decoding.report.split(chr(10))[0]}".rstrip()
    return found


def check_fusion(name: str, report: str, expected: dict[str, int]) -> None:
    """Raise Wrong unless every pattern in `expected` was fused as often; `report` is a FusionReport's text."""
    done = report.splitlines()[0].removeprefix("fused: ") if report else "nothing"
    counts = {pattern: int(count) for count, _, pattern in (one.partition(" ") for one in done.split(", ")) if pattern}
    less = [f"{counts.get(pattern, 0)} of {count} {pattern}" for pattern, count in expected.items()
            if counts.get(pattern, 0) < count]  # fmt: skip
    if less or not counts:
        left = " | ".join(report.splitlines()[1:])
        raise Wrong(f"{name}: fused only {', '.join(less) or 'nothing'}. {left}".strip())


def fused_whole(layers: int) -> dict[str, int]:
    """Return the least that fusing a Llama of so many layers has to report."""
    return {"attention": layers, "mlp": layers, "layer": layers, "model": 1}


def check_graphs(setup: Setup) -> dict[str, Any]:
    """Compare the tokens of graphs with those of rounds computed each time; lengths grow, batches are of many sizes."""
    found: dict[str, Any] = {}
    rounds = 100 if setup.full else 12 if setup.quick or setup.fake else 40
    for batch in (1, 3) if setup.quick or setup.fake else (1, 3, 8, 21):
        said = []
        for recorded in (False, True):
            capture = setup.capture() if recorded else None
            model = setup.build("small", torch.float32)
            decoding = Decoding(model, setup.device, batch, 256, capture, setup.ops, fused=not setup.fake)
            decoding.read(made_prompts(batch, 10, 60))
            said.append(decoding.decode(rounds))
        check_recorded(f"batch {batch}", decoding.graphs)
        if said[0] != said[1]:
            wrong = sum(a != b for a, b in zip(*said, strict=True))
            raise Wrong(f"batch {batch}: {wrong} of {batch} answers differ with graphs")
        found[f"batch {batch}"] = f"{len(said[0][0])} rounds the same"
    return found


def check_recorded(name: str, graphs: Any) -> None:
    """Raise Wrong where a recording failed, or there is none."""
    if graphs is None:
        raise Wrong(f"{name}: this runner has no graphs")
    if graphs.failures:
        raise Wrong(f"{name}: not recorded: {graphs.failures}")
    if not graphs.recorded:
        raise Wrong(f"{name}: no round was recorded, all were computed each time")


def copy_bytes_s(setup: Setup) -> float:
    """Return what a copy on the device reaches, in bytes read and written a second."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=setup.device)
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    setup.synchronize()
    started = time.perf_counter()
    for _ in range(20):
        target.copy_(source)
    setup.synchronize()
    return 20 * 2 * COPY_BYTES / (time.perf_counter() - started)


def scale_figures(copied: float) -> dict[str, Any]:
    """Return the figures that say how bars were scaled for this card."""
    return {
        "a copy of 1 GiB_gb_per_s": round(copied / 1e9, 1),
        "bars": f"an H200's at {H200_COPY_BYTES_S / 1e12:g} TB/s times {copied / H200_COPY_BYTES_S:.3f}",
    }


def time_decode_8b(setup: Setup) -> CheckOutcome:
    """Time decoding by graphs at CONTEXT tokens each."""
    need_card(setup, "8 billion weights, and the times of their rounds")
    copied = copy_bytes_s(setup)
    model = setup.build("llama-3-8b", torch.bfloat16)
    weights = sum(weight.nbytes for weight in model.parameters()) - model.model.embed_tokens.weight.nbytes
    found, bars = scale_figures(copied), []
    steps = 20 if setup.quick else 200
    for batch, wanted in DECODE_TOKENS_S.items():
        decoding = Decoding(model, setup.device, batch, 1600, setup.capture())
        if batch == 1:  # the model stays fused
            check_fusion("llama-3-8b", decoding.report, fused_whole(len(model.model.layers)))
        rates = []
        for chained in (False, True):
            decoding.pretend(CONTEXT)
            decoding.chain(5)
            setup.synchronize()
            started = time.perf_counter()
            decoding.chain(steps) if chained else decoding.decode(steps)
            rates.append(batch * steps / (time.perf_counter() - started))
        check_recorded(f"batch {batch}", decoding.graphs)
        bytes_round = weights + batch * CONTEXT * token_bytes(model.config, torch.bfloat16)
        found[f"batch {batch}: tokens_per_s"] = round(rates[0])
        found[f"batch {batch}, launched ahead: tokens_per_s"] = round(rates[1])
        found[f"batch {batch}: bound by reading at the copy's rate, tokens_per_s"] = round(batch * copied / bytes_round)
        bars.append(judged(f"decode, batch {batch}", rates[1], wanted * copied / H200_COPY_BYTES_S, "tokens/s",
                           at_least=True, judge=not setup.quick))  # fmt: skip
        del decoding
        torch.cuda.empty_cache()
    return CheckOutcome("decode 8b", RIGHT, figures=found, bars=bars)


def profile_8b(setup: Setup) -> dict[str, Any]:
    """Show where a round's time goes: its kernels by their time, and the time without any."""
    need_card(setup, "kernels and their times")
    model = setup.build("llama-3-8b", torch.bfloat16)
    found: dict[str, Any] = {}
    for batch in DECODE_TOKENS_S:
        decoding = Decoding(model, setup.device, batch, 1600, setup.capture())
        decoding.pretend(CONTEXT)
        decoding.chain(5)
        setup.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            started = time.perf_counter()
            decoding.chain(PROFILED_ROUNDS)
            setup.synchronize()
            wall_us = (time.perf_counter() - started) * 1e6 / PROFILED_ROUNDS
        times, calls = Counter[str](), Counter[str]()
        for event in profiler.events() or ():
            if str(event.device_type).endswith("CUDA"):
                times[event.name] += event.time_range.elapsed_us() / PROFILED_ROUNDS
                calls[event.name] += 1
        if not times:
            raise Skipped("torch's profiler saw no kernel: no rights to trace, or no CUPTI")
        found[f"batch {batch}: a round_us"] = round(wall_us, 1)
        found[f"batch {batch}: its kernels_us"] = round(sum(times.values()), 1)
        for name, taken in times.most_common(NAMES_SHOWN):
            each = f"{calls[name] / PROFILED_ROUNDS:g} calls"
            found[f"batch {batch}: {name[:60]}"] = f"{taken:.1f} us a round in {each}"
        del decoding
        torch.cuda.empty_cache()
    return found


def time_transformers_8b(setup: Setup) -> dict[str, Any]:
    """Time transformers' continuous batching on requests like those of `together 8b`."""
    need_card(setup, "8 billion weights, and the times of their rounds")
    from transformers import GenerationConfig

    model = setup.build("llama-3-8b", torch.bfloat16, "sdpa")
    tokens = 16 if setup.quick else 128
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=tokens)
    prompts, rates = made_prompts(64, 512, 512), []
    for _ in range(2):  # the first has what is done once
        started = time.perf_counter()
        results = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
        seconds = time.perf_counter() - started
        made = sum(len(result.generated_tokens) for result in results.values())
        rates.append(made / seconds)
    return {"64 requests, 512 in, the first time: tokens_per_s": round(rates[0]), "tokens_per_s": round(rates[1])}


def _probed(decoding: Decoding) -> torch.Tensor:
    """Return the logits of some rounds, with the same tokens whatever the model would say; float64 on the host."""
    decoding.read(made_prompts(4, 20, 90))
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
