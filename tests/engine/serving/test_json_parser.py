"""Large JSON is read by a process of its own, with the same answers and the same refusals as small JSON."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import signal
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.engine.serving.v2.held import info
from weftline.engine.protocol.packed import Packed
from weftline.engine.protocol.values import live, pack
from weftline.engine.serving import json_process
from weftline.engine.serving.anthropic.responses import MessageAnswer
from weftline.engine.serving.backend import Answer
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.http.binary_tensors import BinaryOutputs, response_body
from weftline.engine.serving.json_parser import JsonParser
from weftline.engine.serving.openai.completions import AnswerHeader, Completion
from weftline.engine.serving.openai.ports import AnswerPorts
from weftline.engine.serving.openai.responses_api.answer import generated_answer
from weftline.engine.serving.v2.elements import decode_elements, encode_elements
from weftline.engine.serving.v2.messages import InferRequest, Region, Tensor
from weftline.engine.serving.v2.request import to_asks
from weftline.engine.serving.v2.response import to_response
from weftline.errors import InputError, LimitReached, StepError, WeftlineError
from weftline.nodes.detections import Detections
from weftline.nodes.json_value import encode_json
from weftline.nodes.ports import PortType

LIMITS = ServeLimits()
LARGE = [{"a": n, "b": "x" * 8} for n in range(5000)]


def _with(work: Callable[[JsonParser], Any]) -> Any:
    async def run() -> Any:
        parser = JsonParser()
        try:
            return await work(parser)
        finally:
            parser.close()

    return asyncio.run(run())


def _asked(parser: JsonParser, type: str, *documents: object, limits: ServeLimits = LIMITS) -> Any:
    async def asked() -> Any:
        raw = encode_elements([one if isinstance(one, bytes) else json.dumps(one).encode() for one in documents])
        request = InferRequest("m", (Tensor("x", "BYTES", (len(documents),), raw),))
        model = info({"x": type})
        return to_asks(await parser.elements(request, model, limits, None), model, limits).asks[0].inputs["x"]

    return asked()


def test_a_large_document_round_trips_and_a_small_one_starts_no_process() -> None:
    async def work(parser: JsonParser) -> None:
        assert await _asked(parser, "json", {"a": 1}) == {"a": 1}
        assert not parser.queue.pids()
        large = await _asked(parser, "json", LARGE)
        assert large.__class__ is Packed and msgspec.msgpack.decode(large.data) == LARGE
        pids = parser.queue.pids()
        both = await _asked(parser, "list[json]", LARGE, {"a": 1})
        assert both.kind == "list" and msgspec.msgpack.decode(both.items[1].data) == {"a": 1}
        assert await _asked(parser, "list[list[text]]", [["a"] * 40_000]) == [[["a"] * 40_000]]
        found = [{"name": "star", "score": 0.5, "box": [1, 2, 3, 4]}] * 2000
        assert (await _asked(parser, "detections", found)).kind == "detections"
        assert pids and set(pids) <= set(parser.queue.pids())

    _with(work)


@pytest.mark.parametrize("type", ["json", "any", "list[json]"])
def test_large_outputs_are_written_as_small_ones_are(type: str) -> None:
    value = [LARGE, {"a": float("inf"), "b": None}, [1]] if type == "list[json]" else LARGE
    parts = [Packed("json", data=msgspec.msgpack.encode(one)) for one in value]
    encoded = Packed("list", items=tuple(parts)) if type == "list[json]" else Packed("json", data=encode_json(value))
    model, asked = info({"x": "json"}, outputs={"y": type}), InferRequest("m", ())

    async def work(parser: JsonParser) -> None:
        answer = Answer({"y": encoded, "z": 1})
        await parser.write(answer, model)
        assert to_response(asked, model, [answer], None) == to_response(asked, model, [Answer({"y": value})], None)
        assert parser.queue.pids()
        with pytest.raises(StepError, match="output y: its worker sent bytes that hold no json"):
            await parser.write(Answer({"y": Packed("json", data=b"\xc1" * 40_000)}), model)

    _with(work)


def test_regions_beyond_the_limit_or_named_twice_are_refused_unread() -> None:
    class Unread:
        def check(self, name: str, offset: int, size_bytes: int) -> None:
            raise AssertionError("a region was read")

        read_into = write = check

    tensor = Tensor("x", "BYTES", (1,), region=Region("r", 0, 1 << 30))

    async def work(parser: JsonParser) -> None:
        model = info({"x": "json"})
        with pytest.raises(LimitReached, match="request_bytes_max"):
            await parser.elements(InferRequest("m", (tensor,)), model, LIMITS, Unread())
        with pytest.raises(InputError, match="twice"):
            await parser.elements(InferRequest("m", (tensor,) * 4), model, LIMITS, Unread())

    _with(work)


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (b'{"a": 1, "a": "' + b"x" * 80_000 + b'"}', "twice"),
        (b'{"a": NaN, "b": "' + b"x" * 80_000 + b'", "a": NaN}', "twice"),
        (b"[" + b"1," * 40_000 + b"18446744073709551616]", "64 bits"),
        (b"[" * 40_000 + b"]" * 40_000, "deeper than 64"),
        (b'["' + b"x" * 80_000 + b'\\ud800"]', "surrogate"),
        (b"[" + b"1," * (1 << 20) + b"1]", "found 1048578 values, expected at most 1048576"),
    ],
)
def test_what_is_refused_of_small_documents_is_refused_of_large_ones(document: bytes, why: str) -> None:
    with pytest.raises(InputError, match=f"input x: json.*: .*{why}|input x: json: {why}"):
        _with(lambda parser: _asked(parser, "json", document))


def test_nan_arrives_in_a_large_document_too() -> None:
    document = b"[" + b"1," * 40_000 + b"NaN, -Infinity]"
    found = msgspec.msgpack.decode(_with(lambda parser: _asked(parser, "json", document)).data)
    assert np.isnan(found[-2]) and found[-1] == float("-inf")


def test_values_are_counted_over_all_elements_of_a_request() -> None:
    many = [[0] * 30_000] * 4
    with pytest.raises(InputError, match="found 120004 values, expected at most 100000"):
        _with(lambda parser: _asked(parser, "list[json]", *many, limits=ServeLimits(elements_max=100_000)))


def test_a_large_rest_body_comes_back_with_raw_tensors() -> None:
    numbers = np.arange(60_000, dtype=np.float32)
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [60_000], "data": numbers.tolist()},
        {"name": "t", "datatype": "BYTES", "shape": [2], "data": ["a", "ü"]},
    ]
    body = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()

    async def work(parser: JsonParser) -> None:
        request, wanted = await parser.rest_body(body, None, "m", "1", LIMITS)
        x, t = request.inputs
        assert np.array_equal(np.frombuffer(x.raw or b"", np.float32), numbers) and x.values is None
        assert decode_elements(t.raw or b"", 2) == [b"a", "ü".encode()] and wanted.rest
        with pytest.raises(InputError, match="inputs: expected a list of objects"):
            await parser.rest_body(b'{"inputs": 1, "x": "' + b" " * 80_000 + b'"}', None, "m", "1", LIMITS)
        wrong = json.dumps({"inputs": [inputs[0] | {"datatype": "INT8"}]}).encode()
        with pytest.raises(InputError, match="input x: found elements that INT8 cannot hold"):
            await parser.rest_body(wrong, None, "m", "1", LIMITS)

    _with(work)


def test_the_event_loop_runs_on_while_a_large_document_is_read() -> None:
    async def work(parser: JsonParser) -> None:
        await parser.document(b'"' + b"x" * 80_000 + b'"', "x")  # the process stands
        os.kill(parser.queue.pids()[0], signal.SIGSTOP)
        reading = asyncio.ensure_future(_asked(parser, "json", LARGE))
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert not reading.done()
        assert await parser.document(b"[1]", "x") == [1]
        os.kill(parser.queue.pids()[0], signal.SIGCONT)
        assert isinstance(await reading, Packed)

    _with(work)


def test_a_dead_or_hung_process_fails_its_document_and_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(parser: JsonParser) -> None:
        await _asked(parser, "json", LARGE)
        os.kill(parser.queue.pids()[0], signal.SIGKILL)
        with pytest.raises(WeftlineError, match="ended"):
            await _asked(parser, "json", LARGE)
        assert "the JSON process died: signal 9, SIGKILL; its document fails; then: " in caplog.text
        monkeypatch.setattr(json_process, "JOB_S", 0.01)
        with pytest.raises(LimitReached, match="took more than"):  # not even started by then
            await _asked(parser, "json", LARGE)
        monkeypatch.setattr(json_process, "JOB_S", 20.0)
        assert isinstance(await _asked(parser, "json", LARGE), Packed)

    _with(work)


def test_bytes_of_a_hostile_process_that_are_no_json_are_refused() -> None:
    async def work(parser: JsonParser) -> None:
        await parser.check("x", Packed("json", data=msgspec.msgpack.encode(LARGE)))
        for data in (b"\xc1", b"\xdd\xff\xff\xff\xff", msgspec.msgpack.encode({1: 2}), msgspec.msgpack.encode(b"x")):
            with pytest.raises(InputError, match="input x: found bytes that are no json value"):
                await parser.check("x", Packed("list", items=(Packed("json", data=data),)))

    _with(work)


SMALL = b'"' + b"x" * 80_000 + b'"'
SLOW = b"[" + b'{"a":[1]},' * 20_000 + b"1]"
"""200 KB that take about 80 ms."""


def test_documents_of_one_caller_do_not_delay_those_of_another() -> None:
    async def work(parser: JsonParser) -> None:
        await asyncio.gather(*(parser.document(SMALL, "x", name) for name in ("a", "b")))
        await asyncio.gather(*(parser.document(SLOW, "x", name) for name in ("a", "b")))
        for size, documents in ((len(SLOW), [SLOW] * 20), (len(SMALL), [SLOW[:120_000] + b"1]"] * 40)):
            greedy = [asyncio.ensure_future(parser.document(one, "x", "greedy")) for one in documents]
            await asyncio.sleep(0.02)
            await parser.document(SMALL if size < 100_000 else SLOW, "x", "other")
            assert sum(one.done() for one in greedy) < len(greedy) / 2
            for one in greedy:
                one.cancel()
            await asyncio.gather(*greedy, return_exceptions=True)

    _with(work)


def test_a_full_queue_refuses_the_caller_with_the_most_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weftline.engine.serving.json_queue.WAITING_MAX", 4)

    async def work(parser: JsonParser) -> None:
        greedy = [asyncio.ensure_future(parser.document(SLOW, "x", "greedy")) for _ in range(6)]
        await asyncio.sleep(0)
        others = [asyncio.ensure_future(parser.document(SLOW, "x", "other")) for _ in range(3)]
        found = await asyncio.gather(*greedy, *others, return_exceptions=True)
        refused = [isinstance(one, LimitReached) for one in found]
        assert sum(refused[:6]) >= 2 and not any(refused[6:])

    _with(work)


def test_a_cancelled_document_is_let_go_at_once_or_after_it_was_read() -> None:
    class Watched(bytearray):
        """A bytearray that weak references can watch."""

    async def work(parser: JsonParser) -> None:
        await parser.document(SLOW, "x", "a")
        slow = b"[" + (b'{"a":["' + b"x" * 500 + b'"]},') * 20_000 + b"1]"  # longer on a busy machine
        documents = [Watched(slow) for _ in range(10)]
        watched = [weakref.ref(one) for one in documents]
        reading = [asyncio.ensure_future(parser.document(one, "x", "a")) for one in documents]
        del documents
        await asyncio.sleep(0.01)
        for one in reading:
            one.cancel()
        await asyncio.sleep(0.01)
        assert sum(task.done() for task in reading) == 9, "the one that is read keeps its request"
        left = next(task for task in reading if not task.done())
        reading.clear()  # a finished task keeps its frames
        del one
        gc.collect()
        assert sum(each() is not None for each in watched) == 1, "a document outlives its request"
        await asyncio.wait([left])
        del left
        for _ in range(200):  # the thread releases its work after it has reported its end
            await asyncio.sleep(0.01)
            gc.collect()
            if not any(each() is not None for each in watched):
                return
        raise AssertionError("a document outlives its request")

    _with(work)


async def _longest_stall_s(work: Awaitable[Any]) -> tuple[float, Any]:
    """Return the most time of a processor that the event loop's thread took in one turn, and the result."""
    longest_s, last_s = 0.0, time.thread_time()
    running = asyncio.ensure_future(work)
    while not running.done():
        await asyncio.sleep(0.001)
        now_s = time.thread_time()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    return longest_s, running.result()


STALL_S = 0.02
"""Longest turn of an event loop. Written in the loop, each of these answers took 60 ms and more."""


@pytest.mark.parametrize("kind", ["json", "detections", "numbers"])
def test_a_large_rest_answer_does_not_stop_the_event_loop(kind: str) -> None:
    found = Detections(
        np.ones((100_000, 4), np.float32), np.ones(100_000, np.float32), np.zeros(100_000, np.int32), ("a",)
    )
    values: dict[str, tuple[str, Any]] = {
        "json": ("json", Packed("json", data=encode_json([{"a": None, "b": "x" * 8}] * 200_000))),
        "detections": ("detections", pack(found, PortType("detections"), "y")),
        "numbers": ("uint8[N]", np.zeros(2_000_000, np.uint8)),
    }
    type, value = values[kind]
    model, asked = info({"x": "json"}, outputs={"y": type}), InferRequest("m", ())

    async def work(parser: JsonParser) -> None:
        async def body() -> bytes:
            answer = Answer({"y": value})
            await parser.write(answer, model)
            return (await parser.rest_response(to_response(asked, model, [answer], None), BinaryOutputs()))[0]

        await body()  # starts the processes
        stalls, written = zip(*[await _longest_stall_s(body()) for _ in range(2)], strict=True)
        plain = {"y": live(value, {}) if kind != "numbers" else value}
        inline = response_body(to_response(asked, model, [Answer(plain)], None), BinaryOutputs())[0]
        assert json.loads(written[0]) == json.loads(inline)
        assert min(stalls) < STALL_S, stalls

    _with(work)


@pytest.mark.parametrize("chat", [True, False])
def test_a_large_completion_is_the_small_one_and_does_not_stop_the_loop(chat: bool) -> None:
    top = [{"token": "t", "logprob": -1.5}] * 20
    logprobs = [{"token": "a", "logprob": -0.5, "top": top}] * 300
    answers = [{"text": "a" * 300, "finish_reason": "stop", "logprobs": logprobs} for _ in range(16)]
    ports = AnswerPorts(output="text", sampling=None, tenant=None, usage="usage", answers="answers")
    completion = Completion(AnswerHeader("o", "m", 1), ports, chat, logprobs=True, n=16, usage=True)
    small = {"text": "a" * 300, "usage": {"prompt_tokens": 3}, "answers": answers}
    large = small | {"answers": Packed("json", data=encode_json(answers))}

    async def work(parser: JsonParser) -> None:
        assert await parser.completion(completion, [large]) == completion.whole([small])
        assert await parser.ending(completion, large, {"text": 7}) == completion.ending(small, {"text": 7})
        stalls = [(await _longest_stall_s(parser.completion(completion, [large])))[0] for _ in range(2)]
        assert min(stalls) < STALL_S, stalls
        with pytest.raises(StepError, match="no json value"):
            await parser.completion(completion, [small | {"answers": Packed("json", data=b"\xc1" * 40_000)}])

    _with(work)


def test_a_large_message_is_the_small_one() -> None:
    ports = AnswerPorts(output="text", sampling=None, tenant=None, usage="usage", answers=None, tool_calls="calls")
    message = MessageAnswer(id="i", model="m", ports=ports, index=1, opened="text")
    calls = [{"id": "c", "function": {"name": "f", "arguments": json.dumps({"a": "x" * 300_000})}}]
    small = {"text": "abc", "usage": {"prompt_tokens": 3}, "calls": calls}
    large = small | {"calls": Packed("json", data=encode_json(calls))}

    async def work(parser: JsonParser) -> None:
        assert await parser.completion(message, [large]) == message.whole([small])
        assert await parser.ending(message, large, {"text": 1}) == message.ending(small, {"text": 1})

    _with(work)


def test_a_large_answer_is_the_small_one_and_does_not_stop_the_loop() -> None:
    top = [{"token": "t", "logprob": -1.5}] * 20
    logprobs = [{"token": "a", "logprob": -0.5, "top": top}] * 5000
    calls = [{"id": "c1", "function": {"name": "f", "arguments": {"city": "Bergen"}}}]
    answers = [{"text": "a" * 5000, "finish_reason": "stop", "logprobs": logprobs, "tool_calls": calls}]
    ports = AnswerPorts(output="text", sampling=None, tenant=None, usage="usage", answers="answers")
    small = {"text": "a" * 5000, "usage": {"prompt_tokens": 3}, "answers": answers}
    large = small | {"answers": Packed("json", data=encode_json(answers))}

    async def work(parser: JsonParser) -> None:
        found = await parser.answer(large, ports, True)
        assert found == await parser.answer(small, ports, True) == generated_answer(small, ports, True)
        assert (len(found.logprobs or ()), found.calls[0].arguments) == (5000, '{"city": "Bergen"}')
        stalls = [(await _longest_stall_s(parser.answer(large, ports, True)))[0] for _ in range(2)]
        assert min(stalls) < STALL_S, stalls

    _with(work)


def test_a_large_answer_with_what_json_lacks_fails_its_step_alone() -> None:
    ports = AnswerPorts(output="text", sampling=None, tenant=None, usage="usage", answers="answers")
    completion = Completion(AnswerHeader("o", "m", 1), ports, True, logprobs=True, n=1)
    token = {"token": "a", "logprob": -0.5, "top": []}
    for wrong in ({"logprobs": [token] * 5000 + [token | {"logprob": math.nan}]}, {"tool_calls": ["f" * 40_000]}):
        answers = [{"text": "a", "finish_reason": "length", "logprobs": [], **wrong}]
        large = {"text": "a", "usage": {}, "answers": Packed("json", data=encode_json(answers))}

        async def work(parser: JsonParser, large: Any = large, calls: bool = "tool_calls" in wrong) -> None:
            with pytest.raises(StepError, match="the model gave"):
                await parser.answer(large, ports, True)
            if not calls:
                with pytest.raises(StepError, match="the model gave nan"):
                    await parser.completion(completion, [large])

        _with(work)
