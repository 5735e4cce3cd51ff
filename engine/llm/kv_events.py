"""KV cache event log, numbered and pulled by routers.

Events and their fields are named as vLLM and SGLang name theirs (`BlockStored`, `BlockRemoved`, `AllBlocksCleared`;
`block_hashes`, `parent_block_hash`, `token_ids`, `block_size`, `lora_id`, `medium`), so that a router that reads
theirs reads ours: a block there is a page here. Numbers have no gaps. A reader that asks for a number that is no longer
kept gets the count of missed events and must resynchronise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

EVENTS_KEPT = 10_000
"""Events that can still be pulled: minutes of a busy engine, at about 300 bytes each."""
MEDIUM = "GPU"
"""Where a page lies, as these event formats name it: the device's memory, whatever the device is."""


@dataclass(frozen=True, slots=True)
class KvEvent:
    """One event: `number` counts from 1; `type` and `fields` as in the module's text."""

    number: int
    type: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class KvEvents:
    """Result of `pull`: events in order. missed: number of requested events that are no longer kept."""

    events: tuple[KvEvent, ...]
    missed: int


class KvLog:
    """The last `kept` events."""

    def __init__(self, kept: int = EVENTS_KEPT) -> None:
        self._events: deque[KvEvent] = deque(maxlen=kept)
        self._number = 0

    def stored(self, key: bytes, parent: bytes | None, tokens: Sequence[int], adapter: int) -> None:
        """Log that a page holds `tokens`, which follow the page `parent`."""
        self._note(
            "BlockStored",
            block_hashes=[key],
            parent_block_hash=parent,
            token_ids=list(tokens),
            block_size=len(tokens),
            lora_id=adapter or None,
            medium=MEDIUM,
        )

    def removed(self, key: bytes) -> None:
        self._note("BlockRemoved", block_hashes=[key], medium=MEDIUM)

    def cleared(self) -> None:
        self._note("AllBlocksCleared")

    def pull(self, after: int = 0, most: int = 1000) -> KvEvents:
        """Return up to `most` events numbered above `after`."""
        oldest = self._events[0].number if self._events else self._number + 1
        missed = max(0, oldest - 1 - after)
        skip = max(0, after + 1 - oldest)
        return KvEvents(tuple(islice(self._events, skip, skip + most)), missed)

    def _note(self, type: str, **fields: Any) -> None:
        self._number += 1
        self._events.append(KvEvent(self._number, type, fields))
