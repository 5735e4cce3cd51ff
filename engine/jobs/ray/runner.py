"""Ray runner: executes blocks on replicas of a pipeline through Ray Data.

    submit --block--> object store       Ray Data:  block numbers --> Replica, one of `replicas`
     |                    ^                                              |
     |                    `------------ reads the block by its number ---+
     `--number--> Coordinator               driver <-- results by number

Ray Data sends numbers to its actors, restarts those that die and sends their numbers again; the coordinator has the
next attempt for the restarted one (coordinator.py). Order, commits and resumption belong to the job: a result resolves
the future of its block once, in any order.
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
from weftline.engine.jobs.rows import BlockResult, JobRunner, RowBlock
from weftline.engine.jobs.runners.factory import RunnerFactory, local_runner_factory
from weftline.errors import ModelError, SessionClosed, Unavailable, WeftlineError
from weftline.pipelines.spec.loader import load_file

IN_FLIGHT_MAX = 16
"""Most concurrent blocks of a replica; the runner's `ahead` is the tighter bound."""

LOOK_S = 1.0
"""Polling interval while waiting for the first replica."""

CLOSED = "the replicas were closed"

END_S = 20.0
"""Longest wait for running blocks at close."""


class RayRunner:
    """Executes blocks on a cluster; see `rows.JobRunner`. The constructor waits for the first replica.

    opener:    'module:function' that returns a JobRunner, importable on every machine of the cluster.
    arguments: its keyword arguments; JSON values. Files among them are read where a replica runs.
    replicas:  number of replicas.
    need:      resources of each.
    address:   of the cluster; see `connected`.
    connection: an open connection, closed with the runner; None: connect to `address`.
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
        self._asked: dict[
            int, tuple[Future[BlockResult], Any]
        ] = {}  # by number: the future, and the reference that keeps the block
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
            info = self._wait_info()
        except BaseException:
            self.close()
            raise
        self.ahead = replicas * (info.ahead + 1)
        self.block_rows, self.inputs, self.outputs = info.block_rows, info.inputs, info.outputs
        self.repeatable = info.repeatable

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

    def wait_for_figures(self) -> None:
        """Figures arrive with results."""

    def close(self) -> None:
        """End the replicas. Waiting blocks are dropped; running ones have END_S to finish."""
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

    # results

    def _listen(self, answers: Any) -> None:
        """Receive results until the end."""
        from weftline.engine.jobs.ray.replica import ANSWER, NUMBER

        error: BaseException | None = None
        try:
            for batch in answers.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
                for number, data in zip(batch[NUMBER].to_pylist(), batch[ANSWER].to_pylist(), strict=True):
                    self._receive(number, data)
        except Exception as failure:  # any error of Ray or a replica ends the job with a message
            error = failure
        self._end(self._why(error))

    def _receive(self, number: int, data: bytes) -> None:
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
        """Fail all waiting futures."""
        with self._lock:
            self._failure = self._failure or (SessionClosed(CLOSED) if self._closed else why)
            waiting, self._asked = self._asked, {}
        for future, _ in waiting.values():
            _resolve(future, self._failure)

    def _why(self, error: BaseException | None) -> WeftlineError:
        try:
            reason = self._ray.get(self._coordinator.failure.remote(), timeout=LOOK_S)
        except Exception:
            reason = ""  # the coordinator is gone, which is the reason
        if not reason:
            found = "its machine may be gone" if error is None else _last_line(error)
            reason = f"the replicas on the Ray cluster ended: {found}"
        return ModelError(reason)

    def _wait_info(self) -> RunnerInfo:
        """Wait for the first replica, without a time limit while replicas can open."""
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
    """Start the coordinator on this machine, whose loss ends the driver too."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from weftline.engine.jobs.ray.coordinator import Coordinator

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=here)(Coordinator).remote(replicas)


def _pipeline(coordinator: Any, opener: str, arguments: str, replicas: int, need: Need) -> Any:
    """Return the data set of results; execution starts with its iteration.

    Ray Data merges small blocks up to a target size. A target of one byte sends every result at once.
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
    """Resolve a future that may be cancelled."""
    try:
        if isinstance(end, WeftlineError):
            future.set_exception(end)
        else:
            future.set_result(end)
    except InvalidStateError:
        pass


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip()[:300] if lines else ''}"


BUSY = "busy:"
"""Prefix of figures that are current fractions; the others are totals."""

STARTED = "started"
"""Figure of a replica: number of replicas started at its opening, with itself."""

SILENT_S = 30.0
"""Replicas without a report for this time count neither as busy nor as idle."""


@dataclass(slots=True)
class ReplicaStats:
    """Last figures of each replica. A restarted replica has a new name; the totals of the old one still count.

    replicas: number of concurrent replicas.
    """

    replicas: int
    _reports: dict[str, tuple[float, Mapping[str, float]]] = field(default_factory=dict)

    def note(self, replica: str, figures: Mapping[str, float], now_s: float) -> None:
        """Store the figures; results arrive in any order, so a smaller total is older."""
        before = self._reports.get(replica, (now_s, {}))[1]
        totals = {
            name: value if name.startswith(BUSY) else max(value, before.get(name, 0.0))
            for name, value in figures.items()
        }
        self._reports[replica] = now_s, totals

    def figures(self, now_s: float) -> dict[str, float]:
        """Return sums of totals, and means of fractions over recently active replicas.

        `replicas`: recently active ones; `restarts`: replacements of ended ones, after their first result.
        """
        summed: dict[str, float] = {}
        lately = sorted(self._reports.values(), key=lambda one: -one[0])[: self.replicas]
        lately = [one for one in lately if now_s - one[0] <= SILENT_S]
        for _, report in self._reports.values():
            for name, value in report.items():
                if not name.startswith(BUSY) and name != STARTED:
                    summed[name] = summed.get(name, 0.0) + value
        for _, report in lately:
            for name, value in report.items():
                if name.startswith(BUSY):
                    summed[name] = summed.get(name, 0.0) + value / len(lately)
        started = max((report.get(STARTED, 0.0) for _, report in self._reports.values()), default=0.0)
        return {**summed, "replicas": float(len(lately)), "restarts": max(0.0, started - self.replicas)}


DECIDE_S = 300.0
"""Longest wait for resources for planning, which needs those of one replica."""

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
    """Connect to a cluster and plan a job there; as `local_runner_factory`, with replicas of the pipeline.

    The pipeline's files have the same paths on every machine. Calling the factory opens the replicas; closing the
    runner closes the connection. PipelineError for the file; InputError, Unavailable, MissingPackage for the cluster;
    ModelError for errors on the cluster's machines.
    """
    load_file(pipeline)
    request = {
        "pipeline": str(pipeline.resolve()),
        "outputs": None if outputs is None else list(outputs),
        "seed": seed,
        "block_rows": block_rows,
        "mode": mode,
    }
    with ExitStack() as connecting:
        connecting.enter_context(connected(address))
        check_capacity(need, replicas)
        plan = _decided(request, need)
        connection = connecting.pop_all()
    arguments = {**request, "mode": plan["mode"], "block_rows": plan["block_rows"]}

    def open_replicas(progress: object) -> JobRunner:
        return RayRunner(OPENER, arguments, replicas=replicas, need=need, connection=connection)

    return RunnerFactory(
        plan["mode"], plan["why"], plan["block_rows"], plan["part_rows"], plan["repeatable"], open_replicas
    )  # fmt: skip


def open_replica(
    pipeline: str, outputs: Sequence[str] | None, seed: int, block_rows: int | None, mode: str
) -> JobRunner:
    """Open the runner of a replica, on its machine."""
    return local_runner_factory(Path(pipeline), outputs=outputs, seed=seed, block_rows=block_rows, mode=mode)(None)


def decide(request: str) -> str:
    """Plan a job on a machine of the cluster; returns JSON with the settings, or `error`."""
    options = msgspec.json.decode(request)
    try:
        factory = local_runner_factory(Path(options.pop("pipeline")), **options)
    except WeftlineError as error:
        return msgspec.json.encode({"error": str(error)}).decode()
    plan: dict[str, Any] = {name: getattr(factory, name) for name in ("mode", "why", "block_rows", "part_rows")}
    return msgspec.json.encode({**plan, "repeatable": dict(factory.repeatable)}).decode()


def _decided(request: dict[str, Any], need: Need) -> dict[str, Any]:
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    task = ray.remote(num_cpus=need.cpus, num_gpus=need.gpus, max_retries=1)(decide)
    try:
        plan: dict[str, Any] = msgspec.json.decode(
            ray.get(task.remote(msgspec.json.encode(request).decode()), timeout=DECIDE_S)
        )
    except GetTimeoutError:
        found = f"the Ray cluster had no resources for a replica within {DECIDE_S:g} s"
        raise Unavailable(f"{found}\n    fix: wait until other work on it has ended, or request less") from None
    except RayError as error:
        reason = " ".join(str(error).split())[-300:]
        fix = "install the same weftline on every machine of the cluster"
        raise ModelError(f"the Ray cluster could not plan the pipeline: {reason}\n    fix: {fix}") from None
    if "error" in plan:
        raise ModelError(f"on the Ray cluster: {plan['error']}")
    return plan
