"""LoRA adapter files in PEFT's format: reading, validation and splitting.

An adapter is a folder with adapter_config.json and adapter_model.safetensors. It promises that what `read_adapter`
returns is complete and finite, has the shapes that its own config says, and means what plain LoRA means (Hu et al.
2021, "LoRA"): y = W x + scale * B (A x). What changes that meaning is refused by name, and so is a config key that is
not known here, since it might. Whether the pairs fit a model is for `weftline.engine.llm.lora.adapters` to say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weftline.errors import ModelError
from weftline.nodes.model_file import check_safetensors, load_weights
from weftline.nodes.model_limits import parse_json, read_bytes

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_BYTES_MAX = 1 << 20
RANK_MAX = 256
WEIGHTS_BYTES_MAX = 2 << 30
"""A rank-256 adapter for all linear layers of an 8-billion-parameter model takes 1.3 GiB in bfloat16."""

_MEANINGLESS = frozenset(
    ["auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type", "peft_type", "peft_version",
     "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "fan_in_fan_out", "bias", "use_rslora",
     "init_lora_weights", "layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size", "eva_config",
     "ensure_weight_tying", "runtime_config", "library_name"]
)  # fmt: skip
"""Keys that are read below, or that say how the adapter was trained and nothing about how it is used."""
_UNLIKE_LORA = {
    "use_dora": "DoRA scales the model's own weights",
    "modules_to_save": "whole modules saved beside LoRA",
    "rank_pattern": "ranks that differ by module",
    "alpha_pattern": "alphas that differ by module",
    "lora_bias": "biases of its own",
    "layer_replication": "layers used more than once",
    "trainable_token_indices": "embeddings of its own",
    "target_parameters": "LoRA on parameters that are no linear layer",
    "alora_invocation_tokens": "aLoRA, which begins in the middle of a prompt",
    "megatron_config": "a model split by Megatron",
}
_CHANGES_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin training that take something out of the model's own weights; such an adapter needs those weights."""
_KEY = re.compile(r"(?:base_model\.model\.)?(?P<module>[\w.]+)\.lora_(?P<side>[AB])\.(?:default\.)?weight")


@dataclass(frozen=True, slots=True)
class Adapter:
    """A validated LoRA adapter.

    rank:  of every pair, 1 to RANK_MAX.
    scale: what B A is multiplied by: alpha / rank, or alpha / sqrt(rank) with rsLoRA.
    pairs: by module, as the model that it was trained on calls it: A [rank, in], B [out, rank]; as stored.
    """

    rank: int
    scale: float
    pairs: Mapping[str, tuple[Tensor, Tensor]]


def read_adapter(folder: Path, shown: str) -> Adapter:
    """Read and validate the adapter in `folder` (`shown` in errors); ModelError if invalid."""
    rank, scale = _read_config(folder / CONFIG_NAME, f"{shown}/{CONFIG_NAME}")
    path, name = _weights(folder, shown)
    return Adapter(rank, scale, _pairs(load_weights(path, f"adapter {name}"), rank, name))


def check_adapter(folder: Path, shown: str) -> None:
    """Raise ModelError for an adapter that `read_adapter` would refuse by its config or the header of its weights."""
    _read_config(folder / CONFIG_NAME, f"{shown}/{CONFIG_NAME}")
    path, name = _weights(folder, shown)
    check_safetensors(path, f"adapter {name}")


def _weights(folder: Path, shown: str) -> tuple[Path, str]:
    """Return the weights of an adapter and their name in errors."""
    path, name = folder / WEIGHTS_NAME, f"{shown}/{WEIGHTS_NAME}"
    if not path.is_file():
        raise ModelError(f"adapter {shown} has no {WEIGHTS_NAME}; pickled weights are not loaded")
    size_bytes = path.stat().st_size
    if size_bytes > WEIGHTS_BYTES_MAX:
        raise ModelError(f"adapter {name}: found {size_bytes} bytes, expected at most {WEIGHTS_BYTES_MAX}")
    return path, name


def _read_config(path: Path, shown: str) -> tuple[int, float]:
    """Read the config; return (rank, scale)."""
    try:
        config = parse_json(read_bytes(path, CONFIG_BYTES_MAX))
    except FileNotFoundError:
        raise ModelError(f"adapter {shown}: no such file\n    fix: give the folder that PEFT saved") from None
    except OSError as error:
        raise ModelError(f"adapter {shown} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"adapter {shown} {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"adapter {shown} is no JSON object")
    _check_meaning(config, shown)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= RANK_MAX:
        raise ModelError(f"adapter {shown}: r: found {rank!r:.40}, expected a whole number from 1 to {RANK_MAX}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < 1e6:
        raise ModelError(f"adapter {shown}: lora_alpha: found {alpha!r:.40}, expected a number above 0")
    return rank, float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)


def _check_meaning(config: dict[str, Any], shown: str) -> None:
    kind, bias, begun = config.get("peft_type"), config.get("bias") or "none", config.get("init_lora_weights")
    if kind != "LORA":
        raise ModelError(f"adapter {shown}: peft_type: found {kind!r:.40}, expected 'LORA'")
    if bias != "none":
        raise ModelError(f"adapter {shown}: bias: found {bias!r:.40}, but biases cannot change with the adapter")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_WEIGHTS):
        raise ModelError(
            f"adapter {shown}: init_lora_weights: found {begun!r:.40}, which changes the model's own weights\n"
            "    fix: save it with PEFT's path_initial_model_for_weight_conversion, which makes it plain LoRA"
        )
    for key, value in config.items():
        if key not in _MEANINGLESS and value:
            reason = _UNLIKE_LORA.get(key, "a key that is not known here and may change what the adapter means")
            raise ModelError(f"adapter {shown}: {key!r:.60}: {reason}; only plain LoRA is supported")


def _pairs(state: Mapping[str, Tensor], rank: int, shown: str) -> dict[str, tuple[Tensor, Tensor]]:
    import torch

    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise ModelError(f"adapter {shown}: {key!r:.120} is no LoRA matrix of a linear layer")
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ModelError(f"adapter {shown}: {key!r:.120}: found {tensor.dtype}, expected float32 or 16 bits")
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"adapter {shown}: {key!r:.120} holds numbers that are not finite")
        halves.setdefault(match["module"], {})[match["side"]] = tensor
    pairs = {}
    for module, sides in halves.items():
        if len(sides) != 2:
            raise ModelError(f"adapter {shown}: {module:.120} has lora_{next(iter(sides))} only")
        a, b = sides["A"], sides["B"]
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
            found = f"A {list(a.shape)} and B {list(b.shape)}"
            raise ModelError(f"adapter {shown}: {module:.120}: found {found}, expected [{rank}, in] and [out, {rank}]")
        pairs[module] = (a, b)
    if not pairs:
        raise ModelError(f"adapter {shown} holds no tensors")
    return pairs
