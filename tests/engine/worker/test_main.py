"""A worker process, driven by messages as from the runtime."""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from weftline.engine.protocol import messages as msg
from weftline.engine.protocol.values import pack, unpack
from weftline.engine.runtime.processes import WorkerProcess
from weftline.nodes.ports import PortType
from weftline.pipelines.spec.policy import BatchPolicy
from weftline.shm.arena import HostArena
from weftline.shm.block import Block

OWN = 1
PATIENCE_S = 30.0

NODES = '''
import ctypes
import os
import time
from pathlib import Path

import numpy as np

from weftline.node import BatchNode, Piece, Ports, StreamNode, port
from weftline.pipelines.spec.policy import BatchPolicy


class Waits(BatchNode):
    """Says when it has begun, then works until its first item is cancelled; answers how many calls it has had."""

    calls = 0

    @classmethod
    def ports(cls, config, step):
        return Ports((port("text", "text"),), (port("text", "text"),))

    def open(self, context):
        self.folder = context.base_dir

    def warm_up(self):
        time.sleep(0.02)

    def run(self, batch):
        self.calls += 1
        if batch["text"][0] == "wait":
            (self.folder / "begun").touch()
            until = time.monotonic() + 20
            while not batch.cancelled(0) and time.monotonic() < until:
                time.sleep(0.001)
            return {"text": ["cancelled" if batch.cancelled(p) else "kept" for p in range(len(batch))]}
        return {"text": [f"{text} {self.calls} {batch.urgency(p).priority}" for p, text in enumerate(batch["text"])]}

    def end_sequence(self, id):
        if id == "bad":
            raise ValueError("no such sequence")
        (self.folder / f"ended-{id}").touch()


class Holds(BatchNode):
    """Hold the interpreter lock for the seconds in the input."""

    @classmethod
    def ports(cls, config, step):
        return Ports((port("seconds", "json"),), (port("seconds", "json"),))

    def run(self, batch):
        for seconds in batch["seconds"]:
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        return {"seconds": list(batch["seconds"])}


class Ticks(StreamNode):
    """One piece a round for every item that is not paused; written before there was urgency."""

    @classmethod
    def ports(cls, config, step):
        return Ports((port("text", "text"),), (port("text", "text", pieces=True),))

    def __init__(self, config):
        super().__init__(config)
        self.left, self.paused = {}, set()

    def submit(self, item, inputs):
        self.left[item] = 3

    def cancel(self, item):
        self.left.pop(item, None)
        self.paused.discard(item)

    def pause(self, item):
        if item not in self.left:
            os._exit(1)  # it never receives items of other workers
        if item == 13:
            raise RuntimeError("not this one")
        self.paused.add(item)

    def resume(self, item):
        self.paused.discard(item)

    @property
    def busy(self):
        return bool(self.left.keys() - self.paused)

    def round(self):
        pieces = []
        for item in list(self.left.keys() - self.paused):
            self.left[item] -= 1
            last = not self.left[item]
            pieces.append(Piece(item, {"text": "." * 3 if last else "."}, last=last))
            if last:
                del self.left[item]
        return pieces


class Urgent(Ticks):
    """Answer with the priority of the item."""

    def submit(self, item, inputs, urgency):
        self.left[item] = urgency.priority

    def round(self):
        return [Piece(item, {"text": str(self.left.pop(item))}, last=True) for item in list(self.left)]
'''


class Talk:
    """The runtime's side of one worker: sends messages and waits for those of a kind."""

    def __init__(self, folder: Path, steps: list[msg.StepToOpen], arena_bytes: int = 1 << 20) -> None:
        self.process = WorkerProcess("w", 1)
        self.channel = self.process.channel
        self.received: deque[msg.FromWorker] = deque()
        self.beats = 0
        self.say(msg.OpenSteps("w", arena_bytes, 1, str(folder), str(folder / "cache"), tuple(steps)))
        hello = self.wait_for(msg.Hello)
        self.arena = HostArena.attach(self.channel.take_descriptor(), hello.arena_bytes)
        self.arenas = {OWN: self.arena}
        self.say(msg.Attach(OWN, 0))
        self.ready = self.wait_for(msg.Ready)

    def say(self, message: msg.ToWorker) -> None:
        self.channel.send(msg.encode(message))

    def wait_for(self, kind: type[Any], seconds: float = PATIENCE_S) -> Any:
        """Return the next message of `kind`; earlier ones of other kinds are kept for later calls."""
        until = time.monotonic() + seconds
        while True:
            for message in self.received:
                if isinstance(message, kind):
                    self.received.remove(message)
                    return message
            left = until - time.monotonic()
            assert left > 0, f"no {kind.__name__} came; received {list(self.received)}; {self.process.last_lines}"
            select.select([self.channel.fileno()], [], [], left)
            for body in self.channel.receive():
                message = msg.decode_from_worker(body)
                if isinstance(message, msg.Heartbeat):
                    self.beats += 1
                if not isinstance(message, msg.Heartbeat | msg.OpenProgress) or kind is type(message):
                    self.received.append(message)

    def run(self, items: list[msg.Item], **more: Any) -> msg.BatchDone:
        self.say(msg.RunBatch(1, 0, tuple(items), **more))
        return self.wait_for(msg.BatchDone)  # type: ignore[no-any-return]

    def close(self) -> None:
        self.say(msg.Close())
        self.process.wait_end(5)
        self.arena.close()


Start = Callable[..., Talk]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    (tmp_path / "nodes.py").write_text(NODES)
    talks: list[Talk] = []

    def begin(*names: str, items_max: int = 4, arena_bytes: int = 1 << 20) -> Talk:
        steps = [
            msg.StepToOpen(
                index,
                name.lower(),
                f"nodes.py:{name}",
                {},
                (PORT[name],),
                (PORT[name],),
                "cpu",
                BatchPolicy(items_max),
                False,
            )
            for index, name in enumerate(names)
        ]
        talks.append(Talk(tmp_path, steps, arena_bytes))
        return talks[-1]

    yield begin
    for talk in talks:
        talk.close()


PORT = {"Waits": ("text", "text"), "Holds": ("seconds", "json"), "Ticks": ("text", "text"), "Urgent": ("text", "text")}


def text(item: int, value: str, **brought: Any) -> msg.Item:
    packed = pack(value, PortType("text"), "x").inline()
    return msg.Item(item, (packed,), msg.ItemMetadata(**brought) if brought else None)


def answers(done: msg.BatchDone) -> list[Any]:
    return [unpack(one.outputs[0], {}) if isinstance(one, msg.ItemResult) else one.error for one in done.results]


def test_a_worker_opens_answers_and_reports_its_warm_up_time(start: Start) -> None:
    talk = start("Waits", "Holds")
    assert set(talk.ready.opened_ms) == {"waits", "holds"}
    assert list(talk.ready.warm_ms) == ["waits"] and talk.ready.warm_ms["waits"] >= 20
    done = talk.run([text(1, "a"), text(2, "b", priority=7)])
    assert answers(done) == ["a 1 0", "b 1 7"]
    assert [(one.batches, one.items) for one in done.ran] == [(1, 2)] and done.ran[0].run_ms > 0


def test_a_running_batch_receives_the_cancel_of_one_of_its_items(start: Start, tmp_path: Path) -> None:
    talk = start("Waits")
    talk.say(msg.RunBatch(1, 0, (text(1, "wait"), text(2, "b"))))
    wait_until(lambda: (tmp_path / "begun").exists())
    talk.say(msg.CancelItems(0, (1,)))
    assert answers(talk.wait_for(msg.BatchDone)) == ["cancelled", "kept"]


def test_a_batch_that_has_not_begun_leaves_cancelled_items_out(start: Start, tmp_path: Path) -> None:
    talk = start("Waits", items_max=2)
    talk.say(msg.RunBatch(1, 0, (text(1, "wait"), text(2, "b"), text(3, "c"), text(4, "d"))))
    wait_until(lambda: (tmp_path / "begun").exists())
    talk.say(msg.CancelItems(0, (1, 3)))
    talk.say(msg.RunBatch(2, 0, (text(3, "again"),)))
    assert answers(talk.wait_for(msg.BatchDone)) == ["cancelled", "kept", "RequestCancelled", "d 2 0"]
    assert answers(talk.wait_for(msg.BatchDone)) == ["again 3 0"]


def test_a_killer_is_logged_before_it_runs_and_refused_afterwards(start: Start) -> None:
    talk = start("Waits")
    done = talk.run([text(1, "good"), text(2, "poison")], suspect=True)
    reported = talk.wait_for(msg.Suspected)
    assert answers(done) == ["good 1 0", "poison 1 0"] and len(set(reported.digests)) == 2 and reported.dispatch == 1
    talk.say(msg.QuarantineItems(0, (reported.digests[1],)))
    done = talk.run([text(3, "good"), text(4, "poison")])
    assert answers(done) == ["good 2 0", "InputError"]
    assert done.results[1] == msg.Failure("InputError", "this input killed its worker before; it is refused")
    talk.say(msg.QuarantineItems(0, ()))
    assert answers(talk.run([text(5, "poison")])) == ["poison 3 0"]


def test_streaming_items_are_logged_and_refused_in_the_same_way(start: Start) -> None:
    talk = start("Urgent")
    talk.say(msg.Submit(0, (text(5, "poison"),), suspect=True))
    reported = talk.wait_for(msg.Suspected)
    assert reported.streams == (5,) and reported.dispatch == 0 and len(reported.digests) == 1
    assert talk.wait_for(msg.OutputChunks).pieces[0].failure is None
    talk.say(msg.QuarantineItems(0, reported.digests))
    talk.say(msg.Submit(0, (text(6, "poison"),)))
    [piece] = talk.wait_for(msg.OutputChunks).pieces
    assert piece.last and piece.failure is not None and piece.failure.error == "InputError"


@pytest.mark.slow
def test_a_worker_beats_unless_its_interpreter_is_blocked(start: Start) -> None:
    talk = start("Holds")
    talk.wait_for(msg.Heartbeat, 3 * msg.BEAT_S)
    talk.say(msg.RunBatch(1, 0, (msg.Item(1, (pack(2.5 * msg.BEAT_S, PortType("json"), "x").inline(),)),)))
    before = talk.beats
    talk.wait_for(msg.BatchDone)
    assert talk.beats - before <= 1
    talk.wait_for(msg.Heartbeat, 3 * msg.BEAT_S)


def test_sequences_end_and_a_node_that_cannot_end_one_does_no_harm(start: Start, tmp_path: Path) -> None:
    talk = start("Waits")
    talk.say(msg.EndSequences(0, ("bad", "s1")))
    assert answers(talk.run([text(1, "a")])) == ["a 1 0"]
    assert (tmp_path / "ended-s1").exists()


def test_a_paused_item_sends_no_chunks_until_it_is_resumed(start: Start) -> None:
    talk = start("Waits", "Ticks")
    talk.say(msg.RunBatch(1, 0, (text(1, "wait"),)))  # all that follows has come before the first round
    talk.say(msg.Submit(1, (text(5, "x"), text(13, "its node cannot pause it"))))
    talk.say(msg.PauseItems(1, (99, 13, 5)))
    talk.say(msg.Submit(1, (text(6, "y"),)))
    talk.say(msg.CancelItems(0, (1,)))
    ends: list[int] = []
    while 6 not in ends:
        ends += [piece.item for piece in talk.wait_for(msg.OutputChunks).pieces if piece.last]
    assert set(ends) == {6, 13}
    talk.say(msg.ResumeItems(1, (5,)))
    while 5 not in ends:
        ends += [piece.item for piece in talk.wait_for(msg.OutputChunks).pieces if piece.last]


def test_a_stream_node_receives_the_urgency_if_it_has_a_parameter_for_it(start: Start) -> None:
    talk = start("Urgent")
    talk.say(msg.Submit(0, (text(5, "x", priority=42),)))
    [piece] = talk.wait_for(msg.OutputChunks).pieces
    assert unpack(piece.outputs[0], {}) == "42"


def test_a_cancelled_stream_ends_with_a_last_piece(start: Start) -> None:
    talk = start("Ticks")
    talk.say(msg.Submit(0, (text(5, "x"),)))
    talk.say(msg.CancelItems(0, (5,)))
    failures: list[msg.Failure] = []
    while not failures:
        failures += [one.failure for one in talk.wait_for(msg.OutputChunks).pieces if one.failure]
    assert failures[0].error == "RequestCancelled"


def test_a_buffer_requested_during_a_dispatch_comes_before_later_messages(start: Start) -> None:
    talk = start("Waits")
    big = "x" * 40_000
    talk.say(msg.RunBatch(1, 0, (text(1, big),)))
    asked = talk.wait_for(msg.BufferRequest)
    talk.say(msg.RunBatch(2, 0, (text(2, "later"),)))
    talk.say(msg.OutputBuffer((Block(OWN, 4096, asked.sizes[0], 1),)))
    done = talk.wait_for(msg.BatchDone)
    assert unpack(done.results[0].outputs[0], talk.arenas) == f"{big} 1 0" and done.copied_bytes == asked.sizes[0]
    assert answers(talk.wait_for(msg.BatchDone)) == ["later 2 0"]


def test_a_worker_ends_when_the_runtime_closes_its_socket(start: Start) -> None:
    talk = start("Waits")
    pidfd = os.dup(talk.process.pidfd)
    talk.channel.close()
    assert select.select([pidfd], [], [], 5)[0]
    os.close(pidfd)
    talk.say = lambda message: None  # type: ignore[method-assign]


def wait_until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.005)
