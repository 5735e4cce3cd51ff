"""The options of one request: everything a caller can set beside the inputs.

    session.run(RequestOptions(deadline_ms=200, outputs=["text"]), photo=Path("photo.png"))

Options and inputs have separate name spaces: a pipeline's inputs can have any name. Sessions and clients take the same
options. Values are checked when the options are made, as far as possible without the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from weftline.errors import InputError
from weftline.nodes.urgency import PRIORITY_MAX, SEEDS, SequencePart

SEQUENCE_CHARS_MAX = 128
"""Longest id of a sequence of requests."""

DEADLINE_MS_MAX = 86_400_000
"""Longest deadline, a day: as in a pipeline file. Every wait then fits into the system's time types."""


@dataclass(frozen=True, slots=True, init=False)
class RequestOptions:
    """Options of one request, for sessions and clients. All are keywords, and none is required.

    outputs:     names of the wanted outputs; steps that only other outputs need do not run. None: all.
    deadline_ms: time limit from the call on; None: the pipeline's own deadline.
    priority:    from -100 to 100; requests of higher priority go first in every queue.
    sequence:    the request's position in a sequence of requests; an id alone means a request in the middle.
    job:         True for a row of a job: it waits behind other requests in every queue, at priority -100 unless
                 another is set, and the pipeline's own deadline does not apply.
    seed:        seed of random choices, from 0 to 2^62 - 1; None: a new one for each request.
    """

    outputs: tuple[str, ...] | None
    deadline_ms: float | None
    priority: int
    sequence: SequencePart | None
    job: bool
    seed: int | None

    def __init__(
        self,
        *,
        outputs: Sequence[str] | None = None,
        deadline_ms: float | None = None,
        priority: int = 0,
        sequence: SequencePart | str | None = None,
        job: bool = False,
        seed: int | None = None,
    ) -> None:
        """Check every value; InputError for the first invalid one."""
        put = object.__setattr__
        put(self, "outputs", None if outputs is None else _checked_outputs(outputs))
        put(self, "deadline_ms", None if deadline_ms is None else _checked_deadline(deadline_ms))
        priority = _checked_int("priority", priority, -PRIORITY_MAX, PRIORITY_MAX)
        put(self, "priority", -PRIORITY_MAX if job and not priority else priority)
        put(self, "sequence", None if sequence is None else _checked_sequence(sequence))
        put(self, "job", _checked_bool("job", job))
        put(self, "seed", None if seed is None else _checked_int("seed", seed, 0, SEEDS - 1))


def checked_options(options: object) -> RequestOptions:
    """Return `options`, or the default options for None; InputError for any other type."""
    if options is None:
        return DEFAULT_OPTIONS
    if not isinstance(options, RequestOptions):
        found = f"options: found {type(options).__name__}, expected weftline.RequestOptions"
        raise InputError(f"{found}\n    fix: pass inputs by name, as in run(photo=...); run(**inputs) passes a dict")
    return options


def options_hint(unknown: Iterable[str]) -> str:
    """Return a remedy for unknown inputs that are names of options; '' if none is."""
    names = [one.name for one in fields(RequestOptions) if one.name in set(unknown)]
    if not names:
        return ""
    return f"\n    fix: pass options in one value: RequestOptions({', '.join(f'{name}=...' for name in names)})"


def _checked_outputs(outputs: Sequence[str]) -> tuple[str, ...]:
    if isinstance(outputs, str):
        raise InputError("outputs: expected a list of names")
    try:
        names = tuple(outputs)
    except TypeError:
        raise InputError("outputs: expected a list of names") from None
    if not all(isinstance(name, str) for name in names):
        raise InputError("outputs: expected a list of names")
    return names


def _checked_deadline(deadline_ms: object) -> float:
    if isinstance(deadline_ms, bool) or not isinstance(deadline_ms, int | float):
        raise InputError(f"deadline_ms: found {type(deadline_ms).__name__}, expected a number of milliseconds")
    if not 0 <= deadline_ms <= DEADLINE_MS_MAX:
        raise InputError(f"deadline_ms: found {deadline_ms}, expected 0 to {DEADLINE_MS_MAX} milliseconds")
    return deadline_ms


def _checked_int(name: str, value: object, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name}: found {type(value).__name__}, expected a whole number")
    if not least <= value <= most:
        raise InputError(f"{name}: found {value}, expected {least} to {most}")
    return value


def _checked_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name}: found {type(value).__name__}, expected True or False")
    return value


def _checked_sequence(sequence: object) -> SequencePart:
    part = SequencePart(sequence) if isinstance(sequence, str) else sequence
    if not isinstance(part, SequencePart) or not isinstance(part.id, str):
        raise InputError(f"sequence: found {type(sequence).__name__}, expected an id, or a weftline.SequencePart")
    if not 1 <= len(part.id) <= SEQUENCE_CHARS_MAX:
        raise InputError(f"sequence: found an id of {len(part.id)} characters, expected 1 to {SEQUENCE_CHARS_MAX}")
    return part


DEFAULT_OPTIONS = RequestOptions()
