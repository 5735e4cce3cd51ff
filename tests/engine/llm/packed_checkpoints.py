"""AWQ and GPTQ checkpoints of tiny models, packed value by value from the formats' descriptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.engine.llm import tiny

AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ: dict[str, Any] = {
    "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False, "checkpoint_format": "gptq"
}  # fmt: skip
COLUMN_OF_AWQ_NIBBLE = {0: 0, 4: 2, 8: 4, 12: 6, 16: 1, 20: 3, 24: 5, 28: 7}
"""Column of eight that AWQ stores from each bit of an int32 on."""


def put(words: np.ndarray, row: int, column: int, shift: int, value: int) -> None:
    """Set the bits of `words[row, column]` from `shift` on."""
    words[row, column] |= np.uint32(value << shift)


def pack_awq(codes: np.ndarray) -> torch.Tensor:
    """Pack [rows, columns] of 4 bits into int32 [rows, columns / 8]."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for shift, offset in COLUMN_OF_AWQ_NIBBLE.items():
        for row in range(words.shape[0]):
            for column in range(words.shape[1]):
                put(words, row, column, shift, int(codes[row, 8 * column + offset]))
    return torch.from_numpy(words.view(np.int32))


def pack_rows(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Pack [rows, columns] along the rows, as GPTQ stores weights."""
    words = np.zeros((codes.shape[0] * bits // 32, codes.shape[1]), np.uint32)
    for (row, column), value in np.ndenumerate(codes):
        put(words, row * bits // 32, column, row * bits % 32, int(value))
    return torch.from_numpy(words.view(np.int32))


def pack_columns(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Pack [rows, columns] along the columns, as GPTQ stores zero points."""
    return pack_rows(codes.T, bits).t().contiguous()


def quantise(
    weight: np.ndarray, settings: dict[str, Any], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the codes [inputs, outputs], zero points and scales [groups, outputs] and group of each input."""
    inputs, outputs = weight.shape[1], weight.shape[0]
    size = settings["group_size"] if settings["group_size"] > 0 else inputs
    groups = np.arange(inputs) // size
    if settings.get("desc_act"):
        groups = rng.permutation(groups)
    most = 2 ** settings["bits"] - 1
    scales = np.zeros((groups.max() + 1, outputs), np.float16)
    zeros = np.zeros((groups.max() + 1, outputs), np.int64)
    codes = np.zeros((inputs, outputs), np.int64)
    for group in range(groups.max() + 1):
        part = weight.T[groups == group].astype(np.float64)
        low, high = np.minimum(part.min(0), 0), np.maximum(part.max(0), 0)
        if settings.get("sym"):
            high = np.maximum(-low, high)
            low = -high
        scales[group] = (high - low) / most
        zeros[group] = (most + 1) // 2 if settings.get("sym") else np.round(-low / scales[group])
        zeros[group, 0] = 0  # such a zero point wraps around where one less is stored
        codes[groups == group] = np.clip(np.round(part / scales[group]) + zeros[group], 0, most)
    return codes, zeros, scales, groups


def write_packed(folder: Path, settings: dict[str, Any], family: str = "llama", whole: Any = None) -> Any:
    """Write a tiny model's checkpoint with packed weights; return the model with the same weights, unpacked.

    whole: the model; None: the family's.
    """
    rng = np.random.default_rng(4)
    state: dict[str, torch.Tensor] = {}
    whole = tiny.reference(family) if whole is None else whole
    plain = dict(whole.state_dict())
    for name, weight in whole.state_dict().items():
        if "_proj.weight" not in name or name.removesuffix(".weight") in settings.get("modules_to_not_convert", ()):
            state[name] = weight
            continue
        codes, zeros, scales, groups = quantise(weight.numpy(), settings, rng)
        plain[name] = torch.from_numpy((scales[groups].astype(np.float64) * (codes - zeros[groups])).T.copy()).float()
        layer, bits = name.removesuffix("weight"), settings["bits"]
        if settings["quant_method"] == "awq":
            state[layer + "qweight"], state[layer + "qzeros"] = pack_awq(codes), pack_awq(zeros)
        else:
            stored = zeros if settings["checkpoint_format"] == "gptq_v2" else (zeros - 1) % 2**bits
            state[layer + "qweight"], state[layer + "qzeros"] = pack_rows(codes, bits), pack_columns(stored, bits)
            state[layer + "g_idx"] = torch.from_numpy(groups.astype(np.int32))
        state[layer + "scales"] = torch.from_numpy(scales)
    config = whole.config.to_dict() | {"quantization_config": settings, "architectures": [type(whole).__name__]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_config(whole.config, attn_implementation="eager").eval()
    model.load_state_dict(plain)
    return model
