"""A stream node: the sentences of a text that contain a keyword."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weftline.node import USUAL, Piece, Ports, StepContext, StreamNode, Urgency, port


@dataclass(slots=True)
class Extract:
    """State of one item of `Extracts`: sentences not yet sent, and the text sent so far."""

    waiting: list[str]
    sent: str = ""


class Extracts(StreamNode):
    """Streams the sentences of a text that contain a keyword, one sentence per round."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._items: dict[int, Extract] = {}

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        return Ports(
            inputs=(port("text", "text"), port("words", "json")),
            outputs=(port("extract", "text", pieces=True),),
        )

    def submit(self, item: int, inputs: Mapping[str, Any], urgency: Urgency = USUAL) -> None:
        sentences = re.split(r"(?<=[.!?])\s+", inputs["text"])
        words = set(inputs["words"])
        self._items[item] = Extract([one for one in sentences if words & set(re.findall(r"\w+", one.lower()))])

    def cancel(self, item: int) -> None:
        self._items.pop(item, None)

    @property
    def busy(self) -> bool:
        return bool(self._items)

    def round(self) -> Sequence[Piece]:
        """Return the next sentence of every item; after the last sentence, the whole text."""
        pieces = []
        for item, extract in list(self._items.items()):
            if extract.waiting:
                new = (" " if extract.sent else "") + extract.waiting.pop(0)
                extract.sent += new
                pieces.append(Piece(item, {"extract": new}))
            else:
                del self._items[item]
                pieces.append(Piece(item, {"extract": extract.sent}, last=True))
        return pieces
