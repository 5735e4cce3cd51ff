"""Request parameters, under Triton's names.

    sequence_id               an integer or text; 0 and '' are none
    sequence_start, _end      the request is the first or last of its sequence
    priority                  0: usual. 1 is the highest and greater is lower, as in Triton; 1 is our 100, 2 our 99, and
                              from 201 on it is our -100
    timeout                   time limit in microseconds, 0 for none; the shorter of it and the call's deadline counts
    triton_enable_empty_final_response    a stream ends with a separate response without outputs

Weftline's own:

    job                       the request is a row of a job: it waits behind other requests
    seed                      seed of random choices, 0 to 2^62 - 1; every item of a batch has the same

Every other name that begins with `triton_` is reserved and refused, as by Triton, and so is `headers`. Any other name
is checked for its size and ignored: Triton passes it to the model, and steps have no input for it.
(`binary_data_output` is handled by the REST server.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weftline.engine.request import DEADLINE_MS_MAX, SEQUENCE_CHARS_MAX
from weftline.engine.serving.v2.messages import Parameter
from weftline.errors import InputError
from weftline.nodes.urgency import PRIORITY_MAX, SEEDS, SequencePart

PARAMETERS_MAX = 64
"""Most parameters of a request, and of a tensor."""

KEY_CHARS_MAX = 128
TEXT_CHARS_MAX = 4096
"""Longest name and longest text value of a parameter."""

ID_CHARS_MAX = 256
"""Longest id of a request."""

RESERVED = "triton_"
EMPTY_FINAL = "triton_enable_empty_final_response"


@dataclass(frozen=True, slots=True)
class RequestParameters:
    """Request parameters in our units.

    deadline_ms: the shorter of `timeout` and the call's deadline, at most a day; None: neither is set.
    empty_final: its stream ends with a separate response without outputs.
    job, seed:   as in `RequestOptions`.
    """

    sequence: SequencePart | None = None
    priority: int = 0
    deadline_ms: float | None = None
    empty_final: bool = False
    job: bool = False
    seed: int | None = None


def read_parameters(parameters: Mapping[str, Parameter], deadline_ms: float | None = None) -> RequestParameters:
    """Read a request's parameters; InputError for a reserved one, or one of the wrong type.

    deadline_ms: time left of the call; None: it has no deadline.
    """
    if not parameters:
        return RequestParameters(None, 0, shorter_deadline(None, deadline_ms))
    check_sizes(parameters, "parameters")
    for key in parameters:
        if key == "headers" or (key.startswith(RESERVED) and key != EMPTY_FINAL):
            raise InputError(f"parameter {key!r} is reserved; leave it out")
    timeout_us = _count(parameters, "timeout", "microseconds")
    timeout_ms = _clamped(timeout_us / 1e3) if timeout_us else None
    return RequestParameters(
        _sequence(parameters),
        _priority(_count(parameters, "priority", "0 for usual, or a level from 1, the highest")),
        shorter_deadline(timeout_ms, deadline_ms),
        _flag(parameters, EMPTY_FINAL),
        _flag(parameters, "job"),
        _seed(parameters.get("seed")),
    )


def shorter_deadline(timeout_ms: float | None, deadline_ms: float | None) -> float | None:
    """Return the shorter of a request's `timeout` and its call's time left, at most a day; None without both."""
    if deadline_ms is None:
        return timeout_ms
    left_ms = _clamped(deadline_ms)
    return left_ms if timeout_ms is None else min(timeout_ms, left_ms)


def check_sizes(parameters: Mapping[str, Parameter], what: str) -> None:
    """Raise InputError for too many parameters, or too long ones."""
    if len(parameters) > PARAMETERS_MAX:
        raise InputError(f"{what}: found {len(parameters)}, expected at most {PARAMETERS_MAX}")
    for key, value in parameters.items():
        if len(key) > KEY_CHARS_MAX:
            raise InputError(f"{what}: found a name of {len(key)} characters, expected at most {KEY_CHARS_MAX}")
        if isinstance(value, str) and len(value) > TEXT_CHARS_MAX:
            raise InputError(f"{what}: {key!r} has {len(value)} characters, expected at most {TEXT_CHARS_MAX}")


def _sequence(parameters: Mapping[str, Parameter]) -> SequencePart | None:
    id = parameters.get("sequence_id", 0)
    start, end = _flag(parameters, "sequence_start"), _flag(parameters, "sequence_end")
    if type(id) is int or isinstance(id, str):
        if id not in (0, ""):
            text = str(id) if isinstance(id, str) or abs(id) < 1 << 64 else "x" * (SEQUENCE_CHARS_MAX + 1)
            if len(text) > SEQUENCE_CHARS_MAX:
                raise InputError(f"sequence_id: expected at most {SEQUENCE_CHARS_MAX} characters")
            return SequencePart(text, start, end)
        if start or end:
            raise InputError("sequence_start and sequence_end: found without a sequence_id, expected one with them")
        return None
    raise InputError(f"sequence_id: found a {type(id).__name__}, expected an integer or text")


def _priority(level: int) -> int:
    return 0 if level == 0 else max(PRIORITY_MAX + 1 - level, -PRIORITY_MAX)


def _clamped(deadline_ms: float) -> float:
    return min(max(deadline_ms, 0.0), float(DEADLINE_MS_MAX))


def _count(parameters: Mapping[str, Parameter], key: str, expected: str) -> int:
    value = parameters.get(key, 0)
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise InputError(f"{key}: expected {expected}")
    return value


def _seed(seed: Parameter | None) -> int | None:
    if seed is not None and (type(seed) is not int or not 0 <= seed < SEEDS):
        raise InputError(f"seed: expected a whole number from 0 to {SEEDS - 1}")
    return seed


def _flag(parameters: Mapping[str, Parameter], key: str) -> bool:
    value = parameters.get(key, False)
    if not isinstance(value, bool):
        raise InputError(f"{key}: found a {type(value).__name__}, expected true or false")
    return value
