"""Incremental decoding gives the text that decoding all tokens at once gives, whatever the tokenizer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.engine.llm import tiny
from weftline.engine.llm.detokenizer import BytesDecoder, WindowDecoder
from weftline.engine.llm.tokens import Tokens

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
TEXTS = (
    "the user asks and the assistant answers, again and again", "größer 🙂 than 家族 — naïve",
    "  two  spaces\n\tand a tab", "x = {'a': [1, 2]}  # don't", "ไทย हिन्दी العربية 👩\u200d👩\u200d👧",
)  # fmt: skip
SPECIAL = ["<unk>", "<s>", "</s>", "<|turn|>"]
KINDS = ("bytes", "bytes alone in a sequence", "llama 2", "gemma", "metaspace", "wordpiece", "suffixes", "no decoder")
BY_TABLE = KINDS[:4]
FALLBACK = KINDS[2:4]


@cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    special, alphabet = list(SPECIAL), []
    trainer: type[Any] = trainers.BpeTrainer
    options: dict[str, Any] = {}
    if kind.startswith("bytes"):
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel() if kind == "bytes" else decoders.Sequence([decoders.ByteLevel()])
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    elif kind in FALLBACK:
        made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        strip = [decoders.Strip(" ", 1, 0)] if kind == "llama 2" else []
        made.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
    elif kind == "wordpiece":
        made = Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
        trainer = trainers.WordPieceTrainer
    else:
        made = Tokenizer(
            models.BPE(unk_token="<unk>", **({"end_of_word_suffix": "</w>"} if kind == "suffixes" else {}))
        )
        made.pre_tokenizer = pre_tokenizers.Metaspace() if kind == "metaspace" else pre_tokenizers.Whitespace()
        if kind == "metaspace":
            made.decoder = decoders.Metaspace()
        elif kind == "suffixes":
            made.decoder = decoders.BPEDecoder()
            options["end_of_word_suffix"] = "</w>"
    made.train_from_iterator(
        [*TEXTS] * 3,
        trainer(vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False, **options),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    if kind in FALLBACK:  # they are plain tokens in such models, not special ones
        fast = _with_plain_bytes(fast)
    fast.add_tokens(["<think>", "größe \N{SNOWMAN}"])
    return fast


def _with_plain_bytes(fast: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    import json

    state = json.loads(fast.backend_tokenizer.to_str())
    state["added_tokens"] = [one for one in state["added_tokens"] if not one["content"].startswith("<0x")]
    made = Tokenizer.from_str(json.dumps(state))
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _streamed(words: Tokens, ids: Sequence[int], control: bool = False, stop: Sequence[str] = ()) -> list[str]:
    stream = words.stream(stop, control)
    return [*map(stream.push, ids), stream.finish()]


def _well_formed(whole: str) -> bool:
    return "\N{REPLACEMENT CHARACTER}" not in whole


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_random_tokens_are_the_text_of_all_of_them(kind: str, control: bool) -> None:
    words = Tokens(tokenizer(kind), 512)
    size = len(words.tokenizer) + 3  # a model may have more logits than its tokenizer has tokens
    draws = random.Random(3)
    compared = 0
    for _ in range(150):
        known = draws.choice([range(size), range(4), words.tokenizer.encode(draws.choice(TEXTS))])
        ids = draws.choices(known, k=draws.randint(0, 24))
        whole = words._decoder(control)(ids)
        if kind not in KINDS[:2] and not _well_formed(whole):
            continue  # what such tokenizers make of broken bytes changes with what follows
        compared += 1
        assert "".join(_streamed(words, ids, control)) == whole, ids
    assert compared > 60


@pytest.mark.parametrize("kind", KINDS[:4])
def test_every_text_comes_back_in_whole_characters(kind: str) -> None:
    words = Tokens(tokenizer(kind), 512)
    for text in TEXTS:
        ids = words.tokenizer.encode(text, add_special_tokens=False)
        pieces = _streamed(words, ids)
        assert "".join(pieces) == words.tokenizer.decode(ids)
        assert all(map(_well_formed, pieces))
        assert sum(map(bool, pieces)) > 3, "and they come one by one"


@pytest.mark.parametrize("kind", FALLBACK)
def test_broken_bytes_spoil_no_character_beside_them(kind: str) -> None:
    words = Tokens(tokenizer(kind), 512)
    byte = words.tokenizer.convert_tokens_to_ids
    euro = [byte(f"<0x{one:02X}>") for one in "€".encode()]
    unfinished = "\N{REPLACEMENT CHARACTER}"
    assert "".join(_streamed(words, [*euro, byte("<0xFF>"), *euro, *euro[:2]])) == f"€{unfinished}€{unfinished}"
    pieces = _streamed(words, [*euro, byte("<0xFF>"), *euro])
    assert pieces == ["", "", "€", unfinished, "", "", "€", ""], "nor hold them up"


def test_a_special_token_amid_the_answer_takes_no_space_along() -> None:
    for kind in KINDS[2:5]:
        words = Tokens(tokenizer(kind), 512)
        known = words.tokenizer.encode("the user asks", add_special_tokens=False)
        ids = [known[0], words.tokenizer.convert_tokens_to_ids("</s>"), *known[1:]]
        assert "".join(_streamed(words, ids)) == words.tokenizer.decode(ids, skip_special_tokens=True), kind


@pytest.mark.parametrize("kind", KINDS)
def test_stop_strings_end_the_text_where_they_first_appear(kind: str) -> None:
    words = Tokens(tokenizer(kind), 512)
    draws = random.Random(5)
    found = 0
    for text in TEXTS[:4]:
        ids = words.tokenizer.encode(text, add_special_tokens=False)
        whole = words.decode(ids)
        for _ in range(10):
            at = draws.randrange(max(1, len(whole) - 3))
            stop = whole[at : at + draws.randint(1, 3)]
            stream, pieces = words.stream([stop]), []
            for id in ids:
                pieces.append(stream.push(id))
                if stream.stopped:
                    break
            pieces.append(stream.finish())
            assert "".join(pieces) == whole[: whole.find(stop)]
            found += stream.stopped
    assert found > 20


def test_each_token_is_decoded_once() -> None:
    decoded: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return "".join(chr(97 + id) for id in ids)

    draws, alone = random.Random(1), {}
    ids = draws.choices(range(20), k=1000)
    for _ in range(2):
        decoder = WindowDecoder(decode, alone)
        assert "".join([*map(decoder.push, ids), decoder.finish()]) == decode(ids)
        decoded.pop()
    assert len(decoded) == 2 * len(ids) + len(set(ids)), "beside each token alone, once"
    assert max(decoded) == 2, "with the one before, and no more"


@pytest.mark.parametrize("kind", BY_TABLE)
def test_tokens_of_most_tokenizers_come_from_a_table(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = Tokens(tokenizer(kind), 512)
    ids = words.tokenizer.encode("the user asks", add_special_tokens=False)
    whole = words.decode(ids)
    monkeypatch.setattr(Tokens, "_decoder", lambda *_: pytest.fail("decoded by the tokenizer"))
    assert isinstance(words.stream()._decoder, BytesDecoder)
    assert "".join(_streamed(words, ids)) == whole


def test_a_bpe_tokenizer_is_not_slowed_by_an_ignored_clean_up() -> None:
    """Llama 3's files ask for one; transformers applies it to no BPE vocabulary."""
    made = tiny.tokenizer()
    made.clean_up_tokenization_spaces = True
    words = Tokens(made, 512)
    ids = made.encode("again , and")
    assert isinstance(words.stream()._decoder, BytesDecoder)
    assert "".join(_streamed(words, ids)) == made.decode(ids) == "again , and"
