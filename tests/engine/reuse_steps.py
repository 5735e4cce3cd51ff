"""Steps that use their memory again: what a call returns is overwritten by the next one, or shares memory with others.

Each computes from its input alone, so that a new instance called in plain Python says what the engine must answer.
"""

# ruff: noqa: F821 - port types are no names

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

import weftline
from weftline.node import (
    USUAL,
    Batch,
    BatchNode,
    Detections,
    Outputs,
    Piece,
    Ports,
    StepContext,
    StreamNode,
    Urgency,
    port,
)

LONGEST = 8000

SHARED = np.zeros(LONGEST, np.float32)
"""Written by every step of a worker that uses it."""


class Part:
    """Returns part of a buffer."""

    def __init__(self) -> None:
        self.out = np.zeros(LONGEST, np.float32)

    def __call__(self, x: "float32[N]") -> "float32[N]":
        np.multiply(x, 2, out=self.out[: len(x)])
        return self.out[: len(x)]


class Owned:
    """Returns a buffer whole, an array that owns its memory."""

    def __init__(self) -> None:
        self.by_size: dict[int, np.ndarray] = {}

    def __call__(self, x: "float32[N]") -> "float32[N]":
        out = self.by_size.setdefault(len(x), np.zeros(len(x), np.float32))
        np.add(x, 1, out=out)
        return out


class Weak:
    """Returns arrays that it finds again by a weak reference as long as they live."""

    def __init__(self) -> None:
        import weakref

        self.found: Any = weakref.WeakValueDictionary()

    def __call__(self, x: "float32[N]") -> "float32[N]":
        out = self.found.get(len(x))
        if out is None:
            out = self.found[len(x)] = np.zeros(len(x), np.float32)
        np.add(x, 3, out=out)
        return out


class Viewed:
    """Returns a new array, and keeps a view of it to write into."""

    def __init__(self) -> None:
        self.before: np.ndarray | None = None

    def __call__(self, x: "float32[N]") -> "float32[N]":
        if self.before is not None:
            self.before[:] = -1
        out = x + 5
        self.before = out[:]
        return out


class Bytes:
    """Returns an array in memory of a bytearray."""

    def __init__(self) -> None:
        self.memory = bytearray(LONGEST * 4)

    def __call__(self, x: "float32[N]") -> "float32[N]":
        out = np.frombuffer(self.memory, np.float32, len(x))
        out[:] = x - 1
        return out


def common(x: "float32[N]") -> "float32[N]":
    """Write into memory of the module."""
    np.multiply(x, 3, out=SHARED[: len(x)])
    return SHARED[: len(x)]


def common_too(x: "float32[N]") -> "float32[N]":
    """Write into the same memory, out of it where the step before gave it."""
    SHARED[: len(x)] = x + 7
    return SHARED[: len(x)]


class Fresh:
    """Returns a new array."""

    def __call__(self, x: "float32[N]") -> "float32[N]":
        return x * 2


def same(x: "float32[N]") -> "float32[N]":
    return x


def tail(x: "float32[N]") -> "float32[M]":
    return x[1:]


def backwards(x: "float32[N]") -> "float32[N]":
    return x[::-1]


class Pair:
    """Returns two outputs that overlap, in a dict of its own."""

    def __init__(self) -> None:
        self.out = np.zeros(LONGEST, np.float32)
        self.answer: dict[str, Any] = {}

    def __call__(self, x: "float32[N]") -> {"whole": "float32[N]", "most": "float32[M]"}:
        np.multiply(x, 2, out=self.out[: len(x)])
        self.answer["whole"], self.answer["most"] = self.out[: len(x)], self.out[1 : len(x)]
        return self.answer


class Windows:
    """Returns a list of its own of overlapping views of a buffer."""

    def __init__(self) -> None:
        self.out, self.answer = np.zeros(LONGEST, np.float32), []

    def __call__(self, x: "float32[N]") -> "list[float32[M]]":
        np.multiply(x, 2, out=self.out[: len(x)])
        self.answer[:] = [self.out[at : len(x)] for at in range(3)]
        return self.answer


class Mutated:
    """Returns a dict that it changes in the next call."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] = {"seen": []}

    def __call__(self, x: "float32[N]") -> "json":
        self.answer["sum"] = float(x.sum())
        self.answer["seen"][:] = [float(x[0])]
        return self.answer


class Raw:
    """Returns a view of a bytearray."""

    def __init__(self) -> None:
        self.memory = bytearray(LONGEST * 4)

    def __call__(self, x: "float32[N]") -> bytes:
        self.memory[: x.nbytes] = x.tobytes()
        return memoryview(self.memory)[: x.nbytes]


class Boxes:
    """Returns detections in arrays of its own."""

    def __init__(self) -> None:
        self.boxes, self.scores = np.zeros((2, 4), np.float32), np.zeros(2, np.float32)

    def __call__(self, x: "float32[N]") -> "detections":
        self.boxes[:], self.scores[:] = x[0], x[0] / 1000
        return Detections(self.boxes, self.scores, np.zeros(2, np.int32), ("thing",))


class Together:
    """Takes batches, and returns rows of a buffer in a list of its own."""

    def __init__(self) -> None:
        self.out, self.answer = np.zeros((64, LONGEST), np.float32), []

    def __call__(self, x: "float32[N]") -> "float32[N]":
        for row, one in zip(self.out, x):
            np.multiply(one, 2, out=row[: len(one)])
        self.answer[:] = [row[: len(one)] for row, one in zip(self.out, x)]
        return self.answer


class Splits(Together):
    """As Together; some batches raise, and their halves are run apart."""

    def __call__(self, x: "float32[N]") -> "float32[N]":
        answer = super().__call__(x)
        if len(x) > 1 and any(int(one[0]) % 3 == 0 for one in x):
            raise ValueError("not all at once")
        return answer


class Rows(BatchNode):
    """A node class: one array [items, ...] that every call writes into."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._out = np.zeros((64, LONGEST), np.float32)

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        return Ports((port("x", "float32[N]"),), (port("output", "float32[M]"),))

    def run(self, batch: Batch) -> Outputs:
        longest = max(map(len, batch["x"]))
        for row, one in zip(self._out, batch["x"]):
            row[:longest] = one.sum()
        return {"output": self._out[: len(batch), :3]}


class _Computed(Sequence[Any]):
    def __init__(self, values: Sequence[np.ndarray], out: np.ndarray) -> None:
        self._values, self._out = values, out

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, at: Any) -> Any:
        np.multiply(self._values[at], 2, out=self._out[: len(self._values[at])])
        return self._out[: len(self._values[at])]


class Lazy(BatchNode):
    """A node class whose outputs are computed when they are looked at."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._out = np.zeros(LONGEST, np.float32)

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        return Ports((port("x", "float32[N]"),), (port("output", "float32[N]"),))

    def run(self, batch: Batch) -> Outputs:
        return {"output": _Computed(batch["x"], self._out)}


class Settles(Lazy):
    """A node class that computes item by item."""

    def run(self, batch: Batch) -> Outputs:
        given = []
        for at, x in enumerate(batch["x"]):
            outputs = {"output": _Computed([x], self._out)[0]}
            batch.settle(at, outputs)
            given.append(outputs["output"])
        return {"output": given}


class Flows(StreamNode):
    """A streaming node whose rounds are generators over one buffer; and one answer for each item."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._out = np.zeros(LONGEST, np.float32)
        self._inputs: dict[int, np.ndarray] = {}

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        return Ports((port("x", "float32[N]"),), (port("output", "float32[N]"),))

    def submit(self, item: int, inputs: Mapping[str, Any], urgency: Urgency = USUAL) -> None:
        self._inputs[item] = inputs["x"]

    def cancel(self, item: int) -> None:
        self._inputs.pop(item, None)

    @property
    def busy(self) -> bool:
        return bool(self._inputs)

    def round(self) -> Iterator[Piece]:  # type: ignore[override]
        for item in list(self._inputs):
            x = self._inputs.pop(item)
            np.multiply(x, 2, out=self._out[: len(x)])
            yield Piece(item, {"output": self._out[: len(x)]}, last=True)


def torch() -> ModuleType:
    import torch

    torch.set_num_threads(1)
    return torch


class Tensors:
    """Returns part of a torch buffer."""

    def __init__(self) -> None:
        self.out = torch().zeros(LONGEST)

    def __call__(self, x: "float32[N]") -> "float32[N]":
        return sys.modules["torch"].mul(x, 2, out=self.out[: len(x)])


class Arrays:
    """Returns a torch buffer as an array."""

    def __init__(self) -> None:
        self.out = torch().zeros(LONGEST)

    def __call__(self, x: "float32[N]") -> "float32[N]":
        out = self.out[: len(x)]
        out.copy_(sys.modules["torch"].tensor(x * 2))
        return out.numpy()


class Before:
    """Returns what it was given before in the same sequence, kept as it was given."""

    def __init__(self) -> None:
        self.kept: dict[str, np.ndarray] = {}

    def __call__(self, x: "float32[N]") -> "float32[M]":
        part = weftline.current().sequence
        before = self.kept.get(part.id, x)
        self.kept[part.id] = x
        return before

    def end_sequence(self, id: str) -> None:
        self.kept.pop(id, None)


class Counted(BatchNode):
    """A node class that counts the requests of each sequence."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._counts: Counter[str] = Counter()

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        return Ports((port("x", "float32[N]"),), (port("output", "json"),))

    def run(self, batch: Batch) -> Outputs:
        counts = []
        for now in weftline.current().items:
            id = now.sequence.id if now.sequence is not None else "none"
            self._counts[id] += 1
            counts.append(self._counts[id])
        return {"output": counts}
