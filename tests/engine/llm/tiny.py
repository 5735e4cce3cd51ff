"""Tiny random models and a tokenizer for the LLM's tests, and what transformers' own generate says about them."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from weftline.engine.llm import attention
from weftline.engine.llm.runner import Runner, RunnerOptions

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
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = 24


def config(family: str) -> Any:
    """Return the config of a tiny model; mistral looks back WINDOW tokens, less than most prompts of the tests."""
    if family == "llama":
        return LlamaConfig(**_SIZES)
    if family == "qwen3":
        return Qwen3Config(**_SIZES, head_dim=16)
    return MistralConfig(**_SIZES, head_dim=16, sliding_window=WINDOW)


@cache
def reference(family: str) -> Any:
    """Return the model as transformers runs it, float32, with its eager attention."""
    torch.set_num_threads(1)
    torch.manual_seed(11)
    return AutoModelForCausalLM.from_config(config(family), attn_implementation="eager").eval()


@cache
def runner(family: str, pages: int = 64, page_tokens: int = 8) -> Runner:
    """Return the same weights with paged attention; the KV memory has `pages` pages."""
    attention.register()
    ours = AutoModelForCausalLM.from_config(config(family), attn_implementation=attention.NAME)
    ours.load_state_dict(reference(family).state_dict())
    token_bytes = 2 * 2 * 2 * 16 * 4
    made = Runner(ours, RunnerOptions(page_tokens=page_tokens, kv_bytes=pages * page_tokens * token_bytes))
    if made.pages != pages:
        raise AssertionError(f"{made.pages} pages, expected {pages}")
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


def tokenizer() -> PreTrainedTokenizerFast:
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
    fast.add_tokens(["<think>"])
    fast.chat_template = TEMPLATE
    return fast


def save(folder: Path) -> Path:
    """Write a tiny llama with the tokenizer to `folder`, as a user would have it; returns the folder."""
    torch.manual_seed(5)
    words = tokenizer()
    sizes = {**_SIZES, "vocab_size": len(words), "eos_token_id": words.eos_token_id}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder
