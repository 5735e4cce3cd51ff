"""Choices of completions: log-probabilities with names, bytes and offsets of tokens, and what ended them."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.engine.llm import tiny
from weftline.engine.llm.tokens import Tokens
from weftline.engine.serving.openai.completions import (
    ChatFormat,
    Choice,
    TextFormat,
    TextOffsets,
    chat_logprobs_json,
    choices_of,
    text_tokens,
)
from weftline.engine.serving.openai.ports import AnswerPorts

TEXT = "a \N{GRINNING FACE} é!"


def tokens_of(words: Any, text: str) -> list[dict[str, Any]]:
    found = Tokens(words, 512)
    named = [(id, found.name_of(id)) for id in words.encode(text, add_special_tokens=False)]
    return [
        {"id": id, "token": name.text, "bytes": None if name.data is None else list(name.data), "logprob": -1.0}
        for id, name in named
    ]


def pieces() -> PreTrainedTokenizerFast:
    """Return a tokenizer in the form of SentencePiece's, whose decoder drops the first space."""
    vocabulary = {"<unk>": 0, "</s>": 1, "▁the": 2, "▁red": 3, "s": 4}
    words = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, ignore_merges=True))
    words.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    words.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")


def test_bytes_of_tokens_are_those_of_the_text() -> None:
    tokens = tokens_of(tiny.tokenizer(), TEXT)
    assert b"".join(bytes(one["bytes"]) for one in tokens).decode() == TEXT
    assert tokens[2]["token"] == "\\xf0" and len(tokens) > len(TEXT)
    assert chat_logprobs_json(tokens)["content"][2] | {"top_logprobs": 0} == {
        "token": "\\xf0", "logprob": -1.0, "bytes": [0xF0], "top_logprobs": 0,
    }  # fmt: skip


def test_parts_of_a_character_have_its_offset() -> None:
    tokens = tokens_of(tiny.tokenizer(), TEXT)
    columns = TextFormat().whole(Choice(0, TEXT, logprobs=tokens))["logprobs"]
    assert columns["tokens"][2] == "bytes:\\xf0"
    for place, one in enumerate(columns["text_offset"]):
        assert (
            bytes(byte for token in tokens[:place] for byte in token["bytes"]).decode("utf-8", "ignore") == TEXT[:one]
        )


def test_a_control_token_has_its_name_and_no_bytes() -> None:
    words = tiny.tokenizer()
    name = Tokens(words, 512).name_of(words.eos_token_id)
    assert (name.text, name.data) == ("<|im_end|>", None)
    assert Tokens(words, 512).name_of(words.eos_token_id, control=True).data == b"<|im_end|>"
    thought = words.convert_tokens_to_ids("<think>")
    assert Tokens(words, 512).name_of(thought).text == "<think>"


def test_a_token_keeps_the_space_at_its_beginning() -> None:
    tokens = tokens_of(pieces(), "the red")
    assert [one["token"] for one in tokens] == [" the", " red"]
    assert TextOffsets().add(tokens, "the red") == [0, 3]


@pytest.mark.parametrize(("finish", "count"), [("stop", 2), ("length", 4)])
def test_tokens_behind_the_text_are_no_part_of_a_chat(finish: str, count: int) -> None:
    ended = [{"token": "<end>", "bytes": None, "logprob": -1.0}]
    tokens = [{"token": one, "bytes": list(one.encode()), "logprob": -1.0} for one in ("a", " b", " stop")]
    assert len(text_tokens(Choice(0, "a b", finish, logprobs=[*tokens, *ended]))) == count


def test_pieces_have_the_offsets_of_the_whole() -> None:
    tokens = tokens_of(tiny.tokenizer(), TEXT)
    offsets, whole = TextOffsets(), TextOffsets().add(tokens, TEXT)
    assert [*offsets.add(tokens[:3], TEXT), *offsets.add(tokens[3:], "")] == whole


@pytest.mark.parametrize(
    ("outputs", "ended"),
    [
        ({"usage": {"finish_reason": "stop", "stop_string": "END"}}, {"finish_reason": "stop", "stop_reason": "END"}),
        ({"usage": {"finish_reason": "stop"}}, {"finish_reason": "stop"}),
        ({"usage": {"finish_reason": "length", "stop_string": "END"}}, {"finish_reason": "length"}),
        ({"answers": [{"text": "a", "finish_reason": "stop", "stop_string": "."}] * 2},
         {"finish_reason": "stop", "stop_reason": "."}),
    ],
)  # fmt: skip
def test_the_stop_string_that_ended_an_answer_is_named(outputs: dict[str, Any], ended: dict[str, Any]) -> None:
    ports = AnswerPorts(output="text", sampling=None, tenant=None, usage="usage", answers="answers")
    for choice in choices_of({"text": "a"} | outputs, ports, False, 0):
        whole, last = ChatFormat().whole(choice), ChatFormat().ending(choice, "", "", 0)[-1]
        for found in (whole, last, TextFormat().whole(choice)):
            assert {key: found[key] for key in found.keys() & {"finish_reason", "stop_reason"}} == ended
