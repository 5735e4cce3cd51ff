"""Text classification node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from weftline.node import Batch, BatchNode, ConfigError, OpenContext, Outputs, Ports, StepContext, port
from weftline.nodes.precision import check_precision
from weftline.nodes.text_classifier import TextClassifier, check_classifier, is_onnx, open_classifier


@dataclass(frozen=True, slots=True)
class ClassifyConfig:
    """Options of `classify`.

    model: a folder with model.onnx, tokenizer.json and config.json (see weftline.nodes.text_classifier), or a sequence
           classification model of transformers as a folder or hub name: safetensors only, no code from the model. It
           has two labels or more, of single texts; where they do not exclude each other (problem_type
           multi_label_classification) scores are those of each label alone.
    precision: what a model of transformers computes in: 'float32', 'tf32' (GPUs only), 'bfloat16' or 'float16'.
           Compared with float32 on the CPU, with random weights of BERT and DistilBERT, all labels were the same;
           probabilities moved by at most 2e-4 in bfloat16 and 3e-5 in float16. TF32 was not measured.
    """

    model: str
    precision: str = "float32"


class Classify(BatchNode):
    """Gives a text the label its model finds most likely. A text longer than the model reads is judged by its start."""

    Config: ClassVar[type[Any]] = ClassifyConfig
    extra: ClassVar[str] = "llm"
    heavy: ClassVar[bool] = True
    batch_default: ClassVar[tuple[int, float]] = (16, 1.0)

    _classifier: TextClassifier | None = None

    @classmethod
    def ports(cls, config: ClassifyConfig, step: StepContext) -> Ports:
        check_precision(config.precision)
        labels = check_classifier(config.model, step.base_dir, "model")
        if config.precision != "float32" and is_onnx(config.model, step.base_dir):
            found = f"{config.precision}, but {config.model} is an ONNX model, whose file says what it computes in"
            raise ConfigError("precision", found, "float32", "leave it out, or name a model of transformers")
        if labels is not None and len(labels) == 1:
            found = f"{config.model} has one label, {labels[0]!r:.60}, which every text would be given"
            raise ConfigError("model", found, "a model with two labels or more", "use node guardrail for a threshold")
        return Ports(
            inputs=(port("text", "text"),),
            outputs=(
                port("label", "text", about="the likeliest label"),
                port("scores", "json", about="probability of each label"),
            ),
        )

    def open(self, context: OpenContext) -> None:
        self._classifier = open_classifier(self.config.model, context, self.config.precision)

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
