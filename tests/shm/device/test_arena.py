"""Device arenas: one memory seen by several, checked places, and mappings that outlive the arena while looked at."""

import os
import socket
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

from weftline.shm.block import Block
from weftline.shm.device.arena import DeviceArena
from weftline.shm.device.driver import DriverError
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.spec import TensorSpec
from weftline.testing.fake_gpu.gpu import FakeGpu

MIB = 1 << 20
FOUR = TensorSpec("float32", (2, 2))
AT_256 = Block(1, 256, 16, 1).place(0, 16)


def upload(driver: FakeGpu, room: DeviceTensor, numbers: list[float]) -> None:
    stream = driver.stream()
    DeviceTensor.from_array(driver, np.array(numbers, np.float32).reshape(room.shape), stream, into=room)
    driver.synchronize(stream)


def test_a_reader_sees_what_the_writer_wrote_and_cannot_write() -> None:
    writer, reader = FakeGpu("fake:0"), FakeGpu("fake:0")
    with (
        DeviceArena.create(writer, MIB) as ours,
        DeviceArena.attach(reader, ours.size_bytes, "descriptor", os.dup(ours.fd)) as theirs,
    ):
        upload(writer, ours.view(AT_256, FOUR, writable=True), [1, 2, 3, 4])
        seen = theirs.view(AT_256, FOUR)
        assert seen.host(reader, reader.stream()).tolist() == [[1, 2], [3, 4]]
        with pytest.raises(ValueError, match="read-only"):
            np.asarray(seen)[0, 0] = 9
        with pytest.raises(ValueError, match="only the process that created"):
            theirs.view(AT_256, FOUR, writable=True)
        assert (theirs.fd, theirs.writable, theirs.writable_by_necessity) == (-1, False, False)


def test_sizes_are_rounded_up_to_what_the_driver_deals_in() -> None:
    driver = FakeGpu("fake:0")
    with DeviceArena.create(driver, 1) as arena:
        assert arena.size_bytes == driver.granularity()


def test_inconsistent_outside_or_unaligned_places_are_refused() -> None:
    with DeviceArena.create(FakeGpu("fake:0"), MIB) as arena:
        end = arena.size_bytes
        with pytest.raises(ValueError, match="takes 16 bytes, its place has 12"):
            arena.view(Block(1, 0, 12, 1).place(0, 12), FOUR)
        with pytest.raises(ValueError, match="outside an arena"):
            arena.view(Block(1, end, 16, 1).place(0, 16), FOUR)
        with pytest.raises(ValueError, match="multiples of 256"):
            arena.view(Block(1, 64, 16, 1).place(0, 16), FOUR)
        with pytest.raises(ValueError, match="multiples of their size"):
            arena.view(Block(1, 256, 32, 1).place(2, 16), FOUR)
        assert arena.view(Block(1, 256, 32, 1).place(4, 16), FOUR).address == arena.address + 260


def test_viewed_memory_outlives_the_arena_until_its_last_view() -> None:
    driver = FakeGpu("fake:0")
    arena = DeviceArena.create(driver, MIB)
    tensor = arena.view(AT_256, FOUR, writable=True)
    upload(driver, tensor, [1, 2, 3, 4])
    mapping = weakref.ref(tensor.owner)
    one = tensor[1]
    arena.close()
    del tensor
    assert one.host(driver, driver.stream()).tolist() == [3, 4]
    del one
    assert mapping() is None
    with pytest.raises(ValueError, match="closed"):
        arena.view(AT_256, FOUR)


def test_a_torch_view_keeps_the_memory_of_a_closed_arena() -> None:
    pytest.importorskip("torch")
    driver = FakeGpu("fake:0")
    arena = DeviceArena.create(driver, MIB)
    upload(driver, arena.view(AT_256, FOUR, writable=True), [1, 2, 3, 4])
    tensor = arena.view(AT_256, FOUR)
    mapping = weakref.ref(tensor.owner)
    seen = tensor.torch()[1]
    arena.close()
    del tensor, arena
    assert seen.tolist() == [3, 4]  # in a process whose memory was unmapped under it this line would be its last
    del seen
    assert mapping() is None


def test_a_mapping_is_released_once_after_its_last_view() -> None:
    unmapped = []

    class Counting(FakeGpu):
        def unmap(self, address: int, size_bytes: int) -> None:
            unmapped.append((address, size_bytes))
            super().unmap(address, size_bytes)

    arena = DeviceArena.create(Counting("fake:0"), MIB)
    address, size = arena.address, arena.size_bytes
    tensor = arena.view(AT_256, FOUR)
    descriptor = arena.fd
    arena.close()
    arena.close()
    with pytest.raises(OSError):
        os.fstat(descriptor)
    assert unmapped == []
    del tensor
    assert unmapped == [(address, size)]


def test_a_tensor_is_found_by_where_it_lies() -> None:
    driver = FakeGpu("fake:0")
    with DeviceArena.create(driver, MIB) as arena, DeviceArena.create(driver, MIB) as other:
        tensor = arena.view(AT_256, FOUR)
        assert arena.place_of(tensor) == 256
        assert arena.place_of(tensor[1]) == 264
        assert other.place_of(tensor) is None
        elsewhere = DeviceTensor(FOUR, "fake:1", tensor.address)
        assert arena.place_of(elsewhere) is None
        beyond = DeviceTensor(FOUR, "fake:0", arena.address + arena.size_bytes - 8)
        assert arena.place_of(beyond) is None


def test_where_the_driver_refuses_to_map_read_only_the_arena_says_so() -> None:
    class Careless(FakeGpu):
        def map(self, memory: int, size_bytes: int, writable: bool) -> int:
            if not writable:
                raise DriverError("cuMemSetAccess", "CUDA_ERROR_INVALID_VALUE")
            return super().map(memory, size_bytes, writable)

    driver = Careless("fake:0")
    with DeviceArena.create(driver, MIB) as ours:
        theirs = DeviceArena.attach(driver, ours.size_bytes, "descriptor", os.dup(ours.fd))
        assert theirs.writable_by_necessity
        assert not theirs.writable
        with pytest.raises(ValueError, match="only the process that created"):
            theirs.view(AT_256, FOUR, writable=True)
        theirs.close()


def open_descriptors() -> set[str]:
    return {link.name for link in Path("/proc/self/fd").iterdir() if link.exists() or link.is_symlink()}


def test_nothing_is_left_behind_when_the_driver_refuses() -> None:
    class Refusing(FakeGpu):
        refused = ""
        given_back = 0

        def _ask(self, call: str) -> None:
            if call == self.refused:
                raise DriverError(call, "NOT_SUPPORTED")

        def unmap(self, address: int, size_bytes: int) -> None:
            self.given_back += 1
            super().unmap(address, size_bytes)

        def share(self, address: int) -> bytes:
            raise DriverError("share", "NOT_SUPPORTED")

        def free(self, address: int) -> None:
            self.given_back += 1
            super().free(address)

        def export(self, memory: int) -> int:
            self._ask("export")
            return super().export(memory)

        def map(self, memory: int, size_bytes: int, writable: bool) -> int:
            self._ask("map")
            return super().map(memory, size_bytes, writable)

        def import_memory(self, descriptor: int) -> int:
            self._ask("import_memory")
            return super().import_memory(descriptor)

    driver = Refusing("fake:0")
    DeviceArena.create(driver, MIB).close()  # a fake opens what it keeps for itself at its first memory
    before = open_descriptors()
    for driver.refused in ("map", "export"):
        with pytest.raises(DriverError, match=driver.refused):
            DeviceArena.create(driver, MIB)
        assert open_descriptors() <= before
    driver.refused, driver.given_back = "export", 0
    with pytest.raises(DriverError) as export:
        DeviceArena.create(driver, MIB)
    with pytest.raises(DriverError) as share:
        DeviceArena.create(driver, MIB, "handle")
    assert (driver.given_back, export.value.call, share.value.call) == (2, "export", "share")  # while errors are held
    driver.refused = ""
    with DeviceArena.create(driver, MIB) as ours:
        before = open_descriptors()
        for driver.refused in ("import_memory", "map"):
            with pytest.raises(DriverError, match=driver.refused):
                DeviceArena.attach(driver, ours.size_bytes, "descriptor", os.dup(ours.fd))
            assert open_descriptors() <= before
        with pytest.raises(ValueError, match="cannot be attached"):
            DeviceArena.attach(driver, 0, "descriptor", os.dup(ours.fd))
        with pytest.raises(ValueError, match="cannot be attached"):
            DeviceArena.attach(driver, MIB, "host", os.dup(ours.fd))
        assert open_descriptors() <= before
    with pytest.raises(ValueError, match="unknown share mode"):
        DeviceArena.create(driver, MIB, "host")


def test_another_process_maps_the_descriptor_after_its_creator_closed_it() -> None:
    child = (
        "import socket,sys;from weftline.shm.block import Block;from weftline.shm.spec import TensorSpec;"
        "from weftline.testing.fake_gpu.gpu import FakeGpu;from weftline.shm.device.arena import DeviceArena;"
        "s=socket.socket(fileno=int(sys.argv[1]));_,fds,_,_=socket.recv_fds(s,1,1);d=FakeGpu('fake:0');"
        f"a=DeviceArena.attach(d,{2 * MIB},'descriptor',fds[0]);s.send(b'attached');s.recv(1);"
        "t=a.view(Block(1,256,16,1).place(0,16),TensorSpec('float32',(4,)));print(t.host(d,d.stream()).tolist())"
    )
    driver = FakeGpu("fake:0")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        arena = DeviceArena.create(driver, 2 * MIB)
        process = subprocess.Popen(
            [sys.executable, "-c", child, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdout=subprocess.PIPE
        )
        socket.send_fds(ours, [b"x"], [arena.fd])
        assert ours.recv(8) == b"attached"
        upload(driver, arena.view(AT_256, FOUR, writable=True), [1, 2, 3, 4])
        arena.close()
        ours.send(b"x")
        out, _ = process.communicate(timeout=20)
    assert out.strip() == b"[1.0, 2.0, 3.0, 4.0]"
