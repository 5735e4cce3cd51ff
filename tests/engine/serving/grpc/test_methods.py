"""The methods of inference.GRPCInferenceService, each through the stock client, each with a visible effect.

ModelInfer and ModelStreamInfer have modules of their own; here each is called once, so that all 20 stand together.
"""

from __future__ import annotations

import base64
import logging
import os
import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

from tests.engine.serving.grpc.served import ECHO, TEXT, WORDS, Served, served_in_thread
from weftline.engine.serving.grpc.protos import INFERENCE_SERVICE


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served_in_thread(
        {"echo": ECHO, "words": WORDS, "spare": TEXT}, expose={"echo": ["same"]}, lazy=["spare"], shared_memory=True
    ) as one:
        yield one


@pytest.fixture
def client(server: Served) -> Iterator[Any]:
    with triton.InferenceServerClient(server.address) as one:
        yield one


def numbers(values: Any, name: str = "x") -> Any:
    array = np.asarray(values, np.uint8)
    tensor = triton.InferInput(name, list(array.shape), "UINT8")
    tensor.set_data_from_numpy(array)
    return tensor


def text(value: str, name: str = "text") -> Any:
    tensor = triton.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode()], np.object_))
    return tensor


def test_every_method_of_the_descriptor_is_answered(server: Served) -> None:
    prefix = f"/{INFERENCE_SERVICE.full_name}/"
    served = {path.removeprefix(prefix) for path in server.server.methods if path.startswith(prefix)}
    assert served == {method.name for method in INFERENCE_SERVICE.methods} and len(served) == 20


def test_server_live_ready_and_metadata_tell_of_the_server(client: Any) -> None:
    assert client.is_server_live() and client.is_server_ready()
    meta = client.get_server_metadata()
    assert (meta.name, meta.version) == ("weftline", "0.1")
    assert {"statistics", "model_repository", "system_shared_memory"} <= set(meta.extensions)
    assert "cuda_shared_memory" not in meta.extensions


def test_a_model_is_ready_only_in_the_version_that_serves(client: Any) -> None:
    assert client.is_model_ready("echo") and client.is_model_ready("echo", "1") and client.is_model_ready("echo.same")
    assert not client.is_model_ready("echo", "2")
    assert not client.is_model_ready("spare") and not client.is_model_ready("nothing")


def test_metadata_and_configuration_describe_pipelines_and_exposed_steps(client: Any) -> None:
    meta = client.get_model_metadata("echo")
    assert [(one.name, one.datatype, list(one.shape)) for one in meta.inputs] == [("x", "UINT8", [-1, -1])]
    assert [(one.name, one.datatype) for one in meta.outputs] == [("y", "UINT8")]
    assert list(meta.versions) == ["1"] and meta.platform == "weftline"
    assert [one.name for one in client.get_model_metadata("echo.same").inputs] == ["value"]
    config = client.get_model_config("words").config
    assert (
        config.model_transaction_policy.decoupled
        and not client.get_model_config("echo").config.model_transaction_policy.decoupled
    )
    assert config.parameters["input:text"].string_value == "text"
    with pytest.raises(InferenceServerException, match="has no version"):
        client.get_model_metadata("echo", "7")


def test_model_infer_answers(client: Any) -> None:
    result = client.infer("echo", [numbers([1, 2, 3])], request_id="seven")
    assert result.as_numpy("y").tolist() == [1, 2, 3]
    assert (result.get_response().id, result.get_response().model_version) == ("seven", "1")


def test_model_stream_infer_answers_piece_by_piece(client: Any) -> None:
    received: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: received.put((result, error)))
    client.async_stream_infer("words", [text("go")], enable_empty_final_response=True)
    pieces = []
    while True:
        result, error = received.get(timeout=20)
        assert error is None
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
        pieces.append(result.as_numpy("text")[0].decode())
    client.stop_stream()
    assert pieces == ["aaaaaaaa", "bbbbbbbb", "cccccccc", "dddddddd"]
    assert not result.get_response().outputs


def test_statistics_count_requests_of_a_pipeline_and_runs_of_its_steps(client: Any) -> None:
    def of(name: str) -> dict[str, Any]:
        return {one.name: one for one in client.get_inference_statistics(name).model_stats}

    before = of("echo")["echo"].inference_stats.success.count
    for _ in range(3):
        client.infer("echo", [numbers([1])])
    assert list(of("echo")) == ["echo"]
    after = of("")
    assert after["echo"].inference_stats.success.count == before + 3
    assert after["echo"].inference_stats.compute_infer.ns > 0 and after["echo"].last_inference > 0
    assert [one.batch_size for one in after["echo"].batch_stats] == [1]
    assert {"echo", "echo.same", "words"} <= set(after)
    with pytest.raises(InferenceServerException, match="no model is called"):
        client.get_inference_statistics("nothing")


def test_the_index_lists_models_and_can_leave_out_those_that_are_not_ready(client: Any, server: Served) -> None:
    index = {one.name: one for one in client.get_model_repository_index().models}
    assert (index["echo"].state, index["echo"].version) == ("READY", "1")
    assert index["spare"].state == "UNAVAILABLE"
    with triton.service_pb2_grpc.grpc.insecure_channel(server.address) as channel:
        stub = triton.service_pb2_grpc.GRPCInferenceServiceStub(channel)
        ready = stub.RepositoryIndex(triton.service_pb2.RepositoryIndexRequest(ready=True)).models
    assert {one.name for one in ready} == {"echo", "echo.same", "words"}


@pytest.mark.slow
def test_a_model_is_loaded_reloaded_and_unloaded(client: Any) -> None:
    client.load_model("spare")
    assert client.is_model_ready("spare")
    assert client.infer("spare", [text("hello")]).as_numpy("text").tolist() == [b"hello"]
    client.load_model("spare")
    assert client.get_model_metadata("spare").versions == ["2"]
    client.unload_model("spare")
    assert not client.is_model_ready("spare") and client.is_server_ready()
    with pytest.raises(InferenceServerException, match="not loaded") as refused:
        client.infer("spare", [text("hello")])
    assert refused.value.status() == "StatusCode.UNAVAILABLE"


def test_loading_takes_a_name_and_nothing_else(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="as configured by the operator"):
        client.load_model("echo", config='{"backend": "python"}')
    with pytest.raises(InferenceServerException, match="as configured by the operator"):
        client.load_model("echo", config="{}", files={"file:1/model.py": b"import os"})
    for name in ("../echo", "/etc/passwd", "nothing", "a" * 100_000):
        with pytest.raises(InferenceServerException, match="is not configured on this server") as refused:
            client.load_model(name)
        assert len(refused.value.message()) < 1_000
    assert client.is_model_ready("echo", "1")


def test_tensors_go_through_registered_system_shared_memory_both_ways(client: Any) -> None:
    client.unregister_system_shared_memory()
    size = 100_000
    data = np.arange(size, dtype=np.uint8)
    keys = [f"/weftline_methods_{os.getpid()}_{end}" for end in ("in", "out")]
    place = shm.create_shared_memory_region("in", keys[0], size)
    answer = shm.create_shared_memory_region("out", keys[1], size)
    try:
        shm.set_shared_memory_region(place, [data])
        client.register_system_shared_memory("in", keys[0], size)
        client.register_system_shared_memory("out", keys[1], size)
        regions = client.get_system_shared_memory_status().regions
        assert {name: one.byte_size for name, one in regions.items()} == {"in": size, "out": size}
        tensor = triton.InferInput("x", [size], "UINT8")
        tensor.set_shared_memory("in", size)
        wanted = triton.InferRequestedOutput("y")
        wanted.set_shared_memory("out", size)
        result = client.infer("echo", [tensor], outputs=[wanted])
        assert not result.get_response().raw_output_contents[0]
        output = result.get_output("y")
        got = shm.get_contents_as_numpy(answer, np.uint8, list(output.shape))
        assert (got == data).all()
        client.unregister_system_shared_memory("in")
        assert list(client.get_system_shared_memory_status().regions) == ["out"]
        with pytest.raises(InferenceServerException, match="no region is registered as in"):
            client.infer("echo", [tensor])
        client.unregister_system_shared_memory()
        assert not client.get_system_shared_memory_status().regions
    finally:
        shm.destroy_shared_memory_region(place)
        shm.destroy_shared_memory_region(answer)


def test_gpu_memory_is_refused_in_words(client: Any, server: Served) -> None:
    assert not client.get_cuda_shared_memory_status().regions
    for size, text in ((64, "no GPU memory to share"), (63, "found 63 bytes"), (65, "found 65 bytes"), (0, "found 0")):
        with pytest.raises(InferenceServerException, match=text) as refused:
            client.register_cuda_shared_memory("gpu", base64.b64encode(b"h" * size), 0, 1024)
        assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"
    with pytest.raises(InferenceServerException, match="device_id"):
        client.register_cuda_shared_memory("gpu", base64.b64encode(b"h" * 64), -1, 1024)
    client.unregister_cuda_shared_memory("gpu")
    with pytest.raises(InferenceServerException, match="no GPU region"):
        client.get_cuda_shared_memory_status("gpu")


def test_trace_settings_turn_on_a_log_line_for_sampled_requests(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    def traced(count: int) -> int:
        caplog.clear()
        with caplog.at_level(logging.INFO, "weftline.ingress.trace"):
            for _ in range(count):
                client.infer("echo", [numbers([1])], request_id="abc")
        return sum("trace of echo 'abc'" in line.getMessage() for line in caplog.records)

    assert traced(2) == 0
    settings = client.update_trace_settings("echo", {"trace_level": ["TIMESTAMPS"], "trace_rate": "2"}).settings
    assert list(settings["trace_level"].value) == ["TIMESTAMPS"] and list(settings["trace_rate"].value) == ["2"]
    assert list(client.get_trace_settings().settings["trace_level"].value) == ["OFF"]
    assert traced(4) == 2
    client.update_trace_settings("echo", {"trace_level": None})
    assert traced(2) == 0
    for wrong in ({"trace_file": "/tmp/x"}, {"trace_level": ["TENSORS"]}, {"trace_rate": "0"}, {"nothing": "1"}):
        with pytest.raises(InferenceServerException):
            client.update_trace_settings("echo", wrong)
    with pytest.raises(InferenceServerException, match="no model is called"):
        client.get_trace_settings("nothing")


def test_log_settings_move_the_level_of_the_log(client: Any) -> None:
    logger = logging.getLogger("weftline")
    before = logger.level
    try:
        settings = client.update_log_settings({"log_verbose_level": 1}).settings
        assert settings["log_verbose_level"].uint32_param == 1 and logger.level == logging.DEBUG
        client.update_log_settings({"log_verbose_level": 0, "log_info": False, "log_warning": False})
        assert logger.level == logging.ERROR and not client.get_log_settings().settings["log_info"].bool_param
        for wrong in ({"log_file": "/tmp/x"}, {"log_format": "ISO8601"}, {"log_info": None}, {"nothing": True}):
            with pytest.raises(InferenceServerException):
                client.update_log_settings(wrong)
        assert logger.level == logging.ERROR
    finally:
        logger.setLevel(before)
