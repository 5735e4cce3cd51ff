"""Requests as bytes through a real session and back: views at odd addresses, regions, batches and optional inputs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from tests.engine.serving.v2.held import HeldRegions
from weftline.engine.request import RequestOptions
from weftline.engine.serving.backend import Answer
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.model_info import ModelInfo, model_info
from weftline.engine.serving.v2 import protobuf
from weftline.engine.serving.v2.elements import encode_elements
from weftline.engine.serving.v2.messages import InferRequest, InferResponse, Region, Tensor, WantedOutput
from weftline.engine.serving.v2.request import to_asks
from weftline.engine.serving.v2.response import to_response
from weftline.engine.session import Session, load
from weftline.pipelines.spec.builder import Builder

TYPES = {"x": "float32[N]", "b": "bfloat16[N]", "i": "image", "t": "text", "l": "list[json]"}


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    p = Builder("all", limits={"arena_bytes": 8 << 20})
    for name, type in TYPES.items():
        value = p.step(f"s{name}", "echo", type=type, value=p.input(name, type, optional=True)).value
        p.output(f"{name}_out", value)
    with load(p).open(timeout_s=60) as opened:
        yield opened


def served(session: Session, *inputs: Tensor, regions: HeldRegions | None = None, **more: object) -> InferResponse:
    """Send a request through every layer as bytes, and return the response a client reads."""
    info: ModelInfo = model_info("all", session.version, session.plan)
    data = protobuf.request_bytes(InferRequest("all", inputs, **more))  # type: ignore[arg-type]
    request = protobuf.parse_request(b"".join([data]), ServeLimits())
    asked = to_asks(request, info, ServeLimits(), regions)

    async def answer() -> list[Answer]:
        runs = [session.arun(RequestOptions(outputs=one.outputs), **one.inputs) for one in asked.asks]
        return [Answer(result, version=session.version) for result in await asyncio.gather(*runs)]

    return protobuf.parse_response(
        protobuf.response_bytes(to_response(request, info, asyncio.run(answer()), asked.batch, regions))
    )


def numbers(response: InferResponse, name: str, dtype: str) -> np.ndarray:
    tensor = next(one for one in response.outputs if one.name == name)
    return np.frombuffer(tensor.raw or b"", dtype).reshape(tensor.shape)


@pytest.mark.parametrize("size", [3, 5000, 500_000])
@pytest.mark.parametrize("odd", range(4))
def test_tensors_come_back_from_wherever_in_a_message_they_lay(session: Session, size: int, odd: int) -> None:
    sent = np.arange(size, dtype=np.float32)
    response = served(session, Tensor("x", "FP32", (size,), sent.tobytes()), id="x" * odd)
    assert np.array_equal(numbers(response, "x_out", "<f4"), sent)
    absent = next(one for one in response.outputs if one.name == "t_out")
    assert absent.parameters == {"absent": True}


def test_every_kind_goes_in_and_comes_out(session: Session) -> None:
    picture = np.random.default_rng(1).integers(0, 255, (20, 30, 3), np.uint8)
    response = served(
        session,
        Tensor("b", "BF16", (4,), np.uint16([1, 2, 3, 4]).tobytes()),
        Tensor("i", "UINT8", picture.shape, picture.tobytes()),
        Tensor("t", "BYTES", (1,), encode_elements(["grün".encode()])),
        Tensor("l", "BYTES", (2,), encode_elements([b'{"a":1}', b"[]"])),
    )
    assert [one.datatype for one in response.outputs] == ["FP32", "BF16", "UINT8", "BYTES", "BYTES"]
    assert numbers(response, "b_out", "<u2").tolist() == [1, 2, 3, 4]
    assert np.array_equal(numbers(response, "i_out", "u1"), picture)
    assert response.outputs[3].raw == encode_elements(["grün".encode()])
    assert response.outputs[4].raw == encode_elements([b'{"a":1}', b"[]"])


def test_a_tensor_goes_from_one_region_to_another(session: Session) -> None:
    sent = np.arange(40_000, dtype=np.uint16)
    regions = HeldRegions(source=b"12345678" + sent.tobytes(), target=bytes(80_000))
    wanted = (WantedOutput("b_out", Region("target", 0, 80_000)),)
    tensor = Tensor("b", "BF16", (40_000,), region=Region("source", 8, 80_000))
    response = served(session, tensor, regions=regions, outputs=wanted)
    assert response.outputs[0].region == Region("target", 0, 80_000)
    assert regions.held["target"] == sent.tobytes() and regions.reads == [("source", 8, 80_000)]


def test_a_batch_is_asked_side_by_side(session: Session) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    wanted = (WantedOutput("x_out"), WantedOutput("t_out"))
    words = encode_elements([b"a", b"b", b"c", b"d"])
    response = served(
        session, Tensor("x", "FP32", (4, 3), rows.tobytes()), Tensor("t", "BYTES", (4,), words), outputs=wanted
    )
    assert np.array_equal(numbers(response, "x_out", "<f4"), rows)
    assert response.outputs[1].shape == (4, 1) and response.outputs[1].raw == words
