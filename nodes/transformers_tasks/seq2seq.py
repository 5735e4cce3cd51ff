"""Tasks that turn a text into another: summarization, translation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weftline.nodes.contract import Batch, ConfigError, Outputs, StepContext
from weftline.nodes.hugging_face import TEXT_TO_TEXT
from weftline.nodes.ports import Ports, port
from weftline.nodes.text_tokens import check_overflow
from weftline.nodes.transformers_tasks.task import Model, TransformersConfig
from weftline.nodes.transformers_tasks.texts import TextTask

TOKENS_MAX = 128
"""Default of option `tokens_max`."""


class TextToText(TextTask):
    """A text from a text: one `generate` call for a batch, decoded as the model's generation_config.json says."""

    auto_class = "AutoModelForSeq2SeqLM"
    kinds = (TEXT_TO_TEXT,)
    expected = "a T5 model (T5ForConditionalGeneration)"
    options = ("prefix", "tokens_max", "overflow")
    method = "generate"

    def __init__(self, config: TransformersConfig, model: Model) -> None:
        super().__init__(config, model)
        self._prefix = _prefix(model.config, self.name) if config.prefix is None else config.prefix

    @classmethod
    def ports(cls, config: TransformersConfig, found: Mapping[str, Any] | None, step: StepContext) -> Ports:
        if config.tokens_max is not None and not 1 <= config.tokens_max <= 1 << 16:
            raise ConfigError("tokens_max", f"{config.tokens_max}", "a count from 1 to 65536")
        check_overflow(config.overflow or "error")
        return Ports((port("text", "text"),), (port("text", "text", about=f"the result of the {cls.name}"),))

    def warm_up(self) -> None:
        self._generate([f"{self._prefix}warm-up"], 2)

    def run(self, batch: Batch) -> Outputs:
        most = self.config.tokens_max or TOKENS_MAX
        texts = [self._prefix + text for text in batch["text"]]
        return {"text": self._of_fitting(texts, lambda fitting: self._generate(fitting, most))}

    def _generate(self, texts: list[str], tokens_max: int) -> list[str]:
        encoded = self._encoded(texts)
        inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
        tokens = self.model(inputs, max_new_tokens=tokens_max)
        found: list[str] = self.model.processor.batch_decode(tokens, skip_special_tokens=True)
        return found


def _prefix(config: Mapping[str, Any], task: str) -> str:
    """Return the text that config.json puts before the inputs of a task."""
    tasks = config.get("task_specific_params")
    own = tasks.get(task) if isinstance(tasks, Mapping) else None
    prefix = own.get("prefix") if isinstance(own, Mapping) else None
    return prefix if isinstance(prefix, str) else ""


class Summarization(TextToText):
    """A summary of a text."""

    name = "summarization"


class Translation(TextToText):
    """A translation of a text; `prefix` names the languages, where the model reads them there."""

    name = "translation"
