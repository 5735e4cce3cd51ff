"""Test the device arenas of the runtime: offer, id, introduction and release."""

from __future__ import annotations

import os

from weftline.engine.protocol import messages as msg
from weftline.engine.runtime.device_arenas import DeviceArenas


def descriptor() -> int:
    return os.memfd_create("test", os.MFD_CLOEXEC)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def up(share_mode: str = "descriptor", device: str = "fake:0") -> msg.DeviceUp:
    return msg.DeviceUp(device, 4096, share_mode, b"h" * 64 if share_mode == "handle" else b"")


def test_an_arena_is_announced_with_its_id_and_closed_when_removed() -> None:
    arenas, fd = DeviceArenas(), descriptor()
    arenas.offer(0, up(), fd)
    assert list(arenas.on("fake:0")) == []
    assert arenas.accept(0, 7) == "fake:0"
    assert [id for id, _ in arenas.on("fake:0")] == [7] and list(arenas.on("fake:1")) == []
    assert arenas.attach_message(7) == (msg.AttachDevice(7, 4096, "descriptor"), fd)
    assert arenas.forget(7) and not arenas.forget(7)
    assert not is_open(fd)


def test_an_arena_offered_by_a_dead_worker_is_dropped() -> None:
    arenas, fd = DeviceArenas(), descriptor()
    arenas.offer(0, up(), fd)
    arenas.died(0)
    assert arenas.accept(0, 7) == "" and not is_open(fd)


def test_only_a_descriptor_outlives_the_worker() -> None:
    arenas, fd = DeviceArenas(), descriptor()
    arenas.offer(0, up(), fd)
    arenas.offer(1, up("handle"))
    arenas.accept(0, 7)
    arenas.accept(1, 8)
    arenas.died(0)
    arenas.died(1)
    assert [id for id, _ in arenas.on("fake:0")] == [7]
    arenas.close()
    arenas.close()
    assert not is_open(fd)


def test_a_later_worker_does_not_receive_a_dead_workers_events() -> None:
    arenas = DeviceArenas()
    arenas.offer(0, msg.DeviceUp("fake:0", 4096, "descriptor", events=(b"e" * 64,)), descriptor())
    arenas.accept(0, 7)
    assert arenas.attach_message(7)[0].events == (b"e" * 64,)
    arenas.died(0)
    assert arenas.attach_message(7)[0] == msg.AttachDevice(7, 4096, "descriptor")
    arenas.close()
