"""What a request may ask for, and the life of a sequence."""

from __future__ import annotations

import json
import math

import pytest

from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.sequence import MOVES, Sequence, check_tokens
from weftline.errors import InputError


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"tokens_max": 2**31}, "tokens_max"),
        ({"tokens_max": 0}, "tokens_max"),
        ({"tokens_max": True}, "tokens_max"),
        ({"tokens_max": "9"}, "tokens_max"),
        ({"tokens_max": 4, "tokens_min": 5}, "tokens_min"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 10**5000}, "temperature"),
        ({"tokens_max": 10**5000}, "tokens_max"),
        ({"top_p": 0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": math.inf}, "presence_penalty"),
        ({"stop": "text"}, "stop"),
        ({"stop": ["x"] * 100_000}, "100000"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x" * 10_000]}, "stop"),
        ({"stop": [3]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"temprature": 1}, "temperature"),
        ([], "object"),
    ],
)
def test_a_sampling_field_out_of_range_is_refused_by_name(values, named):
    with pytest.raises(InputError, match=named):
        SamplingParams.read(values)


def test_a_request_changes_single_keys_of_the_steps_sampling():
    step = SamplingParams(tokens_max=9, temperature=0.5, stop=("a",))
    changed = SamplingParams.read(json.loads('{"temperature": 1, "stop": ["b", "c"]}'), step)
    assert changed == SamplingParams(tokens_max=9, temperature=1, stop=("b", "c"))


@pytest.mark.parametrize("ids", [[], [1, -1], [5], [0.5], ["a"], [True]])
def test_a_prompt_outside_the_vocabulary_is_refused(ids):
    with pytest.raises(InputError, match="expected"):
        check_tokens(ids, 5)


def test_an_illegal_move_names_state_event_and_what_was_allowed():
    sequence = Sequence(1, [1, 2], 2, 9, SamplingParams(), 0)
    with pytest.raises(RuntimeError, match=r"waiting: preempt is no move; allowed: \['join', 'finish', "):
        sequence.move("preempt")


def test_terminal_states_have_no_way_out():
    assert {state for state, _ in MOVES} == {"waiting", "running"}
    assert set(MOVES.values()) == {"waiting", "running", "finished", "cancelled", "failed"}
