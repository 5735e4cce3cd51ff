"""Responses of a stream become pieces, and the whole of what grew."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.client.faces import told
from weftline.engine.client.decoder import Garbled
from weftline.engine.client.pieces import STATUS, Pieces
from weftline.engine.client.refusal import Refused
from weftline.engine.result import StreamedOutput
from weftline.engine.serving.face import ModelFace, PortFace
from weftline.engine.serving.v2.messages import InferRequest, InferResponse
from weftline.engine.serving.v2.protobuf import stream_response_bytes
from weftline.engine.serving.v2.response import to_chunk_response

FACE = ModelFace("m", 2, (), (PortFace("text", "text", pieces=True), PortFace("facts", "json")))


def response(output: str, value: Any, **parameters: Any) -> bytes:
    piece = to_chunk_response(InferRequest("m", ()), FACE, StreamedOutput(output, value, False), 2)
    return stream_response_bytes(InferResponse("m", "2", "", piece.outputs, parameters))


def final(**parameters: Any) -> bytes:
    return stream_response_bytes(InferResponse("m", "2", "", (), {"triton_final_response": True, **parameters}))


def test_what_grows_comes_in_pieces_and_whole_at_the_end() -> None:
    pieces = Pieces(told(FACE))
    assert list(pieces.take(response("text", "a "))) == [StreamedOutput("text", "a ", False)]
    assert list(pieces.take(response("facts", {"n": 1}))) == [StreamedOutput("facts", {"n": 1}, True)]
    assert list(pieces.take(response("text", "b"))) == [StreamedOutput("text", "b", False)]
    assert list(pieces.take(final())) == [StreamedOutput("text", "a b", True)]
    assert pieces.version == "2"


def test_the_last_piece_may_be_the_final_response() -> None:
    pieces = Pieces(told(FACE))
    assert list(pieces.take(response("text", "a", triton_final_response=True))) == [
        StreamedOutput("text", "a", False),
        StreamedOutput("text", "a", True),
    ]


@pytest.mark.parametrize(
    ("parameters", "status", "pushback_ms"),
    [
        ({}, "UNKNOWN", None),
        ({"retry_after_ms": 70}, "RESOURCE_EXHAUSTED", 70.0),
        ({STATUS: "INVALID_ARGUMENT"}, "INVALID_ARGUMENT", None),
        ({STATUS: "UNAVAILABLE", "retry_after_ms": 5}, "UNAVAILABLE", 5.0),
    ],
)
def test_an_error_is_a_refusal_with_what_the_server_told(parameters: Any, status: str, pushback_ms: Any) -> None:
    data = stream_response_bytes(InferResponse("m", "", "", (), parameters), "it broke")
    with pytest.raises(Refused) as refused:
        list(Pieces(told(FACE)).take(data))
    found = refused.value.refusal
    assert (found.status, found.message, found.pushback_ms) == (status, "it broke", pushback_ms)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_response_are_garbled_or_empty(data: bytes) -> None:
    try:
        list(Pieces(told(FACE)).take(data))
    except (Garbled, Refused):
        pass
