"""Text classification as a step: what kind of text this is, and how sure the model is of each kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from weftline.nodes.contract import Batch, BatchNode, OpenContext, Outputs, StepContext
from weftline.nodes.ports import Ports, port
from weftline.nodes.text_classifier import TextClassifier, check_classifier, is_onnx, open_classifier


@dataclass(frozen=True, slots=True)
class ClassifyConfig:
    """Options of `classify`.

    model: a folder with model.onnx, tokenizer.json and config.json (see weftline.nodes.text_classifier), or a sequence
           classification model of transformers as a folder or hub name: safetensors only, no code from the model.
    """

    model: str


class Classify(BatchNode):
    """Gives a text the label its model finds most likely. A text longer than the model reads is judged by its start."""

    Config: ClassVar[type[Any]] = ClassifyConfig
    extra: ClassVar[str] = "llm"
    heavy: ClassVar[bool] = True
    batch_default: ClassVar[tuple[int, float]] = (16, 1.0)

    _classifier: TextClassifier | None = None

    @classmethod
    def ports(cls, config: ClassifyConfig, step: StepContext) -> Ports:
        check_classifier(config.model, step.base_dir, "model")
        return Ports(
            inputs=(port("text", "text"),),
            outputs=(
                port("label", "text", about="the likeliest label"),
                port("scores", "json", about="probability of each label"),
            ),
        )

    def open(self, context: OpenContext) -> None:
        self._classifier = open_classifier(self.config.model, context)

    def warm_up(self) -> None:
        self._opened.probabilities(["a text to begin with"])

    def run(self, batch: Batch) -> Outputs:
        labels = self._opened.labels
        found = self._opened.probabilities(batch["text"])
        scores = [{label: round(float(p), 6) for label, p in zip(labels, row, strict=True)} for row in found]
        return {"label": [labels[int(row.argmax())] for row in found], "scores": scores}

    @classmethod
    def can_rest(cls, config: ClassifyConfig, step: StepContext) -> bool:
        return not is_onnx(config.model, step.base_dir)

    def sleep(self, keep: str) -> bool:
        return self._opened.sleep(keep)

    def wake(self) -> None:
        self._opened.wake()

    def close(self) -> None:
        self._classifier = None

    @property
    def _opened(self) -> TextClassifier:
        if self._classifier is None:
            raise RuntimeError("the node is not open")
        return self._classifier
