"""What killed a worker before is known again by what it is made of, and refused.

Of a suspect dispatch the runtime is told what each item is made of before it is run: if the worker then dies, the
runtime knows by what. Items that are on a step's list are refused without being run.
"""

from __future__ import annotations

from collections.abc import Callable

from weftline.engine.messages import Failure, FromWorker, Item, Quarantine, Run, Submit, Suspected
from weftline.engine.worker.digest import digest
from weftline.engine.worker.memory import Memory
from weftline.errors import StepError

QUARANTINED = Failure("InputError", "this input killed its worker before; it is refused")


class Screening:
    """The lists of one worker's steps. `say` sends a message."""

    def __init__(self, memory: Memory, say: Callable[[FromWorker], None]) -> None:
        self._memory = memory
        self._say = say
        self._listed: dict[int, frozenset[bytes]] = {}  # by step; none is empty

    def list(self, message: Quarantine) -> None:
        """Refuse what is listed from now on, in place of what was before."""
        self._listed.pop(message.step, None)
        if message.digests:
            self._listed[message.step] = frozenset(message.digests)

    def refused(self, message: Run | Submit) -> dict[int, Failure]:
        """Say what suspect items are made of; return the failures of those that are refused, by position."""
        if not message.suspect and message.step not in self._listed:
            return {}
        listed = self._listed.get(message.step, frozenset())
        digests = tuple(map(self._digest, message.items))
        if message.suspect:
            dispatch, streams = (message.dispatch, ()) if isinstance(message, Run) else (0, message.items)
            self._say(Suspected(dispatch, digests, tuple(item.id for item in streams)))
        return {position: QUARANTINED for position, one in enumerate(digests) if one in listed}

    def _digest(self, item: Item) -> bytes:
        """Return what an item is made of; b'' where it cannot be read here, which is for its call to say."""
        bring = None if self._memory.near is None else self._memory.near.bring
        try:
            return digest(item.inputs, self._memory.arenas, bring)
        except StepError:
            return b""
