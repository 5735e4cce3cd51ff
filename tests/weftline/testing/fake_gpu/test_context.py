"""Fake devices between real processes: memory and events cross by descriptor, a death is noticed, handles may not."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.shm.device.fakes import brought_in, peek
from weftline.shm.device.driver import DeviceLost, DriverError
from weftline.testing.fake_gpu.context import Process, lives, this_process
from weftline.testing.fake_gpu.gpu import GRANULARITY_BYTES, FakeGpu

CHILD = """
import socket, sys
from weftline.engine.worker.hardening import harden
from weftline.testing.fake_gpu.gpu import GRANULARITY_BYTES as SIZE, FakeGpu
import ctypes, os
line = socket.socket(fileno=int(sys.argv[1]))
device, hardened = sys.argv[2:]
if hardened == "hardened":
    harden(os.getppid())
gpu = FakeGpu(device)
if device == "fake:0":
    memory = gpu.create(SIZE)
    address, fds, handle = gpu.map(memory, SIZE, True), [gpu.export(memory)], b""
else:
    address = gpu.allocate(SIZE)
    fds, handle = [], gpu.share(address)
mark, stream = gpu.event(shared=True), gpu.stream()
held = gpu._events.mark(mark)  # counted as a record on a GPU that is busy
socket.send_fds(line, [handle.ljust(64) + gpu.export_event(mark)], fds)
while line.recv(1):
    ctypes.memmove(address, b"hello", 5)
    held.event.finish(held.number)
"""


CAP_SYS_PTRACE = 19
"""capabilities(7): who has it may trace hardened processes too, as root may outside of a container."""


@contextmanager
def no_tracer() -> Iterator[None]:
    """Go without CAP_SYS_PTRACE for a while (capset(2), version 3), as every process but root's does."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    before = data[0]
    data[0] &= ~(1 << CAP_SYS_PTRACE)
    assert libc.capset(header, data) == 0
    try:
        yield
    finally:
        data[0] = before
        assert libc.capset(header, data) == 0


@contextmanager
def producer(device: str = "fake:0", hardened: str = "") -> Iterator[tuple[subprocess.Popen, socket.socket]]:
    """Run a producer that says what it shares, and whose event is done when it is sent a byte."""
    here, there = socket.socketpair()
    with here, there:
        arguments = [sys.executable, "-c", CHILD, str(there.fileno()), device, hardened]
        child = subprocess.Popen(arguments, pass_fds=[there.fileno()])
        there.close()
        try:
            yield child, here
        finally:
            child.kill()
            child.wait()


def met(gpu: FakeGpu, line: socket.socket) -> tuple[int, int]:
    """Return the producer's memory and event, as they are here."""
    message, fds, _, _ = socket.recv_fds(line, 200, 1)
    address = brought_in(gpu, fds[0]) if fds else gpu.open_shared(message[:64])
    for fd in fds:
        os.close(fd)
    return address, gpu.import_event(message[64:])


def test_a_stream_waits_for_another_process_and_sees_what_it_wrote() -> None:
    gpu = FakeGpu()
    with producer() as (_, line):
        address, ready = met(gpu, line)
        stream, done, own = gpu.stream(), gpu.event(), gpu.allocate(5)
        gpu.wait(stream, ready)
        gpu.copy(own, address, 5, stream)
        gpu.record(done, stream)
        assert not gpu.finished(done)
        line.send(b"g")
        gpu.wait_event(done)
        assert peek(own) == b"hello"


def test_a_producer_killed_before_its_event_loses_it_and_its_memory_stays() -> None:
    gpu = FakeGpu()
    with producer() as (child, line):
        address, ready = met(gpu, line)
        stream = gpu.stream()
        gpu.wait(stream, ready)
        child.send_signal(signal.SIGKILL)
        # No parent reaps it: a process that was killed is dead all the same.
        with pytest.raises(DeviceLost, match="PRODUCER_DIED"):
            gpu.synchronize(stream)
        assert peek(address) == bytes(5)
        gpu.unmap(address, GRANULARITY_BYTES)


def test_the_older_way_works_where_the_kernel_lends_a_descriptor() -> None:
    gpu = FakeGpu("fake-legacy:0")
    with producer("fake-legacy:0") as (_, line):
        try:
            address, ready = met(gpu, line)
        except DriverError as refused:  # not every kernel lets a parent trace its child
            pytest.skip(str(refused))
        line.send(b"g")
        gpu.wait_event(ready)
        assert peek(address) == b"hello"


def test_the_older_way_is_refused_between_hardened_processes() -> None:
    gpu = FakeGpu("fake-legacy:0")
    refused = pytest.raises(DriverError, match=r"NOT_SUPPORTED.*lend")
    with producer("fake-legacy:0", "hardened") as (_, line), no_tracer(), refused:
        met(gpu, line)


def test_a_handle_of_a_process_that_is_gone_is_refused() -> None:
    gpu = FakeGpu("fake-legacy:0")
    with producer("fake-legacy:0") as (child, line):
        message = line.recv(200)
        child.kill()
        child.wait()
        with pytest.raises(DriverError, match="INVALID_HANDLE"):
            gpu.open_shared(message[:64])


def test_a_later_process_of_the_same_number_is_another() -> None:
    me = this_process()
    assert lives(me)
    assert not lives(Process(me.number, me.born - 1))
    assert not lives(Process(2**22 + 1, 0))
