"""Steps for the tests of faults in real processes: nodes that wait at a gate, crash, loop, or say what they know."""

# ruff: noqa: F821 - port types are no names

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import weftline
from weftline.node import (
    USUAL,
    Batch,
    BatchNode,
    ModelError,
    OpenContext,
    Outputs,
    Piece,
    Ports,
    StepContext,
    StreamNode,
    Urgency,
    port,
)


@dataclass(frozen=True, slots=True)
class GatedConfig:
    """Options of `Gated`.

    folder:   where `calls` is written, and where a file `hold` keeps every call waiting.
    gives_up: a call ends as soon as all of its items are cancelled.
    """

    folder: str
    gives_up: bool = False


class Gated(BatchNode):
    """Passes texts on, notes what each call was given, and waits while the gate is closed."""

    Config: ClassVar[type[Any]] = GatedConfig

    @classmethod
    def ports(cls, config: GatedConfig, step: StepContext) -> Ports:
        return Ports((port("value", "text"),), (port("value", "text"),))

    def run(self, batch: Batch) -> Outputs:
        folder = Path(self.config.folder)
        report = {
            "values": list(batch["value"]),
            "left_ms": [batch.urgency(place).left_ms for place in range(len(batch))],
            "priority": [batch.urgency(place).priority for place in range(len(batch))],
        }
        with (folder / "calls").open("a") as notes:
            notes.write(json.dumps(report) + "\n")
        while (folder / "hold").exists():
            time.sleep(0.002)
            if self.config.gives_up and all(batch.cancelled(place) for place in range(len(batch))):
                break
        return {"value": list(batch["value"])}


@dataclass(frozen=True, slots=True)
class FragileConfig:
    """Options of `Fragile`. folder: while it has a file `broken`, the worker ends when the node is opened."""

    folder: str


class Fragile(BatchNode):
    """Passes texts on; can be made to crash whenever it is opened."""

    Config: ClassVar[type[Any]] = FragileConfig

    @classmethod
    def ports(cls, config: FragileConfig, step: StepContext) -> Ports:
        return Ports((port("value", "text"),), (port("value", "text"),))

    def open(self, context: OpenContext) -> None:
        broken = Path(self.config.folder) / "broken"
        if not broken.exists():
            return
        if broken.read_text() == "says so":
            raise ModelError("the model is corrupt")
        os._exit(3)

    def run(self, batch: Batch) -> Outputs:
        return {"value": list(batch["value"])}


@dataclass(frozen=True, slots=True)
class ShapedConfig:
    """Options of `Shaped`. stacks: it cannot run items of different shapes, and pads nothing itself."""

    stacks: bool = True


class Shaped(BatchNode):
    """Doubles matrices, all of a batch as one array, and says how many there were and how large they were made."""

    Config: ClassVar[type[Any]] = ShapedConfig

    @classmethod
    def ports(cls, config: ShapedConfig, step: StepContext) -> Ports:
        return Ports((port("x", "float32[T, 4]"),), (port("y", "float32[T, 4]"), port("report", "json")))

    def run(self, batch: Batch) -> Outputs:
        whole = batch.stacked("x")
        report = {"items": len(batch), "shape": list(whole.shape[1:])}
        return {"y": list(whole * 2 + 1), "report": [report] * len(batch)}


class Spells(StreamNode):
    """Spells its text letter by letter, and ends its worker on the word `bomb`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._left: dict[int, list[str]] = {}
        self._whole: dict[int, str] = {}

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        return Ports((port("value", "text"),), (port("value", "text", pieces=True),))

    def submit(self, item: int, inputs: Mapping[str, Any], urgency: Urgency = USUAL) -> None:
        self._left[item], self._whole[item] = list(inputs["value"]), inputs["value"]

    def cancel(self, item: int) -> None:
        self._left.pop(item, None)

    def round(self) -> Sequence[Piece]:
        time.sleep(0.02)
        if "bomb" in (self._whole[item] for item in self._left):
            os._exit(86)
        pieces = []
        for item in list(self._left):
            if self._left[item]:
                pieces.append(Piece(item, {"value": self._left[item].pop(0)}))
            else:
                del self._left[item]
                pieces.append(Piece(item, {"value": self._whole.pop(item)}, last=True))
        return pieces

    @property
    def busy(self) -> bool:
        return bool(self._left)


def shout(text: str) -> str:
    return text.upper()


def ends(text: str) -> str:
    """End the worker on the word `bomb`."""
    if "bomb" in text:
        os._exit(86)
    return text.upper()


def unopened(text: str) -> str:
    """Send, on 'bad', a message that no worker that is ready may send, as a worker gone wrong would."""
    if text == "bad":
        from weftline.engine.protocol import messages as msg
        from weftline.engine.protocol.channel import Channel

        frame = sys._getframe()
        while not isinstance(frame.f_locals.get("channel"), Channel):
            frame = frame.f_back  # type: ignore[assignment]
        frame.f_locals["channel"].send(msg.encode(msg.OpenFailed("s", msg.Failure("ModelError", "not at all"))), None)
        time.sleep(60)
    return text


def daemons(text: str) -> str:
    """Start a daemon by a double fork, and one by executing a program in a session of its own; tell their pids."""
    out, into = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(into, str(os.getpid()).encode())
            os.close(0)
            time.sleep(300)
        os._exit(0)
    os.close(into)
    forked = os.read(out, 20).decode()
    os.close(out)
    command = ["sh", "-c", "setsid sleep 300 > /dev/null 2>&1 & echo $!"]
    return f"{forked} {subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout}"


def loops(text: str) -> str:
    """Never end on the word `loop`; other threads go on."""
    while text == "loop":
        pass
    return text.upper()


def picky(text: str) -> str:
    if text.startswith("bad"):
        raise ValueError("this one is bad")
    return text.upper()


def line(x: "float32[N]") -> "float32[N]":
    """Compute something whose every bit counts; refuse what has no number in it."""
    if not np.isfinite(x).all():
        raise ValueError("not a number")
    return np.sin(x) * np.float32(1.1)


def all_lines(x: "float32[N]") -> "float32[N]":
    """As `line`, for a whole batch at a time: one bad item spoils the call."""
    whole = np.stack(x)
    if not np.isfinite(whole).all():
        raise ValueError("not a number")
    return list(np.sin(whole) * np.float32(1.1))


def left(text: str) -> "json":
    """Spend 50 ms and say what was left of the deadline before."""
    before_ms = weftline.current().left_ms
    time.sleep(0.05)
    return before_ms


def left_again(before: "json") -> "json":
    return {"first": before, "second": weftline.current().left_ms}


def patient(text: str) -> str:
    """Work for 60 s, or until it is cancelled; return which."""
    for _ in range(6000):
        if weftline.current().cancelled:
            break
        time.sleep(0.01)
    return text


def copied(x: "float32[N]") -> "float32[N]":
    return x + 1


def stuck(x: "float32[N]") -> "float32[N]":
    time.sleep(600)
    return x


def kind(text: str) -> str:
    """Return the first word."""
    return text.split(" ")[0]


def found(photo: "image") -> "detections":
    """Find one object in each row of ten pixels: as many as the picture is high."""
    from weftline.nodes.detections import Detections

    count = photo.shape[0] // 10
    boxes = np.array([[0, 10 * row, 10, 10 * row + 10] for row in range(count)], np.float32).reshape(-1, 4)
    scores = np.linspace(0.9, 0.5, count, dtype=np.float32)
    return Detections(boxes, scores, np.zeros(count, np.int32), ("thing",))


def brightness(crop: "image") -> "json":
    return int(crop.mean())


def joined(text: str, ending: str = "!") -> str:
    return text + ending


def halves(x: "float32[N]") -> "float32[M]":
    return x[: len(x) // 2]


class Counts:
    """Counts the requests of each sequence."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def __call__(self, text: str) -> "json":
        part = weftline.current().sequence
        self.counts[part.id] = self.counts.get(part.id, 0) + 1
        return self.counts[part.id]

    def end_sequence(self, id: str) -> None:
        self.counts.pop(id, None)
