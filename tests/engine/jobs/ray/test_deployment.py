"""`weftline serve --engine ray`: what is refused, and a service on a real cluster whose replica is killed."""

from __future__ import annotations

import queue
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.engine.jobs.ray.conftest import BODY, HEAD
from tests.weftline.served import Served, serving
from weftline.cli.main import main
from weftline.engine.jobs.ray.cluster import Need
from weftline.engine.jobs.ray.deployment import check_config, machine_for
from weftline.engine.serving.config import GrpcConfig, HttpConfig, ServeConfig, ServedPipeline, Tls
from weftline.errors import PipelineError

END_S, HEALED_S = 40.0, 40.0

CONFIG = ServeConfig({"greet": ServedPipeline(Path("greet.yaml"))}, insecure=True)


def test_what_ray_serve_cannot_do_is_refused_all_at_once() -> None:
    check_config(CONFIG)
    config = replace(
        CONFIG,
        insecure=False,
        http=HttpConfig(),
        tls=Tls(Path("a"), Path("b")),
        shared_memory=True,
        grpc=GrpcConfig(processes=2, socket=Path("s")),
        otlp="http://localhost:4317",
        tokens=Path("/nowhere/tokens.yaml"),
    )
    with pytest.raises(PipelineError) as refused:
        check_config(config)
    message = str(refused.value)
    for key in ("http", "tls", "shared_memory", "grpc.socket", "grpc.processes", "otlp", "grpc.host", "tokens.yaml"):
        assert key in message
    assert "without TLS" in message and "--insecure" in message


def test_pipelines_are_checked_against_the_gpus_a_replica_is_to_get() -> None:
    here = len(machine_for(Need()).devices)
    assert [one.name for one in machine_for(Need(gpus=here + 0.5)).devices][-1] == f"cuda:{here}"


@pytest.fixture(scope="module")
def service() -> Iterator[Served]:
    """Serve with two replicas on a cluster of its own, and end it; nothing of it may be left."""
    pytest.importorskip("ray")
    folder = Path(tempfile.mkdtemp(prefix="w", dir="/tmp"))  # names of sockets in it are bounded
    (folder / "greet.yaml").write_text(HEAD + BODY)
    words = ["greet.yaml", "--engine", "ray", "--replicas", "2", "--insecure", "--port", "0", "--grace-s", "5"]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_TMPDIR", str(folder))
            patch.setenv("RAY_OVERRIDE_RESOURCES", '{"CPU": 4}')
            with serving(folder, *words) as served:
                served.wait_up()
                port = served.grpc.removeprefix("0.0.0.0:")
                assert served.lines == [f"grpc  0.0.0.0:{port}", "model greet: ready, 2 replicas"]
                yield served
                served.signal(signal.SIGTERM)
                assert served.wait_end(END_S) == 0
                assert served.left() == []
                assert "Traceback" not in served.err
    finally:
        rmtree(folder, ignore_errors=True)


def replicas_of(served: Served) -> list[psutil.Process]:
    """Return the processes of a service's replicas."""
    found = []
    for one in psutil.Process(served.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a zombie is one, too
            found += [one] if "ServeReplica" in " ".join(one.cmdline()[:1]) else []
    return found


def text_of(text: str) -> list[Any]:
    given = triton.InferInput("text", [1], "BYTES")
    given.set_data_from_numpy(np.array([text.encode()], object))
    return [given]


@pytest.mark.slow
def test_a_stock_client_is_served_and_a_killed_replica_is_replaced(service: Served) -> None:
    with triton.InferenceServerClient(service.grpc.replace("0.0.0.0", "127.0.0.1")) as client:
        _methods(client)
        _stream(client)
        _survives(service, client)


def _methods(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("greet")
    assert client.get_server_metadata().name == "weftline"
    assert [one.name for one in client.get_model_metadata("greet").outputs] == ["said"]
    assert client.get_model_config("greet").config.name == "greet"
    assert [one.state for one in client.get_model_repository_index().models] == ["READY"]
    assert client.get_inference_statistics("greet").model_stats[0].name == "greet"
    assert client.infer("greet", text_of("you")).as_numpy("said").tolist() == [b"hello you"]
    assert client.infer("greet", text_of("x" * 90_000)).as_numpy("said")[0] == b"hello " + b"x" * 90_000
    with pytest.raises(InferenceServerException, match="no model is called 'other'") as unknown:
        client.infer("other", text_of("you"))
    assert unknown.value.status() == "StatusCode.NOT_FOUND"
    with pytest.raises(InferenceServerException) as absent:
        client.load_model("greet")
    assert absent.value.status() == "StatusCode.UNIMPLEMENTED"


def _stream(client: triton.InferenceServerClient) -> None:
    came: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: came.put((result, error)))
    for number in range(5):
        client.async_stream_infer("greet", text_of(f"{number}"), request_id=f"{number}")
    client.stop_stream()
    found = [came.get(timeout=20) for _ in range(5)]
    assert all(error is None for _, error in found)
    said = {result.get_response().id: result.as_numpy("said")[0] for result, _ in found}
    assert said == {f"{number}": f"hello {number}".encode() for number in range(5)}


def _survives(service: Served, client: triton.InferenceServerClient) -> None:
    """Kill a replica and keep asking: every request is answered, at once or when it is sent again."""
    first = replicas_of(service)
    assert len(first) == 2
    first[0].kill()
    until = time.monotonic() + HEALED_S
    number = refused = 0
    while len(now := replicas_of(service)) < 2 or first[0].pid in {one.pid for one in now} or number < 200:
        assert time.monotonic() < until, "no replica took its place"
        number += 1
        for _ in range(10):
            try:
                assert client.infer("greet", text_of(f"{number}")).as_numpy("said")[0] == f"hello {number}".encode()
                break
            except InferenceServerException as error:
                assert error.status() in ("StatusCode.UNAVAILABLE", "StatusCode.INTERNAL")
                refused += 1
        else:
            raise AssertionError(f"request {number} was never answered")
    assert refused <= 5


@pytest.mark.parametrize("words", [["--replicas", "2"], ["--gpus-per-replica", "1"], ["--address", "auto"]])
def test_options_of_ray_are_refused_without_it(
    words: list[str], greet: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(greet()), *words]) == 2
    assert f"{words[0]} needs --engine ray" in " ".join(capsys.readouterr().err.split())
