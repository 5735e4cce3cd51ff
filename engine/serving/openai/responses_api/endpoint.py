"""Handlers of OpenAI's Responses API: create, get, delete, list the input items of a response, cancel.

A request is answered as the chat request that it is translated to (`body.py`, `items.py`). Its answer becomes output
items and events (`output.py`). Responses are kept in this process (`store.py`): a server has one process for HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from weftline.engine.serving.backend import Ask
from weftline.engine.serving.http.body import hold_bytes
from weftline.engine.serving.http.context import HttpContext, caller_of
from weftline.engine.serving.http.errors import HttpError, unsupported
from weftline.engine.serving.http.responses import JSON, EventStream, json_response, named_event, openai_problem
from weftline.engine.serving.openai.bodies import ChatBody
from weftline.engine.serving.openai.endpoints import PromptEndpoint, StreamedText
from weftline.engine.serving.openai.messages import MESSAGES_MAX, chat_inputs
from weftline.engine.serving.openai.ports import ChatPorts, chat_ports
from weftline.engine.serving.openai.responses_api.answer import logprobs_json
from weftline.engine.serving.openai.responses_api.body import ResponsesBody, naming_fields
from weftline.engine.serving.openai.responses_api.items import messages_of, output_items, read_items, references_in
from weftline.engine.serving.openai.responses_api.output import REASONING, TEXT, Event, ResponseHeader, ResponseWriter
from weftline.engine.serving.openai.responses_api.store import ResponseStore, StoredResponse

ITEMS_SHOWN, ITEMS_SHOWN_MAX = 20, 100
"""Input items that a list has by default, and at most."""


class _Turn(msgspec.Struct, frozen=True):
    """A request that is being answered.

    places:   the place of each message of the chat in the request.
    items:    those of its input.
    previous: the response that it continues.
    """

    body: ResponsesBody
    chat: ChatBody
    places: Sequence[str]
    ports: ChatPorts
    items: Sequence[Mapping[str, Any]]
    previous: StoredResponse | None
    caller: str


class Responses(PromptEndpoint):
    """The routes under /v1/responses. store: the responses that are kept."""

    def __init__(self, context: HttpContext) -> None:
        super().__init__(context)
        limits = context.limits
        self.store = ResponseStore(limits.responses_bytes_max, limits.responses_max, limits.responses_s)
        self._expiry: asyncio.TimerHandle | None = None

    async def create(self, request: Request) -> ASGIApp:
        """POST /v1/responses."""
        body = ResponsesBody.parse(await self._object(request))
        info = self._info(request, body.model)
        turn, ask = await self._turn(request, body, chat_ports(info))
        header = ResponseHeader(body.echo(), int(self._context.now_s()), self._is_kept(body))
        writer = ResponseWriter(header, body.has_encoded_reasoning)
        with naming_fields(turn.chat, turn.places):
            if body.stream:
                ports = turn.ports
                texts = [ports.output, ports.reasoning, self._streamed_logprobs(turn.chat, ports)]
                text = await self._text(request, ask, *filter(None, texts))
                return EventStream(self._events(turn, writer, text), lambda error: _failed(writer, error))
            [outputs] = await self._outputs_of(request, [ask], encoded=True)
        answer = await self._context.json.answer(outputs, turn.ports, body.has_logprobs, turn.caller)
        writer.finish(answer, int(self._context.now_s()))
        return Response(self._keep(turn, writer.response), media_type=JSON)

    async def _turn(self, request: Request, body: ResponsesBody, ports: ChatPorts) -> tuple[_Turn, Ask]:
        """Return a request with its conversation, and what the model is asked."""
        for field in ("instructions", "previous_response_id"):
            if getattr(body, field) is not None and ports.messages is None:
                why = "the model reads the last user message alone; leave it out, or add an input `messages: json`"
                raise unsupported(field, why)
        caller = caller_of(request).name
        previous = self._previous(caller, body.previous_response_id)
        history = await self._history(request, previous)
        items = read_items([] if body.input is None else body.input, await self._referenced(request, body.input))
        wheres = ["previous_response_id"] * len(history) + [f"input[{place}]" for place in range(len(items))]
        messages, places = messages_of([*history, *items], wheres)
        if previous is not None and len(messages) > MESSAGES_MAX:
            found = f"found a conversation of {len(messages)} messages, expected at most {MESSAGES_MAX}"
            raise HttpError(f"previous_response_id: {found}; begin a new one", param="previous_response_id")
        chat = body.chat(messages)
        places = ["instructions"] * (len(chat.messages) - len(messages)) + places
        with naming_fields(chat, places):
            inputs = chat_inputs(chat, ports)
            [ask] = self._asks(request, chat, ports, [inputs])
        return _Turn(body, chat, places, ports, items, previous, caller), ask

    async def _events(self, turn: _Turn, writer: ResponseWriter, text: StreamedText) -> AsyncGenerator[bytes, None]:
        """Yield the events of a streamed response. Log-probabilities that may be of other parts come at the end."""
        for one in writer.opening():
            yield named_event(one)
        ports, scored = turn.ports, list[Any]()
        with naming_fields(turn.chat, turn.places):
            async with contextlib.aclosing(text.deltas()) as deltas:
                async for output, delta in deltas:
                    if output == ports.logprobs:
                        scored += delta
                        continue
                    kind = REASONING if output == ports.reasoning else TEXT
                    mixed = kind == REASONING or writer.has_reasoning or turn.chat.has_tools
                    logprobs = [] if mixed else logprobs_json(scored)
                    scored = []
                    for one in writer.add(kind, delta, logprobs):
                        yield named_event(one)
        answer = await self._context.json.answer(text.outputs, ports, turn.body.has_logprobs, turn.caller)
        ending = writer.finish(answer, int(self._context.now_s()))
        self._keep(turn, writer.response)
        for one in ending:
            yield named_event(one)

    # the store

    def _is_kept(self, body: ResponsesBody) -> bool:
        return self.store.on and body.store is not False

    def _keep(self, turn: _Turn, response: Event) -> bytes:
        """Store a finished response, unless the request is against it; return it as JSON.

        One that the store does not keep is returned with `store: false`.
        """
        if not response["store"]:
            return msgspec.json.encode(response)
        ids = [one["id"] for one in (*turn.items, *response["output"])]
        encoded = msgspec.json.encode(response)
        stored = StoredResponse(response["id"], msgspec.msgpack.encode(turn.items), encoded, tuple(ids), turn.previous)
        if self.store.put(turn.caller, stored, self._now_s()):
            self._expire()
            return encoded
        response["store"] = False
        return msgspec.json.encode(response)

    def _expire(self) -> None:
        """Remove old responses, and do so again when the next one is too old."""
        if self._expiry is not None:
            self._expiry.cancel()
        now_s = self._now_s()
        due_s = self.store.expire(now_s)
        loop = asyncio.get_running_loop()
        self._expiry = None if due_s is None else loop.call_later(max(1.0, due_s - now_s), self._expire)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _previous(self, caller: str, id: str | None) -> StoredResponse | None:
        if id is None:
            return None
        if not self.store.on:
            why = "this server keeps no responses, limits.responses_bytes_max is 0; send the conversation as input"
            raise unsupported("previous_response_id", why)
        found = self.store.get(caller, id, self._now_s())
        if found is None:
            name = "previous_response_not_found"
            raise HttpError(
                f"Previous response with id {id!r:.80} not found.", code=404, param="previous_response_id", name=name
            )
        return found

    async def _history(self, request: Request, previous: StoredResponse | None) -> list[Mapping[str, Any]]:
        """Return the items of the conversation that a request continues."""
        conversation = [] if previous is None else previous.conversation()
        return await self._items(request, conversation, "previous_response_id")

    async def _referenced(self, request: Request, input: object) -> dict[str, Mapping[str, Any]]:
        """Return the items that `input` refers to, as far as the caller's responses have them, by id."""
        caller = caller_of(request).name
        found = [self.store.with_item(caller, id, self._now_s()) for id in references_in(input)]
        responses = list(dict.fromkeys(one for one in found if one is not None))
        return {one["id"]: one for one in await self._items(request, responses, "input")}

    async def _items(
        self, request: Request, responses: Sequence[StoredResponse], field: str
    ) -> list[Mapping[str, Any]]:
        """Return the items of stored responses, once there is room for them.

        HttpError if a request with all of them would be too large.
        """
        size = sum(len(one.items) + len(one.response) for one in responses)
        most = self._context.limits.message_bytes_max
        if size > most:
            found = f"found a conversation of {size} bytes, limits.message_bytes_max is {most}; begin a new one"
            raise HttpError(f"{field}: {found}", code=413, param=field)
        await hold_bytes(request, size)
        items: list[Mapping[str, Any]] = []
        for one in responses:
            items += msgspec.msgpack.decode(one.items)
            items += output_items(one.response)
            await asyncio.sleep(0)
        return items

    def _stored(self, request: Request) -> StoredResponse:
        """Return the response in the path; HttpError unless it is one of the caller's."""
        id = request.path_params["response"]
        found = self.store.get(caller_of(request).name, id, self._now_s())
        if found is None:
            raise _not_found(id)
        return found

    # other routes

    async def get(self, request: Request) -> ASGIApp:
        """GET /v1/responses/{response}."""
        for field in ("stream", "starting_after"):
            if request.query_params.get(field, "false") != "false":
                raise unsupported(field, "a stored response is returned whole; leave it out")
        return Response(self._stored(request).response, media_type=JSON)

    async def delete(self, request: Request) -> ASGIApp:
        """DELETE /v1/responses/{response}."""
        id = request.path_params["response"]
        if not self.store.delete(caller_of(request).name, id, self._now_s()):
            raise _not_found(id)
        return json_response({"id": id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> ASGIApp:
        """POST /v1/responses/{response}/cancel. No response is computed in the background, so none can be cancelled."""
        id = self._stored(request).id
        why = "only responses with background: true can be, and this server makes none; close the connection instead"
        raise HttpError(f"response {id} cannot be cancelled: {why}")

    async def input_items(self, request: Request) -> ASGIApp:
        """GET /v1/responses/{response}/input_items, newest first."""
        stored, query = self._stored(request), request.query_params
        order, limit = query.get("order", "desc"), query.get("limit", str(ITEMS_SHOWN))
        if order not in ("asc", "desc"):
            raise HttpError("order: expected asc or desc", param="order")
        if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= ITEMS_SHOWN_MAX):
            raise HttpError(f"limit: expected a whole number from 1 to {ITEMS_SHOWN_MAX}", param="limit")
        await hold_bytes(request, len(stored.items))
        items = msgspec.msgpack.decode(stored.items, type=list[msgspec.Raw])
        ids = list(stored.item_ids[: len(items)])
        if order == "desc":
            items, ids = items[::-1], ids[::-1]
        if (after := query.get("after")) is not None and after not in ids:
            raise HttpError(f"after: found {after!r:.80}, expected the id of an item", param="after")
        rest = items if after is None else items[ids.index(after) + 1 :]
        page, shown = rest[: int(limit)], ids[len(ids) - len(rest) :][: int(limit)]
        ends = {"first_id": shown[0] if shown else "", "last_id": shown[-1] if shown else ""}
        listed = {"object": "list", "data": page, "has_more": len(rest) > len(page)} | ends
        encoded = await self._context.json.text(msgspec.msgpack.encode(listed), caller_of(request).name)
        return Response(encoded, media_type=JSON)


def _not_found(id: str) -> HttpError:
    return HttpError(f"Response with id {id!r:.80} not found.", code=404, name="response_not_found")


def _failed(writer: ResponseWriter, error: BaseException) -> bytes:
    return b"".join(map(named_event, writer.fail(openai_problem(error)["error"])))
