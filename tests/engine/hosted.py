"""Test fixture: a hosted step whose node is a function of the batch, with arenas in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from weftline.engine.protocol import messages as msg
from weftline.engine.protocol.values import pack, unpack
from weftline.engine.worker.batch import HostedStep
from weftline.engine.worker.inbox import Cancels
from weftline.engine.worker.memory import Memory
from weftline.errors import LimitReached
from weftline.node import Batch, BatchNode, Outputs, Ports, PortType, StepContext
from weftline.pipelines.spec.policy import BatchPolicy
from weftline.shm.arena import HostArena
from weftline.shm.block import Block, align_up
from weftline.shm.view import bytes_view

OWN, OTHER = 1, 2
ARENA_BYTES = 1 << 20


class Calls(BatchNode):
    """A node that is a function of the batch."""

    def __init__(self, run: Callable[[Batch], Outputs]) -> None:
        super().__init__(None)
        self._run = run

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        raise NotImplementedError

    def run(self, batch: Batch) -> Outputs:
        return self._run(batch)


class Bench:
    """The memory of a worker: its own arena, and another process's arena that holds inputs.

    asked: sizes of each buffer request.
    """

    def __init__(self) -> None:
        self.arenas = {OWN: HostArena.create(ARENA_BYTES), OTHER: HostArena.create(ARENA_BYTES)}
        self.asked: list[list[int]] = []
        self.cancels = Cancels()
        self.memory = Memory(self.arenas, OWN, self._need)
        self._next = {OWN: 0, OTHER: 0}

    def close(self) -> None:
        for arena in self.arenas.values():
            arena.close()

    def block(self, size_bytes: int, arena: int = OWN) -> Block:
        """Lease a block; LimitReached when the arena is full."""
        offset = self._next[arena]
        if offset + size_bytes > ARENA_BYTES:
            raise LimitReached("no room")
        self._next[arena] = align_up(offset + size_bytes, 4096)
        return Block(arena, offset, size_bytes, offset + 1)

    def value(self, value: Any, type: str, placed: bool = False) -> msg.Value:
        """Return a value as received in a message: in the other arena when it is large or `placed`."""
        packed = pack(value, PortType.parse(type), "x")
        if packed.travels_inline and not placed:
            return packed.inline()
        place = self.block(packed.size_bytes, OTHER).place(0, packed.size_bytes)
        packed.write(bytes_view(self.arenas[OTHER], place))
        return packed.at(place)

    def step(
        self,
        run: Callable[[Batch], Outputs],
        inputs: dict[str, str],
        outputs: dict[str, str],
        *,
        index: int = 0,
        items_max: int = 8,
        mutates_inputs: bool = False,
        pad: dict[str, tuple[int, ...]] | None = None,
        pad_value: float = 0.0,
        remembers: bool = False,
    ) -> HostedStep:
        step = msg.StepToOpen(
            index,
            f"step{index}",
            "calls",
            {},
            tuple(inputs.items()),
            tuple(outputs.items()),
            "cpu",
            BatchPolicy(items_max, pad=pad or {}, pad_value=pad_value),
            mutates_inputs,
            remembers=remembers,
        )
        return HostedStep(step, Calls(run), self.memory, self.cancels)

    def answers(self, done: msg.BatchDone) -> list[Any]:
        """Return each item's outputs as Python values (one alone as itself), or its Failure without its traceback."""
        return [self._answer(result) for result in done.results]

    def _answer(self, result: msg.ItemResult | msg.Failure) -> Any:
        if isinstance(result, msg.Failure):
            return msg.Failure(result.error, result.message, result.stage)
        values = [unpack(value, self.arenas) for value in result.outputs]
        return values[0] if len(values) == 1 else values

    def _need(self, sizes: Sequence[int], device: Sequence[int]) -> tuple[Sequence[Block], Sequence[Block]]:
        self.asked.append(list(sizes))
        return [self.block(size) for size in sizes], []


def run_of(rows: Sequence[Sequence[msg.Value]], **more: Any) -> msg.RunBatch:
    """Return a dispatch of items 100, 101 and so on with these inputs."""
    items = tuple(msg.Item(100 + position, tuple(row)) for position, row in enumerate(rows))
    return msg.RunBatch(1, 0, items, **more)
