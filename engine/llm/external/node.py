"""LLM node with an external engine: prompts in, text out as a server with OpenAI's API streams it.

The server has the model, its memory, its batches and its prefix cache. The node has the ports of the llm step, sends
each item as one chat completion, and streams the answer. All items run at the same time, in the event loop of one
thread (`calls.py`). The worker's thread is woken for new chunks.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from weftline.engine.llm.counters import TokenCounters
from weftline.engine.llm.external.options import ONLY_OWN, ExternalLlmConfig, ca_file, check_external
from weftline.engine.llm.external.request import chat_request
from weftline.engine.llm.external.servers import SERVERS
from weftline.engine.llm.ports import TENANT, answer_outputs, request_inputs
from weftline.errors import DeadlineExceeded, WeftlineError
from weftline.node import (
    USUAL,
    MissingPackage,
    ModelError,
    OpenContext,
    Piece,
    Ports,
    StepContext,
    StreamNode,
    Urgency,
)
from weftline.shm.device.names import is_gpu

if TYPE_CHECKING:
    from weftline.engine.llm.external.calls import Calls


class ExternalLlm(StreamNode):
    """Answer prompts or conversations with a model behind a server with OpenAI's API, streaming."""

    Config: ClassVar[type[Any]] = ExternalLlmConfig
    extra: ClassVar[str] = "openai"
    other_options: ClassVar[Mapping[str, str]] = dict.fromkeys(ONLY_OWN, "engine: weftline")

    def __init__(self, config: ExternalLlmConfig) -> None:
        super().__init__(config)
        self._calls: Calls | None = None
        self._salt_secret = b""
        self._refused: list[Piece] = []
        self._active: set[int] = set()
        self._counters = TokenCounters()

    @classmethod
    def ports(cls, config: ExternalLlmConfig, step: StepContext) -> Ports:
        check_external(config, step.base_dir, os.environ)
        tenant = (TENANT,) if SERVERS[config.server].salted else ()
        reasoning = "reasoning, where the server sends it apart"
        return Ports((*request_inputs(), *tenant), answer_outputs(reasoning))

    @classmethod
    def variables(cls, config: ExternalLlmConfig) -> Sequence[str]:
        return (config.key,) if config.key else ()

    @classmethod
    def plan_notes(cls, config: ExternalLlmConfig, step: StepContext) -> Sequence[str]:
        """Return where answers come from, and what the server decides instead of the plan."""
        url = urlsplit(config.url)
        where = f"model {config.model} at {url.scheme}://{url.netloc} (server: {config.server})"
        key = f"; its process inherits {config.key}" if config.key else ""
        unused = ("it uses no GPU; leave `device` out",) if any(map(is_gpu, step.devices)) else ()
        return (
            *unused,
            f"answers come from {where}: memory, batches, prefix cache and constraints are the server's",
            f"at most {config.sequences_max} requests run there at a time (sequences_max){key}",
        )

    def open(self, context: OpenContext) -> None:
        try:
            from weftline.engine.llm.external.calls import Calls
            from weftline.engine.llm.external.client import CallFailed, EngineAddress
        except ModuleNotFoundError as error:
            raise MissingPackage(error.name or "httpx2", self.extra) from error
        config: ExternalLlmConfig = self.config
        key = os.environ.get(config.key, "") if config.key else ""
        if config.key and not key:
            raise ModelError("key: the environment variable that it names is not set here")
        ca = ca_file(config.ca, context.base_dir) if config.ca else None
        self._salt_secret = key.encode() or secrets.token_bytes(32)
        self._calls = Calls(EngineAddress(config.url, key, ca, config.sequences_max, config.stall_max_s))
        try:
            self._calls.open()
            if config.probe:
                context.progress("checking the external engine's models", 0.5)
                self._check_model(self._calls.models())
        except OSError as error:
            self.close()
            raise ModelError(f"ca: {config.ca:.200}: {error.strerror or 'it has no certificate'}") from None
        except CallFailed as failed:
            self.close()
            raise ModelError(f"probe: {failed.error}") from None

    def _check_model(self, models: Sequence[str]) -> None:
        if self.config.model not in models:
            self.close()
            shown = ", ".join(f"{one!r:.80}" for one in models[:8]) or "none"
            raise ModelError(f"model {self.config.model}: the external engine does not have it; its models: {shown}")

    def close(self) -> None:
        if self._calls is not None:
            self._calls.close()
        self._calls = None
        self._active.clear()

    def submit(self, item: int, inputs: Mapping[str, Any], urgency: Urgency = USUAL) -> None:
        from weftline.engine.llm.external.calls import Call

        calls = self._opened()
        try:
            if urgency.left_ms is not None and urgency.left_ms <= 0:
                raise DeadlineExceeded("the deadline passed before the request was sent to the external engine")
            secret, of = self._salt_secret, (urgency.caller, urgency.seed, urgency.program)
            request = chat_request(self.config, inputs, secret, *of)
        except WeftlineError as error:
            self._counters.failed += 1
            self._refused.append(Piece(item, last=True, error=error))
            return
        now_s = calls.now_s()
        deadline_s = None if urgency.left_ms is None else now_s + urgency.left_ms / 1e3
        self._active.add(item)
        calls.start(Call(item, request, now_s, urgency.priority, deadline_s))

    def cancel(self, item: int) -> None:
        self._refused = [piece for piece in self._refused if piece.item != item]
        if item in self._active:
            self._active.discard(item)
            self._counters.dropped += 1
            self._opened().cancel(item)

    def pause(self, item: int) -> None:
        self._opened().pause(item)

    def resume(self, item: int) -> None:
        self._opened().resume(item)

    def round(self) -> Sequence[Piece]:
        """Return the chunks that came since the last round."""
        pieces, self._refused = self._refused, []
        for piece in self._opened().outbox.take():
            if piece.item in self._active:  # it may have been cancelled meanwhile
                self._count(piece)
                pieces.append(piece)
        return pieces

    @property
    def busy(self) -> bool:
        return bool(self._refused) or (self._calls is not None and len(self._calls.outbox) > 0)

    @property
    def wake_descriptor(self) -> int:
        return -1 if self._calls is None else self._calls.outbox.descriptor

    def figures(self) -> Mapping[str, float]:
        counts = self._opened().counts
        return {
            "running": counts.running,
            "waiting": counts.waiting,
            "calls_total": counts.sent,
            "retries_total": counts.retried,
            **self._counters.figures(),
        }

    def _count(self, piece: Piece) -> None:
        """Count a last chunk."""
        if not piece.last:
            return
        self._active.discard(piece.item)
        if piece.error is not None:
            self._counters.failed += 1
            return
        usage = piece.outputs["usage"]
        self._counters.prompt_tokens += usage["prompt_tokens"] or 0
        self._counters.completion_tokens += usage["completion_tokens"] or 0
        for answer in piece.outputs["answers"]:
            self._counters.cut += answer["finish_reason"] == "length"
            self._counters.stopped += answer["finish_reason"] != "length"

    def _opened(self) -> Calls:
        if self._calls is None:
            raise RuntimeError("the llm node is not open")
        return self._calls
