"""Meaning of Triton's request parameters."""

from __future__ import annotations

import pytest

from weftline.engine.serving.v2.parameters import EMPTY_FINAL, RequestParameters, read_parameters
from weftline.errors import InputError
from weftline.nodes.urgency import SequencePart


def test_nothing_said_is_nothing_meant() -> None:
    assert read_parameters({}) == RequestParameters()
    assert (
        read_parameters({"priority": 0, "timeout": 0, "sequence_id": 0, "sequence_start": False}) == RequestParameters()
    )
    assert read_parameters({"sequence_id": ""}) == RequestParameters()


@pytest.mark.parametrize(("id", "meant"), [(7, "7"), ("chat-1", "chat-1"), (2**64 - 1, str(2**64 - 1))])
def test_a_sequence_has_a_number_or_a_name(id: int | str, meant: str) -> None:
    found = read_parameters({"sequence_id": id, "sequence_start": True, "sequence_end": True})
    assert found.sequence == SequencePart(meant, True, True)
    assert read_parameters({"sequence_id": id}).sequence == SequencePart(meant)


@pytest.mark.parametrize(("level", "ours"), [(1, 100), (2, 99), (101, 0), (201, -100), (2**64 - 1, -100)])
def test_the_lower_a_level_the_higher_the_priority(level: int, ours: int) -> None:
    assert read_parameters({"priority": level}).priority == ours


@pytest.mark.parametrize(
    ("timeout_us", "call_ms", "left_ms"),
    [
        (500_000, None, 500),
        (500_000, 200.0, 200),
        (500_000, 900.0, 500),
        (0, 200.0, 200),
        (1, None, 0.001),
        (0, -5.0, 0),
        (2**64 - 1, None, 86_400_000),
        (0, 1e300, 86_400_000),
    ],
)
def test_the_shorter_of_timeout_and_deadline_holds(timeout_us: int, call_ms: float | None, left_ms: float) -> None:
    assert read_parameters({"timeout": timeout_us}, call_ms).deadline_ms == left_ms


def test_a_calls_deadline_holds_without_parameters() -> None:
    assert read_parameters({}, 12.5).deadline_ms == 12.5


def test_the_empty_final_response_can_be_asked_for() -> None:
    assert read_parameters({EMPTY_FINAL: True}).empty_final and not read_parameters({EMPTY_FINAL: False}).empty_final


def test_parameters_of_the_clients_own_are_ignored() -> None:
    assert read_parameters({"colour": "red", "n": 3, "x": 0.5, "binary_data_output": True}) == RequestParameters()


def test_a_request_may_be_a_row_of_a_job_and_bring_its_seed() -> None:
    found = read_parameters({"job": True, "seed": 2**62 - 1})
    assert (found.job, found.seed, found.priority) == (True, 2**62 - 1, 0)
    assert (
        read_parameters({"job": False}).job,
        read_parameters({"seed": 0}).seed,
        read_parameters({"priority": 1}).seed,
    ) == (False, 0, None)


@pytest.mark.parametrize(
    "parameters",
    [
        {"triton_final_response": True}, {"triton_": 1}, {"headers": "x"}, {EMPTY_FINAL: 1},
        {"sequence_id": True}, {"sequence_id": 1.5}, {"sequence_id": "x" * 129}, {"sequence_id": 10**5000},
        {"sequence_start": True}, {"sequence_id": 0, "sequence_end": True}, {"sequence_id": 1, "sequence_start": "yes"},
        {"priority": -1}, {"priority": "1"}, {"priority": True}, {"priority": 1 << 64}, {"timeout": -1},
        {"timeout": 1.5}, {"timeout": "1"}, {"k" * 129: 1}, {"k": "x" * 4097}, {f"k{i}": i for i in range(65)},
        {"job": 1}, {"job": "true"}, {"seed": -1}, {"seed": 1 << 62}, {"seed": True}, {"seed": "7"}, {"seed": 1.0},
    ],
)  # fmt: skip
def test_what_is_reserved_or_of_the_wrong_type_is_refused(parameters: dict[str, object]) -> None:
    with pytest.raises(InputError) as refused:
        read_parameters(parameters)  # type: ignore[arg-type]
    assert len(str(refused.value)) < 200
