"""A source of text for streaming_guard.yaml: it recites what it is given, a few letters at a time, as a model would.

A node of your own that streams is a `StreamNode`: it is handed items as they come, and each `round` gives pieces of
some. `cancel` is what stops it when the guardrail blocks: unread text is not generated.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from weftline.node import USUAL, ConfigError, Piece, Ports, StepContext, StreamNode, Urgency, port


@dataclass(frozen=True, slots=True)
class ReciteConfig:
    """Options of `Recite`."""

    piece_chars: int = 4
    """How many letters a piece has."""

    round_ms: float = 5.0
    """How long a round takes, in milliseconds; each round gives every text its next piece."""


class Recite(StreamNode):
    """Gives a text back piece by piece."""

    Config: ClassVar[type[Any]] = ReciteConfig

    def __init__(self, config: ReciteConfig) -> None:
        super().__init__(config)
        self._texts: dict[int, tuple[str, int]] = {}  # by item: the text, and how much of it was given
        self._paused: set[int] = set()

    @classmethod
    def ports(cls, config: ReciteConfig, step: StepContext) -> Ports:
        if config.piece_chars < 1:
            raise ConfigError("piece_chars", f"{config.piece_chars}", "a number from 1")
        return Ports(inputs=(port("text", "text"),), outputs=(port("text", "text", pieces=True),))

    def submit(self, item: int, inputs: Mapping[str, Any], urgency: Urgency = USUAL) -> None:
        self._texts[item] = inputs["text"], 0

    def cancel(self, item: int) -> None:
        self._texts.pop(item, None)
        self._paused.discard(item)

    def pause(self, item: int) -> None:
        self._paused.add(item)

    def resume(self, item: int) -> None:
        self._paused.discard(item)

    @property
    def busy(self) -> bool:
        return any(item not in self._paused for item in self._texts)

    def round(self) -> Sequence[Piece]:
        time.sleep(self.config.round_ms / 1000)
        pieces = []
        for item in [item for item in self._texts if item not in self._paused]:
            text, given = self._texts[item]
            upto = min(len(text), given + self.config.piece_chars)
            pieces.append(Piece(item, {"text": text[given:upto]}))
            self._texts[item] = text, upto
            if upto == len(text):
                del self._texts[item]
                pieces.append(Piece(item, {"text": text}, last=True))
        return pieces
