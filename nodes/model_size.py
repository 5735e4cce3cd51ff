"""Estimate how many weights a network has by its configuration, without a framework and without building it.

The estimates are lower bounds, by the matrices that every such network has: embeddings, attention and feed-forward
layers, experts, positions. `check` compares them with the stored weights and with the machine's memory; the exact
number is counted when a model opens, by a network without memory (torch's meta device).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

WEIGHTS_PER_BYTE = 2
"""Most weights that a stored byte holds, of plain weights: 8 bits each, and tied embeddings counted twice."""

PACKED_PER_BYTE = 8
"""The same of quantised weights: the smallest published ones take 1.6 bits each."""

SLACK_WEIGHTS = 1 << 24
"""Weights that a network may have more: tables that are computed, and heads that are not stored. 64 MB as float32."""

EXPERT_LAYERS = 4
"""At least one of so many layers has experts, in networks that have any."""

_LEARNED = frozenset({
    "albert", "bart", "bert", "camembert", "clip", "clip_text_model", "deberta", "deberta-v2", "distilbert", "electra",
    "gpt2", "gpt_neo", "mbart", "mpnet", "opt", "roberta", "whisper", "xlm-roberta",
})  # fmt: skip
"""Kinds of models with a table of positions, whatever else their configuration says."""

_COMPUTED = ("rope", "rotary", "alibi")
"""Parts of names of settings of networks that compute positions."""


def size_mismatch(weights: int, stored_bytes: int, packed: bool) -> str:
    """Return why a network of at least `weights` weights cannot be the one that is stored; '' where it can."""
    most = stored_bytes * (PACKED_PER_BYTE if packed else WEIGHTS_PER_BYTE) + SLACK_WEIGHTS
    if weights <= most:
        return ""
    return f"describes a network of at least {weights} weights, and {stored_bytes} bytes of weights are stored"


def least_weights(config: Any) -> int:
    """Return how many weights a network with this config.json has at least; 0 where it states no sizes.

    Of networks inside it, such as that for pictures, the largest counts: some are described and not built.
    """
    found, waiting = 0, [config]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            found = max(found, _weights(one))
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)
    return found


def _weights(config: Mapping[str, Any]) -> int:
    width = _first(config, "hidden_size", "d_model", "n_embd", "dim", "emb_dim")
    inner = _first(config, "intermediate_size", "ffn_dim", "encoder_ffn_dim", "n_inner", "d_ff", "hidden_dim")
    layers = _first(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    layers = max(layers, _first(config, "encoder_layers") + _first(config, "decoder_layers"))
    if config.get("model_type") == "albert":  # its layers share their weights
        layers = min(layers, _first(config, "num_hidden_groups") or 1)
    experts = _first(config, "num_local_experts", "num_experts", "n_routed_experts")
    expert = _first(config, "moe_intermediate_size") or inner
    blocks = layers * width * (width // 2 + min(inner, expert))
    routed = layers // EXPERT_LAYERS * experts * width * expert * 2
    return blocks + routed + _tables(config, width) + _patches(config, width) + _stages(config)


def _tables(config: Mapping[str, Any], width: int) -> int:
    """Return the weights of tables: of tokens, their types, positions and labels."""
    column = _first(config, "embedding_size", "word_embed_proj_dim") or width
    rows = _first(config, "vocab_size", "n_vocab") + _first(config, "type_vocab_size")
    if config.get("model_type") in _LEARNED or not any(part in str(key) for key in config for part in _COMPUTED):
        rows += _first(config, "max_position_embeddings", "n_positions", "max_source_positions")
    return rows * column + _first(config, "num_labels") * width


def _patches(config: Mapping[str, Any], width: int) -> int:
    """Return the weights of what reads pictures in patches: one projection, and a position for each."""
    patch, side = _first(config, "patch_size"), _first(config, "image_size")
    return (patch**2 + (side // patch) ** 2) * width if patch else 0


def _stages(config: Mapping[str, Any]) -> int:
    """Return the weights of layers whose widths are a list, and of stages with `depths` layers each."""
    found = 0
    for name in ("hidden_sizes", "conv_dim", "tdnn_dim"):
        widths = _sizes(config.get(name))
        found += sum(one * after for one, after in itertools.pairwise(widths))
    depths = _sizes(config.get("depths"))
    widths = _sizes(config.get("hidden_sizes")) or [_first(config, "embed_dim")] * len(depths)
    return found + sum(depth * width**2 // 2 for depth, width in zip(depths, widths))


def _first(config: Mapping[str, Any], *names: str) -> int:
    """Return the first of these settings that is a count; 0 for none."""
    return next((config[name] for name in names if type(config.get(name)) is int and config[name] > 0), 0)


def _sizes(value: Any) -> list[int]:
    return [one for one in value if type(one) is int and one > 0] if isinstance(value, list) else []


_NO_WEIGHTS = re.compile(r"Pool|Upsample|Pad|Identity|Dropout|LU|Softmax|Sigmoid|Tanh|Flatten|Shuffle|Fold|Norm")
"""Layers of torch without weights, or with few."""


def least_yolo_weights(architecture: Mapping[str, Any]) -> int:
    """Return about how many weights the layers of a valid ultralytics architecture have, rather too few.

    A layer is counted as one matrix or convolution from the channels of the layers that it reads to its own.
    """
    depth, wide, most = _scale(architecture)
    channels: list[int] = []
    found = 0
    for source, repeats, module, arguments in (*architecture.get("backbone", ()), *architecture.get("head", ())):
        read = [channels[at] for at in _sources(source) if -len(channels) <= at < len(channels)] or [3]
        sizes = [one for one in _flat(arguments) if one > 0]
        into, own = max(read), sum(read) if module == "Concat" else max(read)
        if module.startswith(("nn.", "torchvision.")):
            count = 0
            if sizes and not _NO_WEIGHTS.search(module):
                count = into
                for size in sizes:
                    count *= size
        elif sizes and module != "Concat":
            own = max(int(min(sizes[0], most) * wide), 1)
            kernel = sizes[1] if "Conv" in module and len(sizes) > 1 else 1
            count = (1 if module.startswith("DW") else into) * own * kernel**2
        else:
            count = 0
        found += max(int(repeats * depth), 1) * count
        channels.append(own)
    return found


def _scale(architecture: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return the factors of depth and width of an architecture, and its most channels, as ultralytics reads them."""
    scales = architecture.get("scales")
    if isinstance(scales, Mapping) and scales:
        chosen = scales.get(architecture.get("scale") or next(iter(scales)))
        if isinstance(chosen, list) and len(chosen) == 3 and all(isinstance(one, int | float) for one in chosen):
            return chosen[0], chosen[1], chosen[2]
    depth, wide = (architecture.get(name, 1.0) for name in ("depth_multiple", "width_multiple"))
    return (
        depth if isinstance(depth, int | float) else 1.0,
        wide if isinstance(wide, int | float) else 1.0,
        float("inf"),
    )


def _sources(source: Any) -> Sequence[int]:
    return [one for one in (source if isinstance(source, list) else [source]) if type(one) is int]


def _flat(values: Any) -> list[int]:
    """Return the whole numbers among a layer's arguments, of a list the largest."""
    found = []
    for one in values if isinstance(values, list) else ():
        if isinstance(one, list):
            found.append(max(_flat(one), default=0))
        elif type(one) is int:
            found.append(one)
    return found
