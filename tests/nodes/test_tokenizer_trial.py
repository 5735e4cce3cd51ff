"""Test that a tokenizer whose patterns take exponential time or memory is refused, and published patterns are not."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from weftline.errors import InputError, ModelError
from weftline.nodes.hugging_face import load_tokenizer
from weftline.nodes.text_tokens import TEXT_CHARS_MAX, Overflow, TextTokens
from weftline.nodes.tokenizer_trial import try_tokenizer

MODELS = Path(__file__).parents[2] / "examples" / "models"


def _split(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": split}


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


HOSTILE: dict[str, dict[str, Any]] = {
    "split": _split(r"(a+)+$"),
    "split of a rare letter": _split(r"(z|z)*q"),
    "replace": {"normalizer": _replace({"Regex": "(x+x+)+y"}, "")},
    "decoder": {"decoder": _replace({"Regex": "(w+w+)+y"}, "")},
    "growth": {"normalizer": _replace({"String": "a"}, "a" * 1000)},
    "doubling": {
        "normalizer": {"type": "Sequence", "normalizers": [_replace({"String": "a"}, "aa")] * 40}
    },
    "long pieces": {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["?", 0.0], ["a" * 1000, -1.0]]}},
    "long pieces of no type": {"model": {"vocab": [["\u4e00" * 100, -1.0]]}},
    "long words": {"model": {"type": "WordPiece", "max_input_chars_per_word": 10**9}},
}  # fmt: skip


def _write(folder: Path, parts: dict[str, Any]) -> Path:
    whole = {"normalizer": None, "pre_tokenizer": None, "decoder": None, "model": {"type": "WordLevel"}, **parts}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    return folder


@pytest.mark.timeout(90)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_tokenizer_of_slow_patterns_is_refused(tmp_path: Path, name: str) -> None:
    started = time.process_time()
    with pytest.raises(ModelError, match=r"m/tokenizer\.json"):
        try_tokenizer(_write(tmp_path, HOSTILE[name]), "m")
    assert time.process_time() - started < 2  # the work is done in the other process


def test_a_node_refuses_such_a_tokenizer_as_it_opens(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="its patterns"):
        load_tokenizer(_write(tmp_path, HOSTILE["split"]), "m")


def test_a_deeply_nested_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"normalizer":' * 100_000)
    with pytest.raises(ModelError, match="not valid JSON"):
        try_tokenizer(tmp_path, "m")


PUBLISHED = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
"""The patterns of GPT-2, Llama 3 (Qwen2's too) and GPT-4o."""


def test_pieces_of_published_lengths_are_accepted(tmp_path: Path) -> None:
    pieces = [[text, -1.0] for text in ("?", "\u4e00" * 16, '"\\"' * 16, "<extra_id_99>")]
    try_tokenizer(_write(tmp_path, {"model": {"type": "Unigram", "vocab": pieces}}), "m")


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_published_patterns_are_accepted(tmp_path: Path, pattern: str) -> None:
    try_tokenizer(_write(tmp_path, _split(pattern)), "m")


@pytest.mark.parametrize("name", ["shapes-chat", "guardrail"])
def test_bundled_tokenizers_are_accepted(name: str) -> None:
    try_tokenizer(MODELS / name, name)


def test_a_text_of_too_many_characters_is_not_encoded() -> None:
    tokens = TextTokens(load_tokenizer(MODELS / "guardrail", "guardrail"), 64, 0)
    texts = ["a" * (TEXT_CHARS_MAX + 1), "hello"]
    long, short = tokens.encode(texts, [Overflow("end")] * 2)
    assert isinstance(long, InputError) and "characters" in str(long) and not isinstance(short, InputError)
