"""What a caller asks for beside its inputs, and a caller that waits for one request."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from weftline.engine.scheduling import events as ev
from weftline.errors import InputError, SessionClosed
from weftline.nodes.urgency import PRIORITY_MAX, SEEDS, SequencePart

SEQUENCE_CHARS_MAX = 128
"""Longest id of a sequence of requests."""

ENDS = frozenset({ev.Finish, ev.Fail, ev.Refuse})
"""Commands that end a request."""


class Asked:
    """What a caller wants beside the inputs, checked as far as it can be without knowing the pipeline."""

    __slots__ = ("deadline_ms", "job", "outputs", "pieces", "priority", "seed", "sequence")

    def __init__(
        self,
        outputs: Sequence[str] | None,
        deadline_ms: float | None,
        priority: int,
        sequence: SequencePart | str | None,
        pieces: bool = False,
        *,
        job: bool = False,
        seed: int | None = None,
    ) -> None:
        """job: it is a row of a job, which waits wherever usual requests do; seed: what chance in it is drawn from."""
        self.outputs = outputs
        self.deadline_ms = deadline_ms
        self.priority = priority if priority == 0 and type(priority) is int else _checked_priority(priority)
        if job and not priority:
            self.priority = -PRIORITY_MAX
        self.sequence = None if sequence is None else _checked_sequence(sequence)
        self.pieces = pieces
        self.job = job
        self.seed = None if seed is None else _checked_seed(seed)


class Waiting:
    """One caller waiting for one request: a lock that is released when the end comes."""

    __slots__ = ("_end", "_latch")

    def __init__(self) -> None:
        self._end: ev.Command | None = None
        self._latch = threading.Lock()
        self._latch.acquire()

    def hear(self, command: ev.Command) -> None:
        if type(command) in ENDS:
            self._end = command
            self._latch.release()

    def wait(self) -> ev.Command:
        self._latch.acquire()
        if self._end is None:
            raise SessionClosed("the session was closed while a request waited")
        return self._end


def _checked_priority(priority: object) -> int:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InputError(f"priority: found {type(priority).__name__}, expected a whole number")
    if not -PRIORITY_MAX <= priority <= PRIORITY_MAX:
        raise InputError(f"priority: found {priority}, expected -{PRIORITY_MAX} to {PRIORITY_MAX}")
    return priority


def _checked_seed(seed: object) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InputError(f"seed: found {type(seed).__name__}, expected a whole number")
    if not 0 <= seed < SEEDS:
        raise InputError(f"seed: found {seed}, expected 0 to {SEEDS - 1}")
    return seed


def _checked_sequence(sequence: object) -> SequencePart:
    part = SequencePart(sequence) if isinstance(sequence, str) else sequence
    if not isinstance(part, SequencePart) or not isinstance(part.id, str):
        raise InputError(f"sequence: found {type(sequence).__name__}, expected an id, or a weftline.SequencePart")
    if not 1 <= len(part.id) <= SEQUENCE_CHARS_MAX:
        raise InputError(f"sequence: found an id of {len(part.id)} characters, expected 1 to {SEQUENCE_CHARS_MAX}")
    return part
