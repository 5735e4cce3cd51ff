"""Real ingress processes: started, killed, silent, hostile, drained; and the effects on the engine and on others."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.fire import Gate, descriptors, memory_maps, settled, wait_until
from tests.engine.fire import builder as base
from tests.engine.serving.frontend.linked import linked
from weftline.engine.protocol.messages import Value
from weftline.engine.repository import Repository
from weftline.engine.scheduler.restarts import RestartPolicy
from weftline.engine.serving.backend import Ask
from weftline.engine.serving.config import GrpcConfig, ServeConfig, ServedPipeline
from weftline.engine.serving.frontend import messages as msg
from weftline.engine.serving.frontend import supervisor
from weftline.engine.serving.frontend.messages import IngressSpec
from weftline.engine.serving.frontend.supervisor import FrontendManager
from weftline.engine.serving.local import LocalBackend
from weftline.errors import LimitReached, SessionClosed, WeftlineError
from weftline.nodes.urgency import SequencePart
from weftline.shm.block import Place

ENTRY = "tests.engine.serving.frontend.line_process"
BUFFER_BYTES = 32 << 20
ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    return Gate(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def repository(gate: Gate) -> Iterator[Repository]:
    with Repository() as repository:
        for name, node, kind, options in (
            ("text", "echo", "text", {}),
            ("array", "echo", "float32[N]", {"type": "float32[N]"}),
            ("gated", "fire_steps.py:Gated", "text", {"folder": str(gate.folder)}),
            ("flood", "trickle", "text", {"pieces": 4000, "piece_bytes": 8192}),
        ):
            p = base(name, arena_bytes=64 << 20)
            p.output("y", p.step("s", node, value=p.input("x", kind), **options).value)
            repository.load(name, p)
        yield repository


@pytest.fixture(autouse=True)
def nothing_is_left(repository: Repository, gate: Gate) -> Iterator[None]:
    gate.open()
    yield
    gate.open()
    wait_until(lambda: all(settled(repository.get(entry.name)) for entry in repository.index()), 5)


def spec(name: str = "line", port: int = 0, **more: Any) -> IngressSpec:
    pipelines = {"a": ServedPipeline(Path("a.yaml"), ("s",))}
    return IngressSpec(name, ("grpc",), ServeConfig(pipelines, grpc=GrpcConfig(port=port), **more))


@asynccontextmanager
async def manager(repository: Repository) -> AsyncIterator[FrontendManager]:
    manager = FrontendManager(LocalBackend(repository, {}), BUFFER_BYTES)
    try:
        yield manager
    finally:
        await manager.stop()


class Client:
    """A client of the line server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, port: int) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def send(self, **fields: Any) -> None:
        self.writer.write(json.dumps(fields).encode() + b"\n")

    async def receive(self) -> dict[str, Any] | None:
        """Return the next line; None when the connection is closed."""
        try:
            line = await self.reader.readline()
        except ConnectionError:
            return None
        message: dict[str, Any] | None = json.loads(line) if line else None
        return message

    async def ask(self, **fields: Any) -> dict[str, Any] | None:
        self.send(**fields)
        return await self.receive()


def run(script: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(script, 30))


async def until(what: Callable[[], Any], within_s: float = 5.0) -> float:
    """Wait until something holds, and return how long it took."""
    since = time.monotonic()
    while not what():
        assert time.monotonic() - since < within_s, "it did not come to pass"
        await asyncio.sleep(0.005)
    return time.monotonic() - since


def opened(repository: Repository) -> int:
    """Return how many requests are open in the engine."""
    return sum(repository.get(entry.name).stats()["requests"]["open"] for entry in repository.index())


def leased(repository: Repository) -> int:
    return sum(repository.get(entry.name).stats()["arena"]["leased_bytes"] for entry in repository.index())


# life


@pytest.mark.slow
def test_an_ingress_process_answers_and_ends_with_nothing_left(repository: Repository) -> None:
    async def script() -> None:
        async with manager(repository) as d:
            ports = await d.start_ingress(spec(), ENTRY)
            pid = d.pids()["line"]
            client = await Client.connect(ports["grpc"])
            assert await client.ask(ask="text", x="a") == {"y": "a"}
            assert await client.ask(ask="array", items=1000) == {"sum": 499500.0}
            assert await client.ask(index=1) == {"array": True, "flood": True, "gated": True, "text": True}
            assert (await client.ask(ask="missing", x="a") or {})["error"] == "UnknownModel"
            client.writer.close()
        assert not psutil.pid_exists(pid)

    run(script())  # what modules and sessions open once is open now
    before = descriptors(), memory_maps()
    run(script())
    gc.collect()
    assert (descriptors(), memory_maps()) == before


@pytest.mark.slow
def test_it_has_neither_privileges_nor_secrets_nor_frameworks(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")

    async def script() -> None:
        async with manager(repository) as d:
            ports = await d.start_ingress(spec(), ENTRY)
            who = await (await Client.connect(ports["grpc"])).ask(do="who") or {}
            assert (who["dumpable"], who["no_new_privs"]) == (0, 1)
            assert "SECRET_TOKEN" not in who["environment"]
            assert not {"torch", "transformers", "PIL", "onnxruntime"} & set(who["modules"])

    run(script())


@pytest.mark.slow
def test_a_server_that_cannot_listen_is_an_error_and_leaves_nothing(repository: Repository) -> None:
    async def script() -> None:
        async with manager(repository) as d:
            with socket.socket() as taken:
                taken.bind(("127.0.0.1", 0))
                taken.listen()
                with pytest.raises(WeftlineError, match="in use"):
                    await d.start_ingress(spec(port=taken.getsockname()[1]), ENTRY)
            assert d.pids() == {}

    run(script())


@pytest.mark.slow
def test_a_process_that_never_comes_up_is_an_error(repository: Repository) -> None:
    async def script() -> None:
        async with manager(repository) as d:
            with pytest.raises(SessionClosed, match="exit code 1"):
                await d.start_ingress(spec(), "tests.engine.serving.frontend.nothing_like_it")
            assert d.pids() == {}

    run(script())


@pytest.mark.slow
def test_a_drain_lets_open_calls_finish_and_ends_the_process(repository: Repository, gate: Gate) -> None:
    async def script() -> None:
        async with manager(repository) as d:
            ports = await d.start_ingress(spec(), ENTRY)
            pid = d.pids()["line"]
            gate.close()
            client = await Client.connect(ports["grpc"])
            client.send(ask="gated", x="a")
            await until(lambda: opened(repository) == 1)
            draining = asyncio.create_task(d.drain(10))
            await asyncio.sleep(0.1)
            with pytest.raises(OSError):
                await Client.connect(ports["grpc"])
            assert not draining.done()
            gate.open()
            assert await client.receive() == {"y": "a"}
            await draining
            assert not psutil.pid_exists(pid)

    run(script())


@pytest.mark.slow
def test_a_drain_cuts_what_takes_longer_than_the_grace(repository: Repository, gate: Gate) -> None:
    async def script() -> None:
        async with manager(repository) as d:
            ports = await d.start_ingress(spec(), ENTRY)
            gate.close()
            client = await Client.connect(ports["grpc"])
            client.send(ask="gated", x="a")
            await until(lambda: opened(repository) == 1)
            since = time.monotonic()
            await d.drain(0.2)
            assert time.monotonic() - since < 4
            assert await client.receive() is None
            gate.open()
            await until(lambda: opened(repository) == 0)

    run(script())


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signals_to_end_are_for_the_engine(repository: Repository, signum: signal.Signals) -> None:
    async def script() -> None:
        async with manager(repository) as d:
            ports = await d.start_ingress(spec(), ENTRY)
            client = await Client.connect(ports["grpc"])
            os.kill(d.pids()["line"], signum)
            assert await client.ask(ask="text", x="a") == {"y": "a"}

    run(script())


@pytest.mark.slow
def test_changed_models_reach_the_processes_also_after_a_failed_poll(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script() -> None:
        async with manager(repository) as d:
            ports = await d.start_ingress(spec(), ENTRY)
            client = await Client.connect(ports["grpc"])
            monkeypatch.setattr(d, "publish", lambda: 1 / 0)
            await asyncio.sleep(0.3)
            monkeypatch.undo()
            p = base("late")
            p.output("y", p.step("s", "echo", value=p.input("x", "text")).value)
            await asyncio.to_thread(repository.load, "late", p)
            try:
                since = time.monotonic()
                while "late" not in (await client.ask(index=1) or {}):
                    assert time.monotonic() - since < 5
                    await asyncio.sleep(0.02)
                assert await client.ask(ask="late", x="a") == {"y": "a"}
            finally:
                await asyncio.to_thread(repository.unload, "late")

    run(script())


# deaths


@pytest.mark.slow
def test_a_killed_ingress_frees_its_requests_within_a_second(repository: Repository, gate: Gate) -> None:
    """R5: two processes, eight streams and large requests in one of them, kill -9."""

    async def script() -> float:
        async with manager(repository) as d:
            doomed = await d.start_ingress(spec("doomed"), ENTRY)
            other = await d.start_ingress(spec("other"), ENTRY)
            healthy = await Client.connect(other["grpc"])
            gate.close()
            clients = [await Client.connect(doomed["grpc"]) for _ in range(12)]
            for at, client in enumerate(clients):
                if at < 8:
                    client.send(stream="flood", x="a")
                elif at < 10:
                    client.send(ask="array", items=2_000_000)
                else:
                    client.send(ask="gated", x="b" * 50_000)
            assert all([await client.receive() for client in clients[:8]])
            await until(lambda: opened(repository) >= 10)
            os.kill(d.pids()["doomed"], signal.SIGKILL)
            gate_opens = asyncio.get_running_loop().call_later(0.5, gate.open)
            took_s = await until(lambda: opened(repository) == 0, 2.0)
            assert await asyncio.wait_for(healthy.ask(ask="text", x="a"), 1) == {"y": "a"}
            for client in clients:
                while await client.receive() is not None:
                    pass  # what was on its way; then the connection is closed, and stays no second longer
            await until(lambda: leased(repository) == 0, 2.0)
            gate_opens.cancel()
            gate.open()
            return took_s

    assert run(script()) < 1.0


@pytest.mark.slow
def test_it_is_started_again_where_it_was(repository: Repository) -> None:
    async def script() -> None:
        async with manager(repository) as d:
            ports = await d.start_ingress(spec(), ENTRY)
            for _ in range(2):
                pid = d.pids()["line"]
                client = await Client.connect(ports["grpc"])
                client.send(do="exit")
                assert await client.receive() is None
                await until(lambda pid=pid: d.ready and d.pids().get("line") not in (None, pid))  # type: ignore[misc]
                assert await (await Client.connect(ports["grpc"])).ask(ask="text", x="a") == {"y": "a"}

    run(script())


def test_stopping_does_not_wait_for_a_back_off(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "RestartPolicy", lambda: RestartPolicy(first_ms=60_000.0, longest_ms=60_000.0))

    async def script() -> None:
        async with manager(repository) as d:
            ports = await d.start_ingress(spec(), ENTRY)
            (await Client.connect(ports["grpc"])).send(do="exit")
            await until(lambda: not d.pids() and not d.ready)
            since = time.monotonic()
            await d.stop()
            assert time.monotonic() - since < 2

    run(script())


@pytest.mark.slow
def test_one_that_never_comes_up_again_is_given_up_and_others_serve_on(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "RestartPolicy", lambda: RestartPolicy(first_ms=1.0, longest_ms=1.0, crashes_max=1))

    async def script() -> None:
        async with manager(repository) as d:
            doomed = await d.start_ingress(spec("doomed"), ENTRY)
            other = await d.start_ingress(spec("other"), ENTRY)
            monkeypatch.setattr(d._supervisors[0], "_entry", "tests.engine.serving.frontend.nothing_like_it")
            (await Client.connect(doomed["grpc"])).send(do="exit")
            await until(lambda: d._supervisors[0].given_up, 15)
            assert not d.ready and set(d.pids()) == {"other"}
            assert await (await Client.connect(other["grpc"])).ask(ask="text", x="a") == {"y": "a"}

    run(script())


@pytest.mark.slow
def test_a_silent_process_is_killed_and_restarted(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SILENT_S", 0.5)
    monkeypatch.setattr(msg, "PING_S", 0.1)

    async def script() -> None:
        async with manager(repository) as d:
            ports = await d.start_ingress(spec(), ENTRY)
            await asyncio.sleep(1.0)
            pid = d.pids()["line"]  # it answers, so it lives
            (await Client.connect(ports["grpc"])).send(do="hang")
            await until(lambda: d.ready and d.pids().get("line") not in (None, pid), 30)
            assert await (await Client.connect(ports["grpc"])).ask(ask="text", x="a") == {"y": "a"}

    run(script())


@pytest.mark.slow
def test_a_blocked_engine_does_not_kill_a_live_process(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SILENT_S", 1.0)
    monkeypatch.setattr(msg, "PING_S", 0.2)

    async def script() -> None:
        async with manager(repository) as d:
            await d.start_ingress(spec(), ENTRY)
            pid = d.pids()["line"]
            for _ in range(3):
                await asyncio.sleep(0.1)
                time.sleep(1.5)  # the loop reads nothing meanwhile
            await asyncio.sleep(0.5)
            assert d.ready and d.pids() == {"line": pid}

    run(script())


@pytest.mark.slow
def test_it_ends_within_a_second_when_the_engine_is_killed(tmp_path: Path) -> None:
    script = """
import asyncio, sys
from pathlib import Path
from weftline.engine.serving.frontend.supervisor import FrontendManager
from weftline.engine.serving.local import LocalBackend
from weftline.engine.repository import Repository
from tests.engine.serving.frontend.test_supervisor import ENTRY, spec

async def main():
    manager = FrontendManager(LocalBackend(Repository(), {}), 1 << 20)
    await manager.start_ingress(spec(), ENTRY)
    print(manager.pids()["line"], flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    engine = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert engine.stdout is not None
    with engine.stdout:
        pid = int(engine.stdout.readline())
    assert psutil.pid_exists(pid)
    engine.kill()
    since = time.monotonic()
    engine.wait()
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 5)
    assert time.monotonic() - since < 1.0


# hostile ones


def _request(inputs: dict[str, Value], number: int = 1 << 40) -> bytes:
    return msg.encode(msg.FrontendRequest(number, False, Ask("array", {}), inputs))


HOSTILE: dict[str, list[bytes]] = {
    "no message": [b"\xc1\xc1"],
    "an unknown message": [b"\x91\xa5Start"],
    "the engine's own message": [msg.encode(msg.Ping())],
    "a place behind the buffer": [_request({"x": Value("tensor", "uint8", (8,), None, Place(0, 1 << 40, 8, 0, 0))})],
    "a place before it": [_request({"x": Value("tensor", "uint8", (8,), None, Place(0, -8, 8, -8, 0))})],
    "a size that is not the tensor's": [_request({"x": Value("tensor", "uint8", (9,), None, Place(0, 0, 8, 0, 0))})],
    "another arena": [_request({"x": Value("tensor", "uint8", (8,), None, Place(1, 0, 8, 0, 0))})],
    "a negative dimension": [_request({"x": Value("tensor", "uint8", (-1, -8), None, Place(0, 0, 8, 0, 0))})],
    "a dtype that is none": [_request({"x": Value("tensor", "object", (1,), b"12345678")})],
    "a tensor without its bytes": [_request({"x": Value("tensor", "uint8", (8,), b"")})],
    "text that is none": [_request({"x": Value("text", data=b"\xff\xfe")})],
    "detections that are none": [_request({"x": Value("detections", data=b"\x93\x01\x02\x03")})],
    "json that is none": [_request({"x": Value("json", data=b"\xdd\xff\xff\xff\xff")})],
    "a pending tensor of another size": [_request({"x": Value("pending", "float32", (1 << 40,), b"1234")})],
    "an id used twice": [_request({"x": Value("text", data=b"a")})] * 2,
    "a block that was not lent": [msg.encode(msg.BlockReleased(0))],
    "no block at all": [msg.encode(msg.BlockReleased(-1))],
    "servers opened twice": [msg.encode(msg.ServersOpened({"grpc": 1}))],
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_ingress_is_cut_off_and_harms_nothing(repository: Repository, what: str) -> None:
    """S8: the engine closes the connection of a process that sends invalid messages, and serves others."""

    async def script() -> None:
        backend = LocalBackend(repository, {})
        async with linked(backend) as hostile, linked(backend) as healthy:
            hostile.connection._ports.set_result({})
            for body in HOSTILE[what]:
                hostile.transport.send(body)
            await asyncio.wait_for(hostile.connection.wait_closed(), 5)
            assert hostile.connection.close_reason
            with await healthy.remote.ask(Ask("text", {"x": "a"})) as answer:
                assert answer.outputs == {"y": "a"}

    run(script())


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.floats(0, 1, exclude_max=True), to=st.integers(0, 255), cut=st.booleans())
def test_a_request_with_any_byte_changed_harms_nothing(repository: Repository, at: float, to: int, cut: bool) -> None:
    body = msg.encode(
        msg.FrontendRequest(
            5,
            False,
            Ask("array", {}, ("y",), 50.0, sequence=SequencePart("q", start=True)),
            {"x": Value("tensor", "float32", (2,), b"12345678"), "y": Value("list", items=(Value("text", data=b"a"),))},
        )
    )
    place = int(at * len(body))
    body = body[:place] if cut else body[:place] + bytes([to]) + body[place + 1 :]

    async def script() -> None:
        backend = LocalBackend(repository, {})
        async with linked(backend, 1 << 20) as hostile, linked(backend, 1 << 20) as healthy:
            hostile.transport.send(body)
            with await healthy.remote.ask(Ask("text", {"x": "a"})) as answer:
                assert answer.outputs == {"y": "a"}
            await asyncio.sleep(0.005)

    run(script())


def test_a_frame_too_long_is_refused_when_it_is_announced(repository: Repository) -> None:
    async def script() -> None:
        async with linked(LocalBackend(repository, {}), frame_bytes_max=1000) as hostile:
            assert hostile.transport._transport is not None
            hostile.transport._transport.write((1001).to_bytes(4, "little"))
            await asyncio.wait_for(hostile.connection.wait_closed(), 5)

    run(script())


@pytest.mark.slow
def test_a_process_that_sends_invalid_messages_is_restarted(repository: Repository) -> None:
    async def script() -> None:
        async with manager(repository) as d:
            ports = await d.start_ingress(spec(), ENTRY)
            pid = d.pids()["line"]
            (await Client.connect(ports["grpc"])).send(do="babble")
            await until(lambda: d.ready and d.pids().get("line") not in (None, pid))
            assert await (await Client.connect(ports["grpc"])).ask(ask="text", x="a") == {"y": "a"}

    run(script())


def test_more_calls_than_the_limit_are_refused(repository: Repository, gate: Gate) -> None:
    from tests.engine.serving.frontend.linked import linked

    async def script() -> None:
        gate.close()
        async with linked(LocalBackend(repository, {}), calls_max=3) as link:
            asking = [asyncio.create_task(link.remote.ask(Ask("gated", {"x": "a"}))) for _ in range(3)]
            await until(lambda: link.connection.open_requests == 3)
            with pytest.raises(LimitReached, match="calls_max") as caught:
                await link.remote.ask(Ask("gated", {"x": "b"}))
            assert caught.value.retry_after_s > 0
            gate.open()
            for answer in await asyncio.gather(*asking):
                answer.release()

    run(script())


# over time


@pytest.mark.slow
def test_three_hundred_large_requests_leave_the_memory_where_it_was(repository: Repository) -> None:
    async def script() -> None:
        async with manager(repository) as d:
            ports = await d.start_ingress(spec(), ENTRY)
            here, there = psutil.Process(), psutil.Process(d.pids()["line"])
            clients = [await Client.connect(ports["grpc"]) for _ in range(3)]

            async def many(client: Client, count: int) -> None:
                for _ in range(count):
                    assert await client.ask(ask="array", items=1_000_000) is not None

            await asyncio.gather(*(many(client, 34) for client in clients))
            before = here.memory_info().rss, there.memory_info().rss
            await asyncio.gather(*(many(client, 66) for client in clients))
            grown = here.memory_info().rss - before[0], there.memory_info().rss - before[1]
            assert max(grown) < 24 << 20  # a leak of one in ten would be 80 MB
            connection = d._supervisors[0].connection
            assert connection is not None
            await until(lambda: connection.open_requests == connection.lent_bytes == 0)

    run(script())
