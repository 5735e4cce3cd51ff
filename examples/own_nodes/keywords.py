"""A batch node: the most frequent words of a text."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from weftline.node import REQUEST, Batch, BatchNode, Outputs, Ports, StepContext, port


@dataclass(frozen=True, slots=True)
class KeywordsConfig:
    """Options of `Keywords`; each field is a key of the step in the pipeline file."""

    words_max: Annotated[int, Meta(ge=1, le=100), REQUEST] = 3
    """Number of keywords per text."""

    chars_min: Annotated[int, Meta(ge=1), REQUEST] = 4
    """Length of the shortest keyword, in characters."""


class Keywords(BatchNode):
    """Finds the most frequent words of a text."""

    Config: ClassVar[type[Any]] = KeywordsConfig
    batch_default: ClassVar[tuple[int, float]] = (16, 1.0)  # items_max, wait_max_ms

    @classmethod
    def ports(cls, config: KeywordsConfig, step: StepContext) -> Ports:
        return Ports(inputs=(port("text", "text"),), outputs=(port("words", "json", about="list of words"),))

    def run(self, batch: Batch) -> Outputs:
        return {"words": [self._keywords(text) for text in batch["text"]]}

    def _keywords(self, text: str) -> list[str] | ValueError:
        words = [word for word in re.findall(r"\w+", text.lower()) if len(word) >= self.config.chars_min]
        if not words:
            return ValueError(f"no word of {self.config.chars_min} or more characters")  # fails this item only
        ranked = sorted(Counter(words).items(), key=lambda pair: (-pair[1], pair[0]))
        return [word for word, _ in ranked[: self.config.words_max]]
