"""Handlers of the OpenAI routes: chat, completions, embeddings, the list of models; and of rerank.

`docs/guides/openai.md` lists what each field does.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from weftline.engine.result import StreamedOutput
from weftline.engine.serving.backend import Ask
from weftline.engine.serving.http.body import json_object_of
from weftline.engine.serving.http.client_gone import while_connected
from weftline.engine.serving.http.context import HttpContext, ask_for, caller_of
from weftline.engine.serving.http.errors import HttpError, unsupported
from weftline.engine.serving.http.responses import DONE, JSON, EventStream, event, json_response
from weftline.engine.serving.lifecycle import gather_or_cancel
from weftline.engine.serving.model_info import ModelInfo
from weftline.engine.serving.openai.bodies import (
    EMBEDDING_TEXTS_MAX,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    GenerationBody,
    OpenAiBody,
    RerankBody,
    ScoreBody,
    TruncatingBody,
    answers_output,
)
from weftline.engine.serving.openai.completions import (
    AnswerHeader,
    ChatFormat,
    Completion,
    Format,
    TextFormat,
    Usage,
    usage_of,
)
from weftline.engine.serving.openai.messages import chat_inputs
from weftline.engine.serving.openai.ports import (
    AnswerPorts,
    RerankPorts,
    TextPorts,
    chat_ports,
    completion_ports,
    embedding_ports,
    rerank_ports,
    vector_length,
)
from weftline.errors import ContextOverflow, InputError, StepError, WeftlineError
from weftline.nodes.exact_numbers import converted, inexact


class Endpoint:
    """Base of the handlers."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def _object(self, request: Request) -> dict[str, Any]:
        return await json_object_of(request, self._context.limits.message_bytes_max, json=self._context.json)

    def _info(self, request: Request, name: str) -> ModelInfo:
        return self._context.authorised_info(request, self._context.model_of(name))

    def _ask(
        self,
        request: Request,
        name: str,
        inputs: Mapping[str, Any],
        outputs: Sequence[str],
        priority: int | None = None,
    ) -> Ask:
        return ask_for(request, self._context.model_of(name), inputs, outputs, priority)

    async def _outputs_of(
        self, request: Request, asks: Sequence[Ask], field: str = "", encoded: bool = False
    ) -> list[dict[str, Any]]:
        """Run requests, `limits.batch_max` at a time, and return their outputs; the first error cancels the others.

        field:   field with a list of values, one for each request, which is named in an InputError; '': none is.
        encoded: large json stays Packed.
        """
        wheres = [f"{field}[{place}]: " if field else "" for place in range(len(asks))]
        places = asyncio.Semaphore(self._context.limits.batch_max)

        async def run(ask: Ask, where: str) -> dict[str, Any]:
            async with places:
                return await self._outputs(request, ask, where, encoded)

        runs = list(map(run, asks, wheres))
        return await while_connected(request.scope, gather_or_cancel(runs))

    async def _outputs(self, request: Request, ask: Ask, where: str, encoded: bool) -> dict[str, Any]:
        try:
            return await self._context.outputs(request, ask, encoded)
        except InputError as error:
            if not where:
                raise
            kind = ContextOverflow if isinstance(error, ContextOverflow) else InputError
            raise kind(f"{where}{error}", param=error.param) from None

    async def _text(self, request: Request, ask: Ask, *outputs: str) -> StreamedText:
        """Start a streamed request and wait for its first chunk; failures up to then are raised."""
        return StreamedText(outputs, *await self._context.begin(request, ask))


def tenant_of(request: Request, ports: AnswerPorts | RerankPorts, salt: str | None = None) -> dict[str, str]:
    """Return the input that separates the prompt caches of callers, so that timing reveals no prompt of another.

    salt: separates those of one caller; HttpError where the model has no such input.
    """
    name = caller_of(request).name
    if salt is not None:
        if ports.tenant is None:
            raise unsupported("cache_salt", "the model has no input `tenant: text`; leave it out, or add one")
        name = hashlib.sha256(f"{len(name)}:{name}:{salt}".encode("utf-8", "replace")).hexdigest()
    return {ports.tenant: name} if ports.tenant is not None and name else {}


def template_of(body: GenerationBody, ports: AnswerPorts) -> dict[str, Any]:
    """Return the input with the options of the chat template; HttpError where the model has none."""
    options = body.template()
    if ports.template is not None:
        options = {**body.template_base, **options}
        return {ports.template: options} if options else {}
    options = {key: one for key, one in options.items() if (key, one) != ("reasoning_effort", "none")}
    for key in options:
        fix = "leave it out, or add one and wire it to an llm step without `engine: openai`"
        raise unsupported(body.field_of(key), f"model {body.model} has no input `template: json`; {fix}")
    return {}


def overflow_of(body: TruncatingBody, ports: TextPorts | RerankPorts) -> dict[str, Any]:
    """Return the input with the rule for texts that are too long; HttpError where the model has none."""
    overflow = body.overflow()
    if overflow is None:
        return {}
    if ports.overflow is None:
        why = f"model {body.model} has no input `overflow: json`; its operator adds it and wires it to the step"
        raise unsupported(body.truncation_field or "", why)
    return {ports.overflow: overflow}


# generated text

Prompts = tuple[GenerationBody, AnswerPorts, Sequence[Mapping[str, Any]]]
"""A parsed body, the model's ports, and the inputs of each prompt."""


class PromptEndpoint(Endpoint):
    """Base of the routes that send prompts to a model, in any protocol."""

    def _streamed_logprobs(self, body: GenerationBody, ports: AnswerPorts) -> str | None:
        """Return the output with log-probabilities as tokens arrive. Those of an echoed prompt come at the end."""
        single = body.stream and body.n == 1 and not body.echoed
        return ports.logprobs if single and body.top_logprobs_count is not None else None

    def _asks(
        self, request: Request, body: GenerationBody, ports: AnswerPorts, inputs: Sequence[Mapping[str, Any]]
    ) -> list[Ask]:
        """Return a request of the caller for each prompt, with `body.n` answers each."""
        common: dict[str, Any] = {}
        sampling = body.sampling()
        if ports.sampling is None:
            body.check_no_sampling(sampling)
        elif sampling:
            common[ports.sampling] = sampling
        common |= template_of(body, ports) | tenant_of(request, ports, body.cache_salt)
        answers = answers_output(body, ports.answers)
        if body.has_tools and ports.tool_calls is None:
            answers = ports.answers  # which have the calls too
        scored = self._streamed_logprobs(body, ports)
        wanted = [ports.output, ports.reasoning, scored, ports.usage, ports.tool_calls, answers]
        outputs = [name for name in wanted if name]
        merged = [_merged(one, common, ports.template) for one in inputs]
        asks = [self._ask(request, body.model, one, outputs, body.priority) for one in merged]
        caller_of(request).spend(len(asks) * body.n - 1)
        return asks


class GenerationEndpoint(PromptEndpoint, ABC):
    """Handler of a route that generates text, in one response or in chunks."""

    format: ClassVar[Format]

    async def create(self, request: Request) -> ASGIApp:
        body, ports, inputs = self._read(request, await self._object(request))
        asks = self._asks(request, body, ports, inputs)
        if body.stream and len(asks) > 1:
            raise unsupported("prompt", "one prompt streams at a time; send a request for each")
        completion, caller = self._completion(body, ports), caller_of(request).name
        with body.naming_fields():
            if body.stream:
                texts = [name for name in (ports.output, ports.reasoning, self._streamed_logprobs(body, ports)) if name]
                text = await self._text(request, asks[0], *texts)
                ending = partial(self._context.json.ending, caller=caller)
                return EventStream(chunks(body, completion, text, ending))
            answers = await self._outputs_of(request, asks, encoded=True)
        return Response(await self._context.json.completion(completion, answers, caller), media_type=JSON)

    def _completion(self, body: GenerationBody, ports: AnswerPorts) -> Completion:
        kind = self.format.chunk_object if body.stream else self.format.object
        header = AnswerHeader(kind, body.model, int(self._context.now_s()))
        logprobs = body.top_logprobs_count is not None
        chat = isinstance(self.format, ChatFormat)
        return Completion(header, ports, chat, logprobs, body.n, body.usage_in_stream, body.echoed)

    @abstractmethod
    def _read(self, request: Request, fields: Mapping[str, Any]) -> Prompts:
        """Parse a body."""


class Chat(GenerationEndpoint):
    """POST /v1/chat/completions."""

    format = ChatFormat()

    def _read(self, request: Request, fields: Mapping[str, Any]) -> Prompts:
        body = ChatBody.parse(fields)
        ports = chat_ports(self._info(request, body.model))
        return body, ports, [chat_inputs(body, ports)]


class Completions(GenerationEndpoint):
    """POST /v1/completions."""

    format = TextFormat()

    def _read(self, request: Request, fields: Mapping[str, Any]) -> Prompts:
        body = CompletionBody.parse(fields, texts_max=self._context.limits.batch_max)
        ports = completion_ports(self._info(request, body.model))
        return body, ports, [prompt_inputs(ports, one) for one in body.prompt]


def prompt_inputs(
    ports: TextPorts, prompt: str | list[int], field: str = "prompt", wanted: str = "template"
) -> dict[str, Any]:
    """Return the inputs of a prompt: its text, or its token ids for a step that reads them."""
    if isinstance(prompt, str):
        return {ports.prompt: prompt}
    if ports.tokens is not None:
        return {ports.prompt: "", ports.tokens: prompt}
    if ports.template is not None:
        return {ports.prompt: "", ports.template: {"tokens": prompt}}
    raise unsupported(field, f"token ids need an input `{wanted}: json` of the model; send text, or add one")


class Tokenize(Endpoint):
    """POST /tokenize and /detokenize, as vLLM and SGLang have them."""

    async def tokenize(self, request: Request) -> ASGIApp:
        fields = await self._object(request)
        strings = fields.pop("return_token_strs", None)
        body, ports, inputs = self._read(request, fields)
        with body.naming_fields():
            found = await self._prompt_of(request, body, ports, inputs, template_of(body, ports))
        return json_response(
            {
                "count": len(found["prompt_token_ids"]),
                "max_model_len": found["context_max"],
                "tokens": found["prompt_token_ids"],
                "token_strs": found["prompt_tokens"] if strings else None,
            }
        )

    def _read(
        self, request: Request, fields: Mapping[str, Any]
    ) -> tuple[GenerationBody, AnswerPorts, Mapping[str, Any]]:
        if fields.get("messages") is not None:
            chat = ChatBody.parse(fields)
            ports = chat_ports(self._info(request, chat.model))
            return chat, ports, chat_inputs(chat, ports)
        body = CompletionBody.parse(fields)
        text_ports = completion_ports(self._info(request, body.model))
        if len(body.prompt) != 1 or not isinstance(body.prompt[0], str):
            raise HttpError("prompt: expected one text", param="prompt")
        return body, text_ports, prompt_inputs(text_ports, body.prompt[0])

    async def detokenize(self, request: Request) -> ASGIApp:
        body = DetokenizeBody.parse(await self._object(request))
        ports = completion_ports(self._info(request, body.model))
        found = await self._prompt_of(request, body, ports, {ports.prompt: ""}, {}, body.tokens)
        return json_response({"prompt": found["text"]})

    async def _prompt_of(
        self,
        request: Request,
        body: OpenAiBody,
        ports: AnswerPorts,
        inputs: Mapping[str, Any],
        template: Mapping[str, Any],
        tokens: list[int] | None = None,
    ) -> Mapping[str, Any]:
        """Return the tokens of a prompt from the llm step, as its `answers` have them."""
        if ports.template is None or ports.answers is None:
            why = f"model {body.model} needs an input `template: json` and an output `answers: json` of an llm step"
            raise HttpError(why, param="model")
        options = {**template.get(ports.template, {}), "generate": False}
        options |= {} if tokens is None else {"tokens": tokens}
        ask = self._ask(request, body.model, {**inputs, ports.template: options}, [ports.answers], body.priority)
        [outputs] = await self._outputs_of(request, [ask])
        answers = outputs.get(ports.answers)
        if not isinstance(answers, list) or not answers or "prompt_token_ids" not in answers[0]:
            raise StepError(f"model {body.model} returned no tokens of its prompt")
        found: Mapping[str, Any] = answers[0]
        return found


def _merged(inputs: Mapping[str, Any], common: Mapping[str, Any], template: str | None) -> dict[str, Any]:
    """Return the inputs of a prompt with those of all prompts; both may have options of the template."""
    if template is None or template not in inputs:
        return {**inputs, **common}
    return {**inputs, **common, template: {**common.get(template, {}), **inputs[template]}}


class StreamedText:
    """Streamed outputs, and the complete values of all outputs. texts: names of the former.

    sent:    characters, or log-probabilities, of each of the former that were yielded.
    outputs: the latter; large json is Packed.
    """

    def __init__(
        self, texts: Sequence[str], first: StreamedOutput | None, stream: AsyncGenerator[StreamedOutput, None]
    ) -> None:
        self._first = first
        self._stream = stream
        self.sent = dict.fromkeys(texts, 0)
        self.outputs: dict[str, Any] = {}

    async def deltas(self) -> AsyncGenerator[tuple[str, Any], None]:
        """Yield (output, text) as the texts grow, or (output, log-probabilities). Closes the stream."""
        try:
            chunk = self._first
            while chunk is not None:
                if chunk.last:
                    self.outputs[chunk.output] = chunk.value
                elif chunk.output in self.sent and chunk.value:
                    self.sent[chunk.output] += len(chunk.value)
                    yield chunk.output, chunk.value
                chunk = await anext(self._stream, None)
        finally:
            await self._stream.aclose()


Ending = Callable[[Completion, Mapping[str, Any], Mapping[str, int]], Awaitable[list[bytes]]]
"""`JsonParser.ending` for a caller."""


async def chunks(
    body: GenerationBody, completion: Completion, text: StreamedText, ending: Ending
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed answer: its text, and its ending."""
    common, format, ports = completion.common, completion.format, completion.ports
    scored: list[Any] = []  # tokens whose text has not come yet
    with body.naming_fields():
        async with contextlib.aclosing(text.deltas()) as deltas:
            for choice in format.opening():
                yield event(common | {"choices": [choice]})
            async for output, delta in deltas:
                if output == ports.logprobs:
                    scored += delta
                    continue
                yield event(common | {"choices": [format.delta(delta, output == ports.reasoning, scored)]})
                scored = []
    if scored and ports.logprobs:
        text.sent[ports.logprobs] -= len(scored)
    for one in await ending(completion, text.outputs, text.sent):
        yield event(msgspec.Raw(one))
    yield DONE


# other routes


class Embeddings(Endpoint):
    """POST /v1/embeddings."""

    async def create(self, request: Request) -> ASGIApp:
        body = EmbeddingBody.parse(await self._object(request), texts_max=EMBEDDING_TEXTS_MAX)
        info = self._info(request, body.model)
        ports = embedding_ports(info)
        if (length := vector_length(info, ports.output)) is not None:
            body.check_dimensions(length)
        common = tenant_of(request, ports) | overflow_of(body, ports)
        wanted = [name for name in (ports.output, ports.usage) if name]
        asks = [
            self._ask(request, body.model, prompt_inputs(ports, one, "input", "tokens") | common, wanted, body.priority)
            for one in body.input
        ]
        caller_of(request).spend(len(asks) - 1)
        with body.naming_fields():
            answers = await self._outputs_of(request, asks, "input" if len(asks) > 1 else "")
        usage = sum((usage_of(outputs.get(ports.usage or "")) for outputs in answers), Usage())
        for outputs in answers:
            if outputs[ports.output] is not None:
                body.check_dimensions(len(outputs[ports.output]))
        as_text = body.encoding_format == "base64"
        data = []
        for place, outputs in enumerate(answers):
            vector = msgspec.Raw(msgspec.json.encode(_encoded(outputs[ports.output], as_text, body.model)))
            data.append({"object": "embedding", "index": place, "embedding": vector})
            await asyncio.sleep(0)  # other requests go on between two vectors
        return json_response({"object": "list", "data": data, "model": body.model, "usage": usage.prompt_json()})


def _encoded(vector: np.ndarray | None, as_text: bool, model: str) -> list[float] | str | None:
    """Return a vector as numbers, or as base64 of little-endian float32; None for an output that is absent.

    StepError: numbers that the form lacks. base64 has NaN and infinities.
    """
    if vector is None:
        return None
    single, wrong = converted(vector, "float32")
    if wrong is not None:
        raise StepError(f"model {model} gave {inexact('float32')}")
    if as_text:
        return base64.b64encode(single.tobytes()).decode()
    _check_finite(single, f"model {model} gave an embedding", 'send "encoding_format": "base64", or ')
    numbers: list[float] = single.tolist()
    return numbers


def _check_finite(numbers: np.ndarray, what: str, fix: str = "") -> None:
    """Raise StepError for NaN and infinities: clients of these routes read JSON, which lacks them."""
    if not np.isfinite(numbers).all():
        finite = "find the inputs for which the model fails; `finite: true` in its step fails them alone"
        raise StepError(f"{what} with NaN or an infinite number, which JSON lacks\n    fix: {fix}{finite}")


class Rerank(Endpoint):
    """POST /v1/rerank, which OpenAI's protocol lacks: the form that Jina, Cohere and vLLM have in common."""

    async def create(self, request: Request) -> ASGIApp:
        body = RerankBody.parse(await self._object(request), texts_max=self._context.limits.batch_max)
        ports = rerank_ports(self._info(request, body.model))
        inputs = {ports.query: body.query, ports.documents: body.documents}
        inputs |= tenant_of(request, ports) | overflow_of(body, ports)
        wanted = [name for name in (ports.output, ports.usage) if name]
        ask = self._ask(request, body.model, inputs, wanted, body.priority)
        caller_of(request).spend(len(body.documents) - 1)
        with body.naming_fields():
            [outputs] = await self._outputs_of(request, [ask])
        return json_response(
            {
                "id": f"rerank-{secrets.token_hex(12)}",
                "object": "list",
                "model": body.model,
                "results": ranking(body, outputs.get(ports.output)),
                "usage": usage_of(outputs.get(ports.usage or "")).prompt_json(),
            }
        )


class Score(Endpoint):
    """POST /v1/score, as vLLM has it: the scores of pairs, in their order."""

    async def create(self, request: Request) -> ASGIApp:
        body = ScoreBody.parse(await self._object(request))
        pairs = body.pairs(self._context.limits.batch_max)
        ports = rerank_ports(self._info(request, body.model))
        common = tenant_of(request, ports) | overflow_of(body, ports)
        wanted = [name for name in (ports.output, ports.usage) if name]
        asks = [
            self._ask(request, body.model, {ports.query: one, ports.documents: others} | common, wanted, body.priority)
            for one, others in pairs
        ]
        caller_of(request).spend(sum(len(others) for _, others in pairs) - 1)
        with body.naming_fields():
            answers = await self._outputs_of(request, asks)
        scores: list[float] = []
        for (_, others), outputs in zip(pairs, answers, strict=True):
            scores += _scores(body.model, len(others), outputs.get(ports.output))
        usage = sum((usage_of(outputs.get(ports.usage or "")) for outputs in answers), Usage())
        return json_response(
            {
                "id": f"score-{secrets.token_hex(12)}",
                "object": "list",
                "created": int(self._context.now_s()),
                "model": body.model,
                "data": [{"index": at, "object": "score", "score": one} for at, one in enumerate(scores)],
                "usage": usage.prompt_json(),
            }
        )


def _scores(model: str, count: int, scores: np.ndarray | None) -> list[float]:
    """Return the scores of `count` texts; StepError where the model gave others."""
    found = 0 if scores is None else len(scores)
    if scores is None or found != count:
        raise StepError(f"model {model} gave {found} scores for {count} documents")
    _check_finite(scores, f"model {model} gave scores")
    return [float(one) for one in scores]


def ranking(body: RerankBody, scores: np.ndarray | None) -> list[dict[str, Any]]:
    """Return the `top_n` documents with the highest scores, the highest first; equal ones keep their order.

    scores: of all documents, in their order; None: the pipeline left them out, and the results are empty.
    """
    if scores is None:
        return []
    _scores(body.model, len(body.documents), scores)
    results: list[dict[str, Any]] = []
    for index in np.argsort(-scores.astype(np.float64), kind="stable")[: body.top_n].tolist():
        document = {"document": {"text": body.documents[index]}} if body.return_documents else {}
        results.append({"index": index, "relevance_score": float(scores[index])} | document)
    return results


class OpenAiModels(Endpoint):
    """GET /v1/models and /v1/models/{model}. `created` is the server's start: models have no date of their own."""

    def __init__(self, context: HttpContext) -> None:
        super().__init__(context)
        self._created = int(context.now_s())

    async def list(self, request: Request) -> ASGIApp:
        caller = caller_of(request)
        ready = [one.name for one in self._context.backend.index() if one.ready and caller.may_use_model(one.name)]
        infos: dict[str, ModelInfo] = {}
        for name in ready:
            with contextlib.suppress(WeftlineError):  # it was unloaded this very moment
                infos[name] = self._context.backend.info(name)
        infos |= {alias: infos[name] for alias, name in self._context.aliases.items() if name in infos}
        return json_response({"object": "list", "data": list(map(self._model, infos, infos.values()))})

    async def get(self, request: Request) -> ASGIApp:
        name = request.path_params["model"]
        return json_response(self._model(name, self._info(request, name)))

    def _model(self, id: str, info: ModelInfo) -> dict[str, Any]:
        """Return a model by one of its names. root: its own name."""
        about = {"id": id, "object": "model", "created": self._created, "owned_by": "weftline"}
        return about | {"root": info.name, "max_model_len": info.context_max}
