"""The LLM as a node: prompts in, streamed text out.

It is never given batches: items are submitted as they come, join the running ones at the next round, and each round
answers with the pieces it produced. A request that is refused or fails gets its reason in a piece of its own.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from weftline.engine.llm.answers import Answers
from weftline.engine.llm.options import LlmConfig, check_options
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.request import Update, Wish
from weftline.engine.llm.retention import PRIORITY_TEMPLATE, Retention, read_retention
from weftline.engine.llm.totals import Totals, figures
from weftline.errors import InputError, MissingPackage, ModelError, WeftlineError
from weftline.nodes.contract import NodeMemory, OpenContext, Piece, StepContext, StreamNode
from weftline.nodes.embed import embedding_width
from weftline.nodes.hugging_face import find_config
from weftline.nodes.ports import Ports, port
from weftline.nodes.urgency import USUAL, Urgency

if TYPE_CHECKING:
    from weftline.engine.llm.engine import Engine
    from weftline.engine.llm.tokens import Tokens

NAME_CHARS_MAX = 256
"""Longest name of a tenant or an adapter."""


class Llm(StreamNode):
    """Answers prompts or conversations with a transformers model, many at once, streaming."""

    Config: ClassVar[type[Any]] = LlmConfig
    extra: ClassVar[str] = "llm"
    heavy: ClassVar[bool] = True

    def __init__(self, config: LlmConfig) -> None:
        super().__init__(config)
        self._engine: Engine | None = None
        self._tokens: Tokens | None = None
        self._retained: list[int] = []
        self._refused: list[Piece] = []
        self._answers: dict[int, Answers] = {}
        self._totals = Totals()

    @classmethod
    def ports(cls, config: LlmConfig, step: StepContext) -> Ports:
        check_options(config)
        found = find_config(config.model, step.base_dir)
        if config.task != "generate":
            return _head_ports(config, found)
        return Ports(
            inputs=(
                port("prompt", "text", optional=True, about="what the user says; either this or messages"),
                port("messages", "json", optional=True, about="a conversation: [{role, content}, ...]"),
                port("tools", "json", optional=True, about="what the model may call, as its chat template expects it"),
                port("sampling", "json", optional=True, about="changes to the step's sampling options, by key"),
                port("adapter", "text", optional=True, about="name of the LoRA adapter to answer with"),
                port("tenant", "text", optional=True, about="whose cached prompts may be used; others' never are"),
                port("retention", "json", optional=True, about="how long parts of the prompt stay cached, as ranges"),
            ),
            outputs=(
                port("text", "text", pieces=True, about="the answer"),
                port("usage", "json", about="prompt, completion and cached tokens, and finish_reason: stop or length"),
                port("answers", "json", about="all answers: [{index, text, finish_reason, logprobs}, ...]"),
            ),
        )

    def open(self, context: OpenContext) -> None:
        try:
            from weftline.engine.llm.opening import open_engine
        except ModuleNotFoundError as error:
            raise MissingPackage(error.name or "torch", self.extra) from error
        self._engine, self._tokens = open_engine(self.config, context)
        if self.config.system and not self._tokens.has_template:
            self.close()
            raise ModelError(f"model {self.config.model}: it has no chat template, so `system` cannot be said to it")
        self._retained = self._fixed_tokens() if self.config.task == "generate" else []

    def warm_up(self) -> None:
        engine, _ = self._opened()
        if engine.runner.head is not None:
            engine.add(-1, [0], SamplingParams(), Wish(pool=True))
            engine.step()
            return
        engine.generate([[0] * max(1, min(4, engine.context_max - 2))], SamplingParams(tokens_max=2, ignore_eos=True))
        engine.clear_prefixes()

    @classmethod
    def can_rest(cls, config: LlmConfig, step: StepContext) -> bool:
        return config.ranks == 1  # the other ranks are processes of their own, which would stay where they are

    def sleep(self, keep: str) -> bool:
        if keep != "host" or self.config.ranks > 1:
            return False
        engine, _ = self._opened()
        engine.sleep()
        return True

    def wake(self) -> None:
        engine, _ = self._opened()
        engine.wake()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = self._tokens = None
        self._answers.clear()

    def submit(self, item: int, inputs: Mapping[str, Any], urgency: Urgency = USUAL) -> None:
        engine, words = self._opened()
        now_ms = _now_ms()
        deadline_ms = None if urgency.left_ms is None else now_ms + urgency.left_ms
        try:
            pool = engine.runner.head is not None
            params = SamplingParams() if pool else self._params(inputs, urgency.seed)
            tokens = words.raw(inputs["text"] or " ") if pool else self._prompt_tokens(inputs)
            wish = Wish(
                urgency.priority, deadline_ms, _name(inputs, "tenant").encode(), _name(inputs, "adapter"),
                (*self._retention(tokens), *read_retention(inputs.get("retention"))), pool,
            )  # fmt: skip
            engine.add(item, tokens, params, wish, now_ms=now_ms)
        except WeftlineError as error:
            self._totals.failed += 1
            self._refused.append(Piece(item, last=True, error=error))
        else:
            self._answers[item] = Answers(params.n, words.decode)

    def cancel(self, item: int) -> None:
        engine, _ = self._opened()
        self._refused = [piece for piece in self._refused if piece.item != item]
        if self._answers.pop(item, None) is not None:
            self._totals.dropped += 1
            engine.cancel(item)

    def pause(self, item: int) -> None:
        engine, _ = self._opened()
        if item in self._answers:
            engine.pause(item)

    def resume(self, item: int) -> None:
        engine, _ = self._opened()
        if item in self._answers:
            engine.resume(item)

    def memory(self) -> NodeMemory | None:
        engine, _ = self._opened()
        stats = engine.stats()
        return NodeMemory(
            stats.pages_used * stats.page_bytes,
            stats.pages_idle * stats.page_bytes,
            stats.pages_free * stats.page_bytes,
            stats.waiting,
            stats.preemptions,
        )

    def figures(self) -> Mapping[str, float]:
        engine, _ = self._opened()
        return figures(self._totals, engine.stats())

    def resize_memory(self, bytes: int) -> int:
        engine, _ = self._opened()
        page_bytes = engine.runner.page_bytes
        return engine.resize(bytes // page_bytes) * page_bytes

    def round(self) -> Sequence[Piece]:
        engine, _ = self._opened()
        pieces, self._refused = self._refused, []
        return [*pieces, *(piece for update in engine.step(_now_ms()) for piece in self._pieces(update))]

    @property
    def busy(self) -> bool:
        return bool(self._refused) or (self._engine is not None and self._engine.busy)

    def _params(self, inputs: Mapping[str, Any], seed: int | None) -> SamplingParams:
        params: SamplingParams = self.config.sampling
        if inputs.get("tools"):
            params = dataclasses.replace(params, skip_special_tokens=False)  # calls may be written with such tokens
        if inputs.get("sampling") is not None:
            params = SamplingParams.read(inputs["sampling"], params)
        return params if seed is None or params.seed is not None else dataclasses.replace(params, seed=seed)

    def _prompt_tokens(self, inputs: Mapping[str, Any]) -> list[int]:
        _, tokens = self._opened()
        prompt, messages = inputs.get("prompt"), inputs.get("messages")
        if (prompt is None) == (messages is None):
            found = "neither" if prompt is None else "both"
            raise InputError(f"llm: found {found} of prompt and messages, expected exactly one")
        if messages is not None:
            if not tokens.has_template:
                raise InputError("messages: the model has no chat template; send a prompt")
            return tokens.chat(messages, inputs.get("tools"))
        if not isinstance(prompt, str) or not prompt:
            raise InputError("prompt: found an empty text, expected at least one character")
        if not tokens.has_template:
            return tokens.raw(prompt)
        return tokens.chat(self._turns(prompt), inputs.get("tools"))

    def _turns(self, prompt: str) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.config.system}] if self.config.system else []
        return [*system, {"role": "user", "content": prompt}]

    def _fixed_tokens(self) -> list[int]:
        """Return the tokens that every prompt of this step begins with: what two different prompts have in common."""
        _, tokens = self._opened()
        if not (self.config.system or self.config.prefix):
            return []
        try:
            ways = [
                tokens.chat(self._turns(text)) if tokens.has_template else tokens.raw(text)
                for text in (f"{self.config.prefix}0", f"{self.config.prefix}?")
            ]
        except InputError:
            return []  # a template that refuses such a turn: then nothing is known to be fixed
        same = next((at for at, (a, b) in enumerate(zip(*ways, strict=False)) if a != b), 0)
        return ways[0][:same]

    def _retention(self, tokens: list[int]) -> tuple[Retention, ...]:
        same = next((at for at, (a, b) in enumerate(zip(tokens, self._retained)) if a != b), len(self._retained))
        whole = same - same % self.config.page_tokens  # a page with anything else in it is of no use to others
        return (Retention(0, whole, PRIORITY_TEMPLATE),) if whole else ()

    def _pieces(self, update: Update) -> list[Piece]:
        self._totals.take(update, first=not self._answers[update.id].begun)
        if update.error is not None:
            del self._answers[update.id]
            return [Piece(update.id, last=True, error=update.error)]
        if update.pooled is not None:
            del self._answers[update.id]
            return [Piece(update.id, self._pooled(update), last=True)]
        answers, pieces = self._answers[update.id], []
        answers.take(update)
        if update.text and answers.streams:
            pieces.append(Piece(update.id, {"text": update.text}))
        if update.last:
            pieces.append(Piece(update.id, self._answers.pop(update.id).outputs(), last=True))
        return pieces

    def _pooled(self, update: Update) -> dict[str, Any]:
        usage = {"prompt_tokens": update.prompt_tokens, "cached_tokens": update.cached_tokens}
        if self.config.task == "embed":
            return {"embedding": update.pooled, "usage": usage}
        labels = self._opened()[0].runner.head.labels
        return {"scores": dict(zip(labels, map(float, update.pooled), strict=True)), "usage": usage}

    def _opened(self) -> tuple[Engine, Tokens]:
        if self._engine is None or self._tokens is None:
            raise RuntimeError("the llm node is not open")
        return self._engine, self._tokens


def _head_ports(config: LlmConfig, found: dict[str, Any] | None) -> Ports:
    """Return the ports of a step that makes something else of a text than an answer."""
    text = port("text", "text", about="what is read")
    usage = port("usage", "json", about="prompt and cached tokens")
    tenant = port("tenant", "text", optional=True, about="whose cached prompts may be used; others' never are")
    if config.task == "classify":
        return Ports((text, tenant), (port("scores", "json", about="the model's score for each of its labels"), usage))
    width = embedding_width(found, config.model)
    return Ports(
        (text, tenant), (port("embedding", f"float32[{width}]", about="the text's vector, of length 1"), usage)
    )


def _name(inputs: Mapping[str, Any], port_name: str) -> str:
    name = inputs.get(port_name) or ""
    if not isinstance(name, str) or len(name) > NAME_CHARS_MAX:
        raise InputError(f"{port_name}: expected a text of at most {NAME_CHARS_MAX} characters")
    return name


def _now_ms() -> float:
    return time.monotonic() * 1e3
