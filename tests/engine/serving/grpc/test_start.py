"""Inference.start: the same responses and errors as `infer`, without a task; cancels, deadlines, memory and reloads."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.fire import Gate, builder, settled, wait_until
from tests.engine.serving.frontend.linked import linked, settle
from tests.engine.serving.grpc.requests import request, text_request
from weftline.engine.repository import Repository
from weftline.engine.runtime.asyncio_reader import AsyncioReader
from weftline.engine.serving.auth.gate import UNRESTRICTED, Caller
from weftline.engine.serving.auth.shared_memory import SharedMemory
from weftline.engine.serving.backend import Backend, Record
from weftline.engine.serving.config import FREE_BYTES, ServeLimits
from weftline.engine.serving.grpc.infer import Inference
from weftline.engine.serving.grpc.service import CallContext
from weftline.engine.serving.local import LocalBackend
from weftline.engine.serving.v2.protobuf import parse_response
from weftline.engine.serving.v2.settings import TraceSettings
from weftline.errors import AccessDenied, DeadlineExceeded, InputError, SessionClosed, StepError, UnknownModel
from weftline.pipelines.spec.builder import Builder

LIMITS = ServeLimits()
GUEST = Caller("guest", False, frozenset({"text"}))
SPAN = "00-11111111111111111111111111111111-2222222222222222-01"


def one_step(name: str, node: str, kind: str, **options: Any) -> Builder:
    p = builder(name)
    p.output("y", p.step("s", node, value=p.input("x", kind), **options).value)
    return p


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    return Gate(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def repository(gate: Gate) -> Iterator[Repository]:
    with Repository() as repository:
        repository.load("echo", one_step("echo", "echo", "uint8[N]", type="uint8[N]"))
        repository.load("text", one_step("text", "echo", "text"))
        repository.load("json", one_step("json", "echo", "json", type="json"))
        repository.load("image", one_step("image", "echo", "image", type="image"))
        repository.load("fail", one_step("fail", "fail", "text", equals="bad"))
        p = builder("gated")
        p.output("y", p.step("s", "fire_steps.py:Gated", value=p.input("x", "text"), folder=str(gate.folder)).value)
        repository.load("gated", p)
        yield repository
        wait_until(lambda: all(settled(repository.get(entry.name)) for entry in repository.index()), 5)


def inference(backend: Backend, memory: SharedMemory | None = None) -> Inference:
    return Inference(backend, LIMITS, memory or SharedMemory(LIMITS, False), TraceSettings())


def run(script: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(script, 60))


async def start(one: Inference, data: bytes, caller: Caller = UNRESTRICTED, **call: Any) -> bytes:
    """Start a request and return the bytes of its response; raises its error."""
    ended: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def done(result: bytes | BaseException) -> None:
        assert not ended.done(), "done was called twice"
        if isinstance(result, BaseException):
            ended.set_exception(result)
        else:
            ended.set_result(result)

    one.start(data, CallContext(caller, "grpc", **call), done)
    return await ended


def without_raw(message: Any) -> Any:
    del message.raw_input_contents[:]
    return message


def typed() -> Any:
    message = without_raw(request(name="x"))
    message.inputs[0].contents.uint_contents.extend([1, 2, 3])
    return message


def batch(model: str = "echo") -> Any:
    message = request(model, bytes(6))
    message.inputs[0].shape[:] = [3, 2]
    return message


def wanting(*names: str) -> Any:
    message = request()
    for name in names:
        message.outputs.add(name=name)
    return message


def shaped(*shape: int) -> Any:
    message = request()
    message.inputs[0].shape[:] = shape
    return message


MESSAGES: dict[str, Any] = {
    "numbers": request(), "with an id": request(id="7"), "long id": request(id="7" * 300),
    "no elements": request(values=b""),
    "no raw contents": without_raw(shaped(0)), "wanted": wanting("y"), "wanted twice": wanting("y", "y"),
    "unknown output": wanting("z"), "unknown input": request(name="z"), "unknown model": request("missing"),
    "no model": request(""), "too few bytes": shaped(4), "two dimensions": batch(), "a batch of one": shaped(1, 3),
    "negative": shaped(-3), "typed": typed(), "64 KB and more": request(values=bytes(FREE_BYTES)),
    "in an arena": request(values=bytes(FREE_BYTES - 1000)), "text": text_request("text", "grüße", name="x"),
    "json": text_request("json", '{"a": [1, 2]}', name="x"), "broken json": text_request("json", "{", name="x"),
    "a picture that is none": text_request("image", "no picture", name="x"), "failing": text_request("fail",
    "bad", name="x"),
    "parameters": text_request("text", "a", name="x", priority=3, sequence_id=5, sequence_start=True, own="x"),
    "reserved": text_request("text", "a", name="x", headers="a"),
}  # fmt: skip
INVALID = {"empty": b"", "cut": request().SerializeToString()[:-1], "zeros": bytes(10)}


@asynccontextmanager
async def backends(repository: Repository, kind: str) -> AsyncIterator[Backend]:
    local = LocalBackend(repository, {})
    if kind == "local":
        yield local
        return
    async with linked(local) as link:
        yield link.remote
        await settle(link)


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_start_gives_what_infer_gives(repository: Repository, kind: str) -> None:
    async def outcome(work: Coroutine[Any, Any, bytes]) -> object:
        try:
            return await work
        except Exception as error:
            return type(error), str(error)

    async def script() -> None:
        async with backends(repository, kind) as backend:
            one = inference(backend)
            for name, message in (MESSAGES | INVALID).items():
                data = message if isinstance(message, bytes) else message.SerializeToString()
                expected = await outcome(one.infer(data, CallContext(UNRESTRICTED, "grpc")))
                for _ in range(2):  # the second may know the head
                    assert await outcome(start(one, data)) == expected, name

    run(script())


def test_a_usual_request_needs_no_task_and_no_future(repository: Repository) -> None:
    async def script() -> None:
        loop = asyncio.get_running_loop()
        one, ended = inference(LocalBackend(repository, {})), asyncio.Event()
        made: list[str] = []

        def factory(loop: Any, coroutine: Any, **options: Any) -> Any:
            made.append("task")
            return asyncio.Task(coroutine, loop=loop, **options)

        def count_future() -> Any:
            made.append("future")
            return asyncio.Future(loop=loop)

        for data in (request(id="a"), request(id="b"), text_request("text", "a", name="x")):
            ended.clear()
            loop.set_task_factory(factory)
            loop.create_future = count_future  # type: ignore[method-assign]
            one.start(data.SerializeToString(), CallContext(UNRESTRICTED, "grpc"), lambda result: ended.set())
            found = list(made)
            loop.set_task_factory(None)
            del loop.create_future  # type: ignore[method-assign]
            await ended.wait()
            assert not found

    run(script())


def test_a_cancelled_request_is_withdrawn_and_done_is_not_called(repository: Repository, gate: Gate) -> None:
    records: list[Record] = []

    async def script() -> None:
        one = inference(LocalBackend(repository, {}, observers=[records.append]))
        two = text_request("gated", "c", name="x")
        two.inputs[0].shape[:] = [2]
        two.raw_input_contents[0] *= 2
        gate.close()
        ended: list[object] = []
        messages = [text_request("gated", "a", name="x"), text_request("gated", "b", name="x"), two]
        call = CallContext(UNRESTRICTED, "grpc")
        cancels = [one.start(message.SerializeToString(), call, ended.append) for message in messages]
        await asyncio.sleep(0.05)
        for cancel in (cancels[0], cancels[0], cancels[2]):
            cancel()
        gate.open()
        while not ended or repository.get("gated").stats()["requests"]["open"]:
            await asyncio.sleep(0.01)
        for cancel in cancels:
            cancel()
        await asyncio.sleep(0.02)
        assert len(ended) == 1 and isinstance(ended[0], bytes)

    run(script())
    assert sorted(one.status for one in records) == ["CANCELLED", "CANCELLED", "CANCELLED", "OK"]


def test_a_result_that_waits_for_the_loop_is_released_by_a_cancel(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AsyncioReader, "after_read", lambda self, loop, call: False)

    async def script() -> None:
        one, ended = inference(LocalBackend(repository, {})), list[object]()
        data = request(values=bytes(40_000)).SerializeToString()
        cancel = one.start(data, CallContext(UNRESTRICTED, "grpc"), ended.append)
        session = repository.get("echo")
        mailbox = session._submitter._mailboxes[asyncio.get_running_loop()]
        while mailbox._batch is None:  # the loop has not passed the result on
            await asyncio.sleep(0)
        cancel()
        await asyncio.sleep(0.05)
        assert not ended and settled(session)

    run(script())


def test_a_deadline_and_an_error_reach_done(repository: Repository, gate: Gate) -> None:
    async def script() -> None:
        one = inference(LocalBackend(repository, {}))
        gate.close()
        with pytest.raises(DeadlineExceeded):
            await start(one, text_request("gated", "late", name="x").SerializeToString(), deadline_ms=50.0)
        with pytest.raises(DeadlineExceeded):
            await start(one, text_request("gated", "late", name="x", timeout=50_000).SerializeToString())
        gate.open()
        with pytest.raises(StepError, match="failed on purpose"):
            await start(one, text_request("fail", "bad", name="x").SerializeToString())

    run(script())


def test_the_span_is_set_before_done(repository: Repository) -> None:
    async def script() -> None:
        one, ended = inference(LocalBackend(repository, {}, begin=lambda ask: SPAN)), asyncio.Event()
        call, seen = CallContext(UNRESTRICTED, "grpc"), list[str]()

        def done(result: object) -> None:
            seen.append(call.span)
            ended.set()

        one.start(request().SerializeToString(), call, done)
        await ended.wait()
        assert seen == [SPAN]

    run(script())


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_a_thousand_calls_leave_no_memory_borrowed(repository: Repository, kind: str) -> None:
    async def script() -> None:
        async with backends(repository, kind) as backend:
            one = inference(backend)
            for at in range(40):
                data = request(values=bytes([at]) * 40_000, id=str(at)).SerializeToString()
                results = await asyncio.gather(*(start(one, data) for _ in range(25)))
                assert all(result.endswith(bytes([at]) * 40_000) for result in results)
            failing = text_request("fail", "bad", name="x").SerializeToString()
            await asyncio.gather(*(start(one, failing) for _ in range(20)), return_exceptions=True)
        gc.disable()
        try:
            assert settled(repository.get("echo")) and settled(repository.get("fail"))
        finally:
            gc.enable()

    run(script())


def test_done_that_raises_leaves_no_memory_borrowed(repository: Repository, caplog: pytest.LogCaptureFixture) -> None:
    async def script() -> None:
        one = inference(LocalBackend(repository, {}))

        def done(result: object) -> None:
            raise RuntimeError("on purpose")

        one.start(request(values=bytes(40_000)).SerializeToString(), CallContext(UNRESTRICTED, "grpc"), done)
        while "receives the end of a request failed" not in caplog.text:
            await asyncio.sleep(0.01)
        assert len(await start(one, request().SerializeToString())) > 3

    run(script())
    assert settled(repository.get("echo"))


def test_a_known_head_is_refused_to_a_caller_without_the_model(repository: Repository) -> None:
    async def script() -> None:
        one, data = inference(LocalBackend(repository, {})), request().SerializeToString()
        await start(one, data)
        with pytest.raises(AccessDenied):
            await start(one, data, GUEST)
        await start(one, data)

    run(script())


def test_shared_memory_is_read_and_refused_anew_for_each_request(repository: Repository, tmp_path: Path) -> None:
    async def script() -> None:
        memory = SharedMemory(LIMITS, True)
        file = Path("/dev/shm") / f"weftline-test-{tmp_path.name}"
        file.write_bytes(b"\1\2\3")
        try:
            memory.register("r", f"/{file.name}", 0, 3)
            one = inference(LocalBackend(repository, {}), memory)
            message = without_raw(request())
            message.inputs[0].parameters["shared_memory_region"].string_param = "r"
            message.inputs[0].parameters["shared_memory_byte_size"].int64_param = 3
            data = message.SerializeToString()
            assert (await start(one, data)).endswith(b"\1\2\3")
            file.write_bytes(b"\4\5\6")
            assert (await start(one, data)).endswith(b"\4\5\6")
            with pytest.raises(AccessDenied):
                await start(one, data, Caller("guest", False, frozenset({"echo"})))
            memory.unregister_all()
            with pytest.raises(InputError):
                await start(one, data)
        finally:
            file.unlink()

    run(script())


def test_a_reload_and_an_unload_drop_what_was_known_of_heads(repository: Repository) -> None:
    async def script() -> None:
        one = inference(LocalBackend(repository, {}))
        data = request("changing").SerializeToString()

        async def load(kind: str, output: str = "y") -> None:
            p = builder("changing")
            p.output(output, p.step("s", "echo", value=p.input("x", kind), type=kind).value)
            await asyncio.to_thread(repository.load, "changing", p)

        async def names() -> tuple[str, list[str]]:
            response = parse_response(await start(one, data))
            return response.version, [output.name for output in response.outputs]

        await load("uint8[N]")
        assert [await names(), await names()] == [("1", ["y"])] * 2
        await load("uint8[N]", "z")
        assert [await names(), await names()] == [("2", ["z"])] * 2
        await load("uint8[4]")
        for _ in range(2):
            with pytest.raises(InputError, match=r"expected uint8\[4\]|expected UINT8 \[4\]"):
                await names()
        await asyncio.to_thread(repository.unload, "changing")
        for _ in range(2):
            with pytest.raises((UnknownModel, SessionClosed)):
                await names()
        assert "changing" not in one.plans._models

    run(script())


def test_a_version_in_a_known_head_is_checked_again(repository: Repository) -> None:
    async def script() -> None:
        one, message = inference(LocalBackend(repository, {})), request("versioned")
        message.model_version = "1"
        await asyncio.to_thread(repository.load, "versioned", one_step("v", "echo", "uint8[N]", type="uint8[N]"))
        for _ in range(2):
            await start(one, message.SerializeToString())
        await asyncio.to_thread(repository.load, "versioned", one_step("v", "echo", "uint8[N]", type="uint8[N]"))
        with pytest.raises(UnknownModel, match="version 2 serves"):
            await start(one, message.SerializeToString())
        await asyncio.to_thread(repository.unload, "versioned")

    run(script())


def test_concurrent_requests_of_one_head_each_get_their_own(repository: Repository) -> None:
    async def script() -> None:
        one = inference(LocalBackend(repository, {}))
        datas = [request(values=bytes([at] * 100), id=str(at)).SerializeToString() for at in range(100)]
        responses = list(map(parse_response, await asyncio.gather(*(start(one, data) for data in datas))))
        assert [response.id for response in responses] == [str(at) for at in range(100)]
        assert [bytes(response.outputs[0].raw or b"") for response in responses] == [
            bytes([at] * 100) for at in range(100)
        ]

    run(script())


def test_the_loop_may_close_with_requests_open(repository: Repository, gate: Gate) -> None:
    async def script() -> None:
        one = inference(LocalBackend(repository, {}))
        for at in range(3):
            data = text_request("gated", f"open{at}", name="x").SerializeToString()
            one.start(data, CallContext(UNRESTRICTED, "grpc"), lambda result: None)

    gate.close()
    run(script())
    gate.open()
    wait_until(lambda: not repository.get("gated").stats()["requests"]["open"], 10)
