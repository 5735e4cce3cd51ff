"""`weftline serve` from outside: real processes, signals, stock clients; and `weftline token`."""

import queue
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.engine.serving.auth.certificates import Authority
from tests.weftline.served import Served, ask, free_port, serving, wait_until
from weftline.engine.serving.auth.token_entries import read_tokens
from weftline.engine.serving.auth.tokens import digest
from weftline.engine.serving.config import ServeConfig, ServedPipeline
from weftline.engine.serving.serve_file import read_serve_file

PIPELINE = """weftline: 1
name: {name}
inputs: {{words: text}}
steps:
  say: {{node: echo, delay_ms: {delay_ms}, inputs: {{value: words}}, batch: {{items_max: 8}}}}
outputs: {{said: say.value}}
"""
SLOW_TO_OPEN = """
import time
from weftline.testing.nodes import Echo

class Slow(Echo):
    def open(self, context):
        context.progress("taking its time", 0.1)
        time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, delay_ms in (("shout", 0), ("second", 1000), ("minute", 60_000)):
        (tmp_path / f"{name}.yaml").write_text(PIPELINE.format(name=name, delay_ms=delay_ms))
    return tmp_path


def weftline(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself."""
    command = [sys.executable, "-m", "weftline", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


# up


def test_it_says_where_it_is_served_answers_and_leaves_nothing_behind(folder: Path) -> None:
    with serving(folder, "shout.yaml", "second.yaml", "--port", "0", "--http-port", "0", "--expose", "shout.say") as it:
        it.wait_up()
        assert it.http.startswith("http://127.0.0.1:")
        wait_until(lambda: it.status("/readyz") == 200, "ready")
        with it.client() as client:
            assert ask(client, "hello") == "hello"
            names = {one.name for one in client.get_model_repository_index().models}
            assert names == {"shout", "second", "shout.say"}
        assert {line for line in it.lines if line.startswith("model ")} <= {
            "model second: ready, version 1",
            "model shout: ready, version 1",
            "model shout.say: ready, version 1",
        }
        it.signal()
        assert it.wait_end() == 0
        assert it.left() == []
        assert "Traceback" not in it.err


@pytest.mark.slow
def test_a_unix_socket_serves_and_is_gone_afterwards(folder: Path) -> None:
    with serving(folder, "shout.yaml", "--socket", "w.sock") as it:
        it.wait_up()
        client = triton.InferenceServerClient(f"unix:{folder / 'w.sock'}")
        assert ask(client, "hello") == "hello"
        client.close()
        it.signal(signal.SIGINT)
        assert it.wait_end() == 0
        assert not (folder / "w.sock").exists()


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["0", "1"])
def test_a_unix_socket_in_use_is_refused_and_a_stale_one_replaced(folder: Path, processes: str) -> None:
    words = ("shout.yaml", "--socket", "w.sock", "--processes", processes)
    with serving(folder, *words) as first:
        first.wait_up()
        second = weftline(folder, "serve", *words)
        assert second.returncode == 1
        assert "cannot listen at the socket w.sock: another process listens there" in second.stderr
        client = triton.InferenceServerClient(f"unix:{folder / 'w.sock'}")
        assert ask(client, "hello") == "hello"
        client.close()
        first.signal(signal.SIGKILL)
        first.wait_end()
        assert first.left() == [] and (folder / "w.sock").is_socket()
    with serving(folder, *words) as third:
        third.wait_up()
        client = triton.InferenceServerClient(f"unix:{folder / 'w.sock'}")
        assert ask(client, "again") == "again"
        client.close()
        third.signal()
        assert third.wait_end() == 0
    assert not [one.name for one in folder.iterdir() if one.name.startswith((".", "w.sock"))]


@pytest.mark.slow
def test_remote_clients_need_tls_and_tokens_and_probes_need_neither(folder: Path) -> None:
    certificate, key = (authority := Authority(folder, "ca")).sign("server")
    made = weftline(folder, "token", "web", "--model", "shout")
    token = made.stderr.split()[-1]
    (folder / "tokens.yaml").write_text(f"tokens:\n{made.stdout}")
    (folder / "tokens.yaml").chmod(0o600)
    guards = ("--tls-cert", str(certificate), "--tls-key", str(key), "--tokens", "tokens.yaml")
    with serving(
        folder, "shout.yaml", "second.yaml", "--host", "0.0.0.0", "--port", "0", "--http-port", "0", *guards
    ) as it:
        it.wait_up()
        grpc_at = it.grpc.replace("0.0.0.0", "localhost")
        client = triton.InferenceServerClient(grpc_at, ssl=True, root_certificates=str(authority.file))
        assert client.is_server_ready()
        assert health(grpc_at, authority.file.read_bytes()) == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError, match="no such service or model"):
            health(grpc_at, authority.file.read_bytes(), "shout")  # without a token the models are hidden
        with pytest.raises(InferenceServerException, match="UNAUTHENTICATED"):
            ask(client, "hello")
        mine = {"authorization": f"Bearer {token}"}
        assert ask(client, "hello", headers=mine) == "hello"
        with pytest.raises(InferenceServerException, match="PERMISSION_DENIED"):
            ask(client, "hello", "second", headers=mine)
        client.close()
        web = it.http.replace("0.0.0.0", "localhost")
        trusting = ssl.create_default_context(cafile=str(authority.file))
        with urllib.request.urlopen(f"{web}/readyz", context=trusting, timeout=20) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{web}/metrics", context=trusting, timeout=20)
        it.signal()
        assert it.wait_end() == 0
        assert token not in it.err


def health(address: str, authority: bytes, service: str = "") -> int:
    """Ask as a probe does, without a token."""
    with grpc.secure_channel(address, grpc.ssl_channel_credentials(authority)) as channel:
        asked = health_pb2.HealthCheckRequest(service=service)
        return int(health_pb2_grpc.HealthStub(channel).Check(asked, timeout=20).status)


@pytest.mark.slow
def test_models_that_wait_for_an_admin_do_not_count_for_readiness(folder: Path) -> None:
    (folder / "serve.yaml").write_text("pipelines:\n  a: shout.yaml\n  later: {file: shout.yaml, load: false}\n")
    with serving(folder, "serve.yaml", "--port", "0", "--http-port", "0") as it:
        it.wait_up()
        with it.client() as client:
            assert client.is_server_ready()
            assert it.status("/readyz") == 200
            assert not client.is_model_ready("later")
            client.load_model("later")
            assert ask(client, "hello", "later") == "hello"
            client.unload_model("later")
            wait_until(lambda: not client.is_model_ready("later"), "unloaded")
            wait_until(lambda: it.status("/readyz") == 200, "ready without it")  # a busy machine's worker may be silent


@pytest.mark.slow
def test_several_processes_share_the_port_and_end_with_the_server(folder: Path) -> None:
    with (
        serving(folder, "second.yaml", "--port", "0", "--processes", "2", "--grace-s", "30") as it,
        ThreadPoolExecutor(8) as pool,
    ):
        it.wait_up()
        sent = in_flight(it, "second", 8, pool)
        it.signal()
        assert sorted(one.result(30) for one in sent) == sorted(f"{number}" for number in range(8))
        assert it.wait_end() == 0
        assert it.left() == []


@pytest.mark.slow
def test_nothing_is_left_of_a_server_that_was_killed(folder: Path) -> None:
    with serving(folder, "shout.yaml", "--port", "0", "--http-port", "0") as it:
        it.wait_up()
        assert len(it.family) >= 3
        it.signal(signal.SIGKILL)
        assert it.wait_end() == -signal.SIGKILL
        assert it.left() == []


# R13: SIGTERM


def in_flight(it: Served, model: str, count: int, pool: ThreadPoolExecutor) -> list[Future[str]]:
    """Send so many requests at once, each over a connection of its own, and return when they should be there."""
    ready = threading.Barrier(count + 1)

    def one(number: int) -> str:
        with it.client() as client:
            client.is_server_live()
            ready.wait(60)
            return ask(client, f"{number}", model)

    sent = [pool.submit(one, number) for number in range(count)]
    ready.wait(60)
    time.sleep(0.5)
    return sent


@pytest.mark.slow
def test_sigterm_under_load_finishes_open_requests_and_exits_with_0(folder: Path) -> None:
    with (
        serving(folder, "second.yaml", "--port", "0", "--http-port", "0", "--grace-s", "30") as it,
        ThreadPoolExecutor(16) as pool,
    ):
        it.wait_up()
        with it.client() as early:
            assert early.is_server_ready()
            sent = in_flight(it, "second", 16, pool)  # two batches of a second each
            it.signal()
            wait_until(lambda: it.status("/readyz") != 200, "not ready", 1.0)
            with pytest.raises(InferenceServerException) as refused:
                ask(early, "too late", "second")
            assert "UNAVAILABLE" in str(refused.value.status())
            with pytest.raises((InferenceServerException, ConnectionError)) as fresh, it.client() as late:
                ask(late, "too late", "second", timeout_s=5.0)
            assert "DEADLINE" not in str(fresh.value)
        assert sorted(one.result(30) for one in sent) == sorted(f"{number}" for number in range(16))
        assert it.wait_end() == 0
        assert it.left() == []


@pytest.mark.slow
def test_a_stream_that_has_begun_is_finished_before_the_server_ends(folder: Path) -> None:
    text = PIPELINE.format(name="drip", delay_ms=200)
    (folder / "drip.yaml").write_text(
        text.replace("echo", "trickle, pieces: 10").replace(", batch: {items_max: 8}", "")
    )
    pieces: queue.Queue[tuple[str, object]] = queue.Queue()

    def hear(result: triton.InferResult | None, error: object) -> None:
        if result is None:
            pieces.put(("", error))
            return
        last = result.get_response().parameters["triton_final_response"].bool_param
        said = result.as_numpy("said")
        pieces.put((said[0].decode() if said is not None and said.size else "", last))

    with serving(folder, "drip.yaml", "--port", "0") as it:
        it.wait_up()
        with it.client() as client:
            words = triton.InferInput("words", [1], "BYTES")
            words.set_data_from_numpy(np.array([b"x"], object))
            client.start_stream(hear)
            client.async_stream_infer("drip", [words])
            first = pieces.get(timeout=60)
            it.signal()
            chunks_seen = [first]
            while chunks_seen[-1][1] is False:
                chunks_seen.append(pieces.get(timeout=60))
            assert "".join(text for text, _ in chunks_seen) == "".join(chr(ord("a") + n) * 8 for n in range(10))
            assert chunks_seen[-1][1] is True
            client.stop_stream()
        assert it.wait_end() == 0
        assert it.left() == []


@pytest.mark.slow
def test_requests_open_after_the_grace_time_fail_and_the_exit_code_is_0(folder: Path) -> None:
    with serving(folder, "minute.yaml", "--port", "0", "--grace-s", "1") as it, ThreadPoolExecutor(1) as pool:
        it.wait_up()
        sent = in_flight(it, "minute", 1, pool)
        it.signal()
        assert it.wait_end() == 0
        with pytest.raises(InferenceServerException, match=r"CANCELLED|UNAVAILABLE"):
            sent[0].result(30)
        assert it.left() == []


@pytest.mark.slow
def test_a_second_signal_ends_it_now(folder: Path) -> None:
    with serving(folder, "minute.yaml", "--port", "0", "--grace-s", "600") as it, ThreadPoolExecutor(1) as pool:
        it.wait_up()
        sent = in_flight(it, "minute", 1, pool)
        it.signal()
        time.sleep(1.0)
        assert it.process.poll() is None, "it waits for the request"
        it.signal()
        it.wait_end(30.0)
        with pytest.raises(InferenceServerException):
            sent[0].result(30)
        assert it.left() == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_models_load_ends_it(folder: Path, number: int) -> None:
    (folder / "slow.py").write_text(SLOW_TO_OPEN)
    text = PIPELINE.format(name="slow", delay_ms=0).replace("node: echo", 'node: "slow.py:Slow"')
    (folder / "slow.yaml").write_text(text)
    with serving(folder, "slow.yaml", "--port", "0") as it:
        it.wait_err("taking its time")
        it.signal(number)
        assert it.wait_end(30.0) in (0, 130)
        assert it.left() == []
        assert it.lines == [], "nothing was served"


# what it refuses


@pytest.mark.slow
def test_a_port_that_is_taken_is_said_and_nothing_is_left(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for words in (("--port", port), ("--port", "0", "--http-port", port)):
            with serving(folder, "shout.yaml", *words) as it:
                assert it.wait_end() == 1
                assert port in it.err
                assert "in use" in it.err
                assert it.left() == []


@pytest.mark.slow
def test_two_servers_never_share_a_port(folder: Path) -> None:
    port = str(free_port())
    with serving(folder, "shout.yaml", "--port", port) as first:
        first.wait_up()
        again = weftline(folder, "serve", "shout.yaml", "--port", port)
        assert again.returncode == 1
        assert f"{port}" in again.stderr
        assert "in use" in again.stderr
        with first.client() as client:
            assert ask(client, "still here") == "still here"


@pytest.mark.slow
def test_it_does_not_listen_beyond_this_machine_unguarded(folder: Path) -> None:
    for words in (("--host", "0.0.0.0"), ("--host", "::", "--http-port", "0"), ("--host", "0.0.0.0", "--print-config")):
        ended = weftline(folder, "serve", "shout.yaml", "--port", "0", *words)
        assert ended.returncode == 2
        assert "--tls-cert" in ended.stderr
        assert "--insecure" in ended.stderr
        assert "nothing was started" in ended.stderr


@pytest.mark.slow
def test_a_pipeline_that_fails_leaves_the_others_and_strict_none(folder: Path) -> None:
    (folder / "bad.yaml").write_text(PIPELINE.format(name="bad", delay_ms=0).replace("echo", "unknown"))
    words = ("shout.yaml", "bad.yaml", "--port", "0", "--http-port", "0", "--expose", "shout.say")
    with serving(folder, *words) as it:
        it.wait_up()
        wait_until(lambda: "bad.yaml:5" in it.err, "the reason in the log")
        assert it.status("/readyz") == 200
        with it.client() as client:
            assert client.is_server_ready() and not client.is_model_ready("bad")
            assert ask(client, "hello").lower().startswith("hello")
        status = weftline(folder, "status", "--url", it.grpc)
        assert status.returncode == 6 and "bad.yaml:5" in status.stdout
    strict = weftline(folder, "serve", *words, "--strict")
    assert strict.returncode == 2 and "bad.yaml:5" in strict.stderr


@pytest.mark.slow
def test_every_problem_is_reported_before_anything_starts(folder: Path) -> None:
    (folder / "serve.yaml").write_text("pipelines:\n  a: none.yaml\n  b: {file: shout.yaml, expose: [sya]}\n")
    ended = weftline(folder, "serve", "serve.yaml", "--tokens", "none")
    assert ended.returncode == 2
    for said in ("serve.yaml:2", "serve.yaml:3", "did you mean say?", "--tokens: there is no file", "3 problems"):
        assert said in ended.stderr
    assert ended.stdout == ""


@pytest.mark.slow
def test_a_model_that_cannot_be_opened_ends_it_with_the_reason(folder: Path) -> None:
    text = PIPELINE.format(name="broken", delay_ms=0)
    (folder / "broken.yaml").write_text(text.replace("echo", "fail, fail_open: true, message: the file is torn"))
    ended = weftline(folder, "serve", "broken.yaml", "--port", "0")
    assert ended.returncode == 4
    assert "the file is torn" in ended.stderr


# what it prints


@pytest.mark.slow
def test_the_configuration_it_prints_is_one(folder: Path) -> None:
    ended = weftline(folder, "serve", "shout.yaml", "--http-port", "0", "--expose", "say", "--print-config")
    assert ended.returncode == 0
    (folder / "printed.yaml").write_text(ended.stdout)
    said = read_serve_file(folder / "printed.yaml").config
    assert said.pipelines == {"shout": ServedPipeline(folder / "shout.yaml", ("say",))}
    assert said.http is not None
    assert said.limits == ServeConfig({}).limits


@pytest.mark.slow
def test_a_token_is_shown_once_and_its_line_fits_the_token_file(folder: Path) -> None:
    ended = weftline(
        folder, "token", "web", "--model", "a", "--model", "1e3", "--requests-per-s", "2.5", "--burst", "9", "--metrics"
    )  # fmt: skip
    token = ended.stderr.split()[-1]
    assert token not in ended.stdout
    (entry,) = read_tokens(f"tokens:\n{ended.stdout}", "file")
    assert (entry.name, entry.sha256.hex(), entry.models) == ("web", digest(token), {"a", "1e3"})
    assert (entry.requests_per_s, entry.burst, entry.metrics, entry.admin) == (2.5, 9.0, True, False)


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("words", [("a b",), ("web", "--burst", "3"), ("web", "--model", "../x")])
def test_a_token_that_no_file_could_have_is_refused(folder: Path, words: tuple[str, ...]) -> None:
    ended = weftline(folder, "token", *words)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "wl_" not in ended.stderr
