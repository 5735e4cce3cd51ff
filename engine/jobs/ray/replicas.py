"""Ray runner: executes blocks on replicas of a pipeline through Ray Data.

    ask --block--> object store             Ray Data:  feed of numbers --> Replica, as many as were asked for
     |                  ^                                                      |
     `--number--> Desk  `---------------- reads the block by its number ------'
                                             driver <-- numbers with answers --'

Ray Data pulls numbers through its actors, restarts those that die and hands their numbers over again; the desk tells
the restarted one what to try (`trials.py`). Order, commits and resumption are the job's own: an answer resolves the
future of its block, once, whoever gave it and in whatever order.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import msgspec

from weftline.engine.jobs.ray.codec import AnswererInfo, Sent, decode_facts, decode_sent, encode_block
from weftline.engine.jobs.ray.connecting import Need, check_room, connected
from weftline.engine.jobs.ray.figures import ReplicaStats
from weftline.engine.jobs.rows import BlockResult, RowBlock
from weftline.errors import ModelError, SessionClosed, WeftlineError
from weftline.nodes.ports import PortType

IN_FLIGHT_MAX = 16
"""Most blocks that one replica has at a time; how many it is given is bounded by the answerer's `ahead` long before."""

LOOK_S = 1.0
"""How often somebody who waits for the first replica looks whether there can be one."""

CLOSED = "the replicas were closed"

END_S = 20.0
"""How long blocks that are being answered may take to end when the job is closed."""


class ReplicaAnswerer:
    """Answers blocks on a cluster; see `rows.Answerer`. Opening it waits until the first replica has opened.

    opener:    'module:function' that returns an Answerer, importable on every machine of the cluster.
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
        self._fleet = ReplicaStats(replicas)
        self._open = ExitStack()
        self._thread: threading.Thread | None = None
        try:
            self._open.enter_context(connection or connected(address))
            check_room(need, replicas)
            import ray

            self._ray = ray
            self._desk = _start_desk(replicas)
            answers = _pipeline(self._desk, opener, msgspec.json.encode(dict(arguments)).decode(), replicas, need)
            self._thread = threading.Thread(target=self._listen, args=(answers,), name="weftline-replicas", daemon=True)
            self._thread.start()
            self._facts = self._wait_facts()
        except BaseException:
            self.close()
            raise
        self._ahead = replicas * (self._facts.ahead + 1)

    @property
    def ahead(self) -> int:
        return self._ahead

    @property
    def block_rows(self) -> int:
        return self._facts.block_rows

    @property
    def inputs(self) -> Mapping[str, PortType]:
        return self._facts.inputs

    @property
    def outputs(self) -> Mapping[str, PortType]:
        return self._facts.outputs

    @property
    def repeatable(self) -> Mapping[str, str]:
        return self._facts.repeatable

    def ask(self, block: RowBlock) -> Future[BlockResult]:
        future: Future[BlockResult] = Future()
        with self._lock:
            if self._closed or self._failure is not None:
                future.set_exception(self._failure or SessionClosed(CLOSED))
                return future
            number = self._next
            self._next += 1
            ref = self._ray.put(encode_block(block))
            self._asked[number] = future, ref
        self._desk.offer.remote(number, len(block), [ref])  # in a list it travels as a reference
        return future

    def figures(self) -> Mapping[str, float]:
        return self._fleet.figures(time.monotonic())

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
                self._desk.close.remote()
                self._thread.join(END_S)
                self._ray.kill(self._desk)
            self._end(SessionClosed(CLOSED))
        finally:
            self._open.close()

    # the answers

    def _listen(self, answers: Any) -> None:
        """Take answers as they come, until there are no more."""
        from weftline.engine.jobs.ray.feed import NUMBER
        from weftline.engine.jobs.ray.replica import ANSWER

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
        self._desk.forget.remote(number)
        sent: Sent = decode_sent(data)
        self._fleet.note(sent.replica, sent.figures, time.monotonic())
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
            told = self._ray.get(self._desk.failure.remote(), timeout=LOOK_S)
        except Exception:
            told = ""  # the desk is gone, and that is then the reason
        if not told:
            found = "its machine may be gone" if error is None else _first_line(error)
            told = f"the replicas on the Ray cluster ended: {found}"
        return ModelError(told)

    def _wait_facts(self) -> AnswererInfo:
        """Wait for the first replica; models may take their time, so only what cannot end is given up."""
        asking = self._desk.wait_facts.remote()
        while self._thread is not None and self._thread.is_alive():
            done, _ = self._ray.wait([asking], timeout=LOOK_S)
            if done:
                data = self._ray.get(asking)
                if data is None:
                    raise ModelError(self._ray.get(self._desk.failure.remote()))
                return decode_facts(data)
        raise self._failure or ModelError("the replicas on the Ray cluster ended before one had opened")


def _start_desk(replicas: int) -> Any:
    """Start the desk on this machine: with the driver gone nobody needs it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from weftline.engine.jobs.ray.desk import Desk

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=here)(Desk).remote(replicas)


def _pipeline(desk: Any, opener: str, arguments: str, replicas: int, need: Need) -> Any:
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
            return _mapped(desk, opener, arguments, replicas, need)
    finally:
        context.target_max_block_size, context.enable_progress_bars = before


def _mapped(desk: Any, opener: str, arguments: str, replicas: int, need: Need) -> Any:
    import ray

    from weftline.engine.jobs.ray.feed import BlockNumbers
    from weftline.engine.jobs.ray.replica import Replica

    return ray.data.read_datasource(BlockNumbers(desk), num_cpus=0, override_num_blocks=1).map_batches(
        Replica,
        batch_size=1,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=replicas, max_tasks_in_flight_per_actor=IN_FLIGHT_MAX),
        fn_constructor_args=(desk, opener, arguments),
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
