"""Node `transformers`: a Hugging Face model that runs from its task alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from weftline.nodes.contract import Batch, BatchNode, ConfigError, OpenContext, Outputs, StepContext, model_error
from weftline.nodes.hugging_face import hub_notes, network_bytes
from weftline.nodes.ports import Ports
from weftline.nodes.precision import check_precision
from weftline.nodes.transformers_tasks.images import (
    DepthEstimation,
    ImageClassification,
    ImageSegmentation,
    ObjectDetection,
    ZeroShotImageClassification,
)
from weftline.nodes.transformers_tasks.pose import KeypointDetection
from weftline.nodes.transformers_tasks.recordings import AudioClassification, SpeechRecognition
from weftline.nodes.transformers_tasks.seq2seq import Summarization, Translation
from weftline.nodes.transformers_tasks.speech import TextToSpeech
from weftline.nodes.transformers_tasks.task import Model, Task, TransformersConfig, check_model
from weftline.nodes.transformers_tasks.texts import (
    FeatureExtraction,
    QuestionAnswering,
    TextClassification,
    TokenClassification,
    ZeroShotClassification,
)

TASKS: Mapping[str, type[Task]] = {
    task.name: task
    for task in (
        ImageClassification, TextClassification, TokenClassification, QuestionAnswering, ZeroShotClassification,
        FeatureExtraction, ObjectDetection, DepthEstimation, ZeroShotImageClassification, AudioClassification,
        SpeechRecognition, ImageSegmentation, KeypointDetection, Summarization, Translation, TextToSpeech,
    )
}  # fmt: skip
"""The tasks by name."""

_OTHER_NODES = {
    "sentiment-analysis": "classify", "sentence-similarity": "embed", "text-generation": "llm",
}  # fmt: skip
"""Tasks of transformers that other nodes run."""

_COMMON = ("task", "model", "precision")


class Transformers(BatchNode):
    """Runs a model of transformers for one task: its own processor, and one call of the network for a batch."""

    Config: ClassVar[type[Any]] = TransformersConfig
    extra: ClassVar[str] = "transformers"
    heavy: ClassVar[bool] = True
    batch_default: ClassVar[tuple[int, float]] = (8, 2.0)

    _task: Task | None = None

    @classmethod
    def ports(cls, config: TransformersConfig, step: StepContext) -> Ports:
        task = _find_task(config.task)
        check_precision(config.precision)
        for field in dataclasses.fields(config):
            name = field.name
            if name not in (*_COMMON, *task.options) and getattr(config, name) is not None:
                known = ", ".join((*_COMMON, *task.options))
                raise ConfigError(name, f"task {task.name} has no option {name}", f"one of {known}", "leave it out")
        return task.ports(config, check_model(task, config.model, step.base_dir), step)

    @classmethod
    def model_bytes(cls, config: TransformersConfig, step: StepContext) -> int:
        return network_bytes(config.model, step.base_dir)

    @classmethod
    def plan_notes(cls, config: TransformersConfig, step: StepContext) -> Sequence[str]:
        return hub_notes(config.model, step.base_dir)

    def open(self, context: OpenContext) -> None:
        try:
            task = _find_task(self.config.task)
            check_model(task, self.config.model, context.base_dir)
            self._task = task(self.config, Model(task, self.config, context))
        except ConfigError as error:
            raise model_error(error) from None

    def warm_up(self) -> None:
        self._opened.warm_up()

    def run(self, batch: Batch) -> Outputs:
        return self._opened.run(batch)

    def sleep(self, keep: str) -> bool:
        if keep != "host":
            return False
        self._opened.model.sleep()
        return True

    def wake(self) -> None:
        self._opened.model.wake()

    def close(self) -> None:
        self._task = None

    @property
    def _opened(self) -> Task:
        if self._task is None:
            raise RuntimeError("the node is not open")
        return self._task


def _find_task(name: str) -> type[Task]:
    if name in TASKS:
        return TASKS[name]
    other = _OTHER_NODES.get(name)
    fix = f"use node {other}" if other else ""
    raise ConfigError("task", f"{name!r:.60} is not a task of this node", f"one of {', '.join(TASKS)}", fix)
