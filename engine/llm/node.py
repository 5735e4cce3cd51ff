"""LLM node: prompts in, streamed text out.

Items are not batched before the node: they are submitted as they arrive, join the running ones at the next round, and
each round returns the pieces it produced. A refused or failed request gets a piece with its error.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

from weftline.engine.llm.answer_format import AnswerFormat, Prepared, read_notation
from weftline.engine.llm.answer_syntax import END_THINK
from weftline.engine.llm.counters import TokenCounters, figures
from weftline.engine.llm.external.options import ONLY_EXTERNAL
from weftline.engine.llm.model_check import checked_adapter, checked_model, model_bytes, template_of
from weftline.engine.llm.options import LlmConfig, check_options, round_limits
from weftline.engine.llm.output import RequestOutput, prompt_outputs
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.ports import TENANT, answer_outputs, cache_owner, head_ports, read_name, request_inputs
from weftline.engine.llm.request import LlmRequestOptions, TokenUpdate
from weftline.engine.llm.retention import PRIORITY_TEMPLATE, Retention, read_retention
from weftline.engine.llm.sequence import check_tokens, urgency_ms
from weftline.engine.llm.template_options import TemplateOptions
from weftline.engine.llm.tool_choice import ToolRequest
from weftline.engine.llm.vision.decoding import DecodingThread
from weftline.engine.llm.vision.messages import NO_MARKS, Marks, encoded_chars, refuse_media, shows_media
from weftline.engine.llm.vision.ports import check_draft, image_notes, image_ports
from weftline.errors import InputError, StepError, WeftlineError
from weftline.node import (
    USUAL,
    DeviceMemoryLimit,
    MissingPackage,
    ModelError,
    NodeMemory,
    OpenContext,
    Piece,
    Ports,
    StepContext,
    StreamNode,
    Urgency,
    port,
)
from weftline.nodes.hugging_face import hub_notes
from weftline.shm.device.names import torch_device

if TYPE_CHECKING:
    from weftline.engine.llm.engine import Engine
    from weftline.engine.llm.tokens import Tokens
    from weftline.engine.llm.vision.prompt import PromptImage
    from weftline.engine.llm.vision.reader import ImageReader, Taken

_NO_TOOLS = ToolRequest()
STEPS_KEPT = 256
"""Most steps that share the node whose fixed prompts are kept as tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Submitted:
    """An item ready for the engine. It waits for memory where its prompt is longer than all pages."""

    item: int
    prepared: Prepared
    options: LlmRequestOptions
    now_ms: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Request:
    """An item as it was submitted. config: has the request options of its own step."""

    item: int
    inputs: Mapping[str, Any]
    urgency: Urgency
    now_ms: float
    config: LlmConfig

    @property
    def deadline_ms(self) -> float | None:
        return None if self.urgency.left_ms is None else self.now_ms + self.urgency.left_ms


MESSAGE_CHARS = 100_000
"""Encoded characters that count as much as a request itself where decoding is shared among callers."""


class Llm(StreamNode):
    """Answer prompts or conversations with a transformers model, batched continuously, streaming."""

    Config: ClassVar[type[Any]] = LlmConfig
    extra: ClassVar[str] = "llm"
    heavy: ClassVar[bool] = True
    fills_memory: ClassVar[bool] = True
    other_options: ClassVar[Mapping[str, str]] = dict.fromkeys(ONLY_EXTERNAL, "engine: openai")

    def __init__(self, config: LlmConfig) -> None:
        super().__init__(config)
        self._engine: Engine | None = None
        self._tokens: Tokens | None = None
        self._images: ImageReader | None = None
        self._decoding: DecodingThread[_Request, Taken] | None = None
        self._progress: Callable[[str, float], None] = lambda phrase, fraction: None
        # of each step that shares the node: cached, as they follow from the options of a request's step
        self._retained = lru_cache(STEPS_KEPT)(self._fixed_tokens)
        self._format = lru_cache(STEPS_KEPT)(self._answer_format)
        self._ready: list[Piece] = []
        self._outputs: dict[int, RequestOutput] = {}
        self._counters = TokenCounters()
        self._room: DeviceMemoryLimit | None = None
        self._kv_most_bytes = 0
        self._long: list[_Submitted] = []  # items for which the KV memory is too small now

    @classmethod
    def ports(cls, config: LlmConfig, step: StepContext) -> Ports:
        check_options(config)
        found = checked_model(config.model, config.task, step.base_dir, "model", config.weights)
        if config.draft_model:
            draft = checked_model(config.draft_model, config.task, step.base_dir, "draft_model")
            check_draft(draft, config.draft_model)
        if config.task != "generate":
            return head_ports(config, found)
        own = (
            port("adapter", "text", optional=True, about="name of the LoRA adapter to answer with"),
            TENANT,
            port("template", "json", optional=True, about="how the prompt is made, by key: variables, apply, ..."),
            port("retention", "json", optional=True, about="retention of cached parts of the prompt, as ranges"),
        )
        inputs = request_inputs(*image_ports(config, found, step))
        for name, folder in config.adapters.items():
            checked_adapter(name, folder, step.base_dir)
        return Ports((*inputs, *own), answer_outputs())

    @classmethod
    def model_bytes(cls, config: LlmConfig, step: StepContext) -> int:
        return model_bytes(config.model, step.base_dir, config.weights)

    @classmethod
    def plan_notes(cls, config: LlmConfig, step: StepContext) -> Sequence[str]:
        """Return the round limits of a step on a GPU, whose defaults differ from a CPU's, and the answers' notation."""
        found = []
        for limits in dict.fromkeys(round_limits(config, one) for one in step.devices if torch_device(one) != "cpu"):
            rounds = f"rounds of at most {limits.tokens_max} tokens (round_tokens_max)"
            found.append(f"at most {limits.sequences_max} requests generate at a time (sequences_max), in {rounds}")
        if config.task == "generate":
            tools, reasons = read_notation(
                config.tool_format, config.reasoning, template_of(config.model, step.base_dir)
            )
            found += [f"tool calls are read in the notation {tools} (tool_format)"] * bool(tools)
            found += [f"text up to {END_THINK} is the output reasoning (reasoning)"] * reasons
        return [*found, *image_notes(config, step.base_dir), *hub_notes(config.model, step.base_dir)]

    def open(self, context: OpenContext) -> None:
        self._progress = context.progress
        try:
            from weftline.engine.llm.startup import open_engine
        except ModuleNotFoundError as error:
            raise MissingPackage(error.name or "torch", self.extra) from error
        self._engine, self._tokens, self._images = open_engine(self.config, context)
        if self._images is not None:
            self._decoding = DecodingThread()
            self._images = dataclasses.replace(
                self._images, held_bytes=self._held_image_bytes, decode=self._decoding.decode_picture
            )
        self._room = context.memory_limit
        self._kv_most_bytes = context.kv_most_bytes
        try:
            self._check_system(self.config)
        except ModelError:
            self.close()
            raise

    def warm_up(self) -> None:
        engine, _ = self._opened()
        if engine.runner.device.type == "cuda":
            from weftline.engine.llm.kv_sizing import TorchMeter, compute_largest, keep_room

            compute_largest(engine.runner, engine.limits)  # its memory use is measured during warm-up
            self._run_once(engine)
            if self._room is None or not keep_room(engine, self._room, TorchMeter(engine.runner.device)):
                return
        self._run_once(engine)

    def _run_once(self, engine: Engine) -> None:
        """Record CUDA graphs and compile kernels before the first request."""
        engine.record(lambda done, all: self._progress(f"recording CUDA graphs, {done} of {all}", 0.9))
        if engine.runner.head is not None:
            engine.add(-1, [0], SamplingParams(), LlmRequestOptions(pool=True))
            engine.step()
            return
        prompt, plain = [0] * max(1, min(4, engine.context_max - 2)), SamplingParams(tokens_max=2, ignore_eos=True)
        engine.generate([prompt], plain)
        if engine.runner.graphs is not None:  # each kind of sampling has its own kernels
            engine.generate([prompt], dataclasses.replace(plain, temperature=1.0))
            engine.generate([prompt], dataclasses.replace(plain, temperature=1.0, top_k=2, top_p=0.5))
        engine.clear_prefixes()

    @classmethod
    def can_rest(cls, config: LlmConfig, step: StepContext) -> bool:
        return config.ranks == 1  # other ranks are separate processes, which cannot sleep

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
        if self._decoding is not None:
            self._decoding.close()
        self._engine = self._tokens = self._images = self._decoding = None
        self._retained.cache_clear()
        self._format.cache_clear()
        self._outputs.clear()
        self._long.clear()

    def submit(self, item: int, inputs: Mapping[str, Any], urgency: Urgency = USUAL) -> None:
        request = _Request(item, inputs, urgency, _now_ms(), self.config)
        if self._decoding is not None and self._images is not None and shows_media(inputs):
            due_ms = urgency_ms(request.now_ms, request.deadline_ms, urgency.priority)
            cost = 1 + encoded_chars(inputs) / MESSAGE_CHARS
            decode = partial(_take_pictures, self._images, request)
            self._decoding.add(item, request, decode, due_ms, urgency.caller, cost)
        else:
            self._prepare(request)

    def _prepare(self, request: _Request, taken: Taken | None = None) -> None:
        """Check a request and hand it to the engine. taken: its inputs without their pictures, and these."""
        engine, words = self._opened()
        item, inputs, urgency, now_ms = request.item, request.inputs, request.urgency, request.now_ms
        try:
            pool = engine.runner.head is not None
            if pool:
                prepared = Prepared(words.raw(inputs["text"] or " "), SamplingParams(), None)
            else:
                prepared = self._prepared(request, taken)
            fixed = 0 if pool else self._fixed(prepared.prompt, request.config)
            template = (Retention(0, fixed, PRIORITY_TEMPLATE),) if fixed else ()
            options = LlmRequestOptions(
                urgency.priority,
                request.deadline_ms,
                _salt(request),
                read_name(inputs, "adapter"),
                (*template, *read_retention(inputs.get("retention"))), pool,
                shared=fixed if inputs.get("messages") is None else 0,  # a conversation may be all the caller's
                images=prepared.images,
                caller=urgency.caller,
            )  # fmt: skip
        except WeftlineError as error:
            self._refuse(item, error)
            return
        if not TemplateOptions.read(inputs.get("template")).generate:
            outputs = prompt_outputs(prepared.prompt, words, engine.context_max)
            self._ready.append(Piece(item, outputs, last=True))
        else:
            asked = _Submitted(item, prepared, options, now_ms)
            runner = engine.runner
            most = min(runner.context_max, self._kv_most_bytes // runner.page_bytes * runner.page_tokens)
            if engine.context_max <= len(prepared.prompt) < most:
                self._long.append(asked)
            else:
                self._add(asked)

    def _prepare_or_refuse(self, request: _Request, taken: Taken) -> None:
        """Prepare a request within a round, where an exception would fail all items."""
        try:
            self._prepare(request, taken)
        except Exception as error:
            failure = StepError(f"this request cannot be read: {type(error).__name__}")
            failure.__cause__ = error
            self._refuse(request.item, failure)

    def _held_image_bytes(self) -> int:
        """Return the bytes of pictures that are not encoded yet, those of requests that wait for KV memory among them.

        Called in the thread that decodes pictures.
        """
        engine = self._engine
        if engine is None or engine.runner.vision is None:
            return 0
        waiting = [(image.pixels, image.part) for one in self._long for image in one.prepared.images]
        encoding: int = engine.runner.vision.held_bytes
        return encoding + sum(pixels.nbytes(part) for pixels, part in waiting if pixels is not None)

    def _add(self, asked: _Submitted) -> None:
        """Add an item to the engine; one that is refused gets a piece with the error."""
        engine, words = self._opened()
        prepared = asked.prepared
        try:
            engine.add(asked.item, prepared.prompt, prepared.params, asked.options, now_ms=asked.now_ms)
        except WeftlineError as error:
            self._refuse(asked.item, error)
        else:
            name = partial(words.name_of, control=not prepared.params.skip_special_tokens)
            self._outputs[asked.item] = RequestOutput(prepared.params.n, name, prepared.syntax, prepared.prompt[0])

    def _refuse(self, item: int, error: WeftlineError) -> None:
        self._counters.failed += 1
        self._ready.append(Piece(item, last=True, error=error))

    def cancel(self, item: int) -> None:
        engine, _ = self._opened()
        self._ready = [piece for piece in self._ready if piece.item != item]
        if self._decoding is not None and self._decoding.cancel(item):
            self._counters.dropped += 1
        if any(one.item == item for one in self._long):
            self._long = [one for one in self._long if one.item != item]
            self._counters.dropped += 1
        if self._outputs.pop(item, None) is not None:
            self._counters.dropped += 1
            engine.cancel(item)

    def pause(self, item: int) -> None:
        engine, _ = self._opened()
        if item in self._outputs:
            engine.pause(item)

    def resume(self, item: int) -> None:
        engine, _ = self._opened()
        if item in self._outputs:
            engine.resume(item)

    def memory(self) -> NodeMemory | None:
        engine, _ = self._opened()
        stats = engine.stats()
        return NodeMemory(
            stats.pages_used * stats.page_bytes,
            stats.pages_idle * stats.page_bytes,
            stats.pages_free * stats.page_bytes,
            stats.waiting + len(self._long),
            stats.preemptions,
            max((self._wanted_bytes(one) for one in self._long), default=0),
        )

    def figures(self) -> Mapping[str, float]:
        engine, _ = self._opened()
        images = engine.runner.vision.figures() if engine.runner.vision is not None else {}
        return {**figures(self._counters, engine.stats()), **images}

    def resize_memory(self, bytes: int) -> int:
        engine, _ = self._opened()
        page_bytes, before = engine.runner.page_bytes, engine.runner.pages
        asked, self._long = self._long, []
        try:
            have = engine.resize(bytes // page_bytes)
        except Exception:
            for one in asked:  # no memory could be added
                self._add(one)
            raise
        for one in asked:
            if have > before and self._wanted_bytes(one) > have * page_bytes:
                self._long.append(one)  # more memory may follow
            else:
                self._add(one)
        return have * page_bytes

    def _wanted_bytes(self, asked: _Submitted) -> int:
        """Return the KV memory that an item may need, at most the step's maximum."""
        runner = self._opened()[0].runner
        prepared = asked.prepared
        tokens = min(len(prepared.prompt) + prepared.params.tokens_max, runner.context_max)
        pages = -(-tokens // runner.page_tokens)
        return min(pages, self._kv_most_bytes // runner.page_bytes) * runner.page_bytes

    def round(self) -> Sequence[Piece]:
        """Compute a round; when idle, record a missing CUDA graph."""
        engine, _ = self._opened()
        if not engine.busy and not engine.recorded:
            engine.record(most=1)
        for request, taken in self._decoding.finished(idle=not engine.busy) if self._decoding is not None else ():
            if isinstance(taken, WeftlineError):
                self._refuse(request.item, taken)
            else:
                self._prepare_or_refuse(request, taken)
        pieces, self._ready = self._ready, []
        for update in engine.step(_now_ms()):
            self._take(update, pieces)
        return pieces

    @property
    def busy(self) -> bool:
        engine = self._engine
        return (
            bool(self._ready) or bool(self._decoding) or (engine is not None and (engine.busy or not engine.recorded))
        )

    def _prepared(self, request: _Request, taken: Taken | None) -> Prepared:
        """Return prompt, pictures, sampling options and answer notation of a request; InputError if it is invalid."""
        config = request.config
        self._check_system(config)
        format = self._format(config.tool_format, config.reasoning)
        tools = ToolRequest.read(request.inputs)
        params = self._params(request, shows_control=bool(tools.offered) and not format.tools)
        prompt, images = self._prompt(request, tools, taken)
        return dataclasses.replace(format.prepare(tools, prompt, params), images=images)

    def _check_system(self, config: LlmConfig) -> None:
        if config.system and not self._opened()[1].has_template:
            raise ModelError(f"model {config.model}: it has no chat template, so `system` cannot be used")

    def _answer_format(self, tool_format: str, reasoning: str) -> AnswerFormat:
        return AnswerFormat(tool_format, reasoning, self._opened()[1])

    def _params(self, request: _Request, shows_control: bool) -> SamplingParams:
        params, inputs, seed = request.config.sampling, request.inputs, request.urgency.seed
        if shows_control:  # the caller reads the calls, and control tokens may be part of them
            params = dataclasses.replace(params, skip_special_tokens=False)
        if inputs.get("sampling") is not None:
            params = SamplingParams.read(inputs["sampling"], params)
        return params if seed is None or params.seed is not None else dataclasses.replace(params, seed=seed)

    def _prompt(
        self, request: _Request, tools: ToolRequest, taken: Taken | None
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return the tokens of a request's prompt, and its pictures."""
        inputs = request.inputs
        encode = partial(self._prompt_tokens, system=request.config.system, request=tools)
        if self._images is not None:
            return self._images.lay_out(taken or self._images.take(inputs), encode)
        refuse_media(inputs, self.config.model)
        return encode(inputs), ()

    def _prompt_tokens(
        self, inputs: Mapping[str, Any], media: Marks = NO_MARKS, system: str = "", request: ToolRequest = _NO_TOOLS
    ) -> list[int]:
        """Return the tokens of the prompt or conversation. media: what stands for pictures and videos in its texts."""
        _, tokens = self._opened()
        tools = list(request.offered) or None
        options = TemplateOptions.read(inputs.get("template"))
        prompt, messages = inputs.get("prompt"), inputs.get("messages")
        if options.tokens is not None:
            if messages is not None or prompt or tools:
                raise InputError("template.tokens: found messages, tools or a prompt beside them", param="tokens")
            return check_tokens(options.tokens, self._opened()[0].runner.vocabulary)
        if (prompt is None) == (messages is None):
            found = "neither" if prompt is None else "both"
            raise InputError(f"llm: found {found} of prompt and messages, expected exactly one")
        if messages is not None:
            if not tokens.has_template:
                raise InputError("messages: the model has no chat template; send a prompt")
            if not options.apply:
                raise InputError("template.apply: found false, expected true with messages", param="apply")
            return tokens.chat(messages, tools, media, options)
        if not isinstance(prompt, str) or not prompt:
            raise InputError("prompt: found an empty text, expected at least one character")
        applied = tokens.has_template and options.apply
        if tools and not applied:
            raise InputError("tools: the prompt has no chat template, which would describe them", param="tools")
        if not applied:
            return tokens.raw(prompt, media, options.add_special_tokens)
        return tokens.chat(_turns(system, prompt), tools, media, options)

    def _fixed_tokens(self, system: str, prefix: str) -> list[int]:
        """Return the leading tokens of every prompt of a step: the common prefix of two different prompts."""
        _, tokens = self._opened()
        if not (system or prefix):
            return []
        try:
            ways = [
                tokens.chat(_turns(system, text)) if tokens.has_template else tokens.raw(text)
                for text in (f"{prefix}0", f"{prefix}?")
            ]
        except InputError:
            return []  # the template refuses such a turn: no fixed prefix
        same = next((at for at, (a, b) in enumerate(zip(*ways, strict=False)) if a != b), 0)
        return ways[0][:same]

    def _fixed(self, tokens: list[int], config: LlmConfig) -> int:
        """Return the number of leading prompt tokens that are the step's own, in whole pages."""
        retained = self._retained(config.system, config.prefix)
        same: int = next((at for at, (a, b) in enumerate(zip(tokens, retained)) if a != b), len(retained))
        page_tokens: int = config.page_tokens
        return same - same % page_tokens  # a page with other tokens cannot be shared

    def _take(self, update: TokenUpdate, pieces: list[Piece]) -> None:
        """Apply an update to its request, and append the pieces for its caller."""
        item = update.id
        output = self._outputs[item]
        self._counters.add(update, first=not output.begun)
        if update.error is not None:
            del self._outputs[item]
            pieces.append(Piece(item, last=True, error=output.named_error(update.error)))
            return
        if update.pooled is not None:
            del self._outputs[item]
            pieces.append(Piece(item, self._pooled(update), last=True))
            return
        added = output.add(update)
        if added and output.streams:
            pieces.append(Piece(item, added))
        if update.last:
            del self._outputs[item]
            pieces.append(Piece(item, output.outputs(), last=True))

    def _pooled(self, update: TokenUpdate) -> dict[str, Any]:
        usage = {"prompt_tokens": update.prompt_tokens, "cached_tokens": update.cached_tokens}
        if self.config.task == "embed":
            return {"embedding": update.pooled, "usage": usage}
        labels = self._opened()[0].runner.head.labels
        return {"scores": dict(zip(labels, map(float, update.pooled), strict=True)), "usage": usage}

    def _opened(self) -> tuple[Engine, Tokens]:
        if self._engine is None or self._tokens is None:
            raise RuntimeError("the llm node is not open")
        return self._engine, self._tokens


def _turns(system: str, prompt: str) -> list[dict[str, str]]:
    return [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": prompt}]


def _now_ms() -> float:
    return time.monotonic() * 1e3


def _salt(request: _Request) -> bytes:
    """Return the cache salt of a request's program, caller and tenant; b'' for none."""
    urgency, tenant = request.urgency, read_name(request.inputs, "tenant")
    return cache_owner(urgency.program, urgency.caller, tenant).encode()


def _take_pictures(images: ImageReader, request: _Request, cancelled: Callable[[], bool]) -> Taken:
    return images.take(request.inputs, _salt(request), cancelled)
