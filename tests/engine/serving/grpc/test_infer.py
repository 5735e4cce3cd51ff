"""ModelInfer through the stock client, blocking and asyncio, and invalid messages through a bare channel."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tests.engine.serving.grpc.requests import (
    METHOD,
    call_bytes,
    numbers,
    request,
    tensor,
    text,
    text_request,
    wait_until,
)
from tests.engine.serving.grpc.served import ECHO, ENDLESS, FAILS, REMEMBER, Served, served_in_thread
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.grpc.server import NGHTTP2

MANY = """weftline: 1
name: many
inputs: {half: "float16[N]", brain: "bfloat16[N]", said: text, raw: bytes, fact: json}
steps:
  a: {node: echo, type: "float16[N]", inputs: {value: half}}
  b: {node: echo, type: "bfloat16[N]", inputs: {value: brain}}
  c: {node: echo, type: text, inputs: {value: said}}
  d: {node: echo, type: bytes, inputs: {value: raw}}
  e: {node: echo, type: json, inputs: {value: fact}}
outputs: {half: a.value, brain: b.value, said: c.value, raw: d.value, fact: e.value}
"""
SLOW = """weftline: 1
name: slow
inputs: {x: "uint8[N]"}
steps:
  same: {node: echo, type: "uint8[N]", delay_ms: 300, batch: {items_max: 1}, inputs: {value: x}}
outputs: {y: same.value}
"""
LIMITS = ServeLimits(message_bytes_max=4 << 20)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    pipelines = {
        "echo": ECHO,
        "many": MANY,
        "slow": SLOW,
        "fails": FAILS,
        "remember": REMEMBER,
        "endless": ENDLESS,
    }
    with served_in_thread(pipelines, limits=LIMITS) as one:
        yield one


@pytest.fixture
def client(server: Served) -> Iterator[Any]:
    with triton.InferenceServerClient(server.address) as one:
        yield one


def test_half_precision_text_bytes_and_json_come_back_as_they_went(client: Any) -> None:
    half = np.array([0.5, -2, 65504], np.float16)
    brain = np.array([1.5, -3.0, 1e30], ml_dtypes.bfloat16)
    inputs = [
        tensor("half", half, "FP16"),
        tensor("brain", brain, "BF16"),
        text("grüße", "said"),
        tensor("raw", np.array([b"\0\xff\n"], np.object_), "BYTES"),
        text('{"a": [1, 2.5, null]}', "fact"),
    ]
    result = client.infer("many", inputs)
    assert (result.as_numpy("half") == half).all()
    assert (result.as_numpy("brain") == brain).all()
    assert result.as_numpy("said")[0].decode() == "grüße"
    assert result.as_numpy("raw").tolist() == [b"\0\xff\n"]
    assert result.as_numpy("fact").tolist() == [b'{"a":[1,2.5,null]}']


def test_only_wanted_outputs_come_back_and_unknown_ones_are_refused(client: Any) -> None:
    inputs = [
        tensor("half", np.zeros(1, np.float16), "FP16"),
        tensor("brain", np.zeros(1, ml_dtypes.bfloat16), "BF16"),
        text("x", "said"),
        text("x", "raw"),
        text("1", "fact"),
    ]
    result = client.infer("many", inputs, outputs=[triton.InferRequestedOutput("said")])
    assert [one.name for one in result.get_response().outputs] == ["said"]
    with pytest.raises(InferenceServerException, match="nothing"):
        client.infer("many", inputs, outputs=[triton.InferRequestedOutput("nothing")])
    with pytest.raises(InferenceServerException, match="fact"):
        client.infer("many", inputs[:4])


def test_a_batch_runs_as_items_and_comes_back_as_one(client: Any, server: Served) -> None:
    before = server.backend.stats("echo")["requests"]["ok"]
    rows = np.arange(12, dtype=np.uint8).reshape(3, 4)
    assert (client.infer("echo", [numbers(rows)]).as_numpy("y") == rows).all()
    assert server.backend.stats("echo")["requests"]["ok"] == before + 3


def test_a_batch_with_a_bad_item_fails_whole_and_leaves_nothing_behind(client: Any, server: Served) -> None:
    batch = tensor("x", np.array([[b"good"], [b"bad"], [b"fine"]], np.object_), "BYTES")
    with pytest.raises(InferenceServerException, match="failed on purpose") as failed:
        client.infer("fails", [batch])
    assert failed.value.status() == "StatusCode.INTERNAL"
    wait_until(lambda: server.open_requests("fails") == 0)
    good = tensor("x", np.array([[b"good"], [b"fine"]], np.object_), "BYTES")
    assert client.infer("fails", [good]).as_numpy("y").tolist() == [[b"good"], [b"fine"]]


def test_a_request_of_typed_contents_is_answered(server: Served) -> None:
    message = request()
    del message.raw_input_contents[:]
    message.inputs[0].contents.uint_contents.extend([1, 2, 3])
    assert b"\1\2\3" in call_bytes(server.address, message.SerializeToString())


def test_errors_have_the_status_that_says_what_to_do(client: Any) -> None:
    for ask, status in (
        (lambda: client.infer("nothing", [numbers([1])]), "NOT_FOUND"),
        (lambda: client.infer("../../etc/passwd", [numbers([1])]), "INVALID_ARGUMENT"),
        (lambda: client.infer("echo", [numbers([1])], model_version="9"), "NOT_FOUND"),
        (lambda: client.infer("echo", [numbers([1], "z")]), "INVALID_ARGUMENT"),
        (lambda: client.infer("echo", [numbers([1])], priority=-1), "INVALID_ARGUMENT"),
        (lambda: client.infer("fails", [text("bad", "x")]), "INTERNAL"),
    ):
        with pytest.raises((InferenceServerException, ValueError)) as refused:
            ask()
        if isinstance(refused.value, InferenceServerException):
            assert refused.value.status() == f"StatusCode.{status}"
            assert not any(word in refused.value.message() for word in ("Traceback", 'File "', "0x"))


def test_requests_of_a_sequence_are_remembered(client: Any) -> None:
    said = [
        client.infer("remember", [text(word)], sequence_id=7, sequence_start=first, sequence_end=last)
        for word, first, last in (("a", True, False), ("b", False, False), ("c", False, True))
    ]
    assert [one.as_numpy("text")[0] for one in said] == [b"a", b"a b", b"a b c"]
    with pytest.raises(InferenceServerException, match="sequence"):
        client.infer("remember", [text("d")], sequence_id=7)


def test_a_timeout_parameter_and_a_deadline_end_a_request_in_the_engine(client: Any, server: Served) -> None:
    first = client.async_infer("slow", [numbers([1])], callback=lambda result, error: None)
    with pytest.raises(InferenceServerException) as late:
        client.infer("slow", [numbers([2])], timeout=50_000)
    assert late.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    started = time.monotonic()
    with pytest.raises(InferenceServerException):
        client.infer("slow", [numbers([3])], client_timeout=0.1)
    assert time.monotonic() - started < 5
    first.cancel()
    wait_until(lambda: server.open_requests("slow") == 0)


def test_priority_decides_who_goes_first(server: Served) -> None:
    order: list[str] = []

    async def go() -> None:
        async with triton_aio.InferenceServerClient(server.address) as client:

            async def ask(name: str, priority: int) -> None:
                await client.infer("slow", [numbers([1])], priority=priority)
                order.append(name)

            await client.infer("slow", [numbers([1])])  # what other tests left running is over then
            asked = [asyncio.ensure_future(ask("first", 0))]
            await asyncio.sleep(0.1)
            asked += [asyncio.ensure_future(ask(name, level)) for name, level in (("low", 200), ("high", 1))]
            await asyncio.gather(*asked)

    asyncio.run(go())
    assert order == ["first", "high", "low"]


def test_the_asyncio_client_asks_many_things_at_a_time(server: Served) -> None:
    async def go() -> list[int]:
        async with triton_aio.InferenceServerClient(server.address) as client:
            asked = [client.infer("echo", [numbers([place])]) for place in range(64)]
            return [int(one.as_numpy("y")[0]) for one in await asyncio.gather(*asked)]

    assert asyncio.run(go()) == list(range(64))


def test_a_cancel_reaches_the_engine(client: Any, server: Served) -> None:
    before = server.backend.stats("endless")["requests"]["cancelled"]
    asked = client.async_infer("endless", [text("go")], callback=lambda result, error: None)
    wait_until(lambda: server.open_requests("endless") == 1)
    asked.cancel()
    took_s = wait_until(lambda: server.open_requests("endless") == 0)
    assert server.backend.stats("endless")["requests"]["cancelled"] == before + 1
    assert took_s < 1


def test_a_killed_client_frees_its_request(server: Served) -> None:
    code = (
        "import sys, numpy as np, tritonclient.grpc as t\n"
        "i = t.InferInput('text', [1], 'BYTES'); i.set_data_from_numpy(np.array([b'x'], np.object_))\n"
        f"t.InferenceServerClient({server.address!r}).infer('endless', [i])"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: server.open_requests("endless") == 1, 30)
    finally:
        child.send_signal(signal.SIGKILL)
    assert wait_until(lambda: server.open_requests("endless") == 0) < 1
    child.wait(10)


def test_a_storm_of_cancels_leaves_nothing_behind(server: Served) -> None:
    before = server.backend.stats("endless")["requests"]
    with grpc.insecure_channel(server.address) as channel:
        ask = channel.unary_unary(METHOD + "ModelInfer")
        data = text_request("endless", "go").SerializeToString()
        for _ in range(300):
            ask.future(data).cancel()
    wait_until(lambda: server.open_requests("endless") == 0)
    after = server.backend.stats("endless")["requests"]
    assert after["ok"] == before["ok"] and after["failed"] == before["failed"]
    assert after["admitted"] - before["admitted"] == after["cancelled"] - before["cancelled"]
    with triton.InferenceServerClient(server.address) as client:
        assert client.infer("echo", [numbers([1])]).as_numpy("y").tolist() == [1]


def refused(server: Served, data: bytes, **options: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as error:
        call_bytes(server.address, data, **options)
    assert not any(word in error.value.details() for word in ("Traceback", 'File "', "0x", "DecodeError", "google."))
    code: grpc.StatusCode = error.value.code()
    return code


def test_a_message_over_the_limit_is_refused_compressed_or_not(server: Served) -> None:
    data = request("nothing", bytes(5 << 20)).SerializeToString()  # once parsed, it is refused: there is no such model
    assert refused(server, data) is grpc.StatusCode.RESOURCE_EXHAUSTED
    small = request(values=bytes(3 << 20)).SerializeToString()
    if server.server.transport == NGHTTP2:  # takes no compressed messages
        assert refused(server, small, compression=grpc.Compression.Gzip) is grpc.StatusCode.UNIMPLEMENTED
        return
    assert refused(server, data, compression=grpc.Compression.Gzip) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(call_bytes(server.address, small, compression=grpc.Compression.Gzip)) > 3 << 20


def test_broken_messages_are_refused_in_words(server: Served) -> None:
    whole = request(values=bytes(100)).SerializeToString()
    for data in (whole[:-1], whole[: len(whole) // 2], b"\xff" * 40, b"\x0b" * 40, b"\x0a\xff\xff\xff\xff\x0f"):
        assert refused(server, data) is grpc.StatusCode.INVALID_ARGUMENT
        for method in ("ModelMetadata", "RepositoryModelLoad", "SystemSharedMemoryRegister"):
            if data[0] != 0x0A or len(data) < 20:
                code = refused(server, data, method=method)
                assert code is grpc.StatusCode.INVALID_ARGUMENT


def test_too_much_metadata_is_refused_before_anything_else(server: Served) -> None:
    data = request().SerializeToString()
    many = [(f"key-{place}", "value") for place in range(10_000)]
    assert refused(server, data, metadata=many) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused(server, data, metadata=[("key", "v" * 40_000)]) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert call_bytes(server.address, data, metadata=[("key", "v" * 4_000)])


def test_an_unknown_method_is_not_there(server: Served) -> None:
    for method in ("Nothing", "../ModelInfer", ""):
        assert refused(server, b"", method=method) is grpc.StatusCode.UNIMPLEMENTED


def test_trace_context_and_deadline_of_a_call_come_to_the_engine(client: Any, server: Served) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    client.infer("echo", [numbers([1])], request_id="traced", headers={"traceparent": parent}, client_timeout=15)
    record = next(one for one in reversed(server.records) if one.ask.id == "traced")
    assert (record.ask.traceparent, record.ask.protocol, record.status) == (parent, "grpc", "OK")
    assert record.ask.size_bytes > 0
    assert record.ask.deadline_ms is not None and 10_000 < record.ask.deadline_ms <= 15_500
