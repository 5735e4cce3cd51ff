"""Plain requests: POST /run/{model}, most of its bodies at v2's infer route, and Triton's generate extension.

`plain_inputs.py` has the forms of a body, `plain_outputs.py` those of an answer. The query has v2's request parameters
and `output`, which selects outputs by name and may be repeated.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from weftline.engine.protocol.packed import Packed
from weftline.engine.result import StreamedOutput
from weftline.engine.serving.backend import Answer, Ask
from weftline.engine.serving.http.binary_tensors import GENERATE, RUN
from weftline.engine.serving.http.body import body_of
from weftline.engine.serving.http.client_gone import while_connected
from weftline.engine.serving.http.context import (
    ID_CHARS_MAX,
    SPAN,
    HttpContext,
    caller_of,
    deadline_ms_of,
    id_of,
    room_of,
)
from weftline.engine.serving.http.errors import HttpError
from weftline.engine.serving.http.multipart import is_multipart, parts_of
from weftline.engine.serving.http.plain_inputs import (
    Part,
    begins_with_field,
    described,
    inputs_of_fields,
    inputs_of_parts,
    inputs_of_raw,
)
from weftline.engine.serving.http.plain_outputs import (
    EVENTS,
    JSON,
    is_media,
    json_answer,
    json_output,
    matches,
    media_ranges,
    offered,
    raw_output,
)
from weftline.engine.serving.http.responses import EventStream
from weftline.engine.serving.model_info import ModelInfo, PortInfo
from weftline.engine.serving.replies import to_status
from weftline.engine.serving.threads import finish_in_thread
from weftline.engine.serving.v2.messages import InferRequest, Parameter, WantedOutput, check_name, check_version
from weftline.engine.serving.v2.request import to_asks
from weftline.nodes.strict_json import INLINE_BYTES

FORM = "application/x-www-form-urlencoded"
"""Content type that curl sends with -d and --data-binary; a JSON object or a single value may come with it too."""

_FLAGS, _COUNTS = ("sequence_start", "sequence_end", "job"), ("priority", "timeout", "seed")
_KNOWN = ("output", "sequence_id", *_FLAGS, *_COUNTS)


@dataclass(frozen=True, slots=True)
class _Call:
    """A plain request that is ready to run. ports: the outputs that it selects."""

    request: Request
    info: ModelInfo
    ports: Sequence[PortInfo]
    ask: Ask


class Run:
    """Plain requests: POST /run/{model} and the generate routes; v2's infer route uses `answer`, too."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def run(self, request: Request) -> ASGIApp:
        info = self._context.authorised_info(request, check_name(request.path_params["model"]))
        return await self.answer(request, info, await self._read(request, info), "")

    async def form_or_value(self, request: Request, info: ModelInfo) -> InferRequest | None:
        """Read a body that is a form or one value by its content type; None for JSON, which is not read."""
        type = _type_of(request)
        if type == "multipart/form-data":
            return InferRequest(info.name, await self._parts(request, info))
        if type in ("", FORM, JSON) or type.endswith("+json"):
            return None
        return InferRequest(info.name, inputs_of_raw(await self._body(request), type, info.inputs))

    async def answer(self, request: Request, info: ModelInfo, asking: InferRequest, version: str) -> ASGIApp:
        """Run a plain request and answer in the form that the client accepts."""
        asking = msgspec.structs.replace(asking, **_options(request), id=id_of(request), version=version)
        ports = [port for port in info.outputs if not asking.outputs or port.name in {o.name for o in asking.outputs}]
        form = _form_of_answer(request, ports)
        call = _Call(request, info, ports, await self._ask(request, info, asking))
        if form == EVENTS:
            return EventStream(self._events(call, *await self._context.begin(request, call.ask)), _problem)
        return await while_connected(request.scope, self._answered(call, form))

    async def _read(self, request: Request, info: ModelInfo) -> InferRequest:
        found = await self.form_or_value(request, info)
        if found is not None:
            return found
        body, limits, type = await self._body(request), self._context.limits, _type_of(request)
        if type in ("", FORM) and not bytes(body[:64]).lstrip().startswith(b"{"):
            if begins_with_field(body, info.inputs):
                return InferRequest(info.name, inputs_of_fields(bytes(body), info.inputs, limits))
            return InferRequest(info.name, inputs_of_raw(body, "", info.inputs))
        caller = caller_of(request).name
        asking, _ = await self._context.json.rest_body(body, None, info.name, "", limits, caller, info.inputs, RUN)
        return asking

    async def _body(self, request: Request) -> bytes | bytearray | memoryview:
        return await body_of(request, self._context.limits.message_bytes_max)

    async def _parts(self, request: Request, info: ModelInfo) -> Any:
        names = {port.name for port in info.inputs}

        def check(part: Part) -> None:
            if part.name not in names:
                raise HttpError(f"unknown input {part.name!r:.80}; the inputs are {described(info.inputs)}")

        return inputs_of_parts(await parts_of(request, self._context.limits.tensors_max, check), info.inputs)

    async def _ask(self, request: Request, info: ModelInfo, asking: InferRequest) -> Ask:
        """Return the one request of the caller; its cost is counted."""
        context, caller = self._context, caller_of(request)
        asked = to_asks(
            await context.json.elements(asking, info, context.limits, None, caller.name),
            info,
            context.limits,
            deadline_ms=deadline_ms_of(request),
            caller=caller.name,
            protocol="http",
            traceparent=request.headers.get("traceparent", "")[:ID_CHARS_MAX],
            size_bytes=int(request.headers.get("content-length", "0") or 0),
        )
        caller.spend(asked.cost(info) - 1)
        (ask,) = asked.asks
        return ask

    async def generate(self, request: Request) -> ASGIApp:
        """Answer POST /v2/models/{model}/generate."""
        return await while_connected(request.scope, self._answered(await self._generating(request), GENERATE))

    async def generate_stream(self, request: Request) -> ASGIApp:
        """Answer POST /v2/models/{model}/generate_stream: an event for each piece, and one for the other outputs."""
        call = await self._generating(request)
        events = self._generated(call, *await self._context.begin(request, call.ask))
        return EventStream(events, lambda error: _data(_error_json(error)))

    async def _generating(self, request: Request) -> _Call:
        model = check_name(request.path_params["model"])
        version = check_version(request.path_params.get("version", ""))
        info = self._context.authorised_info(request, model, version)
        body, caller, limits = await self._body(request), caller_of(request).name, self._context.limits
        asking, _ = await self._context.json.rest_body(
            body, None, model, version, limits, caller, info.inputs, GENERATE
        )
        return _Call(request, info, info.outputs, await self._ask(request, info, asking))

    async def _answered(self, call: _Call, form: tuple[PortInfo, str] | str) -> Response:
        answer = await self._context.backend.ask(call.ask)
        with answer:
            await room_of(call.request).take(answer.size_bytes)
            await answer.load()
            call.request.scope[SPAN] = answer.traceparent
            if self._context.trace.active:
                self._context.trace.note(call.ask, answer.timings, answer.total_ms)
            if isinstance(form, tuple):
                port, type = form
                value = answer.outputs.get(port.name)
                if value is None:
                    return Response(None, 204)
                return Response(await finish_in_thread(raw_output, port, value, type), media_type=type)
            head = _head(call.ask, answer.version) if form == GENERATE else None
            return Response(await self._json(call, call.ports, answer, head), media_type=JSON)

    async def _json(
        self, call: _Call, ports: Sequence[PortInfo], answer: Answer, head: Mapping[str, str] | None = None
    ) -> bytes:
        json, caller = self._context.json, call.ask.caller
        await json.write(answer, call.info, caller)
        written = {}
        for port in ports:
            value = answer.outputs.get(port.name)
            if is_media(port):
                written[port.name] = await finish_in_thread(json_output, port.type, value)
            elif isinstance(value, np.ndarray) and value.nbytes > INLINE_BYTES and port.port_type.dtype != "bfloat16":
                written[port.name] = await json.nested(value, caller)
        return json_answer(ports, answer.outputs, written, head)

    async def _events(
        self, call: _Call, chunk: StreamedOutput | None, stream: AsyncGenerator[StreamedOutput, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yield `piece` events as outputs grow, and `done` with the whole outputs."""
        whole: dict[str, Any] = {}
        async with aclosing(self._pieces(call, chunk, stream, whole)) as pieces:
            async for output, piece in pieces:
                yield _event("piece", b'{"output":%b,"piece":%b}' % (msgspec.json.encode(output), piece))
        yield _event("done", await self._json(call, call.ports, Answer(whole)))

    async def _generated(
        self, call: _Call, chunk: StreamedOutput | None, stream: AsyncGenerator[StreamedOutput, None]
    ) -> AsyncGenerator[bytes, None]:
        head, left = _head(call.ask, call.info.version), {port.name: port for port in call.ports}
        whole: dict[str, Any] = {}
        async with aclosing(self._pieces(call, chunk, stream, whole)) as pieces:
            async for output, piece in pieces:
                left.pop(output, None)
                port = [one for one in call.ports if one.name == output]
                yield _data(json_answer(port, {}, {output: piece}, head))
        if left:
            yield _data(await self._json(call, list(left.values()), Answer(whole), head))

    async def _pieces(
        self,
        call: _Call,
        chunk: StreamedOutput | None,
        stream: AsyncGenerator[StreamedOutput, None],
        whole: dict[str, Any],
    ) -> AsyncGenerator[tuple[str, bytes], None]:
        """Yield each piece as JSON with its output's name; add whole outputs to `whole`."""
        try:
            while chunk is not None:
                if chunk.last:
                    whole[chunk.output] = chunk.value
                else:
                    yield chunk.output, await self._piece(call, chunk)
                chunk = await anext(stream, None)
        finally:
            await stream.aclose()

    async def _piece(self, call: _Call, chunk: StreamedOutput) -> bytes:
        """Return one piece as JSON."""
        port, value = call.info.output(chunk.output), chunk.value
        if isinstance(value, Packed):
            value = await self._context.json.written(chunk.output, value, call.info, call.ask.caller)
        text = await finish_in_thread(json_output, port.type, value) if port and is_media(port) else None
        return text or json_output(port.type if port else "any", value)


def _event(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def _data(text: bytes) -> bytes:
    return b"data: %b\n\n" % text


def _head(ask: Ask, version: int) -> dict[str, str]:
    return {"model_name": ask.model, "model_version": str(version)} | ({"id": ask.id} if ask.id else {})


def _problem(error: BaseException) -> bytes:
    return _event("error", _error_json(error))


def _error_json(error: BaseException) -> bytes:
    return msgspec.json.encode({"error": to_status(error).message})


def _type_of(request: Request) -> str:
    if is_multipart(request):
        return "multipart/form-data"
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _form_of_answer(request: Request, ports: Sequence[PortInfo]) -> tuple[PortInfo, str] | str:
    """Return JSON, EVENTS, or an output with its media type; HttpError (406) if none is possible."""
    accept = request.headers.get("accept", "").strip()
    if accept in ("", "*/*", JSON):
        return JSON
    types = offered(ports)
    for range in media_ranges(accept):
        if matches(range, JSON):
            return JSON
        if range == EVENTS:
            return EVENTS
        found = next((type for type in types if matches(range, type)), None)
        if found is not None:
            if len(types[found]) > 1:
                names = ", ".join(port.name for port in types[found])
                raise HttpError(f"accept: {found}: add ?output=NAME to the URL, one of {names}", code=406)
            return types[found][0], found
    raise HttpError(f"accept: expected one of {', '.join((JSON, EVENTS, *types))}", code=406)


def _options(request: Request) -> dict[str, Any]:
    """Return the outputs and parameters that the query selects."""
    outputs: list[WantedOutput] = []
    parameters: dict[str, Parameter] = {}
    for name, text in request.query_params.multi_items() if request.scope["query_string"] else ():
        if name not in _KNOWN:
            raise HttpError(f"query: unknown {name!r:.80}; expected {', '.join(_KNOWN)}")
        if name == "output":
            outputs.append(WantedOutput(text))
        elif name in _FLAGS:
            if text not in ("true", "false"):
                raise HttpError(f"query: {name}: expected true or false", param=name)
            parameters[name] = text == "true"
        elif name in _COUNTS:
            if not (text.isascii() and text.isdigit() and len(text) <= 20):
                raise HttpError(f"query: {name}: expected a whole number", param=name)
            parameters[name] = int(text)
        else:
            parameters[name] = text
    return {"outputs": tuple(outputs), "parameters": parameters}
