"""Ray runner: executes blocks on replicas of a pipeline through Ray Data.

    ask --block--> object store             Ray Data:  feed of numbers --> Replica, as many as were asked for
     |                  ^                                                      |
     `--number--> Coordinator  `---------------- reads the block by its number ------'
                                             driver <-- numbers with answers --'

Ray Data pulls numbers through its actors, restarts those that die and hands their numbers over again; the desk tells
the restarted one what to try (`trials.py`). Order, commits and resumption are the job's own: an answer resolves the
future of its block, once, whoever gave it and in whatever order.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from weftline.engine.jobs.ray.cluster import Need, check_capacity, connected
from weftline.engine.jobs.ray.codec import ReplicaResult, RunnerInfo, decode_info, decode_sent, encode_block
from weftline.engine.jobs.rows import BlockResult, RowBlock, Runner
from weftline.engine.jobs.runners.factory import RunnerFactory, local_runner_factory
from weftline.errors import ModelError, SessionClosed, Unavailable, WeftlineError
from weftline.nodes.ports import PortType
from weftline.pipelines.spec.loader import load_file

IN_FLIGHT_MAX = 16
"""Most blocks that one replica has at a time; how many it is given is bounded by the answerer's `ahead` long before."""

LOOK_S = 1.0
"""How often somebody who waits for the first replica looks whether there can be one."""

CLOSED = "the replicas were closed"

END_S = 20.0
"""How long blocks that are being answered may take to end when the job is closed."""


class RayRunner:
    """Answers blocks on a cluster; see `rows.Runner`. Opening it waits until the first replica has opened.

    opener:    'module:function' that returns an Runner, importable on every machine of the cluster.
    arguments: its keyword arguments; JSON values. Files among them are read where a replica runs.
    replicas:  how many.
    need:      what each takes.
    address:   of the cluster; see `connected`.
    connection: holds the connection to it, and is ended with this; None: one is made to `address`.
    """

    def __init__(
        self,
        opener: str,
        arguments: Mapping[str, Any],
        *,
        replicas: int = 1,
        need: Need = Need(),  # noqa: B008  frozen
        address: str | None = None,
        connection: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._asked: dict[int, tuple[Future[BlockResult], Any]] = {}  # by number: who waits, and what keeps the block
        self._next = 0
        self._failure: WeftlineError | None = None
        self._closed = False
        self._stats = ReplicaStats(replicas)
        self._open = ExitStack()
        self._thread: threading.Thread | None = None
        try:
            self._open.enter_context(connection or connected(address))
            check_capacity(need, replicas)
            import ray

            self._ray = ray
            self._coordinator = _start_coordinator(replicas)
            answers = _pipeline(
                self._coordinator, opener, msgspec.json.encode(dict(arguments)).decode(), replicas, need
            )
            self._thread = threading.Thread(target=self._listen, args=(answers,), name="weftline-replicas", daemon=True)
            self._thread.start()
            self._info = self._wait_info()
        except BaseException:
            self.close()
            raise
        self._ahead = replicas * (self._info.ahead + 1)

    @property
    def ahead(self) -> int:
        return self._ahead

    @property
    def block_rows(self) -> int:
        return self._info.block_rows

    @property
    def inputs(self) -> Mapping[str, PortType]:
        return self._info.inputs

    @property
    def outputs(self) -> Mapping[str, PortType]:
        return self._info.outputs

    @property
    def repeatable(self) -> Mapping[str, str]:
        return self._info.repeatable

    def submit(self, block: RowBlock) -> Future[BlockResult]:
        future: Future[BlockResult] = Future()
        with self._lock:
            if self._closed or self._failure is not None:
                future.set_exception(self._failure or SessionClosed(CLOSED))
                return future
            number = self._next
            self._next += 1
            ref = self._ray.put(encode_block(block))
            self._asked[number] = future, ref
        self._coordinator.offer.remote(number, len(block), [ref])  # in a list it travels as a reference
        return future

    def figures(self) -> Mapping[str, float]:
        return self._stats.figures(time.monotonic())

    def settle(self) -> None:
        """Figures come with answers."""

    def close(self) -> None:
        """End the replicas. Blocks that nobody has begun are dropped, and those under way get END_S to end."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            if self._thread is not None:
                self._coordinator.close.remote()
                self._thread.join(END_S)
                self._ray.kill(self._coordinator)
            self._end(SessionClosed(CLOSED))
        finally:
            self._open.close()

    # the answers

    def _listen(self, answers: Any) -> None:
        """Take answers as they come, until there are no more."""
        from weftline.engine.jobs.ray.replica import ANSWER, NUMBER

        error: BaseException | None = None
        try:
            for batch in answers.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
                for number, data in zip(batch[NUMBER].to_pylist(), batch[ANSWER].to_pylist(), strict=True):
                    self._hear(number, data)
        except Exception as failure:  # whatever Ray or a replica raises ends the job, in words
            error = failure
        self._end(self._why(error))

    def _hear(self, number: int, data: bytes) -> None:
        with self._lock:
            asked = self._asked.pop(number, None)
        if asked is None:
            return
        if not data:
            _resolve(asked[0], SessionClosed(CLOSED))
            return
        self._coordinator.forget.remote(number)
        sent: ReplicaResult = decode_sent(data)
        self._stats.note(sent.replica, sent.figures, time.monotonic())
        _resolve(asked[0], sent.answered)

    def _end(self, why: WeftlineError) -> None:
        """Tell everybody who still waits that nobody will answer."""
        with self._lock:
            self._failure = self._failure or (SessionClosed(CLOSED) if self._closed else why)
            waiting, self._asked = self._asked, {}
        for future, _ in waiting.values():
            _resolve(future, self._failure)

    def _why(self, error: BaseException | None) -> WeftlineError:
        try:
            told = self._ray.get(self._coordinator.failure.remote(), timeout=LOOK_S)
        except Exception:
            told = ""  # the desk is gone, and that is then the reason
        if not told:
            found = "its machine may be gone" if error is None else _first_line(error)
            told = f"the replicas on the Ray cluster ended: {found}"
        return ModelError(told)

    def _wait_info(self) -> RunnerInfo:
        """Wait for the first replica; models may take their time, so only what cannot end is given up."""
        asking = self._coordinator.wait_info.remote()
        while self._thread is not None and self._thread.is_alive():
            done, _ = self._ray.wait([asking], timeout=LOOK_S)
            if done:
                data = self._ray.get(asking)
                if data is None:
                    raise ModelError(self._ray.get(self._coordinator.failure.remote()))
                return decode_info(data)
        raise self._failure or ModelError("the replicas on the Ray cluster ended before one had opened")


def _start_coordinator(replicas: int) -> Any:
    """Start the desk on this machine: with the driver gone nobody needs it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from weftline.engine.jobs.ray.coordinator import Coordinator

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=here)(Coordinator).remote(replicas)


def _pipeline(coordinator: Any, opener: str, arguments: str, replicas: int, need: Need) -> Any:
    """Return the data set of answers; nothing runs before it is iterated.

    Ray Data joins what is small into blocks of a size; here every row is on its way to somebody who waits, so that a
    block of one byte is already large enough.
    """
    import ray

    context = ray.data.DataContext.get_current()
    before = context.target_max_block_size, context.enable_progress_bars
    context.target_max_block_size, context.enable_progress_bars = 1, False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of max_concurrency, for which there is no other way
            return _mapped(coordinator, opener, arguments, replicas, need)
    finally:
        context.target_max_block_size, context.enable_progress_bars = before


def _mapped(coordinator: Any, opener: str, arguments: str, replicas: int, need: Need) -> Any:
    import ray

    from weftline.engine.jobs.ray.replica import BlockNumbers, Replica

    return ray.data.read_datasource(BlockNumbers(coordinator), num_cpus=0, override_num_blocks=1).map_batches(
        Replica,
        batch_size=1,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=replicas, max_tasks_in_flight_per_actor=IN_FLIGHT_MAX),
        fn_constructor_args=(coordinator, opener, arguments),
        num_cpus=need.cpus,
        num_gpus=need.gpus,
        max_concurrency=IN_FLIGHT_MAX,
    )


def _resolve(future: Future[BlockResult], end: BlockResult | WeftlineError) -> None:
    """Resolve a future whose owner may have given up on it."""
    try:
        if isinstance(end, WeftlineError):
            future.set_exception(end)
        else:
            future.set_result(end)
    except InvalidStateError:
        pass


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip()[:300] if lines else ''}"


BUSY = "busy:"
"""How figures begin that are fractions of now; all others are totals."""

STARTED = "started"
"""Of a replica: how many had been started when it opened, itself among them."""

SILENT_S = 30.0
"""A replica that has said nothing for so long is not counted as busy, nor as idle."""


@dataclass(slots=True)
class ReplicaStats:
    """What replicas last said of themselves. One that was started again has another name, and its old totals count on.

    replicas: how many there are at a time.
    """

    replicas: int
    _said: dict[str, tuple[float, Mapping[str, float]]] = field(default_factory=dict)

    def note(self, replica: str, figures: Mapping[str, float], now_s: float) -> None:
        """Keep the figures; answers come in any order, so that a smaller total is an older one."""
        before = self._said.get(replica, (now_s, {}))[1]
        totals = {
            name: value if name.startswith(BUSY) else max(value, before.get(name, 0.0))
            for name, value in figures.items()
        }
        self._said[replica] = now_s, totals

    def figures(self, now_s: float) -> dict[str, float]:
        """Return totals summed up, and fractions as means of the replicas that have answered lately.

        `replicas` is how many these are; `restarts` counts those that took the place of one that ended,
        once one of them has answered.
        """
        summed: dict[str, float] = {}
        lately = sorted(self._said.values(), key=lambda one: -one[0])[: self.replicas]
        lately = [one for one in lately if now_s - one[0] <= SILENT_S]
        for _, said in self._said.values():
            for name, value in said.items():
                if not name.startswith(BUSY) and name != STARTED:
                    summed[name] = summed.get(name, 0.0) + value
        for _, said in lately:
            for name, value in said.items():
                if name.startswith(BUSY):
                    summed[name] = summed.get(name, 0.0) + value / len(lately)
        started = max((said.get(STARTED, 0.0) for _, said in self._said.values()), default=0.0)
        return {**summed, "replicas": float(len(lately)), "restarts": max(0.0, started - self.replicas)}


DECIDE_S = 300.0
"""How long the cluster may take to find room for the decision; it takes a moment of one replica's room."""

OPENER = "weftline.engine.jobs.ray.runner:open_replica"


def ray_runner_factory(
    pipeline: Path,
    *,
    outputs: Sequence[str] | None = None,
    seed: int = 0,
    block_rows: int | None = None,
    mode: str = "auto",
    replicas: int = 1,
    need: Need = Need(),  # noqa: B008  frozen
    address: str | None = None,
) -> RunnerFactory:
    """Connect to a cluster and decide how a job is answered there; as `open_here`, with whole-pipeline replicas.

    The pipeline's file, and what it names, lie under the same paths on every machine. Calling what is returned opens
    the replicas; closing their answerer ends the connection.
    PipelineError for what is wrong with the file; InputError, Unavailable, MissingPackage for the cluster; ModelError
    for what the cluster's machines say.
    """
    load_file(pipeline)
    asked = {
        "pipeline": str(pipeline.resolve()),
        "outputs": None if outputs is None else list(outputs),
        "seed": seed,
        "block_rows": block_rows,
        "mode": mode,
    }
    with ExitStack() as connecting:
        connecting.enter_context(connected(address))
        check_capacity(need, replicas)
        said = _decided(asked, need)
        connection = connecting.pop_all()
    arguments = {**asked, "mode": said["mode"], "block_rows": said["block_rows"]}

    def open_replicas(progress: object) -> Runner:
        return RayRunner(OPENER, arguments, replicas=replicas, need=need, connection=connection)

    return RunnerFactory(
        said["mode"], said["why"], said["block_rows"], said["part_rows"], said["repeatable"], open_replicas
    )  # fmt: skip


def open_replica(pipeline: str, outputs: Sequence[str] | None, seed: int, block_rows: int | None, mode: str) -> Runner:
    """Open the answerer of one replica, where it runs."""
    return local_runner_factory(Path(pipeline), outputs=outputs, seed=seed, block_rows=block_rows, mode=mode)(None)


def decide(asked: str) -> str:
    """Return as JSON how a job would be answered on this machine, or `error`: why it cannot be. Runs on the cluster."""
    told = msgspec.json.decode(asked)
    try:
        factory = local_runner_factory(Path(told.pop("pipeline")), **told)
    except WeftlineError as error:
        return msgspec.json.encode({"error": str(error)}).decode()
    said: dict[str, Any] = {name: getattr(factory, name) for name in ("mode", "why", "block_rows", "part_rows")}
    return msgspec.json.encode({**said, "repeatable": dict(factory.repeatable)}).decode()


def _decided(asked: dict[str, Any], need: Need) -> dict[str, Any]:
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    task = ray.remote(num_cpus=need.cpus, num_gpus=need.gpus, max_retries=1)(decide)
    try:
        said: dict[str, Any] = msgspec.json.decode(
            ray.get(task.remote(msgspec.json.encode(asked).decode()), timeout=DECIDE_S)
        )
    except GetTimeoutError:
        found = f"the Ray cluster had no room for a replica within {DECIDE_S:g} s"
        raise Unavailable(f"{found}\n    fix: wait until other work on it has ended, or ask for less") from None
    except RayError as error:
        told = " ".join(str(error).split())[-300:]
        fix = "install the same weftline on every machine of the cluster"
        raise ModelError(f"the Ray cluster could not plan the pipeline: {told}\n    fix: {fix}") from None
    if "error" in said:
        raise ModelError(f"on the Ray cluster: {said['error']}")
    return said
