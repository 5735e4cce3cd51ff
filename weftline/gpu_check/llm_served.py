"""GPU check parts that open the LLM as a step does: filled memory, all graphs recorded, and optional features.

`open as served` shows what KV memory the device gives back and takes when a step shrinks and grows. `features` compares
options of a step with the same engine on a CPU.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from weftline.engine.llm.engine import Engine
from weftline.engine.llm.gpu.models import Setup, build, made_prompts
from weftline.engine.llm.kv_sizing import TorchMeter, compute_largest, fill_device, keep_room
from weftline.engine.llm.model_loader import RunnerOptions
from weftline.engine.llm.options import DEFAULT_LIMITS
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.request import LlmRequestOptions
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.sampling.sampler import Sampler
from weftline.engine.llm.schedule import RoundLimits
from weftline.engine.llm.speculation import DraftModelProposer, NgramProposer, Speculation
from weftline.gpu_check.llm_parts import check_recorded, need_card
from weftline.gpu_check.outcomes import Wrong
from weftline.nodes.contract import DeviceMemoryLimit

MIB = 1 << 20
RESERVE_BYTES = 1 << 30
"""Device memory that the step leaves free, as the reserve of a plan."""
RETURNED_SHARE = 0.9
"""Least part of the memory of released pages that the device has free afterwards."""
DIFFER_MAX = 1
"""Most answers of a feature that may differ from a CPU's: rounding can make two tokens equally likely."""


def open_as_served(setup: Setup) -> dict[str, Any]:
    """Open 8 billion weights with the limits of a step; then shrink and grow its KV memory by an eighth."""
    need_card(setup, "the memory of a device that one model fills")
    limits, device = DEFAULT_LIMITS["gpu"], setup.device
    runner = Runner(
        setup.build("llama-3-8b", torch.bfloat16),
        RunnerOptions(str(device), rows_max=limits.tokens_max, sequences_max=limits.sequences_max),
    )
    room = DeviceMemoryLimit(torch.cuda.mem_get_info(device)[1], RESERVE_BYTES)
    meter, found = TorchMeter(device), dict[str, Any]()
    found["fill_s"] = _seconds(lambda: fill_device([runner], limits, room, meter))
    engine = Engine(runner, None, limits)
    found["free before graphs_mib"] = meter.free() // MIB
    compute_largest(runner, limits)
    found["record_s"] = _seconds(engine.record)
    check_recorded("open as served", runner.graphs)
    found["sizes"] = len(runner.graphs.recorded) if runner.graphs is not None else 0
    found["free with graphs_mib"] = meter.free() // MIB
    found["pages released for them"] = keep_room(engine, room, meter)
    pages = runner.pages
    found["KV_mib"] = pages * runner.page_bytes // MIB
    lost = (pages // 8) * runner.page_bytes
    wrong = []
    for what, target in (("shrink", pages - pages // 8), ("growth", pages)):
        before = meter.free()
        try:
            found[f"{what}_s"] = _seconds(lambda target=target: engine.resize(target))  # type: ignore[misc]
        except RuntimeError as error:
            wrong.append(f"{what} of {lost // MIB} MiB: {type(error).__name__}: {str(error)[:160]}")
            break
        moved = meter.free() - before
        found[f"{what}: free memory changed by_mib"] = moved // MIB
        if what == "shrink" and moved < RETURNED_SHARE * lost:
            wrong.append(f"a shrink of {lost // MIB} MiB returned {moved // MIB} MiB")
    found["graphs after both"] = len(runner.graphs.recorded) if runner.graphs is not None else 0
    answers = engine.generate(made_prompts(4, 20, 60), SamplingParams(tokens_max=8, ignore_eos=True))
    if not wrong and not all(len(answer) == 8 for answer in answers):
        wrong.append("requests after it have no whole answers")
    engine.close()
    if wrong:
        raise Wrong(f"{'; '.join(wrong)}. Figures: {json.dumps(found)}")
    return found


def check_features(setup: Setup) -> dict[str, Any]:
    """Compare fp8 KV, an adapter and speculation with a CPU's answers; count those of fp8 weights."""
    need_card(setup, "kernels of fp8 keys, adapters and verified drafts")
    prompts, tokens = made_prompts(6, 20, 200), 24 if setup.quick else 48
    found, wrong = dict[str, Any](), []
    with tempfile.TemporaryDirectory() as folder:
        adapter = write_adapter(Path(folder) / "mine")
        features: dict[str, tuple[dict[str, Any], str, str]] = {
            "fp8 KV": ({"kv_dtype": "fp8"}, "none", ""),
            "adapter": ({}, "none", str(adapter)),
            "ngram": ({}, "ngram", ""),
            "draft": ({}, "draft", ""),
        }
        for name, (options, speculation, file) in features.items():
            said = []
            for device in (torch.device("cpu"), setup.device):
                engine = _engine(device, torch.float32, options, speculation, file)
                said.append(_answers(engine, prompts, tokens, "mine" if file else ""))
                if device.type == "cuda":
                    check_recorded(name, engine.runner.graphs)
                engine.close()
            differ = sum(a != b for a, b in zip(*said, strict=True))
            found[name] = f"{len(prompts) - differ} of {len(prompts)} answers the CPU's"
            if differ > DIFFER_MAX:
                wrong.append(f"{name}: {differ} of {len(prompts)} answers differ from the CPU's")
    found["fp8 weights"] = _fp8_weights(setup, prompts, tokens)
    if wrong:
        raise Wrong(f"{'; '.join(wrong)}. Figures: {json.dumps(found)}")
    return found


def _fp8_weights(setup: Setup, prompts: Sequence[list[int]], tokens: int) -> str:
    try:
        engine = _engine(setup.device, torch.bfloat16, {"weights": "fp8"}, "none", "")
    except Exception as error:  # torchao is missing, or refuses this card
        return f"not shown: {type(error).__name__}: {str(error)[:200]}"
    answers = _answers(engine, prompts, tokens, "")
    check_recorded("fp8 weights", engine.runner.graphs)
    plain = _engine(setup.device, torch.bfloat16, {}, "none", "")
    same = sum(a == b for one, other in zip(answers, _answers(plain, prompts, tokens, "")) for a, b in zip(one, other))
    return f"{same} of {len(prompts) * tokens} tokens are those of bfloat16"


def _engine(
    device: torch.device, dtype: torch.dtype, options: dict[str, Any], speculation: str, adapter: str
) -> Engine:
    limits = RoundLimits(2048, 16)
    all_options = RunnerOptions(str(device), kv_bytes=64 * MIB, rows_max=2048, sequences_max=16, **options)
    # on a CPU model, the GPU's runner fuses and quantises as it opens
    runner = Runner(build("small", torch.device("cpu"), dtype).to(device), all_options)
    if adapter:
        runner.load_adapter("mine", Path(adapter))
    proposer: Any = None
    if speculation == "ngram":
        proposer = Speculation(NgramProposer(), 5)
    if speculation == "draft":
        draft = Runner(build("small", torch.device("cpu"), dtype).to(device), all_options)
        proposer = Speculation(DraftModelProposer(draft, Sampler(draft.ends, draft.vocabulary), 2048), 5)
    return Engine(runner, None, limits, True, proposer)


def _answers(engine: Engine, prompts: Sequence[list[int]], tokens: int, adapter: str) -> list[list[int]]:
    params, options = SamplingParams(tokens_max=tokens, ignore_eos=True), LlmRequestOptions(adapter=adapter)
    answers: dict[int, list[int]] = {at: [] for at in range(len(prompts))}
    for at, prompt in enumerate(prompts):
        engine.add(at, prompt, params, options)
    while engine.busy:
        for update in engine.step():
            if update.error is not None:
                raise update.error
            answers[update.id] += update.tokens
    return list(answers.values())


def write_adapter(folder: Path, rank: int = 8) -> Path:
    """Write a LoRA adapter of random weights for the shape `small`, as PEFT would; return its folder."""
    folder.mkdir(parents=True)
    seeded, tensors = torch.Generator().manual_seed(3), {}
    sizes = {"q_proj": (512, 512), "v_proj": (512, 128)}
    for layer in range(4):
        for name, (inputs, outputs) in sizes.items():
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, inputs, generator=seeded) * 0.1
            tensors[f"{path}.lora_B.weight"] = torch.randn(outputs, rank, generator=seeded) * 0.1
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": list(sizes), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return round(time.perf_counter() - began, 2)
