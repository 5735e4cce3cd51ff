"""When an answer ends, with one token a round and with several."""

from __future__ import annotations

import pytest

from weftline.engine.llm.answer_syntax import AnswerSyntax
from weftline.engine.llm.detokenizer import TextStream, TokenName, WindowDecoder
from weftline.engine.llm.output import RequestOutput, SequenceOutput
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.request import TokenUpdate
from weftline.engine.llm.sequence import Sequence

END = 99


def _reply(text: bool = True, echo: str = "", **params) -> tuple[SequenceOutput, Sequence]:
    made = SamplingParams(**{"tokens_max": 20, **params})
    sequence = Sequence(1, [1, 2, 3], 3, 3 + made.tokens_max, made, 1)
    stream = TextStream(WindowDecoder(lambda ids: "".join(chr(97 + id) for id in ids)), made.stop) if text else None
    return SequenceOutput(sequence, frozenset([END]), stream, echo), sequence


def _say(reply: SequenceOutput, sequence: Sequence, tokens: list[int], size: int) -> tuple[list[int], str, str | None]:
    """Bring `size` tokens a round, as an engine would."""
    said, text = [], ""
    for at in range(0, len(tokens), size):
        taken = TokenUpdate(1, tuple(tokens[at : at + size]))
        reply.add(taken)
        said += taken.tokens
        text += taken.text
        if taken.finish is not None:
            return said, text, taken.finish
    return said, text, None


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("params", "tokens", "text", "count", "finish"),
    [
        ({}, [0, 1, 2, END, 5], "abc", 4, "stop"),
        ({"ignore_eos": True, "tokens_max": 4}, [0, 1, 2, 3, 4], "abcd", 4, "length"),
        ({"stop": ["cd"]}, [0, 1, 2, 3, 4], "ab", 4, "stop"),
        ({"stop": ["cd"]}, [0, 1, 2, END], "abc", 4, "stop"),
        ({"stop_token_ids": [2]}, [0, 1, 2, 3], "ab", 3, "stop"),
        ({"tokens_max": 2, "stop": ["bc"]}, [0, 1, 2], "ab", 2, "length"),
    ],
)
def test_it_ends_at_the_same_token_however_many_come_at_once(params, tokens, text, count, finish, size):
    reply, sequence = _reply(**params)
    assert _say(reply, sequence, tokens, size) == (tokens[:count], text, finish)


def test_one_token_at_a_time_says_the_same_as_taking_it_alone():
    for text in (True, False):
        one, _ = _reply(text, tokens_max=5)
        many, _ = _reply(text, tokens_max=5)
        for token in (4, 5, 6, END):
            taken, alone = TokenUpdate(1, (token,)), TokenUpdate(1, (token,))
            many.add_all(taken)
            one.add(alone)
            assert alone == taken
            if taken.finish:
                break


def test_text_that_is_held_back_may_complete_a_stop_text_at_the_last_token():
    ended = []
    for alone in (True, False):
        made = SamplingParams(tokens_max=1, stop=("X",))
        stream = TextStream(WindowDecoder(lambda ids: "X\ufffd" if ids else ""), made.stop)
        reply = SequenceOutput(Sequence(1, [1, 2, 3], 3, 4, made, 1), frozenset([END]), stream)
        taken = TokenUpdate(1, (7,))
        (reply.add if alone else reply.add_all)(taken)
        ended.append((taken.text, taken.finish, taken.stop_string))
    assert ended == [("", "stop", "X")] * 2


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize(
    ("stop", "tokens", "matched"),
    [(["e", "cd"], [0, 1, 2, 3, 4], "cd"), (["cd", "bc"], [0, 1, 2, 3], "bc"), (["zz"], [0, 1, END], "")],
)
def test_the_first_stop_string_of_the_text_is_reported(size, stop, tokens, matched):
    output, _ = _reply(stop=stop)
    updates = [TokenUpdate(1, tuple(tokens[at : at + size])) for at in range(0, len(tokens), size)]
    for update in updates:
        output.add(update)
        if update.finish:
            break
    assert (update.finish, update.stop_string) == ("stop", matched)
    request = RequestOutput(1, lambda token: TokenName("", b""))
    request.add(update)
    found = request.outputs()
    for part in (found["usage"], found["answers"][0]):
        assert part.get("stop_string", "") == matched


def test_what_is_echoed_comes_once_and_first():
    reply, sequence = _reply(echo="prompt ")
    assert _say(reply, sequence, [0, 1, END], 1)[1] == "prompt ab"


def test_a_constraint_that_is_fulfilled_ends_the_answer():
    reply, _ = _reply()
    update = TokenUpdate(1, (0, 1), finish="stop")
    reply.add(update)
    assert (update.tokens, update.finish) == ((0, 1), "stop")


@pytest.mark.parametrize(
    ("pieces", "count"),
    [
        (["<think>", "hm", " so", "</think>", "yes", "!"], 4),
        (["<think>", "hm"], 2),
        (["yes", "!"], 0),
    ],
)
def test_tokens_of_the_reasoning_are_counted(pieces: list[str], count: int) -> None:
    output = RequestOutput(1, lambda token: TokenName("", b""), AnswerSyntax(reasoning=True))
    for place, piece in enumerate(pieces):
        last = place == len(pieces) - 1
        output.add(TokenUpdate(0, (7,), text=piece, finish="stop" if last else None, completion_tokens=place + 1))
    assert output.outputs()["usage"].get("reasoning_tokens", 0) == count
