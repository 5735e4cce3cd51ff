"""Tiny random models and a tokenizer for the LLM's tests, and what transformers' own generate says about them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from weftline.engine.llm import attention
from weftline.engine.llm.model_loader import RunnerOptions
from weftline.engine.llm.runner import Runner

VOCABULARY = 199
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TIE = 1e-4
"""Two best logits closer than this may change places: rounding differs between packed and padded batches."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = 24
_ALTERNATING = ["sliding_attention", "full_attention"] * 2

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_rope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": WINDOW},
    "gemma2": {
        "head_dim": 16, "sliding_window": WINDOW, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0,
        "query_pre_attn_scalar": 24,
    },
    "gemma3": {
        "model_type": "gemma3_text", "head_dim": 16, "sliding_window": WINDOW, "num_hidden_layers": 4,
        "layer_types": _ALTERNATING, "query_pre_attn_scalar": 24,
    },
    "phi": {"num_key_value_heads": 4},
    "phi3": {"sliding_window": WINDOW},
    "olmo": {"clip_qkv": 8.0},
    "olmo2": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    },
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "cohere2": {"num_hidden_layers": 4, "sliding_window": WINDOW},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "deepseek_v3": {
        "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "n_group": 1, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1, "n_shared_experts": 1,
    },
}  # fmt: skip
"""What each family's tiny model has beyond the sizes they share; a name is transformers' model type, or has one."""


def config(family: str) -> Any:
    """Return the config of a tiny model; windows are WINDOW tokens, less than most prompts of the tests."""
    options = {"model_type": family, **_SIZES, **FAMILIES[family]}
    return AutoConfig.for_model(**options)


@cache
def reference(family: str) -> Any:
    """Return the model as transformers runs it, float32, with its eager attention."""
    torch.set_num_threads(1)
    torch.manual_seed(11)
    return AutoModelForCausalLM.from_config(config(family), attn_implementation="eager").eval()


@cache
def runner(family: str, pages: int = 64, page_tokens: int = 8, form: str = "auto") -> Runner:
    """Return the same weights with paged attention; the KV memory has `pages` pages."""
    attention.register()
    ours = AutoModelForCausalLM.from_config(config(family), attn_implementation=attention.NAME)
    ours.load_state_dict(reference(family).state_dict())
    made = Runner(ours, RunnerOptions(page_tokens=page_tokens, form=form))
    made.resize(pages)
    return made


def prompts(count: int, seed: int, longest: int = 90) -> list[list[int]]:
    """Return random prompts; every third begins like another one, so that prefixes are found."""
    rng = random.Random(seed)
    made: list[list[int]] = []
    for place in range(count):
        head = rng.choice(made)[: rng.randint(8, 48)] if made and place % 3 == 0 else []
        made.append(head + [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, longest - len(head)))])
    return made


@torch.inference_mode()
def continues(family: str, prompt: list[int], answer: list[int], tokens: int) -> bool | None:
    """Return whether `answer` is what transformers' generate gives; None where it differs from a tie on."""
    model = reference(family)
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    expected = out[0, len(prompt) :].tolist()
    if answer == expected:
        return True
    at = next((i for i, (a, b) in enumerate(zip(answer, expected, strict=False)) if a != b), None)
    if at is None:
        return False
    logits = model(torch.tensor([prompt + expected[:at]])).logits[0, -1]
    return None if float(logits[expected[at]] - logits[answer[at]]) < TIE else False


def tokenizer(added: Sequence[str] = ("<think>",)) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with ChatML's control tokens and template, trained on a few lines."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["the user asks and the assistant answers, again and again"] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<|pad|>", eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.add_tokens([*added])
    fast.chat_template = TEMPLATE
    return fast


def save(folder: Path, words: PreTrainedTokenizerFast | None = None, tokens_max: int = 512) -> Path:
    """Write a tiny llama with the tokenizer to `folder`, as a user would have it; returns the folder."""
    torch.manual_seed(5)
    words = words or tokenizer()
    sizes = {**_SIZES, "vocab_size": len(words), "eos_token_id": words.eos_token_id}
    sizes["max_position_embeddings"] = tokens_max
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def fresh_runner(family: str, pages: int = 64, page_tokens: int = 8, form: str = "auto") -> Runner:
    """Return such a runner for one test alone: one whose memory may be resized."""
    runner.cache_clear()
    made = runner(family, pages, page_tokens, form)
    runner.cache_clear()
    return made


def model_of_words(family: str, **options: Any) -> Any:
    """Return a tiny model of transformers whose vocabulary is that of `tokenizer`."""
    words = tokenizer()
    torch.manual_seed(6)
    torch.set_num_threads(1)
    sizes = _SIZES | {"vocab_size": len(words), "eos_token_id": words.eos_token_id, "bos_token_id": None}
    made = AutoConfig.for_model(family, **sizes | options)
    return AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
