"""How a worker comes by its device: the rung it stands on, what it does without, and what it refuses to begin with."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from weftline.engine import messages as msg
from weftline.engine.worker import opening
from weftline.engine.worker.near import NearMemory
from weftline.engine.worker.opening import Opener, open_near
from weftline.errors import LimitReached, MissingPackage
from weftline.shm.device.driver import DriverError, GpuDriver
from weftline.shm.device.events import EVENTS_MAX
from weftline.shm.device.fake import FakeGpu

ARENA_BYTES = 3 << 20


def told(device: str = "fake:0", arena_bytes: int = ARENA_BYTES, ordering: str = "host") -> msg.Open:
    return msg.Open("w", 4096, 1, ".", ".", (), device, arena_bytes, ordering)


def test_a_worker_without_a_gpu_opens_none_and_tells_of_none() -> None:
    assert open_near(told(device="")) == (None, None, None)


def test_an_arena_is_made_and_told_with_its_descriptor_and_its_events_only_where_they_are_used() -> None:
    near, up, fd = open_near(told())
    assert isinstance(near, NearMemory) and near.arena is not None and up is not None
    assert (up.device, up.rung, up.why, up.events) == ("fake:0", "descriptor", "", ())
    assert up.size_bytes == near.arena.size_bytes == 4 << 20 and fd == near.arena.fd
    near.arena.close()
    near, up, _ = open_near(told(ordering="event"))
    assert near is not None and near.arena is not None and up is not None and len(up.events) == EVENTS_MAX
    near.arena.close()


def test_a_worker_that_gives_nothing_on_its_device_has_no_arena_and_reads_all_the_same() -> None:
    near, up, fd = open_near(told(arena_bytes=0))
    assert near is not None and near.arena is None and (up, fd) == (None, None)


def test_a_device_that_shares_nothing_is_told_with_what_was_refused() -> None:
    near, up, fd = open_near(told("fake-alone:0"))
    assert near is not None and near.arena is None and fd is None
    assert up is not None and (up.size_bytes, up.rung) == (0, "host") and "descriptor: create" in up.why


@pytest.mark.parametrize("error", [DriverError("init", "NO_DEVICE"), MissingPackage("cuda-bindings", "cuda")])
def test_a_device_whose_driver_cannot_be_had_is_done_without(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(device: str) -> GpuDriver:
        raise error

    monkeypatch.setattr(opening, "open_driver", refuses)
    near, up, _ = open_near(told("cuda:0"))
    assert near is None and up == msg.DeviceUp("cuda:0", 0, "host", why=str(error))
    assert open_near(told("cuda:0", arena_bytes=0)) == (None, None, None)


def test_events_that_cannot_be_shared_leave_the_worker_with_ordering_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: FakeGpu, event: int) -> bytes:
        raise DriverError("export_event", "NOT_SUPPORTED")

    monkeypatch.setattr(FakeGpu, "export_event", refuses)
    near, up, _ = open_near(told(ordering="event"))
    assert near is not None and near.events is None and near.arena is not None
    assert up is not None and up.events == () and up.rung == "descriptor" and "events: export_event" in up.why
    near.arena.close()


def test_a_node_is_open_once_its_work_on_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    near = NearMemory(FakeGpu("fake:0"))
    said: list[msg.FromWorker] = []
    waited: list[tuple[int, int]] = []
    monkeypatch.setattr(near.driver, "synchronize", lambda stream: waited.append((stream, len(said))))
    step = msg.StepToOpen(0, "a", "echo", {"type": "uint8[4]"}, (), (), "fake:0", 1, False)
    opener = Opener(told(), near, said.append)
    stream = opener.stream(step)
    opener.node(step, stream)
    assert waited == [(stream, 2)] and said[2] == msg.Progress("a", "ready", 1.0)


@pytest.mark.parametrize(("device", "chosen"), [("cuda:1", [1, 1]), ("cuda:0", []), ("fake:1", []), ("cpu", [])])
def test_torch_works_on_the_step_s_gpu_unless_it_is_the_first_anyway(
    monkeypatch: pytest.MonkeyPatch, device: str, chosen: list[int]
) -> None:
    told_torch: list[int] = []
    cuda = SimpleNamespace(set_device=told_torch.append, is_initialized=lambda: False)
    backends = SimpleNamespace(cuda=SimpleNamespace(is_built=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, backends=backends))
    step = msg.StepToOpen(0, "a", "echo", {"type": "uint8[4]"}, (), (), device, 1, False)
    Opener(told(device), None, lambda message: None).node(step)
    assert told_torch == chosen


def test_a_device_that_has_no_room_for_the_arena_is_an_error_that_says_what_to_lower() -> None:
    with pytest.raises(LimitReached, match=r"(?s)fake:0 has no room for an arena .*gpu\.arena_bytes"):
        open_near(told(arena_bytes=1 << 40))
