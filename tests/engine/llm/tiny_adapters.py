"""LoRA adapters with random matrices for the tiny models, in PEFT's format, and what they come to when merged."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.engine.llm import tiny

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SOME = ("q_proj", "v_proj")


def model(family: str = "llama") -> Any:
    """Return a fresh copy of the family's reference model."""
    return copy.deepcopy(tiny.reference(family))


def matrices(
    seed: int, rank: int, targets: Sequence[str] = ALL, family: str = "llama"
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return A [rank, in] and B [out, rank] by module, of a size that changes answers."""
    rng = torch.Generator().manual_seed(seed)
    pairs = {}
    for path, module in tiny.reference(family).named_modules():
        if path.rpartition(".")[2] in targets and isinstance(module, torch.nn.Linear):
            a = torch.randn(rank, module.in_features, generator=rng) * 0.3
            pairs[path] = (a, torch.randn(module.out_features, rank, generator=rng) * 0.3)
    return pairs


def write(
    folder: Path, seed: int = 1, rank: int = 4, targets: Sequence[str] = ALL, family: str = "llama", **config: Any
) -> Path:
    """Write an adapter as PEFT would; `config` changes keys of its adapter_config.json. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    base = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none",
        "target_modules": sorted(targets), "use_dora": False, "use_rslora": False, "lora_dropout": 0.05,
        "init_lora_weights": True, "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(base | config), encoding="utf-8")
    state = {}
    for path, (a, b) in matrices(seed, rank, targets, family).items():
        state[f"base_model.model.{path}.lora_A.weight"] = a
        state[f"base_model.model.{path}.lora_B.weight"] = b
    save_file(state, folder / "adapter_model.safetensors")
    return folder


def merged(seed: int, rank: int = 4, targets: Sequence[str] = ALL, family: str = "llama", scale: float = 2.0) -> Any:
    """Return the model with the adapter of `write` multiplied into its weights: W + scale * B A."""
    made = model(family)
    for path, (a, b) in matrices(seed, rank, targets, family).items():
        made.get_submodule(path).weight.data += scale * b @ a
    return made
