"""The calls of Triton's Python client examples, with the stock client, against one `weftline serve`.

No package carries the examples themselves (github.com/triton-inference-server/client, src/python/examples), so the
tests make their calls in their own words. To run the examples unchanged as well, name a folder with them:

    TRITON_EXAMPLES=.../src/python/examples python -m pytest tests/engine/serving/test_triton_examples.py

Left out: the examples for CUDA, health_metadata (it compares the server's name) and model_control (it overrides
configurations). Those of pictures over HTTP import attrdict, which must then be installed too.
"""

from __future__ import annotations

import asyncio
import os
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.grpc.aio as over_grpc_aio
import tritonclient.http as over_http
import tritonclient.http.aio as over_http_aio
import tritonclient.utils.shared_memory as shm
from PIL import Image
from tritonclient import utils
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.engine.serving.triton_models import CLASSES, SIDE, write_models
from tests.weftline.served import Served, free_port, serving

pytestmark = pytest.mark.slow

FIRST, ONES = np.arange(16, dtype=np.int32), np.ones(16, np.int32)
VALUES = [11, 7, 5, 3, 2, 0, 1]
REDDISH = (200, 90, 40)

Client = Any
BOTH = pytest.mark.parametrize("protocol", ["grpc", "http"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("triton")
    files = [str(one) for one in write_models(folder)]
    ports = ("--port", str(free_port()), "--http-port", str(free_port()))
    with serving(folder, *files, *ports, "--shared-memory") as served:
        yield served.wait_up()


@pytest.fixture
def client(server: Served, protocol: str) -> Iterator[Client]:
    made = library(protocol).InferenceServerClient(address(server, protocol))
    yield made
    made.close()


def library(protocol: str) -> Any:
    return over_grpc if protocol == "grpc" else over_http


def address(server: Served, protocol: str) -> str:
    return server.grpc if protocol == "grpc" else server.http.removeprefix("http://")


def pair(protocol: str, first: np.ndarray, second: np.ndarray, datatype: str = "INT32") -> list[Any]:
    """Return INPUT0 and INPUT1 as [1, 16]."""
    made = [library(protocol).InferInput(name, [1, 16], datatype) for name in ("INPUT0", "INPUT1")]
    for one, value in zip(made, (first, second), strict=True):
        one.set_data_from_numpy(value[None])
    return made


def wanted(protocol: str, *names: str, **options: Any) -> list[Any]:
    return [library(protocol).InferRequestedOutput(name, **options) for name in names]


def assert_sums(result: Any, second: np.ndarray = ONES) -> None:
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), (FIRST + second)[None])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), (FIRST - second)[None])


# simple_*_infer, custom_args, keepalive, async_infer, aio_infer


@BOTH
def test_infer_with_and_without_outputs_and_statistics_of_one_model(client: Client, protocol: str) -> None:
    outputs = wanted(protocol, "OUTPUT0", "OUTPUT1")
    assert_sums(client.infer("simple", pair(protocol, FIRST, -ONES), outputs=outputs, headers={"test": "1"}), -ONES)
    assert_sums(client.infer("simple", pair(protocol, FIRST, ONES)))
    statistics = client.get_inference_statistics("simple")
    assert len(statistics["model_stats"] if protocol == "http" else statistics.model_stats) == 1
    with pytest.raises(utils.InferenceServerException) as caught:
        client.infer("wrong_model_name", pair(protocol, FIRST, ONES))
    assert caught.value.message().startswith("Request for unknown model")


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_http_bodies_are_compressed_both_ways(server: Served, algorithm: str) -> None:
    client = over_http.InferenceServerClient(address(server, "http"))
    compression = {"request_compression_algorithm": algorithm, "response_compression_algorithm": algorithm}
    assert_sums(client.infer("simple", pair("http", FIRST, ONES), **compression))
    client.close()


@pytest.mark.parametrize(
    "options",
    [
        {"keepalive_options": over_grpc.KeepAliveOptions(2**31 - 1, 20_000, False, 2)},
        {"channel_args": [("grpc.max_send_message_length", 1 << 20), ("grpc.dns_enable_srv_queries", 1)]},
    ],
    ids=["keepalive", "custom args"],
)
def test_channel_options_of_grpc(server: Served, options: dict[str, Any]) -> None:
    client = over_grpc.InferenceServerClient(server.grpc, **options)
    assert_sums(client.infer("simple", pair("grpc", FIRST, ONES), client_timeout=5))
    client.close()


def test_async_infer_over_grpc(server: Served) -> None:
    client = over_grpc.InferenceServerClient(server.grpc)
    answers: queue.Queue[Any] = queue.Queue()
    for _ in range(4):
        client.async_infer("simple", pair("grpc", FIRST, ONES), lambda result, error: answers.put(error or result))
    for _ in range(4):
        assert_sums(answers.get(timeout=30))
    client.close()


def test_async_infer_over_http(server: Served) -> None:
    client = over_http.InferenceServerClient(address(server, "http"), concurrency=4)
    pending = [client.async_infer("simple", pair("http", FIRST, ONES)) for _ in range(4)]
    for one in pending:
        assert_sums(one.get_result())
    client.close()


@BOTH
def test_infer_with_asyncio(server: Served, protocol: str) -> None:
    made = over_grpc_aio if protocol == "grpc" else over_http_aio

    async def work() -> None:
        async with made.InferenceServerClient(address(server, protocol)) as client:
            assert_sums(await client.infer("simple", pair(protocol, FIRST, ONES)))

    asyncio.run(work())


# memory_growth_test


@BOTH
def test_a_new_client_for_each_of_many_requests(server: Served, protocol: str) -> None:
    for _ in range(25):
        client = library(protocol).InferenceServerClient(address(server, protocol))
        given = library(protocol).InferInput("INPUT0", [1, 16], "INT32")
        given.set_data_from_numpy(FIRST[None])
        answer = client.infer("custom_identity_int32", [given], outputs=wanted(protocol, "OUTPUT0"))
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), FIRST[None])
        client.close()


# grpc_explicit_*_content: typed contents in place of raw bytes


@pytest.mark.parametrize(
    ("model", "datatype", "field", "encoded"),
    [
        ("simple", "INT32", "int_contents", int),
        ("simple_int8", "INT8", "int_contents", int),
        ("simple_string", "BYTES", "bytes_contents", lambda value: str(value).encode()),
    ],
)
def test_typed_contents(
    server: Served, model: str, datatype: str, field: str, encoded: Callable[[int], int | bytes]
) -> None:
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, values in (("INPUT0", FIRST), ("INPUT1", ONES)):
        tensor = request.inputs.add(name=name, datatype=datatype, shape=[1, 16])
        getattr(tensor.contents, field).extend(encoded(int(value)) for value in values)
    for name in ("OUTPUT0", "OUTPUT1"):
        request.outputs.add(name=name)
    with grpc.insecure_channel(server.grpc) as channel:
        response = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    found = over_grpc.InferResult(response)
    for name, expected in (("OUTPUT0", FIRST + ONES), ("OUTPUT1", FIRST - ONES)):
        assert [int(one) for one in found.as_numpy(name)[0]] == expected.tolist()


# simple_*_string_infer


def texts(values: np.ndarray) -> np.ndarray:
    return np.array([str(value).encode() for value in values], object)


@BOTH
def test_strings_are_added_and_subtracted(client: Client, protocol: str) -> None:
    answer = client.infer("simple_string", pair(protocol, texts(FIRST), texts(ONES), "BYTES"))
    assert [int(one) for one in answer.as_numpy("OUTPUT0")[0]] == (FIRST + ONES).tolist()
    assert [int(one) for one in answer.as_numpy("OUTPUT1")[0]] == (FIRST - ONES).tolist()


@BOTH
@pytest.mark.parametrize("binary", [True, False], ids=["raw", "json"])
@pytest.mark.parametrize("element", [b"he\0llo", b"\0\1\2\3"])
def test_bytes_with_a_nul_come_back(client: Client, protocol: str, element: bytes, binary: bool) -> None:
    given = library(protocol).InferInput("INPUT0", [1, 16], "BYTES")
    form = {} if protocol == "grpc" else {"binary_data": binary}
    given.set_data_from_numpy(np.array([[element] * 16], object), **form)
    outputs = wanted(protocol, "OUTPUT0", **form)
    found = client.infer("simple_identity", [given], outputs=outputs).as_numpy("OUTPUT0")
    assert found.shape == (1, 16)
    assert {one if isinstance(one, bytes) else one.encode() for one in found.reshape(-1)} == {element}


# simple_*_sequence


def expected_of(model: str, first: int, values: list[int], id: int) -> list[int]:
    """Return the outputs of a sequence: see `triton_models.py`."""
    whole = [first, *values]
    if model == "simple_string_dyna_sequence":
        found = np.cumsum(whole).tolist()
    else:
        found = [first + 1, *values]
    found[-1] += id if "dyna" in model else 0
    return found


SEQUENCES = pytest.mark.parametrize(
    ("model", "id"),
    [
        ("simple_sequence", 1000), ("simple_sequence", "7d3c0e9e-8a8b-4f0e-9d6c-2b1f"), ("simple_dyna_sequence", 1001),
        ("simple_string_dyna_sequence", "1002"),
    ],
)  # fmt: skip


def sequence_requests(protocol: str, id: int | str) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each request of a sequence."""
    whole = [100, *VALUES]
    for place, value in enumerate(whole):
        given = library(protocol).InferInput("INPUT", [1, 1], "INT32")
        given.set_data_from_numpy(np.full((1, 1), value, np.int32))
        edges = {"sequence_start": place == 0, "sequence_end": place == len(whole) - 1}
        yield {"inputs": [given], "outputs": wanted(protocol, "OUTPUT"), "sequence_id": id, **edges}


@BOTH
@SEQUENCES
def test_a_sequence_of_single_requests(client: Client, protocol: str, model: str, id: int | str) -> None:
    answers = [client.infer(model, **one) for one in sequence_requests(protocol, id)]
    found = [int(one.as_numpy("OUTPUT")[0, 0]) for one in answers]
    assert found == expected_of(model, 100, VALUES, int(id) if "dyna" in model else 0)


@SEQUENCES
def test_a_sequence_in_a_stream(server: Served, model: str, id: int | str) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    found: list[int] = []
    with over_grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(callback=lambda result, error: answers.put(error or result))
        for one in sequence_requests("grpc", id):
            client.async_stream_infer(model, request_id=f"{id}_1", **one)
        for _ in range(len(VALUES) + 1):
            answer = answers.get(timeout=30)
            assert answer.get_response().id == f"{id}_1"
            found.append(int(answer.as_numpy("OUTPUT")[0, 0]))
    assert found == expected_of(model, 100, VALUES, int(id) if "dyna" in model else 0)


def test_a_sequence_in_a_stream_of_asyncio(server: Served) -> None:
    async def requests() -> Any:
        for one in sequence_requests("grpc", 1010):
            yield {"model_name": "simple_sequence", **one}

    async def work() -> list[int]:
        async with over_grpc_aio.InferenceServerClient(server.grpc) as client:
            found = []
            async for result, error in client.stream_infer(requests()):
                assert error is None
                found.append(int(result.as_numpy("OUTPUT")[0, 0]))
            return found

    assert asyncio.run(work()) == [101, *VALUES]


# simple_grpc_custom_repeat: a decoupled model


def test_a_decoupled_model_answers_in_pieces(server: Served) -> None:
    count, answers = 10, queue.Queue[Any]()
    inputs = []
    for name, value in (
        ("IN", np.arange(100, 100 + count, dtype=np.int32)),
        ("DELAY", np.ones(count, np.uint32)),
        ("WAIT", np.ones(1, np.uint32)),
    ):
        inputs.append(over_grpc.InferInput(name, list(value.shape), utils.np_to_triton_dtype(value.dtype)))
        inputs[-1].set_data_from_numpy(value)
    with over_grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(callback=lambda result, error: answers.put(error or result))
        client.async_stream_infer("repeat_int32", inputs, outputs=wanted("grpc", "OUT"))
        found = [answers.get(timeout=30).as_numpy("OUT") for _ in range(count + 1)]
    assert [one.tolist() for one in found[:count]] == [[value] for value in range(100, 100 + count)]
    assert found[count].dtype == np.int32 and found[count].tolist() == []  # the last response repeats nothing


# simple_*_shm, simple_*_shm_string, reuse_infer_objects


class SharedRegions:
    """Regions that are registered under their own names, and destroyed at the end."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.handles: dict[str, Any] = {}

    def add(self, name: str, size: int, *arrays: np.ndarray) -> Any:
        key = f"/weftline_{os.getpid()}_{name}"
        handle = self.handles[name] = shm.create_shared_memory_region(name, key, size)
        if arrays:
            shm.set_shared_memory_region(handle, list(arrays))
        self.client.register_system_shared_memory(name, key, size)
        return handle

    def __enter__(self) -> SharedRegions:
        self.client.unregister_system_shared_memory()
        self.client.unregister_cuda_shared_memory()
        return self

    def __exit__(self, *error: object) -> None:
        self.client.unregister_system_shared_memory()
        for handle in self.handles.values():
            shm.destroy_shared_memory_region(handle)


def output_of(result: Any, name: str) -> tuple[str, list[int]]:
    """Return datatype and shape of an output, which is an object over gRPC and a dict over HTTP."""
    output = result.get_output(name)
    found = output if isinstance(output, dict) else {"datatype": output.datatype, "shape": output.shape}
    return found["datatype"], list(found["shape"])


@BOTH
def test_inputs_and_outputs_share_regions_at_offsets(client: Client, protocol: str) -> None:
    size = FIRST.nbytes
    with SharedRegions(client) as regions:
        out = regions.add("out", 2 * size)
        regions.add("in", 2 * size, FIRST, ONES)
        inputs = [library(protocol).InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
        outputs = wanted(protocol, "OUTPUT0", "OUTPUT1")
        for place in range(2):
            inputs[place].set_shared_memory("in", size, offset=place * size)
            outputs[place].set_shared_memory("out", size, offset=place * size)
        result = client.infer("simple", inputs, outputs=outputs)
        for place, expected in enumerate((FIRST + ONES, FIRST - ONES)):
            datatype, shape = output_of(result, f"OUTPUT{place}")
            found = shm.get_contents_as_numpy(out, utils.triton_to_np_dtype(datatype), shape, offset=place * size)
            np.testing.assert_array_equal(found, expected[None])
        status = client.get_system_shared_memory_status()
        assert len(status if protocol == "http" else status.regions) == 2


@BOTH
def test_strings_in_shared_memory(client: Client, protocol: str) -> None:
    given = [utils.serialize_byte_tensor(texts(one)) for one in (FIRST, ONES)]
    expected = [texts(FIRST + ONES), texts(FIRST - ONES)]
    with SharedRegions(client) as regions:
        inputs, outputs, handles = [], wanted(protocol, "OUTPUT0", "OUTPUT1"), []
        for place in range(2):
            size = utils.serialized_byte_size(given[place])
            regions.add(f"in{place}", size, given[place])
            inputs.append(library(protocol).InferInput(f"INPUT{place}", [1, 16], "BYTES"))
            inputs[place].set_shared_memory(f"in{place}", size)
            size = utils.serialized_byte_size(utils.serialize_byte_tensor(expected[place]))
            handles.append(regions.add(f"out{place}", size))
            outputs[place].set_shared_memory(f"out{place}", size)
        result = client.infer("simple_string", inputs, outputs=outputs)
        for place, values in enumerate(expected):
            datatype, shape = output_of(result, f"OUTPUT{place}")
            found = shm.get_contents_as_numpy(handles[place], utils.triton_to_np_dtype(datatype), shape)
            np.testing.assert_array_equal(found[0], values)


@BOTH
def test_objects_are_used_with_and_without_shared_memory(client: Client, protocol: str) -> None:
    size = FIRST.nbytes
    with SharedRegions(client) as regions:
        out = [regions.add(f"out{place}", size) for place in range(2)]
        for place, value in enumerate((FIRST, ONES)):
            regions.add(f"in{place}", size, value)
        inputs, outputs = pair(protocol, FIRST, 2 * ONES), wanted(protocol, "OUTPUT0", "OUTPUT1")
        for shared in (True, False, True):
            for place, value in enumerate((FIRST, 2 * ONES)):
                if shared:
                    inputs[place].set_shared_memory(f"in{place}", size)
                    outputs[place].set_shared_memory(f"out{place}", size)
                else:
                    inputs[place].set_data_from_numpy(value[None])
                    outputs[place].unset_shared_memory()
            result = client.infer("simple", inputs, outputs=outputs)
            if shared:
                found = shm.get_contents_as_numpy(out[0], np.int32, output_of(result, "OUTPUT0")[1])
                np.testing.assert_array_equal(found, (FIRST + ONES)[None])
            else:
                assert_sums(result, 2 * ONES)


# grpc_client, grpc_image_client, image_client, ensemble_image_client


def test_messages_of_the_stub_drive_every_method(server: Served) -> None:
    name = "densenet_onnx"
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ServerLive(service_pb2.ServerLiveRequest()).live
        assert stub.ServerReady(service_pb2.ServerReadyRequest()).ready
        assert stub.ModelReady(service_pb2.ModelReadyRequest(name=name)).ready
        assert "classification" in stub.ServerMetadata(service_pb2.ServerMetadataRequest()).extensions
        assert stub.ModelMetadata(service_pb2.ModelMetadataRequest(name=name)).inputs[0].name == "data_0"
        assert stub.ModelConfig(service_pb2.ModelConfigRequest(name=name)).config.name == name
        request = service_pb2.ModelInferRequest(model_name=name, id="my request id")
        request.inputs.add(name="data_0", datatype="FP32", shape=[3, SIDE, SIDE])
        request.outputs.add(name="fc6_1")
        request.raw_input_contents.append(b"a" * (3 * SIDE * SIDE * 4))
        answer = stub.ModelInfer(request)
    assert answer.id == "my request id" and list(answer.outputs[0].shape) == [CLASSES]


def picture(*sizes: int) -> np.ndarray:
    """Return float32 [batch, 3, side, side] of one colour."""
    return np.broadcast_to(np.float32(REDDISH)[:, None, None], (*sizes, 3, SIDE, SIDE)).copy()


@BOTH
def test_a_client_of_pictures_reads_layout_and_batch_size(client: Client, protocol: str) -> None:
    config = client.get_model_config("densenet_onnx", **({} if protocol == "http" else {"as_json": True}))
    config = config.get("config", config)
    (given,) = config["input"]
    assert given["format"] == "FORMAT_NCHW" and [int(one) for one in given["dims"]] == [3, SIDE, SIDE]
    assert config["max_batch_size"] >= 4


@BOTH
def test_classes_of_a_batch_of_pictures(client: Client, protocol: str) -> None:
    given = library(protocol).InferInput("data_0", [4, 3, SIDE, SIDE], "FP32")
    given.set_data_from_numpy(picture(4))
    outputs = wanted(protocol, "fc6_1", class_count=3)
    found = client.infer("densenet_onnx", [given], request_id="1", outputs=outputs).as_numpy("fc6_1")
    row = [b"200.000000:0:class 0", b"90.000000:1:class 1", b"40.000000:2:class 2"]
    assert [[*one] for one in found] == [row] * 4


@BOTH
def test_classes_of_single_pictures_again_and_again(client: Client, protocol: str) -> None:
    given = library(protocol).InferInput("data_0", [3, SIDE, SIDE], "FP32")
    given.set_data_from_numpy(picture())
    for count in (1, 2, 1, 2, 0):
        found = client.infer("densenet_onnx", [given], outputs=wanted(protocol, "fc6_1", class_count=count))
        shape = (count,) if count else (CLASSES,)
        assert found.as_numpy("fc6_1").shape == shape


def test_classes_in_a_stream(server: Served) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    given = over_grpc.InferInput("data_0", [2, 3, SIDE, SIDE], "FP32")
    given.set_data_from_numpy(picture(2))
    with over_grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(callback=lambda result, error: answers.put(error or result))
        client.async_stream_infer("densenet_onnx", [given], outputs=wanted("grpc", "fc6_1", class_count=1))
        assert answers.get(timeout=30).as_numpy("fc6_1").tolist() == [[b"200.000000:0:class 0"]] * 2


@BOTH
def test_encoded_pictures_go_through_an_ensemble(client: Client, protocol: str, tmp_path: Path) -> None:
    Image.new("RGB", (64, 48), REDDISH).save(tmp_path / "a.png")
    encoded = (tmp_path / "a.png").read_bytes()
    given = library(protocol).InferInput("INPUT", [2, 1], "BYTES")
    given.set_data_from_numpy(np.array([[encoded], [encoded]], object))
    outputs = wanted(protocol, "OUTPUT", class_count=2)
    found = client.infer("preprocess_inception_ensemble", [given], outputs=outputs).as_numpy("OUTPUT")
    assert found.tolist() == [[b"200.000000:0:red", b"90.000000:1:green"]] * 2


# the examples themselves, where a folder has them

UNCHANGED: list[tuple[str, ...]] = [
    ("ensemble_image_client", "http", "-c", "3", "PICTURE"),
    ("ensemble_image_client", "grpc", "-i", "grpc", "-c", "3", "PICTURE"),
    ("grpc_client", "grpc"),
    ("grpc_explicit_byte_content_client", "grpc"),
    ("grpc_explicit_int8_content_client", "grpc"),
    ("grpc_explicit_int_content_client", "grpc"),
    ("grpc_image_client", "grpc", "-m", "densenet_onnx", "-c", "3", "-b", "2", "PICTURE"),
    ("grpc_image_client", "grpc", "-m", "densenet_onnx", "-c", "3", "-b", "2", "--streaming", "PICTURE"),
    ("image_client", "http", "-m", "densenet_onnx", "-c", "3", "-s", "INCEPTION", "PICTURE"),
    ("image_client", "http", "-m", "densenet_onnx", "-b", "2", "-a", "PICTURE"),
    ("image_client", "grpc", "-i", "grpc", "-m", "densenet_onnx", "-b", "2", "-a", "PICTURE"),
    ("image_client", "grpc", "-i", "grpc", "-m", "densenet_onnx", "-b", "2", "--streaming", "PICTURE"),
    ("reuse_infer_objects_client", "http"),
    ("reuse_infer_objects_client", "grpc", "-i", "grpc"),
    ("simple_grpc_aio_infer_client", "grpc"),
    ("simple_grpc_aio_sequence_stream_infer_client", "grpc"),
    ("simple_grpc_aio_sequence_stream_infer_client", "grpc", "-d"),
    ("simple_grpc_async_infer_client", "grpc"),
    ("simple_grpc_custom_args_client", "grpc"),
    ("simple_grpc_custom_repeat", "grpc"),
    ("simple_grpc_infer_client", "grpc"),
    ("simple_grpc_keepalive_client", "grpc"),
    ("simple_grpc_sequence_stream_infer_client", "grpc"),
    ("simple_grpc_sequence_stream_infer_client", "grpc", "-d"),
    ("simple_grpc_sequence_sync_infer_client", "grpc"),
    ("simple_grpc_sequence_sync_infer_client", "grpc", "-d"),
    ("simple_grpc_shm_client", "grpc"),
    ("simple_grpc_shm_string_client", "grpc"),
    ("simple_grpc_string_infer_client", "grpc"),
    ("simple_http_aio_infer_client", "http"),
    ("simple_http_async_infer_client", "http"),
    ("simple_http_infer_client", "http"),
    ("simple_http_sequence_sync_infer_client", "http"),
    ("simple_http_sequence_sync_infer_client", "http", "-d"),
    ("simple_http_shm_client", "http"),
    ("simple_http_shm_string_client", "http"),
    ("simple_http_string_infer_client", "http"),
]
"""Name, protocol and options of each example; memory_growth_test asks fixed ports."""

FOLDER = os.environ.get("TRITON_EXAMPLES", "")

if FOLDER:

    @pytest.mark.parametrize("words", UNCHANGED, ids=" ".join)
    def test_an_example_runs_unchanged(server: Served, tmp_path: Path, words: tuple[str, ...]) -> None:
        name, protocol, *options = words
        Image.new("RGB", (64, 48), REDDISH).save(tmp_path / "a.png")
        arguments = [str(tmp_path / "a.png") if one == "PICTURE" else one for one in options]
        command = [sys.executable, str(Path(FOLDER) / f"{name}.py"), "-u", address(server, protocol), *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, ended.stdout + ended.stderr
