"""ModelStreamInfer: decoupled responses, concurrent requests, errors in between, every kind of end."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2

from tests.engine.serving.grpc.requests import METHOD, numbers, request, text, text_request, wait_until
from tests.engine.serving.grpc.served import (
    ECHO,
    ENDLESS,
    FAILS,
    REMEMBER,
    WORDS,
    Served,
    served_in_thread,
)
from weftline.engine.protocol import values
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.grpc import stream as stream_module
from weftline.engine.serving.grpc.service import InferMethod

BOTH = """weftline: 1
name: both
inputs: {text: text}
steps:
  same: {node: echo, inputs: {value: text}}
  slow: {node: trickle, pieces: 3, delay_ms: 20, inputs: {value: text}}
outputs: {echoed: same.value, text: slow.value}
"""
DOCUMENT = """weftline: 1
name: document
inputs: {text: text, document: json}
steps:
  same: {node: echo, type: json, inputs: {value: document}}
  slow: {node: trickle, pieces: 3, inputs: {value: text}}
outputs: {whole: same.value, text: slow.value}
"""
LARGE = """weftline: 1
name: large
inputs: {text: text}
steps:
  slow: {node: trickle, pieces: 2000, piece_bytes: 65536, inputs: {value: text}}
outputs: {text: slow.value}
limits: {stream_bytes_max: 1048576}
"""
FINAL = "triton_final_response"
LIMITS = ServeLimits(stream_requests_max=16)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    pipelines = {
        "echo": ECHO,
        "words": WORDS,
        "both": BOTH,
        "fails": FAILS,
        "remember": REMEMBER,
        "endless": ENDLESS,
        "large": LARGE,
        "document": DOCUMENT,
    }
    with served_in_thread(pipelines, limits=LIMITS) as one:
        yield one


class Stream:
    """One ModelStreamInfer call over a bare channel."""

    def __init__(self, server: Served) -> None:
        self._channel = grpc.insecure_channel(server.address)
        self._sent: queue.Queue[Any] = queue.Queue()
        kinds: Any = service_pb2
        self.call = self._channel.stream_stream(
            METHOD + "ModelStreamInfer",
            request_serializer=lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
            response_deserializer=kinds.ModelStreamInferResponse.FromString,
        )(iter(self._sent.get, None), timeout=60)

    def send(self, *messages: Any) -> None:
        for message in messages:
            self._sent.put(message)

    def end(self) -> list[Any]:
        """Half-close the call, and return the remaining responses."""
        self._sent.put(None)
        return list(self.call)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self._sent.put(None)
        self.call.cancel()
        self._channel.close()


def summary(response: Any) -> tuple[str, str, bool]:
    """Return a response's output, its text, and whether it is the last."""
    assert not response.error_message
    inner = response.infer_response
    final = inner.parameters[FINAL].bool_param
    if not inner.outputs:
        return "", "", final
    return inner.outputs[0].name, inner.raw_output_contents[0][4:].decode(), final


def test_pieces_come_as_they_are_made_and_the_last_is_flagged(server: Served) -> None:
    with Stream(server) as stream:
        stream.send(text_request("words", "go", "one"))
        received = [summary(one) for one in stream.end()]
    assert received == [(*("text", letter * 8), False) for letter in "abcd"] + [("text", "", True)]


def test_an_empty_final_response_is_sent_to_those_who_ask_for_it(server: Served) -> None:
    with Stream(server) as stream:
        stream.send(text_request("words", "go", "one", triton_enable_empty_final_response=True))
        received = [summary(one) for one in stream.end()]
    assert received[-1] == ("", "", True) and len(received) == 5 and not any(final for _, _, final in received[:-1])


def test_other_outputs_come_when_they_are_known(server: Served) -> None:
    with Stream(server) as stream:
        stream.send(text_request("both", "hello"))
        received = [summary(one) for one in stream.end()]
    assert ("echoed", "hello", False) in received[:3]
    assert [text for name, text, _ in received if name == "text"] == ["a" * 8, "b" * 8, "c" * 8, ""]
    assert [final for *_, final in received] == [False, False, False, False, True]


def test_large_json_of_a_stream_is_not_decoded_by_the_server(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = values._decode_json
    monkeypatch.setattr(
        values, "_decode_json", lambda data: decode(data) if len(data) < 30_000 else pytest.fail("decoded")
    )
    document = json.dumps([{"a": at, "b": None} for at in range(5_000)]).encode()
    message = text_request("document", "hello")
    message.inputs.add(name="document", datatype="BYTES", shape=[1])
    message.raw_input_contents.append(len(document).to_bytes(4, "little") + document)
    with Stream(server) as stream:
        stream.send(message)
        received = {name: text for name, text, _ in map(summary, stream.end()) if name == "whole"}
    assert json.loads(received["whole"]) == json.loads(document)


def test_a_request_that_wants_no_streamed_output_gets_one_response(server: Served) -> None:
    message = text_request("both", "hello")
    message.outputs.add(name="echoed")
    with Stream(server) as stream:
        stream.send(message)
        assert [summary(one) for one in stream.end()] == [("echoed", "hello", True)]


def test_many_requests_run_at_a_time_and_the_quick_are_not_behind_the_slow(server: Served) -> None:
    with Stream(server) as stream:
        stream.send(text_request("endless", "go", "slow"), *(request(id=str(place)) for place in range(10)))
        found: set[str] = set()
        for response in stream.call:
            found.add(response.infer_response.id)
            if {str(place) for place in range(10)} <= found:
                break
        assert "slow" in found or server.open_requests("endless") == 1
    wait_until(lambda: server.open_requests("endless") == 0)


def test_more_requests_than_the_limit_wait_and_are_all_answered(server: Served) -> None:
    with Stream(server) as stream:
        stream.send(*(request(id=str(place)) for place in range(200)))
        assert {one.infer_response.id for one in stream.end()} == {str(place) for place in range(200)}


def test_no_more_requests_than_the_limit_are_in_the_engine(server: Served) -> None:
    with Stream(server) as stream:
        stream.send(*(text_request("endless", "go", str(place)) for place in range(40)))
        wait_until(lambda: server.open_requests("endless") == LIMITS.stream_requests_max)
        time.sleep(0.2)
        assert server.open_requests("endless") == LIMITS.stream_requests_max
    wait_until(lambda: server.open_requests("endless") == 0)


def test_an_error_names_its_request_and_the_stream_continues(server: Served) -> None:
    with Stream(server) as stream:
        stream.send(
            text_request("fails", "bad", "1", "x"),
            text_request("nothing", "x", "2"),
            b"\xff\xff\xff",
            text_request("fails", "good", "4", "x"),
        )
        answers = stream.end()
    errors = {one.infer_response.id: one.error_message for one in answers}
    assert "failed on purpose" in errors["1"] and "no model is called" in errors["2"]
    assert "not a ModelInferRequest" in errors[""] and errors["4"] == ""
    assert all(one.infer_response.parameters[FINAL].bool_param for one in answers)


def test_requests_of_a_sequence_are_answered_in_order(server: Served) -> None:
    words = list("abcdefgh")
    with Stream(server) as stream:
        for place, word in enumerate(words):
            last = word == "h"
            stream.send(
                text_request("remember", word, word, sequence_id=5, sequence_start=place == 0, sequence_end=last)
            )
        answers = stream.end()
    assert [one.infer_response.id for one in answers] == words
    assert summary(answers[-1])[1] == " ".join(words)


def test_a_cancelled_stream_withdraws_everything(server: Served) -> None:
    before = server.backend.stats("endless")["requests"]["cancelled"]
    with Stream(server) as stream:
        stream.send(*(text_request("endless", "go") for _ in range(5)))
        wait_until(lambda: server.open_requests("endless") == 5)
        stream.call.cancel()
        assert wait_until(lambda: server.open_requests("endless") == 0) < 2
    assert server.backend.stats("endless")["requests"]["cancelled"] == before + 5


def test_the_stock_client_streams_and_hears_of_errors(server: Served) -> None:
    received: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(server.address) as client:
        client.start_stream(lambda result, error: received.put((result, error)))
        client.async_stream_infer("echo", [numbers([9])], request_id="a")
        client.async_stream_infer("fails", [text("bad", "x")], request_id="b")
        first, second = received.get(timeout=20), received.get(timeout=20)
        result, error = (first[0] or second[0]), (first[1] or second[1])
        client.stop_stream()
    assert result.as_numpy("y").tolist() == [9] and "failed on purpose" in error.message()


def test_the_stock_clients_cancel_of_a_stream_reaches_the_engine(server: Served) -> None:
    with triton.InferenceServerClient(server.address) as client:
        client.start_stream(lambda result, error: None)
        client.async_stream_infer("endless", [text("go")])
        wait_until(lambda: server.open_requests("endless") == 1)
        client.stop_stream(cancel_requests=True)
        wait_until(lambda: server.open_requests("endless") == 0)


@pytest.mark.slow
def test_a_slow_reader_holds_up_its_own_stream_and_nothing_else(server: Served) -> None:
    with Stream(server) as slow:
        slow.send(text_request("large", "go"))
        next(slow.call)
        started = threading.Event()
        started.wait(0.5)  # 128 MiB would have been made by now, without back-pressure
        arena = server.backend.stats("large")["arena"]["leased_bytes"]
        assert arena < 64 << 20
        with triton.InferenceServerClient(server.address) as client:
            assert client.infer("echo", [numbers([1])]).as_numpy("y").tolist() == [1]
        assert server.open_requests("large") == 1
        count = 1 + sum(1 for _ in slow.end())
    assert count == 2001


@pytest.mark.slow
def test_nothing_more_is_taken_from_a_client_that_does_not_read(server: Served) -> None:
    def admitted() -> int:
        return int(server.backend.stats("echo")["requests"]["admitted"])

    before = admitted()
    with Stream(server) as stream:
        stream.send(*(request(values=bytes(1 << 20), id=str(place)) for place in range(80)))
        wait_until(lambda: admitted() > before + 4)
        time.sleep(1)
        assert admitted() < before + 60
        assert {one.infer_response.id for one in stream.end()} == {str(place) for place in range(80)}
    wait_until(lambda: server.backend.stats("echo")["arena"]["leased_bytes"] < 1 << 20)


def test_a_client_that_vanishes_while_answers_wait_leaves_nothing(server: Served) -> None:
    infer = server.server.methods[METHOD + "ModelInfer"]
    assert isinstance(infer, InferMethod)
    budget = infer.inference.inflight
    with Stream(server) as stream:
        stream.send(*(request(values=bytes(1 << 20)) for _ in range(40)))
        wait_until(lambda: budget.held_bytes > 2 << 20)
        time.sleep(0.3)
        assert budget.held_bytes > 2 << 20  # nothing was read
        stream.call.cancel()
    wait_until(lambda: budget.held_bytes == 0)
    wait_until(lambda: server.backend.stats("echo")["arena"]["leased_bytes"] < 1 << 20)
    wait_until(lambda: server.open_requests("echo") == 0)


@pytest.mark.slow
def test_a_client_that_takes_nothing_for_too_long_loses_the_call(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "STALL_S", 0.5)
    with Stream(server) as stream:
        stream.send(*(request(values=bytes(2 << 20)) for _ in range(20)))
        time.sleep(2.5)
        with pytest.raises(grpc.RpcError) as cut:
            stream.end()
    assert cut.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "was not read" in cut.value.details()
