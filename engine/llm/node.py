"""The LLM as a node: prompts in, streamed text out.

It is never given batches: items are submitted as they come, join the running ones at the next round, and each round
answers with the pieces it produced. A request that is refused or fails gets its reason in a piece of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from weftline.engine.llm.rounds import RoundLimits
from weftline.engine.llm.sequence import SamplingParams
from weftline.errors import InputError, MissingPackage, ModelError, WeftlineError
from weftline.nodes.contract import ConfigError, OpenContext, Piece, StepContext, StreamNode
from weftline.nodes.hugging_face import find_config, local_or_hub
from weftline.nodes.ports import Ports, port
from weftline.nodes.urgency import USUAL, Urgency

if TYPE_CHECKING:
    from weftline.engine.llm.engine import Engine, Update
    from weftline.engine.llm.tokens import Tokens

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class LlmConfig:
    """Options of an llm step."""

    model: str
    """Folder of a transformers model (config.json, *.safetensors, tokenizer), or its name on the hub."""
    system: str = ""
    """Said to the model before every `prompt`; needs a model with a chat template."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """How tokens are chosen and when an answer ends; a request's `sampling` input changes single keys."""
    page_tokens: int = 16
    """Tokens in one page of the KV memory."""
    kv_bytes: int | None = None
    """KV memory in bytes, reserved at start; by default 256 MiB, less where the model cannot use it."""
    round_tokens_max: int = 512
    """Most tokens of one round: a larger budget reads prompts faster, a smaller one streams more evenly."""
    sequences_max: int = 32
    """Most requests that generate at a time; others wait inside the step."""
    dtype: str = "auto"
    """Number format of weights and KV: auto (float32 on CPU, the checkpoint's on a GPU), float32, bfloat16, float16."""
    context_max: int | None = None
    """Longest prompt and answer together, in tokens; by default what the model was made for."""

    def __post_init__(self) -> None:
        if isinstance(self.sampling, Mapping):
            try:
                object.__setattr__(self, "sampling", SamplingParams.read(self.sampling))
            except InputError as error:
                option, _, found = str(error).partition(": ")
                raise ConfigError(option, found) from error


class Llm(StreamNode):
    """Answers prompts or conversations with a transformers model, many at once, streaming."""

    Config: ClassVar[type[Any]] = LlmConfig
    extra: ClassVar[str] = "llm"
    heavy: ClassVar[bool] = True

    def __init__(self, config: LlmConfig) -> None:
        super().__init__(config)
        self._engine: Engine | None = None
        self._tokens: Tokens | None = None
        self._refused: list[Piece] = []
        self._texts: dict[int, list[str]] = {}

    @classmethod
    def ports(cls, config: LlmConfig, step: StepContext) -> Ports:
        for option in ("page_tokens", "round_tokens_max", "sequences_max", "kv_bytes", "context_max"):
            value = getattr(config, option)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(option, f"found {value!r:.40}", "a whole number from 1")
        if config.dtype not in DTYPES:
            raise ConfigError("dtype", f"found {config.dtype!r:.40}", f"one of {', '.join(DTYPES)}")
        if not config.model:
            raise ConfigError("model", "found an empty text", "a model's folder or name")
        find_config(config.model, step.base_dir)
        return Ports(
            inputs=(
                port("prompt", "text", optional=True, about="what the user says; either this or messages"),
                port("messages", "json", optional=True, about="a conversation: [{role, content}, ...]"),
                port("sampling", "json", optional=True, about="changes to the step's sampling options, by key"),
            ),
            outputs=(
                port("text", "text", pieces=True, about="the answer"),
                port("usage", "json", about="prompt, completion and cached tokens, and finish_reason: stop or length"),
            ),
        )

    def open(self, context: OpenContext) -> None:
        try:
            import torch

            from weftline.engine.llm.engine import Engine
            from weftline.engine.llm.runner import Runner, RunnerOptions
            from weftline.engine.llm.tokens import Tokens
        except ModuleNotFoundError as error:
            raise MissingPackage(error.name or "torch", self.extra) from error
        config: LlmConfig = self.config
        torch.set_num_threads(max(1, context.threads))
        source = local_or_hub(config.model, context.base_dir)
        options = RunnerOptions(context.device, config.dtype, config.page_tokens, config.kv_bytes, config.context_max)
        runner = Runner.open(source, options, context.progress, config.model)
        self._tokens = Tokens.open(source, runner.context_max, config.model)
        if config.system and not self._tokens.has_template:
            raise ModelError(f"model {config.model}: it has no chat template, so `system` cannot be said to it")
        self._engine = Engine(runner, self._tokens, RoundLimits(config.round_tokens_max, config.sequences_max))

    def warm_up(self) -> None:
        engine, _ = self._opened()
        engine.generate([[0] * max(1, min(4, engine.context_max - 2))], SamplingParams(tokens_max=2, ignore_eos=True))
        engine.clear_prefixes()

    def close(self) -> None:
        self._engine = self._tokens = None
        self._texts.clear()

    def submit(self, item: int, inputs: Mapping[str, Any], urgency: Urgency = USUAL) -> None:
        engine, _ = self._opened()
        now_ms = _now_ms()
        deadline_ms = None if urgency.left_ms is None else now_ms + urgency.left_ms
        try:
            params: SamplingParams = self.config.sampling
            if inputs.get("sampling") is not None:
                params = SamplingParams.read(inputs["sampling"], params)
            tokens = self._prompt_tokens(inputs)
            engine.add(item, tokens, params, priority=urgency.priority, deadline_ms=deadline_ms, now_ms=now_ms)
        except WeftlineError as error:
            self._refused.append(Piece(item, last=True, error=error))
        else:
            self._texts[item] = []

    def cancel(self, item: int) -> None:
        engine, _ = self._opened()
        self._refused = [piece for piece in self._refused if piece.item != item]
        if self._texts.pop(item, None) is not None:
            engine.cancel(item)

    def pause(self, item: int) -> None:
        engine, _ = self._opened()
        if item in self._texts:
            engine.pause(item)

    def resume(self, item: int) -> None:
        engine, _ = self._opened()
        if item in self._texts:
            engine.resume(item)

    def round(self) -> Sequence[Piece]:
        engine, _ = self._opened()
        pieces, self._refused = self._refused, []
        return [*pieces, *(piece for update in engine.step(_now_ms()) for piece in self._pieces(update))]

    @property
    def busy(self) -> bool:
        return bool(self._refused) or (self._engine is not None and self._engine.busy)

    def _prompt_tokens(self, inputs: Mapping[str, Any]) -> list[int]:
        _, tokens = self._opened()
        prompt, messages = inputs.get("prompt"), inputs.get("messages")
        if (prompt is None) == (messages is None):
            found = "neither" if prompt is None else "both"
            raise InputError(f"llm: found {found} of prompt and messages, expected exactly one")
        if messages is not None:
            if not tokens.has_template:
                raise InputError("messages: the model has no chat template; send a prompt")
            return tokens.chat(messages)
        if not isinstance(prompt, str) or not prompt:
            raise InputError("prompt: found an empty text, expected at least one character")
        if not tokens.has_template:
            return tokens.raw(prompt)
        system = [{"role": "system", "content": self.config.system}] if self.config.system else []
        return tokens.chat([*system, {"role": "user", "content": prompt}])

    def _pieces(self, update: Update) -> list[Piece]:
        if update.error is not None:
            del self._texts[update.id]
            return [Piece(update.id, last=True, error=update.error)]
        pieces = []
        if update.text:
            self._texts[update.id].append(update.text)
            pieces.append(Piece(update.id, {"text": update.text}))
        if update.finish is None:
            return pieces
        usage = {
            "prompt_tokens": update.prompt_tokens,
            "completion_tokens": update.completion_tokens,
            "cached_tokens": update.cached_tokens,
            "finish_reason": update.finish,
        }
        whole = {"text": "".join(self._texts.pop(update.id)), "usage": usage}
        return [*pieces, Piece(update.id, whole, last=True)]

    def _opened(self) -> tuple[Engine, Tokens]:
        if self._engine is None or self._tokens is None:
            raise RuntimeError("the llm node is not open")
        return self._engine, self._tokens


def _now_ms() -> float:
    return time.monotonic() * 1e3
