"""The steps of a worker: opened, chained, put to sleep, woken, closed.

A step is a node and its host: batches (batch.py) or rounds of a stream (stream.py). `Steps` finds a step's host by its
index and runs calls on the step's thread. `Opener` opens nodes, at start and again when a step wakes.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from weftline.engine.protocol import figures
from weftline.engine.protocol.messages import (
    NAME_CHARS_MAX,
    Asleep,
    Awake,
    Chain,
    DropChains,
    DropOptions,
    EndSequences,
    FromWorker,
    Item,
    KvResize,
    KvResized,
    OpenFailed,
    OpenProgress,
    OpenSteps,
    Ready,
    RunBatch,
    SetOptions,
    Sleep,
    StepToOpen,
    Submit,
    Wake,
)
from weftline.engine.worker.batch import HostedStep
from weftline.engine.worker.chain import HostedChain
from weftline.engine.worker.device import WorkerDevice
from weftline.engine.worker.faults import failure
from weftline.engine.worker.heartbeat import StatsCollector
from weftline.engine.worker.inbox import Cancels
from weftline.engine.worker.item_options import number_of
from weftline.engine.worker.memory import Memory
from weftline.engine.worker.memory_profile import DeviceMemoryMeter, profile_largest_batch
from weftline.engine.worker.sleep import SleepController, SleepDevice
from weftline.engine.worker.stdio import StepPipes
from weftline.engine.worker.stream import HostedStream
from weftline.engine.worker.threads import Answer, StepThread
from weftline.errors import StepError
from weftline.nodes.catalog import resolve
from weftline.nodes.contract import BatchNode, DeviceMemoryLimit, Node, OpenContext, StreamNode
from weftline.nodes.declared_files import check_unchanged
from weftline.nodes.model_store import verify
from weftline.pipelines.check.options import to_config
from weftline.shm.device.driver import DeviceLost
from weftline.shm.device.names import index_of, is_fake, is_gpu

_log = logging.getLogger(__name__)


class Steps:
    """The steps of one worker. For one thread at a time; `send` sends a message.

    batches, streams: hosts of the batch steps and of the streaming steps, by index in the plan.
    chains:           by id.
    stats:            collects statistics of their nodes.
    threads:          threads of steps that have their own, by step; set before the steps open.
    """

    def __init__(
        self,
        memory: Memory,
        cancels: Cancels,
        send: Callable[[FromWorker], None],
        pipes: StepPipes | None = None,
    ) -> None:
        self.batches: dict[int, HostedStep] = {}
        self.streams: dict[int, HostedStream] = {}
        self.chains: dict[int, HostedChain] = {}
        self._nodes: dict[int, Node] = {}
        self.stats = StatsCollector(self._nodes, self.streams)
        self.threads: Mapping[int, StepThread] = {}
        self._memory = memory
        self._cancels = cancels
        self._send = send
        self._pipes = pipes
        self._positions: dict[int, int] = {}  # of steps by index, among those of this worker
        self._sleep: SleepController | None = None  # once they are open

    def open(self, message: OpenSteps) -> Ready | OpenFailed:
        """Open every step and measure its device memory; returns the message to send.

        The worker's device is already open, if it has one. Raises DeviceLost when it is lost.
        """
        opened: dict[str, float] = {}
        name = message.steps[0].name if message.steps else ""
        self._positions = {step.index: position for position, step in enumerate(message.steps)}
        try:
            opener = Opener(message, self._memory.device, self._send)
            for step in message.steps:
                name, started = step.name, time.perf_counter()
                self.on_thread(step.index, partial(self._open, step, opener))
                opened[step.name] = (time.perf_counter() - started) * 1000
        except DeviceLost:
            raise
        except Exception as error:
            return open_failed(name, error)
        if message.nvtx:
            from weftline.engine.worker.nvtx import add_nvtx_ranges

            add_nvtx_ranges({step.name: self._hosted(step.index) for step in message.steps})
        gc.collect()
        gc.freeze()  # objects of the frameworks stay: traversing them in each collection would cost milliseconds
        meter = opener.meter
        sleep_device = SleepDevice(self._memory.device, meter, opener.stream)

        def reopen(step: StepToOpen) -> Node:
            return opener.node(step, opener.stream(step))

        self._sleep = SleepController(message.steps, self._nodes, self._hosted, reopen, sleep_device, self._send)
        return Ready(opened, opener.warm_ms, meter.uses, meter.taken_bytes, meter.free_bytes)

    def select_output(self, step: int) -> None:
        """Attribute printed output to this step from now on; called before its code runs."""
        if self._pipes is not None:
            self._pipes.select(self._positions.get(step, -1))

    def chain(self, message: Chain) -> None:
        """Register a chain of steps."""
        self.chains[message.id] = HostedChain(message, [self._batch_step(stage.step) for stage in message.stages])

    def set_options(self, message: SetOptions | DropOptions) -> None:
        """Set or forget options of a step's items; ignored for a step that is not open here."""
        if message.step in self._nodes:
            options = self._hosted(message.step).options
            options.set(message) if isinstance(message, SetOptions) else options.drop(message)

    def options_digest(self, message: RunBatch | Submit, item: Item) -> bytes:
        """Return the request options of an item, encoded: those of its step, or of all stages of its chain."""
        if isinstance(message, RunBatch) and message.chain:
            return b"".join(step.options.digest(number) for step, _, number in self.chains[message.chain].stages)
        return self._hosted(message.step).options.digest(number_of(item)) if message.step in self._nodes else b""

    def drop_chains(self, message: DropChains) -> None:
        """Forget chains, none of which runs."""
        for id in message.chains:
            self.chains.pop(id, None)

    def sleep_or_wake(self, message: Sleep | Wake) -> Asleep | Awake | None:
        """Put a step to sleep or wake it; returns the message to send, None for a step that is not open here."""
        if self._sleep is None or message.step not in self._nodes:
            return None
        done = self.on_thread(message.step, partial(self._sleep_or_wake, self._sleep, message))
        self.collect_stats()  # before the next heartbeat, which would else report freed memory
        return done

    def collect_stats(self) -> None:
        """Collect statistics of the nodes, each on its step's thread."""
        if not self.threads:
            self.stats.collect()
        for thread in dict.fromkeys(self.threads.values()):
            thread.run(partial(self.stats.collect, [step for step, one in self.threads.items() if one is thread]))

    def resize(self, message: KvResize) -> KvResized | None:
        """Resize a streaming step's KV memory and return its new size; None for a step that is not open here."""
        if message.step not in self.streams:
            return None
        held = self.streams[message.step].resize_memory(message.step, message.bytes)
        self.stats.collect()  # before the next heartbeat, which would else report the old size
        return KvResized(message.step, held)

    def end_sequences(self, message: EndSequences) -> None:
        """End sequences of a step; on the step's thread if it has one, without waiting."""
        work = partial(self._end_sequences, message)
        thread = self.threads.get(message.step)
        if thread is None:
            work()
        else:
            thread.submit(work)

    def on_thread(self, step: int, work: Callable[[], Answer]) -> Answer:
        """Run a call on the step's thread and return its result."""
        thread = self.threads.get(step)
        return work() if thread is None else thread.run(work)

    def _sleep_or_wake(self, sleep: SleepController, message: Sleep | Wake) -> Asleep | Awake:
        self.select_output(message.step)
        return sleep.sleep(message) if isinstance(message, Sleep) else sleep.wake(message)

    def _end_sequences(self, message: EndSequences) -> None:
        node = self._nodes[message.step]
        self.select_output(message.step)
        for sequence in message.sequences:
            try:
                node.end_sequence(sequence)
            except Exception:
                _log.exception("the node failed to end sequence %.128s", sequence)

    def close(self) -> None:
        for thread in dict.fromkeys(self.threads.values()):
            thread.drain()  # before nodes free memory that device copies may still read
        for step in self._nodes:
            self.on_thread(step, partial(self._close, step))
        for thread in dict.fromkeys(self.threads.values()):
            thread.stop()

    def _close(self, step: int) -> None:
        self.select_output(step)
        self._nodes[step].close()

    def _open(self, step: StepToOpen, opener: Opener) -> None:
        self.select_output(step.index)
        stream = opener.stream(step)
        node = self._nodes[step.index] = opener.node(step, stream)
        if figures.offers(node):
            self.stats.reporting[step.index] = step.name
        if isinstance(node, StreamNode) and (step.streams or not isinstance(node, BatchNode)):
            self.streams[step.index] = HostedStream(step, node, self._memory)
            return
        thread = self.threads.get(step.index)
        memory, cancels = (self._memory, self._cancels) if thread is None else (thread.memory, thread.cancels)
        hosted = HostedStep(step, node, memory, cancels, stream, partial(self.select_output, step.index))
        self.batches[step.index] = hosted
        if opener.meter.enabled:
            with opener.meter.warming(step.name):
                profile_largest_batch(step, hosted)

    def _hosted(self, step: int) -> HostedStep | HostedStream:
        return self.streams[step] if step in self.streams else self.batches[step]

    def _batch_step(self, index: int) -> HostedStep:
        if index not in self.batches:
            raise StepError(f"step {index} of this worker is not a batch step")
        return self.batches[index]


def open_failed(step: str, error: Exception) -> OpenFailed:
    """Return the OpenFailed of a step, with the traceback of its code."""
    return OpenFailed(step, failure(error))


class Opener:
    """Opens the nodes of one worker, at start and when a step wakes. `send` sends a message.

    warm_ms: warm-up time by step name, for nodes that have a warm-up.
    meter:   measures their device memory.
    """

    def __init__(self, message: OpenSteps, device: WorkerDevice | None, send: Callable[[FromWorker], None]) -> None:
        self.warm_ms: dict[str, float] = {}
        self._message = message
        self._device = device
        self._send = send
        self._streams: dict[int, int] = {}
        arena = device.arena if device is not None else None
        self.meter = DeviceMemoryMeter(
            device.driver if device is not None else None, arena.size_bytes if arena is not None else 0
        )

    def stream(self, step: StepToOpen) -> int:
        """Return the device stream of a step, 0 for a step on the CPU."""
        if self._device is None or not is_gpu(step.device):
            return 0
        if step.index not in self._streams:
            self._streams[step.index] = self._device.new_stream()
        return self._streams[step.index]

    def node(self, step: StepToOpen, stream: int = 0) -> Node:
        """Return a step's node, opened and warmed up."""

        def progress(phrase: str, fraction: float) -> None:
            known = fraction if 0 <= fraction <= 1 else 0.0  # of a node, and so any number
            self._send(OpenProgress(step.name, phrase[:NAME_CHARS_MAX], known))

        message = self._message
        base_dir = Path(step.base_dir or message.base_dir)
        node_class = resolve(step.node, base_dir)
        node = node_class(to_config(node_class, step.options))
        context_stream = 0 if is_fake(step.device) else stream
        verify(step.options, base_dir, progress)
        check_unchanged(step.files)
        progress("opening", 0.0)
        cache_dir = Path(message.cache_dir)
        memory_limit = (
            DeviceMemoryLimit(step.memory_limit_bytes, step.reserve_bytes) if step.memory_limit_bytes else None
        )
        context = OpenContext(
            base_dir,
            step.device,
            message.threads,
            step.batch.items_max,
            cache_dir,
            progress,
            context_stream,
            memory_limit=memory_limit,
            kv_most_bytes=step.kv_most_bytes,
            sizes=step.batch.sizes,
        )
        on_stream = self._device.use_stream(stream) if self._device is not None and stream else contextlib.nullcontext()
        _make_current(step.device)
        with on_stream:
            with self.meter.opening(step.name):
                node.open(context)
            _make_current(step.device)  # opening may have imported torch
            _set_torch_threads(message.threads)
            progress("warming up", 0.9)
            started = time.perf_counter()
            with self.meter.warming(step.name):
                node.warm_up()
        if type(node).warm_up is not Node.warm_up:
            self.warm_ms[step.name] = (time.perf_counter() - started) * 1000
        if self._device is not None and stream:
            self._device.driver.synchronize(stream)  # a streaming node uses its framework's own stream afterwards
        progress("ready", 1.0)
        return node


def _set_torch_threads(threads: int) -> None:
    """Set torch's thread count if torch is loaded: its own default is limited to the number of cores."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def _make_current(device: str) -> None:
    """Set torch's current device to a GPU other than the first, if torch is loaded: Triton launches kernels there."""
    torch = sys.modules.get("torch")
    if device.startswith("cuda") and index_of(device) and torch is not None and torch.backends.cuda.is_built():
        torch.cuda.set_device(index_of(device))
