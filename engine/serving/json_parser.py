"""JSON parser and serialiser: small documents inline, large ones in processes.

A large document becomes the encoded value of its port (Packed). No server process builds its Python objects or checks
it again; the worker that reads it decodes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from weftline.engine.protocol.packed import Packed
from weftline.engine.protocol.values import LIST_ITEMS_MAX
from weftline.engine.serving import json_jobs as jobs
from weftline.engine.serving.backend import Answer
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.http.binary_tensors import (
    BinaryOutputs,
    header_bytes,
    large_outputs,
    read_request,
    response_body,
)
from weftline.engine.serving.http.plain_inputs import BODY_VALUES
from weftline.engine.serving.json_queue import JsonQueue
from weftline.engine.serving.model_info import ModelInfo, PortInfo
from weftline.engine.serving.openai.ports import AnswerPorts
from weftline.engine.serving.openai.responses_api.answer import GeneratedAnswer, generated_answer
from weftline.engine.serving.regions import Regions
from weftline.engine.serving.threads import finish_in_thread
from weftline.engine.serving.v2.datatypes import BYTES, form_of
from weftline.engine.serving.v2.elements import Written, decode_elements, element_bytes, encode_elements
from weftline.engine.serving.v2.messages import InferRequest, InferResponse, Tensor
from weftline.engine.serving.v2.request import check_request, tensor_bytes
from weftline.errors import InputError, StepError
from weftline.nodes.json_value import json_text
from weftline.nodes.strict_json import INLINE_BYTES, loads
from weftline.shm.spec import byte_size


class JsonParser:
    """JSON parser of the servers of one process. For one event loop; `close` ends its JSON processes.

    caller: name of the caller of a document, for its share of the processes.
    """

    def __init__(self) -> None:
        self.queue = JsonQueue()

    def close(self) -> None:
        self.queue.close()

    async def document(self, data: bytes | bytearray | memoryview, what: str, caller: str = "") -> Any:
        """Return the value of a document that describes a request; InputError as `loads`."""
        if len(data) <= INLINE_BYTES:
            return loads(data, what, BODY_VALUES)
        return msgspec.msgpack.decode(await self.queue.run(jobs.Document(what, BODY_VALUES), data, caller))

    async def text(self, value: bytes, caller: str = "") -> bytes:
        """Return the JSON of an encoded json value."""
        if len(value) <= INLINE_BYTES:
            return json_text(msgspec.msgpack.decode(value))
        written = await self.queue.run(jobs.Write(whole=False), msgspec.msgpack.encode([value]), caller)
        return bytes(decode_elements(written, 1)[0])

    async def rest_body(
        self,
        body: bytes | bytearray | memoryview,
        header_length: str | None,
        model: str,
        version: str,
        limits: ServeLimits,
        caller: str = "",
        ports: tuple[PortInfo, ...] = (),
        plain: str = "",
    ) -> tuple[InferRequest, BinaryOutputs]:
        """Parse the body of a v2 REST request or a plain one, as `read_request`."""
        if header_bytes(header_length, len(body)) <= INLINE_BYTES:
            return read_request(body, header_length, model, version, limits, ports, plain)
        job = jobs.RestBody(header_length, model, version, limits, ports, plain)
        return jobs.rest_body(job, await self.queue.run(job, body, caller))

    async def elements(
        self, request: InferRequest, info: ModelInfo, limits: ServeLimits, regions: Regions | None, caller: str = ""
    ) -> InferRequest:
        """Parse the JSON elements of a request in the JSON process if they are large; else return it unchanged.

        InputError for what is wrong with them; what is wrong with the rest of the request is found later.
        """
        kinds = {port.name: form_of(port.type).element for port in info.inputs}
        parsed = [one for one in request.inputs if one.datatype == BYTES and kinds.get(one.name) in jobs.PARSED]
        if sum(map(_size_bytes, parsed)) <= INLINE_BYTES:
            return request
        check_request(request, info, limits)
        types = {port.name: port.type for port in info.inputs}
        done = {}
        for one in parsed:
            try:
                done[id(one)] = await self._elements(one, kinds[one.name], types[one.name], limits, regions, caller)
            except InputError as error:
                raise InputError(f"input {one.name}: {error}") from None
        return msgspec.structs.replace(request, inputs=tuple(done.get(id(one), one) for one in request.inputs))

    async def _elements(
        self, tensor: Tensor, kind: str, type: str, limits: ServeLimits, regions: Regions | None, caller: str
    ) -> Tensor:
        count = byte_size("uint8", tensor.shape)
        if count > min(limits.elements_max, LIST_ITEMS_MAX):
            return tensor  # which is refused for it
        if tensor.values is not None:
            count = len(tensor.values)
            raw: bytes | bytearray | memoryview = encode_elements(element_bytes(tensor.values))
        else:
            raw = await finish_in_thread(tensor_bytes, tensor, regions)
        job = jobs.Elements(kind, type, count, limits.elements_max)
        found = jobs.documents(await self.queue.run(job, raw, caller))
        values: tuple[object, ...]
        if kind == "list":
            values = tuple(map(msgspec.msgpack.decode, found))
        else:
            values = tuple(Packed(kind, data=one) for one in found)
        return msgspec.structs.replace(tensor, raw=None, values=values, region=None)

    async def write(self, answer: Answer, info: ModelInfo, caller: str = "") -> None:
        """Write the large json outputs of an answer as elements, which takes as long as parsing them."""
        for name, value in answer.outputs.items():
            if isinstance(value, Packed):
                answer.outputs = {**answer.outputs, name: await self.written(name, value, info, caller)}

    async def written(self, name: str, value: Packed, info: ModelInfo, caller: str = "") -> Written:
        """Write a large output, or item of a stream, as elements; StepError if it is none of its kind."""
        port = info.output(name)
        listed = value.items is not None and port is not None and form_of(port.type).listed
        parts = tuple(value.leaves())
        job = jobs.Write(value.items is not None and not listed, parts[0].kind)
        try:
            raw = await self.queue.run(job, msgspec.msgpack.encode([one.data for one in parts]), caller)
        except InputError:
            raise StepError(f"output {name}: its worker sent bytes that hold no {value.kind}") from None
        return Written(raw, len(parts) if listed else 1)

    async def rest_response(
        self, response: InferResponse, wanted: BinaryOutputs, caller: str = ""
    ) -> tuple[bytes, int | None]:
        """Return a v2 REST body, as `response_body`."""
        written = {}
        for one in large_outputs(response, wanted):
            job = jobs.Numbers(one.name, one.datatype, math.prod(one.shape))
            written[one.name] = await self.queue.run(job, memoryview(one.raw or b"").cast("B"), caller)
        return response_body(response, wanted, written)

    async def nested(self, array: np.ndarray, caller: str = "") -> bytes:
        """Write a large array of numbers as nested JSON lists."""
        array = np.ascontiguousarray(array)
        job = jobs.Nested(array.dtype.str, array.shape)
        return await self.queue.run(job, array.reshape(-1).view(np.uint8).data, caller)

    async def completion(
        self, completion: jobs.Generation, answers: Sequence[Mapping[str, Any]], caller: str = ""
    ) -> bytes:
        """Return a response; answers: outputs of each prompt, of which large ones are Packed."""
        if not _has_packed(answers):
            return completion.whole(answers)
        return await self._generated(jobs.Generated(completion), answers, caller)

    async def ending(
        self, completion: jobs.Generation, outputs: Mapping[str, Any], sent: Mapping[str, int], caller: str = ""
    ) -> list[bytes]:
        """Return the events that end a stream; sent: characters of each output that were sent before."""
        if not _has_packed([outputs]):
            return completion.ending(outputs, sent)
        return jobs.events(await self._generated(jobs.Generated(completion, dict(sent)), [outputs], caller))

    async def answer(
        self, outputs: Mapping[str, Any], ports: AnswerPorts, logprobs: bool, caller: str = ""
    ) -> GeneratedAnswer:
        """Return the answer in the outputs of one prompt, of which large ones are Packed."""
        if not _has_packed([outputs]):
            return generated_answer(outputs, ports, logprobs)
        return jobs.answered(await self._generated(jobs.Answered(ports, logprobs), [outputs], caller))

    async def _generated(
        self, job: jobs.Generated | jobs.Answered, answers: Sequence[Mapping[str, Any]], caller: str
    ) -> bytes:
        try:
            return await self.queue.run(job, jobs.generated(answers), caller)
        except InputError as error:
            raise StepError(str(error)) from None

    async def check(self, name: str, value: Packed, caller: str = "") -> None:
        """Raise InputError unless an encoded input consists of valid json values; its sender may be hostile."""
        for one in value.leaves():
            try:
                await self.queue.run(jobs.CheckJson(), one.data, caller)
            except InputError as error:
                raise InputError(f"input {name}: {error}") from None


def _has_packed(answers: Sequence[Mapping[str, Any]]) -> bool:
    return any(isinstance(value, Packed) for outputs in answers for value in outputs.values())


def _size_bytes(tensor: Tensor) -> int:
    if tensor.region is not None:
        return tensor.region.size_bytes
    if tensor.values is not None:
        return sum(len(one) for one in tensor.values if isinstance(one, bytes | str))
    return len(tensor.raw or b"")
