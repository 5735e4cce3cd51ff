"""The stock `tritonclient.http` against pipelines of fake nodes: each path with an effect."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from tests.engine.serving.http.backends import Functions, info
from tests.engine.serving.http.hosted import Hosted, hosted
from weftline.engine.repository import Repository
from weftline.engine.serving.config import ServedPipeline, ServeLimits
from weftline.engine.serving.local import LocalBackend
from weftline.engine.serving.statistics import Statistics
from weftline.errors import InputError

PIPELINE = """
weftline: 1
name: {name}
inputs: {{value: "{type}"}}
steps: {{s: {{node: echo, type: "{type}", inputs: {{value: value}}}}}}
outputs: {{value: s.value}}
"""
TYPES = {
    "grid": "float32[2, N]",
    "words": "text",
    "halves": "float16[N]",
    "ints": "int64[N]",
    "flags": "bool[N]",
    "tree": "json",
    "brains": "bfloat16[N]",
}
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    folder = tmp_path_factory.mktemp("pipelines")
    steps, inputs, outputs = [], [], []
    for name, type in TYPES.items():  # one pipeline with many steps: one worker, and it opens quickly
        inputs.append(f"  {name}: {{type: '{type}', optional: true}}")
        steps.append(f"  s-{name}: {{node: echo, type: '{type}', worker: w, inputs: {{value: {name}}}}}")
        outputs.append(f"  {name}: s-{name}.value")
    listed = ["weftline: 1", "name: many", "inputs:", *inputs, "steps:", *steps, "outputs:", *outputs]
    (folder / "many.yaml").write_text("\n".join(listed) + "\n")
    (folder / "other.yaml").write_text(PIPELINE.format(name="other", type="float32[N]"))
    served = {name: ServedPipeline(folder / f"{name}.yaml") for name in ("many", "other")}
    statistics = Statistics()
    with Repository() as repository:

        async def open_backend() -> LocalBackend:
            backend = LocalBackend(repository, served, observers=[statistics])
            await backend.open()
            return backend

        limits = ServeLimits(message_bytes_max=8 * MEGABYTE)
        with hosted(open_backend, shared_memory=True, figures=statistics.tell, limits=limits) as endpoint:
            yield endpoint


@pytest.fixture(scope="module")
def client(endpoint: Hosted) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{endpoint.port}") as client:
        yield client


def given(name: str, array: np.ndarray, datatype: str, binary: bool = True) -> triton.InferInput:
    found = triton.InferInput(name, list(array.shape), datatype)
    found.set_data_from_numpy(array, binary_data=binary)
    return found


def wanted(name: str, binary: bool = True) -> list[triton.InferRequestedOutput]:
    return [triton.InferRequestedOutput(name, binary_data=binary)]


ARRAYS = [
    ("grid", np.arange(6, dtype=np.float32).reshape(2, 3), "FP32"),
    ("words", np.array(["grüße!".encode()], np.object_), "BYTES"),
    ("halves", np.array([0.5, -2], np.float16), "FP16"),
    ("ints", np.array([-(1 << 62), 7], np.int64), "INT64"),
    ("flags", np.array([True, False]), "BOOL"),
]


@pytest.mark.parametrize(("name", "array", "datatype"), ARRAYS, ids=lambda one: one if isinstance(one, str) else "")
@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize("binary_in", [True, False])
def test_tensors_go_in_and_out_as_bytes_and_as_json(
    client: triton.InferenceServerClient,
    name: str,
    array: np.ndarray,
    datatype: str,
    binary_in: bool,
    binary_out: bool,
) -> None:
    if datatype == "FP16" and not binary_in:
        pytest.skip("the client sends FP16 as bytes only")
    response = client.infer("many", [given(name, array, datatype, binary_in)], outputs=wanted(name, binary_out))
    assert (
        response.as_numpy(name).tolist() == [b if binary_out else b.decode() for b in array]
        if datatype == "BYTES"
        else (np.array_equal(response.as_numpy(name), array))
    )


@pytest.mark.skipif(find_spec("ml_dtypes") is None, reason="tritonclient wants ml_dtypes for BF16")
def test_bf16_goes_through_bit_by_bit_and_never_as_json(client: triton.InferenceServerClient) -> None:
    import ml_dtypes

    array = np.array([1.5, -2.25], ml_dtypes.bfloat16)
    response = client.infer("many", [given("brains", array, "BF16")], outputs=wanted("brains"))
    assert response.get_output("brains")["datatype"] == "BF16"
    assert response.as_numpy("brains").astype(np.float32).tolist() == [1.5, -2.25]
    with pytest.raises(InferenceServerException, match="BF16"):
        client.infer("many", [given("brains", array, "BF16")], outputs=wanted("brains", False))


def test_a_batch_comes_back_as_one(client: triton.InferenceServerClient) -> None:
    array = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    response = client.infer("many", [given("grid", array, "FP32")], outputs=wanted("grid"))
    assert np.array_equal(response.as_numpy("grid"), array)


def test_json_ports_carry_json(client: triton.InferenceServerClient) -> None:
    response = client.infer(
        "many", [given("tree", np.array([b'{"a": [1, null]}'], np.object_), "BYTES")], request_id="r7"
    )
    assert response.as_numpy("tree").tolist() == [b'{"a":[1,null]}']
    assert response.get_response()["id"] == "r7"
    assert response.get_response()["model_name"] == "many"


def test_a_version_can_be_named(client: triton.InferenceServerClient) -> None:
    sent = [given("value", np.ones(2, np.float32), "FP32")]
    assert client.infer("other", sent, model_version="1").as_numpy("value").tolist() == [1, 1]
    with pytest.raises(InferenceServerException, match="no version") as refused:
        client.infer("other", sent, model_version="9")
    assert refused.value.status() == "404"


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_bodies_may_be_compressed(client: triton.InferenceServerClient, algorithm: str) -> None:
    array = np.zeros((2, 5000), np.float32)
    response = client.infer(
        "many",
        [given("grid", array, "FP32")],
        outputs=wanted("grid"),
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    assert np.array_equal(response.as_numpy("grid"), array)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_a_compression_bomb_is_refused_by_its_inside(client: triton.InferenceServerClient, algorithm: str) -> None:
    bomb = np.zeros(5 * MEGABYTE, np.float32)
    with pytest.raises(InferenceServerException, match="message_bytes_max") as refused:
        client.infer("other", [given("value", bomb, "FP32")], request_compression_algorithm=algorithm)
    assert refused.value.status() == "413"


def test_a_body_over_the_limit_is_refused(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="message_bytes_max"):
        client.infer("other", [given("value", np.zeros(3 * MEGABYTE, np.float32), "FP32")])


def test_the_server_is_live_and_ready_and_says_what_it_is(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("many")
    assert client.is_model_ready("many", "1")
    assert not client.is_model_ready("many", "2")
    assert not client.is_model_ready("unknown")
    assert client.get_server_metadata()["name"] == "weftline"
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]


def test_models_are_described(client: triton.InferenceServerClient) -> None:
    meta = client.get_model_metadata("other")
    assert meta["inputs"] == [{"name": "value", "datatype": "FP32", "shape": [-1, -1]}]
    assert client.get_model_config("other", "1")["parameters"]["input:value"]["string_value"] == "float32[N]"
    with pytest.raises(InferenceServerException) as refused:
        client.get_model_metadata("unknown")
    assert refused.value.status() == "404"


def test_requests_are_counted(client: triton.InferenceServerClient) -> None:
    def count(name: str) -> int:
        stats = client.get_inference_statistics(name)["model_stats"]
        return int(next(one for one in stats if one["name"] == "other")["inference_stats"]["success"]["count"])

    before = count("other")
    client.infer("other", [given("value", np.ones(2, np.float32), "FP32")])
    assert count("other") == count("") == before + 1
    [only] = client.get_inference_statistics("other")["model_stats"]
    counts = {name: only["inference_stats"][name]["count"] for name in ("compute_input", "compute_output", "success")}
    assert len(set(counts.values())) == 1, counts
    assert {"other.s"} <= {one["name"] for one in client.get_inference_statistics()["model_stats"]}


def test_the_configuration_has_the_keys_that_clients_read(client: triton.InferenceServerClient) -> None:
    assert client.get_model_config("other")["input"][0]["format"] == "FORMAT_NONE"


def test_an_unknown_model_has_the_words_that_clients_look_for(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="Request for unknown model"):
        client.infer("nothing", [given("value", np.ones(2, np.float32), "FP32")])


@pytest.mark.slow
def test_models_are_unloaded_and_loaded(client: triton.InferenceServerClient) -> None:
    client.unload_model("other")
    assert not client.is_model_ready("other")
    states = {one["name"]: one["state"] for one in client.get_model_repository_index()}
    assert states == {"many": "READY", "other": "UNAVAILABLE"}
    with pytest.raises(InferenceServerException) as refused:
        client.infer("other", [given("value", np.ones(2, np.float32), "FP32")])
    assert refused.value.status() == "503"
    client.load_model("other")
    assert client.is_model_ready("other")
    client.infer("other", [given("value", np.ones(2, np.float32), "FP32")])


def test_a_model_is_loaded_as_it_was_configured_and_not_otherwise(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="send none"):
        client.load_model("other", config="{}")
    with pytest.raises(InferenceServerException, match="send none"):
        client.load_model("other", files={"file:1/model.py": b"import os"}, config="{}")
    with pytest.raises(InferenceServerException) as refused:
        client.load_model("unknown")
    assert refused.value.status() == "404"


def test_tensors_lie_in_shared_memory_both_ways(client: triton.InferenceServerClient) -> None:
    array = np.arange(40000, dtype=np.float32).reshape(2, 20000)
    region = shm.create_shared_memory_region("both", "/weftline_http_test", 2 * array.nbytes)
    try:
        shm.set_shared_memory_region(region, [array])
        client.register_system_shared_memory("both", "/weftline_http_test", 2 * array.nbytes)
        assert [one["name"] for one in client.get_system_shared_memory_status()] == ["both"]
        assert client.get_system_shared_memory_status("both")[0]["byte_size"] == 2 * array.nbytes
        sent = triton.InferInput("grid", list(array.shape), "FP32")
        sent.set_shared_memory("both", array.nbytes)
        out = triton.InferRequestedOutput("grid")
        out.set_shared_memory("both", array.nbytes, offset=array.nbytes)
        response = client.infer("many", [sent], outputs=[out])
        assert "parameters" not in response.get_output("grid")  # the C++ client takes any for those of binary data
        assert np.array_equal(shm.get_contents_as_numpy(region, np.float32, (2, 40000)).reshape(2, 2, 20000)[1], array)
        client.unregister_system_shared_memory("both")
        assert client.get_system_shared_memory_status() == []
        with pytest.raises(InferenceServerException, match="no region"):
            client.infer("many", [sent])
    finally:
        client.unregister_system_shared_memory()
        shm.destroy_shared_memory_region(region)


def test_cuda_memory_is_refused_in_words(client: triton.InferenceServerClient) -> None:
    assert client.get_cuda_shared_memory_status() == []
    with pytest.raises(InferenceServerException, match="no CUDA memory"):
        client.register_cuda_shared_memory("c", bytes(64), 0, 64)
    client.unregister_cuda_shared_memory()


def test_traces_are_set_and_written(client: triton.InferenceServerClient, caplog: pytest.LogCaptureFixture) -> None:
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    response = client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"], "trace_rate": "1"})
    assert (response["trace_level"], response["trace_rate"]) == (["TIMESTAMPS"], "1")
    with caplog.at_level(logging.INFO, "weftline.ingress.trace"):
        client.infer("other", [given("value", np.ones(2, np.float32), "FP32")], request_id="seen")
    assert "'seen'" in caplog.text
    client.update_trace_settings(settings={"trace_level": None, "trace_rate": None})
    assert client.get_trace_settings("other")["trace_level"] == ["OFF"]
    with pytest.raises(InferenceServerException, match="trace_file"):
        client.update_trace_settings(settings={"trace_file": "/tmp/x"})


def test_logs_are_set(client: triton.InferenceServerClient) -> None:
    before = logging.getLogger("weftline").level
    try:
        assert client.update_log_settings({"log_verbose_level": 1})["log_verbose_level"] == 1
        assert logging.getLogger("weftline").level == logging.DEBUG
        assert client.get_log_settings()["log_verbose_level"] == 1
        with pytest.raises(InferenceServerException, match="log_file"):
            client.update_log_settings({"log_file": "/tmp/x"})
    finally:
        logging.getLogger("weftline").setLevel(before)


def test_many_requests_at_once_over_the_async_client(endpoint: Hosted) -> None:
    async def ask() -> list[float]:
        async with triton_aio.InferenceServerClient(f"127.0.0.1:{endpoint.port}") as client:
            sent = [[given("value", np.full(2, at, np.float32), "FP32")] for at in range(16)]
            found = await asyncio.gather(*[client.infer("other", one) for one in sent])
            return [float(one.as_numpy("value")[0]) for one in found]

    assert asyncio.run(ask()) == list(range(16))


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'{"inputs": {}}', 400),
        (b'{"inputs": [3]}', 400),
        (b'{"inputs": [], "inputs": []}', 400),
        (b'{"inputs": [{"name": "value", "datatype": "INT32", "shape": [1], "data": [NaN]}]}', 400),
        (b'{"inputs": [{"name": "value", "datatype": "FP32", "shape": [1], "data": [16777217]}]}', 400),
        (b'{"inputs": [{"name": "value", "datatype": "FP32", "shape": [true], "data": [1]}]}', 400),
        (b'{"inputs": [{"name": "value", "datatype": "FP32", "shape": [-1, -4], "data": [1, 2, 3, 4]}]}', 400),
        (b'{"inputs": [{"name": "value", "datatype": "FP32", "shape": [4294967296, 4294967296], "data": []}]}', 400),
        (b'{"inputs": [{"name": "value", "datatype": "FP32", "shape": [1]}]}', 400),
        (b'{"inputs": [{"name": "value", "datatype": "FP33", "shape": [1], "data": [1]}]}', 400),
        (b'{"inputs": [{"name": "value", "datatype": "FP32", "shape": [1], "data": ["x"]}]}', 400),
        (b'{"inputs": [{"name": "value", "datatype": "FP32", "shape": [2], "data": [1]}]}', 400),
        (
            b'{"inputs": [{"name": "value", "datatype": "FP32", "shape": [1], "data": [1], "parameters": {"a": {}}}]}',
            400,
        ),
        (b'{"inputs": [{"name": "x/../y", "datatype": "FP32", "shape": [1], "data": [1]}]}', 400),
        (b'{"inputs": [], "outputs": [{"name": "value", "parameters": {"binary_data": 1}}]}', 400),
        (b'{"inputs": [], "id": 7}', 400),
        (b'{"inputs": ' + b"[" * 100000, 400),
    ],
)
def test_bodies_that_are_no_request_are_refused(endpoint: Hosted, body: bytes, code: int) -> None:
    response = httpx.post(f"{endpoint.url}/v2/models/other/infer", content=body)
    assert response.status_code == code
    assert isinstance(response.json()["error"], str)


@pytest.mark.parametrize("length", ["-1", "x", "1e3", "99999", "0", "\u0661"])
def test_a_wrong_header_length_is_refused(endpoint: Hosted, length: str) -> None:
    header: Any = {"Inference-Header-Content-Length": length.encode()}
    assert httpx.post(f"{endpoint.url}/v2/models/other/infer", content=b"{}", headers=header).status_code == 400


def test_bytes_must_be_those_that_were_announced(endpoint: Hosted) -> None:
    for size, behind in ((8, b"1234"), (4, b"12345678"), (-4, b""), (True, b"1")):
        tensor = {"name": "value", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": size}}
        head = msgspec.json.encode({"inputs": [tensor]})
        response = httpx.post(
            f"{endpoint.url}/v2/models/other/infer",
            content=head + behind,
            headers={"Inference-Header-Content-Length": str(len(head))},
        )
        assert response.status_code == 400


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_numbers_that_json_lacks_go_there_and_back(
    client: triton.InferenceServerClient, binary_in: bool, binary_out: bool
) -> None:
    array = np.array([np.nan, np.inf, -np.inf, 1], np.float32)
    sent = triton.InferInput("value", list(array.shape), "FP32")
    sent.set_data_from_numpy(array, binary_data=binary_in)
    response = client.infer("other", [sent], outputs=wanted("value", binary_out))
    assert np.array_equal(response.as_numpy("value"), array, equal_nan=True)


def test_a_parameter_is_a_finite_number(endpoint: Hosted) -> None:
    body = b'{"inputs": [], "parameters": {"timeout": NaN}}'
    response = httpx.post(f"{endpoint.url}/v2/models/other/infer", content=body)
    assert response.status_code == 400 and "finite" in response.text


def test_nothing_of_the_server_is_named(endpoint: Hosted) -> None:
    response = httpx.get(f"{endpoint.url}/v2")
    assert "server" not in response.headers


def test_every_answer_of_a_batch_gives_its_memory_back() -> None:
    def answer(ask: Any) -> dict[str, Any]:
        if ask.inputs["x"].sum() < 0:
            raise InputError("less than nothing")
        return {"y": ask.inputs["x"]}

    backend = Functions({"same": (info("same", {"x": "float32[2]"}, {"y": "float32[2]"}), answer)})
    with hosted(backend) as endpoint, triton.InferenceServerClient(f"127.0.0.1:{endpoint.port}") as client:
        client.infer("same", [given("x", np.ones((3, 2), np.float32), "FP32")])
        assert backend.released == 3
        bad = np.array([[1, 1], [-1, -1], [1, 1]], np.float32)
        with pytest.raises(InferenceServerException, match="less than nothing"):
            client.infer("same", [given("x", bad, "FP32")])
        assert backend.released - 3 == len(backend.asked) - 3 - 1  # all that were answered
