"""GGUF files of tiny models, written with the gguf package: weights, settings and tokenizer in one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.engine.llm import tiny

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "phi3": {"sliding_window": None},
    "gemma2": {
        "head_dim": 16, "sliding_window": tiny.WINDOW, "query_pre_attn_scalar": 16, "tie_word_embeddings": True
    },
}  # fmt: skip
CONTROL, USER_DEFINED, NORMAL = 3, 4, 1
"""Types of tokens."""


def make(family: str, **options: Any) -> Any:
    """Return a tiny model whose vocabulary is that of tiny's tokenizer."""
    return tiny.model_of_words(family, **FAMILIES[family] | options)


def write_gguf(
    path: Path,
    model: Any,
    kind: str = "F32",
    settings: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    template: str = tiny.TEMPLATE,
) -> Path:
    """Write a model to a GGUF file; returns the path.

    kind:     how matrices are stored.   settings, tensors: further ones of the file.
    """
    config, family = model.config, model.config.model_type
    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3,
            "phi3": gguf.MODEL_ARCH.PHI3, "gemma2": gguf.MODEL_ARCH.GEMMA2}[family]  # fmt: skip
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    for key, value in (settings or {}).items():
        {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)](key, value)
    _add_tokenizer(writer, template)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        values = weight.float().numpy()
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if family == "gemma2" and "norm" in name:
            values = values + 1
        _add_tensor(writer, found, np.ascontiguousarray(values), kind if values.ndim > 1 else "F32")
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensor(writer: Any, name: str, values: np.ndarray, kind: str) -> None:
    stored = gguf.GGMLQuantizationType[kind]
    if kind == "F32":
        writer.add_tensor(name, values)
    elif kind in ("Q4_K", "Q6_K"):  # which the package cannot write: random blocks with small scales
        elements, size = gguf.GGML_QUANT_SIZES[stored]
        rng = np.random.default_rng(len(name))
        blocks = rng.integers(0, 256, (values.size // elements, size), np.uint8)
        scales = rng.uniform(1e-4, 2e-4, (len(blocks), 2)).astype(np.float16).view(np.uint8)
        if kind == "Q4_K":
            blocks[:, :4] = scales
        else:
            blocks[:, -2:] = scales[:, :2]
        writer.add_tensor(name, blocks.reshape(values.shape[0], -1), raw_dtype=stored)
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)


def _add_tokenizer(writer: Any, template: str) -> None:
    words = tiny.tokenizer()
    vocabulary = sorted(words.get_vocab().items(), key=lambda item: item[1])
    added = words.added_tokens_decoder
    types = [(CONTROL if added[id].special else USER_DEFINED) if id in added else NORMAL for _, id in vocabulary]
    merges = json.loads(words.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(words.eos_token_id)
    writer.add_pad_token_id(words.pad_token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(template)
