"""RemoteBackend returns the same outputs, errors and statistics as LocalBackend: each test runs over both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.fire import Gate, settled, wait_until
from tests.engine.fire import builder as base
from tests.engine.serving.frontend.linked import linked, settle
from weftline.engine.protocol.packed import PendingTensor
from weftline.engine.protocol.values import decoded_json
from weftline.engine.repository import Repository
from weftline.engine.result import owned
from weftline.engine.serving.auth.rates import TokenRates
from weftline.engine.serving.auth.tokens import TokenFile, digest
from weftline.engine.serving.backend import Ask, Backend
from weftline.engine.serving.config import ServedPipeline
from weftline.engine.serving.frontend import messages as msg
from weftline.engine.serving.frontend.remote import RemoteBackend
from weftline.engine.serving.frontend.shared_buffer import PackedValues, SharedBuffer
from weftline.engine.serving.local import LocalBackend
from weftline.engine.serving.statistics import Statistics
from weftline.errors import (
    DeadlineExceeded,
    InputError,
    SessionClosed,
    StepError,
    UnknownModel,
    WeftlineError,
)
from weftline.nodes.urgency import SequencePart, seed_of
from weftline.pipelines.spec.builder import Builder
from weftline.shm.arena import HostArena
from weftline.shm.block import PAGE_BYTES
from weftline.shm.spec import TensorSpec

LARGE = np.arange(2_000_000, dtype=np.float32)  # 8 MB

ECHO = """weftline: 1
name: echo
inputs: {x: text}
steps:
  s: {node: echo, inputs: {value: x}}
outputs: {y: s.value}
"""


def one_step(name: str, node: str, kind: str, *, limits: dict[str, Any] | None = None, **options: Any) -> Builder:
    p = base(name, **({"arena_bytes": 64 << 20} | (limits or {})))
    p.output("y", p.step("s", node, value=p.input("x", kind), **options).value)
    return p


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    return Gate(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def repository(gate: Gate) -> Iterator[Repository]:
    with Repository() as repository:
        repository.load("text", one_step("text", "echo", "text"))
        repository.load("array", one_step("array", "echo", "float32[N]", type="float32[N]"))
        repository.load("any", one_step("any", "echo", "tensor", type="tensor"))
        repository.load("json", one_step("json", "echo", "json", type="json"))
        repository.load("arrays", one_step("arrays", "echo", "list[float32[N]]", type="list[float32[N]]"))
        repository.load("bytes", one_step("bytes", "echo", "bytes", type="bytes"))
        repository.load("fail", one_step("fail", "fail", "text", equals="bad"))
        repository.load("trickle", one_step("trickle", "trickle", "text", pieces=5))
        p = base("seeded")
        function = "serving/frontend/seed_step.py:brought"
        p.output("y", p.step("s", "function", value=p.input("x", "text"), function=function).output)
        repository.load("seeded", p)
        p = base("gated")
        p.output("y", p.step("s", "fire_steps.py:Gated", value=p.input("x", "text"), folder=str(gate.folder)).value)
        repository.load("gated", p)
        repository.load(
            "flood",
            one_step("flood", "trickle", "text", pieces=4000, piece_bytes=8192, limits={"stream_bytes_max": 1 << 20}),
        )
        yield repository


Run = Callable[[Callable[[Backend], Coroutine[Any, Any, Any]]], Any]


@pytest.fixture(params=["local", "remote"])
def run(request: pytest.FixtureRequest, repository: Repository, gate: Gate) -> Iterator[Run]:
    """Run a coroutine function with one of the two backends. Afterwards nothing of any request is left."""

    def run(ask: Callable[[Backend], Awaitable[Any]]) -> Any:
        async def over() -> Any:
            backend = LocalBackend(repository, {})
            if request.param == "local":
                return await asyncio.wait_for(ask(backend), 20)
            async with linked(backend) as link:
                answer = await asyncio.wait_for(ask(link.remote), 20)
                await settle(link)
                return answer

        return asyncio.run(over())

    gate.open()
    yield run
    gate.open()
    wait_until(lambda: all(settled(repository.get(entry.name)) for entry in repository.index()), 5)


async def outputs_of(backend: Backend, ask: Ask) -> dict[str, Any]:
    with await backend.ask(ask) as answer:
        await answer.load()
        return {name: decoded_json(owned(value)) for name, value in answer.outputs.items()}


def error_of(run: Run, ask: Ask) -> WeftlineError:
    async def failing(backend: Backend) -> WeftlineError:
        with pytest.raises(WeftlineError) as caught:
            await outputs_of(backend, ask)
        return caught.value

    error: WeftlineError = run(failing)
    return error


# answers


@pytest.mark.slow(but_first=1)
def test_a_seed_goes_with_a_row_of_a_job_to_its_step(run: Run) -> None:
    async def script(backend: Backend) -> None:
        seeded = {"y": f"{seed_of(7, 's')} -100"}
        assert await outputs_of(backend, Ask("seeded", {"x": "a"}, job=True, seed=7)) == seeded
        assert await outputs_of(backend, Ask("seeded", {"x": "a"})) == {"y": "None 0"}

    run(script)


def test_a_small_answer_comes_with_its_timings_and_version(run: Run) -> None:
    async def script(backend: Backend) -> None:
        with await backend.ask(Ask("text", {"x": "a"}, id="7", priority=3)) as answer:
            assert answer.outputs == {"y": "a"}
            assert [timing.step for timing in answer.timings] == ["s"]
            assert (answer.version, answer.total_ms > 0) == (1, True)

    run(script)


def test_eight_megabytes_come_back_bit_for_bit(run: Run) -> None:
    found = run(lambda backend: outputs_of(backend, Ask("array", {"x": LARGE})))
    assert found["y"].tobytes() == LARGE.tobytes()


@pytest.mark.parametrize(
    ("model", "value"),
    [
        ("json", {"a": [1, 2.5, None, True, "x"], "b": {"c": []}}),
        ("json", ["x" * 50_000]),
        ("json", [{"a": n, "b": None} for n in range(20_000)]),
        ("text", "ü" * 40_000),
        ("bytes", b"\x00\xff" * 40_000),
        ("bytes", b""),
    ],
)
def test_values_of_every_kind_come_back_equal(run: Run, model: str, value: Any) -> None:
    assert run(lambda backend: outputs_of(backend, Ask(model, {"x": value})))["y"] == value


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float64", ">f4"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 1), (64, 1024)])
def test_arrays_of_every_dtype_and_shape_come_back_equal(run: Run, dtype: str, shape: tuple[int, ...]) -> None:
    array = (np.arange(int(np.prod(shape))) % 100).astype(dtype).reshape(shape)
    found = run(lambda backend: outputs_of(backend, Ask("any", {"x": array})))["y"]
    assert (found.shape, found.tolist()) == (array.shape, array.tolist())


def test_lists_of_arrays_come_back_equal(run: Run) -> None:
    arrays = [np.full(10_000, at, np.float32) for at in range(4)]
    found = run(lambda backend: outputs_of(backend, Ask("arrays", {"x": arrays})))["y"]
    assert [one.tolist() for one in found] == [one.tolist() for one in arrays]


@pytest.mark.parametrize("items", [4, 100_000])
def test_a_pending_tensor_is_read_once(run: Run, items: int) -> None:
    data, reads = np.arange(items, dtype=np.float32), []

    def read_into(buffer: memoryview) -> None:
        reads.append(len(buffer))
        buffer[:] = data.tobytes()

    pending = PendingTensor(TensorSpec("float32", (items,)), read_into)
    found = run(lambda backend: outputs_of(backend, Ask("array", {"x": pending})))["y"]
    assert found.tolist() == data.tolist()
    assert reads == [items * 4]


def test_a_pending_tensor_whose_bytes_are_gone_is_an_input_error(run: Run) -> None:
    def read_into(buffer: memoryview) -> None:
        raise InputError("region r: it is not there any more")

    pending = PendingTensor(TensorSpec("float32", (100_000,)), read_into)
    assert isinstance(error := error_of(run, Ask("array", {"x": pending})), InputError)
    assert "not there any more" in str(error)


def test_many_at_a_time_each_get_their_own(run: Run) -> None:
    async def script(backend: Backend) -> list[Any]:
        asks = [Ask("array", {"x": np.full(50_000, at, np.float32)}) for at in range(60)]
        return await asyncio.gather(*(outputs_of(backend, ask) for ask in asks))

    assert [int(found["y"][-1]) for found in run(script)] == list(range(60))


# errors


def test_errors_arrive_as_they_were(run: Run) -> None:
    error = error_of(run, Ask("fail", {"x": "bad"}))
    assert isinstance(error, StepError)
    assert (error.status, error.step) == ("INTERNAL", "s")
    assert "failed on purpose" in str(error)
    assert [timing.outcome for timing in error.timings] == ["failed"]


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize(
    ("ask", "kind"),
    [
        (Ask("text", {"x": 3}), InputError),
        (Ask("text", {}), InputError),
        (Ask("text", {"x": "a", "z": "b"}), InputError),
        (Ask("text", {"x": "a"}, outputs=["nothing"]), InputError),
        (Ask("text", {"x": "a"}, priority=1000), InputError),
        (Ask("text", {"x": "a"}, job=True, seed=-1), InputError),
        (Ask("text", {"x": "a"}, deadline_ms=-1), InputError),
        (Ask("text", {"x": "a"}, version="9"), UnknownModel),
        (Ask("text", {"x": "a"}, sequence=SequencePart("q", start=True)), None),
        (Ask("array", {"x": np.ones((2, 2), np.float32)}), InputError),
        (Ask("bytes", {"x": Path("/etc/hostname")}), InputError),
        (Ask("array", {"x": np.array([object()])}), InputError),
        (Ask("missing", {"x": "a"}), UnknownModel),
        (Ask("array", {"x": np.ones(30_000_000, np.float32)}), InputError),
    ],
)
def test_both_refuse_the_same(run: Run, ask: Ask, kind: type[WeftlineError] | None) -> None:
    async def script(backend: Backend) -> type[BaseException] | None:
        try:
            await outputs_of(backend, ask)
        except WeftlineError as error:
            return type(error)
        return None

    assert run(script) is kind


def test_a_deadline_ends_a_request_in_time(run: Run, gate: Gate) -> None:
    async def script(backend: Backend) -> float:
        gate.close()
        since = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await outputs_of(backend, Ask("gated", {"x": "a"}, deadline_ms=100))
        gate.open()
        return time.monotonic() - since

    assert run(script) < 1.0


def test_a_deadline_ends_the_wait_for_memory_for_inputs(repository: Repository) -> None:
    async def script() -> None:
        async with linked(LocalBackend(repository, {}), buffer_bytes=8 << 20) as link:
            taken = link.buffer.place(PackedValues({"x": np.ones(1 << 20, np.float32)}))
            large = {"x": np.ones(5 << 18, np.float32)}
            with pytest.raises(DeadlineExceeded, match="all memory for inputs"):
                await link.remote.ask(Ask("array", large, deadline_ms=50))
            link.buffer.free(taken.block)
            await outputs_of(link.remote, Ask("array", large, deadline_ms=20_000))

    asyncio.run(script())


# cancels


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.02, 0.2])
def test_a_cancelled_ask_is_withdrawn(run: Run, gate: Gate, repository: Repository, after_s: float) -> None:
    session = repository.get("gated")

    async def script(backend: Backend) -> None:
        gate.close()
        asking = asyncio.create_task(outputs_of(backend, Ask("gated", {"x": "a"})))
        await asyncio.sleep(after_s)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        until = time.monotonic() + 1
        while session.stats()["requests"]["open"]:
            assert time.monotonic() < until, "the request is still open"
            await asyncio.sleep(0.005)
        gate.open()

    run(script)


def test_cancels_at_any_moment_leave_nothing(run: Run) -> None:
    async def script(backend: Backend) -> None:
        for after in range(40):
            asking = asyncio.create_task(outputs_of(backend, Ask("array", {"x": LARGE[:500_000]})))
            await asyncio.sleep(after * 0.0003)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    run(script)


# streams


def test_a_stream_comes_in_order_and_then_whole(run: Run) -> None:
    async def script(backend: Backend) -> list[tuple[str, Any, bool]]:
        return [(piece.output, piece.value, piece.last) async for piece in backend.stream(Ask("trickle", {"x": "a"}))]

    found = run(script)
    assert [value for _, value, last in found if not last] == [letter * 8 for letter in "abcde"]
    assert [last for _, _, last in found] == [False] * 5 + [True]


def test_a_streamed_large_array_is_the_readers_own(run: Run) -> None:
    async def script(backend: Backend) -> list[Any]:
        return [piece.value async for piece in backend.stream(Ask("array", {"x": LARGE}))]

    (found,) = run(script)
    assert found.tobytes() == LARGE.tobytes()
    found[0] = 1  # a copy


def test_a_stream_fails_as_it_would_there(run: Run) -> None:
    async def script(backend: Backend) -> None:
        with pytest.raises(InputError):
            async for _ in backend.stream(Ask("trickle", {"x": 3})):
                pass

    run(script)


def test_a_stream_that_is_left_is_withdrawn(run: Run, repository: Repository) -> None:
    session = repository.get("flood")

    async def script(backend: Backend) -> None:
        stream = backend.stream(Ask("flood", {"x": "a"}))
        async for _ in stream:
            break
        await stream.aclose()
        until = time.monotonic() + 1
        while session.stats()["requests"]["open"]:
            assert time.monotonic() < until, "the request is still open"
            await asyncio.sleep(0.005)

    run(script)


@pytest.mark.slow(but_first=1)
def test_a_reader_that_stops_reading_stops_the_steps(run: Run, repository: Repository) -> None:
    """Of 32 MB, a window of 1 MiB is in transit and 1 MiB waits in the engine, each plus one round."""
    session = repository.get("flood")

    async def script(backend: Backend) -> int:
        stream = backend.stream(Ask("flood", {"x": "a"}))
        await anext(stream)
        await asyncio.sleep(0.7)
        assert session.stats()["requests"]["open"] == 1, "all of it was produced without a reader"
        count = 1
        async for _ in stream:
            count += 1
        return count

    assert run(script) == 4001


# what is counted


def test_statistics_are_those_of_the_engine(repository: Repository) -> None:
    statistics = Statistics()

    async def script() -> None:
        backend = LocalBackend(repository, {}, observers=[statistics])
        async with linked(backend, statistics=statistics) as link:
            with await link.remote.ask(Ask("text", {"x": "a"})):
                pass
            assert await link.remote.statistics({"text": 1}) == await statistics.tell({"text": 1})
            assert (await link.remote.statistics({"text": 1}))[0].success.count == 1

    asyncio.run(asyncio.wait_for(script(), 20))


# models


def test_index_faces_and_figures_are_the_same(run: Run, repository: Repository) -> None:
    here = LocalBackend(repository, {})

    async def script(backend: Backend) -> None:
        assert [(state.name, state.version, state.state) for state in backend.index()] == [
            (state.name, state.version, state.state) for state in here.index()
        ]
        assert [backend.info(state.name) for state in backend.index()] == [
            here.info(state.name) for state in here.index()
        ]
        assert backend.info("text", "1").version == 1
        assert backend.stats("text").keys() == here.stats("text").keys()
        for model, version in (("missing", ""), ("text", "2")):
            with pytest.raises(UnknownModel) as theirs:
                backend.info(model, version)
            with pytest.raises(UnknownModel) as ours:
                here.info(model, version)
            assert str(theirs.value) == str(ours.value)

    run(script)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["local", "remote"])
def test_a_loaded_model_is_visible_at_once_and_an_unloaded_one_is_not(where: str, tmp_path: Path) -> None:
    (tmp_path / "echo.yaml").write_text(ECHO)
    (tmp_path / "broken.yaml").write_text(ECHO.replace("node: echo", "node: nothing"))
    served = {name: ServedPipeline(tmp_path / f"{name}.yaml", load=False) for name in ("echo", "broken")}

    async def script(backend: Backend) -> None:
        assert [state.ready for state in backend.index()] == [False, False]
        with pytest.raises(SessionClosed):
            backend.info("echo")
        assert await backend.load("echo") == 1
        assert backend.info("echo").inputs[0].name == "x"
        assert [state.ready for state in backend.index() if state.name == "echo"] == [True]
        assert (await outputs_of(backend, Ask("echo", {"x": "a"}))) == {"y": "a"}
        assert await backend.load("echo") == 2
        assert backend.info("echo").version == 2
        await backend.unload("echo")
        with pytest.raises(SessionClosed):
            backend.info("echo")
        with pytest.raises(SessionClosed):
            await outputs_of(backend, Ask("echo", {"x": "a"}))
        with pytest.raises(UnknownModel):
            await backend.load("missing")
        with pytest.raises(WeftlineError) as caught:
            await backend.load("broken")
        assert caught.value.status == "FAILED_PRECONDITION"
        assert await backend.metrics() == b"figures 1\n"

    async def over() -> None:
        with Repository() as repository:
            local = LocalBackend(repository, served, metrics=lambda: b"figures 1\n")
            if where == "local":
                await script(local)
            else:
                async with linked(local) as link:
                    await script(link.remote)

    asyncio.run(over())


def test_permits_of_all_ingress_processes_come_from_one_account(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    file.write_text(f'tokens:\n  - {{name: web, sha256: "{digest("t")}", requests_per_s: 0.01, burst: 3}}\n')
    file.chmod(0o600)

    async def script() -> None:
        account = TokenRates(TokenFile(file))
        with Repository() as repository:
            local = LocalBackend(repository, {})
            async with linked(local, rates=account) as one, linked(local, rates=account) as two:
                waits = await asyncio.gather(*(link.remote.take("web") for link in (one, two, one, two)))
                assert sorted(wait > 0 for wait in waits) == [False, False, False, True]
                assert max(waits) == pytest.approx(100, abs=1)
                assert await one.remote.take("unknown") == 0.0
                two.connection.close()
                with pytest.raises(SessionClosed):
                    await two.remote.take("web")

    asyncio.run(script())


class Sent:
    """A transport that keeps what is sent."""

    is_open = writable = True

    def __init__(self) -> None:
        self.messages: list[msg.FromIngress] = []

    def send(self, body: bytes) -> None:
        self.messages.append(msg.decode_from_ingress(body))


@pytest.mark.parametrize("order", ["response first", "cancellation first"])
@pytest.mark.parametrize("announced", [False, True])
def test_an_answer_that_meets_a_cancellation_is_released(order: str, announced: bool) -> None:
    async def run() -> None:
        with HostArena.create(PAGE_BYTES) as arena:
            backend, sent = RemoteBackend(SharedBuffer(arena), arena, 1 << 20), Sent()
            backend.attach(sent)  # type: ignore[arg-type]
            asking = asyncio.ensure_future(backend.ask(Ask("m", {"x": "a"})))
            await asyncio.sleep(0)
            [request] = sent.messages
            assert isinstance(request, msg.FrontendRequest)
            response = msg.ResponseReady(request.id, 1 << 20) if announced else msg.FrontendResponse(request.id, {}, 64)
            if order == "response first":
                backend.on_message(response)
                asking.cancel()
            else:
                asking.cancel()
                backend.on_message(response)
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert sent.messages[1:] == [msg.CancelRequest(request.id) if announced else msg.BlockReleased(64)]

    asyncio.run(run())
