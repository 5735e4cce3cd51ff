"""A fake GPU does what the protocol says, and refuses what CUDA leaves undefined."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from tests.shm.device.fakes import brought_in, made, peek, poke, puts
from weftline.shm.device.driver import DeviceLost, DeviceOutOfMemory, DriverError, GpuDriver
from weftline.testing.fake_gpu.gpu import GRANULARITY_BYTES, TOTAL_BYTES, FakeGpu

SIZE = GRANULARITY_BYTES


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_memory_that_was_exported_is_seen_by_its_importer() -> None:
    writer: GpuDriver = FakeGpu()
    reader = FakeGpu()
    memory, address = made(writer)
    descriptor = writer.export(memory)
    seen = brought_in(reader, descriptor)
    os.close(descriptor)
    poke(address, b"hello")
    assert seen != address and peek(seen) == b"hello"


def test_memory_outlives_its_maker_through_its_descriptor() -> None:
    writer = FakeGpu()
    memory, address = made(writer)
    poke(address, b"hello")
    descriptor = writer.export(memory)
    writer.unmap(address, SIZE)
    writer.release(memory)
    writer.close()
    assert peek(brought_in(FakeGpu(), descriptor)) == b"hello"
    os.close(descriptor)


def test_a_large_memory_takes_only_what_is_written_to_it() -> None:
    gpu = FakeGpu()
    memory = gpu.create(TOTAL_BYTES)
    poke(gpu.map(memory, TOTAL_BYTES, True) + TOTAL_BYTES - 5, b"hello")
    descriptor = gpu.export(memory)
    assert os.fstat(descriptor).st_blocks * 512 < 1 << 20
    os.close(descriptor)


def test_what_a_process_made_is_what_counts() -> None:
    one, other = FakeGpu(total_bytes=4 * SIZE), FakeGpu(total_bytes=4 * SIZE)
    memory, address = made(one, 2 * SIZE)
    brought_in(other, one.export(memory), 2 * SIZE)
    assert one.memory() == (2 * SIZE, 4 * SIZE) and other.memory() == (4 * SIZE, 4 * SIZE)
    with pytest.raises(DeviceOutOfMemory, match=f"{3 * SIZE} bytes asked for, {2 * SIZE} are free"):
        one.create(3 * SIZE)
    with pytest.raises(DeviceOutOfMemory):
        one.allocate(3 * SIZE)
    one.release(memory)
    assert one.memory()[0] == 2 * SIZE
    one.unmap(address, 2 * SIZE)
    assert one.memory()[0] == 4 * SIZE


def test_every_descriptor_goes_with_what_it_was_for() -> None:
    before = descriptors()
    writer, reader = FakeGpu("fake-legacy:0"), FakeGpu("fake-legacy:0")
    address = writer.allocate(SIZE)
    event = writer.event(shared=True)
    seen = reader.open_shared(writer.share(address))
    reader.import_event(writer.export_event(event))
    reader.close_shared(seen)
    writer.free(address)
    del reader, writer
    assert descriptors() == before


@pytest.mark.parametrize("device", ["fake-legacy:0", "fake-alone:0"])
def test_older_devices_share_nothing_by_descriptor(device: str) -> None:
    gpu = FakeGpu(device)
    with pytest.raises(DriverError, match="NOT_SUPPORTED"):
        gpu.create(SIZE)
    with pytest.raises(DriverError, match="NOT_SUPPORTED"):
        gpu.import_memory(0)


def test_a_closed_device_admits_only_its_maker() -> None:
    writer, reader = FakeGpu("fake-closed:0"), FakeGpu("fake-closed:0")
    before = descriptors()
    memory = writer.create(SIZE)
    fd = writer.export(memory)
    brought = writer.import_memory(fd)
    with pytest.raises(DriverError, match="NOT_PERMITTED"):
        reader.import_memory(fd)
    os.close(fd)
    for held in (memory, brought):
        writer.release(held)
    assert descriptors() == before


def test_a_device_alone_shares_nothing_by_handle_either() -> None:
    gpu = FakeGpu("fake-alone:0")
    address = gpu.allocate(SIZE)
    for call in (lambda: gpu.share(address), lambda: gpu.open_shared(b""), lambda: gpu.import_event(b"")):
        with pytest.raises(DriverError, match="NOT_SUPPORTED"):
            call()
    with pytest.raises(DriverError, match="NOT_SUPPORTED"):
        gpu.export_event(gpu.event(shared=True))


def misuse(gpu: FakeGpu, memory: int, address: int) -> dict[str, tuple[str, object]]:
    """Return calls that must be refused, with the code that says why."""
    allocation = gpu.allocate(64)
    event = gpu.event()
    stream = gpu.stream()
    return {
        "a size off the granularity": ("INVALID_VALUE", lambda: gpu.create(SIZE + 1)),
        "nothing": ("INVALID_VALUE", lambda: gpu.create(0)),
        "an allocation of nothing": ("INVALID_VALUE", lambda: gpu.allocate(0)),
        "more than there is": ("INVALID_VALUE", lambda: gpu.map(memory, 2 * SIZE, True)),
        "half a mapping": ("INVALID_VALUE", lambda: gpu.unmap(address, 4096)),
        "a second release": ("INVALID_HANDLE", lambda: (gpu.release(memory), gpu.release(memory))),
        "a second unmap": ("INVALID_VALUE", lambda: (gpu.unmap(address, SIZE), gpu.unmap(address, SIZE))),
        "a second free": ("INVALID_VALUE", lambda: (gpu.free(allocation), gpu.free(allocation))),
        "freeing a mapping": ("INVALID_VALUE", lambda: gpu.free(address)),
        "part of an allocation": ("INVALID_VALUE", lambda: gpu.share(allocation)),
        "own memory opened": ("INVALID_CONTEXT", lambda: gpu.open_shared(gpu.share(gpu.allocate(SIZE)))),
        "own memory imported twice": (
            "ALREADY_MAPPED",
            lambda: (gpu.import_memory(gpu.export(memory)), gpu.import_memory(gpu.export(memory))),
        ),
        "a descriptor of something else": ("INVALID_HANDLE", lambda: gpu.import_memory(os.memfd_create("x"))),
        "a descriptor that is closed": ("INVALID_HANDLE", lambda: gpu.import_memory(10_000)),
        "a handle of nothing": ("INVALID_HANDLE", lambda: gpu.open_shared(bytes(64))),
        "an event of nothing": ("INVALID_HANDLE", lambda: gpu.import_event(bytes(64))),
        "an event of another's memory": (
            "INVALID_CONTEXT",
            lambda: gpu.import_event(foreign_event()),
        ),
        "own event imported": (
            "INVALID_CONTEXT",
            lambda: gpu.import_event(gpu.export_event(gpu.event(shared=True))),
        ),
        "an event that is not shared": ("INVALID_VALUE", lambda: gpu.export_event(event)),
        "an event destroyed twice": ("INVALID_HANDLE", lambda: (gpu.destroy_event(event), gpu.destroy_event(event))),
        "an event of no handle": ("INVALID_HANDLE", lambda: gpu.record(memory, gpu.stream())),
        "a stream of no handle": ("INVALID_HANDLE", lambda: gpu.copy(address, address, 1, memory)),
        "a stream destroyed twice": (
            "INVALID_HANDLE",
            lambda: (gpu.destroy_stream(stream), gpu.destroy_stream(stream)),
        ),
        "pages locked twice": (
            "HOST_MEMORY_ALREADY_REGISTERED",
            lambda: (gpu.lock_pages(4096, 4096, True), gpu.lock_pages(8191, 4096, True)),
        ),
        "pages that were not locked": ("HOST_MEMORY_NOT_REGISTERED", lambda: gpu.unlock_pages(4096)),
    }


def foreign_event() -> bytes:
    other = FakeGpu()
    made(other)
    return other.export_event(other.event(shared=True))


@pytest.mark.parametrize("what", misuse(FakeGpu(), 0, 0))
def test_misuse_is_refused(what: str) -> None:
    gpu = FakeGpu()
    code, call = misuse(gpu, *made(gpu))[what]
    with pytest.raises(DriverError) as refused:
        call()  # type: ignore[operator]
    assert refused.value.code == code and not isinstance(refused.value, DeviceLost)


def test_memory_imported_again_after_it_was_given_back_is_fine() -> None:
    writer, reader = FakeGpu(), FakeGpu()
    descriptor = writer.export(made(writer)[0])
    address = brought_in(reader, descriptor)
    with pytest.raises(DriverError, match="ALREADY_MAPPED"):
        reader.import_memory(descriptor)
    reader.unmap(address, SIZE)
    assert brought_in(reader, descriptor)


def test_a_handle_of_an_allocation_that_was_freed_opens_nothing() -> None:
    writer = FakeGpu("fake-legacy:0")
    address = writer.allocate(SIZE)
    handle = writer.share(address)
    writer.free(address)
    writer.allocate(SIZE)  # takes the descriptor's number again
    with pytest.raises(DriverError, match=r"INVALID_HANDLE|NOT_SUPPORTED"):
        FakeGpu("fake-legacy:0").open_shared(handle)


def test_a_write_through_a_read_only_map_loses_only_its_own_device() -> None:
    writer, reader = FakeGpu(), FakeGpu()
    memory, address = made(writer)
    seen = brought_in(reader, writer.export(memory))
    with pytest.raises(DeviceLost, match="read-only"):
        reader.copy(seen, address, 64, 0)
    for call in (lambda: reader.synchronize(0), lambda: reader.finished(reader.event()), lambda: reader.create(SIZE)):
        with pytest.raises(DeviceLost, match="read-only"):
            call()
    reader.unmap(seen, SIZE)  # giving back still works
    writer.copy(address, address + 64, 64, 0)
    writer.synchronize(0)


def test_read_only_is_the_memory_s_own_not_a_promise() -> None:
    writer, reader = FakeGpu(), FakeGpu()
    seen = brought_in(reader, writer.export(made(writer)[0]))
    line = next(line for line in Path("/proc/self/maps").read_text().splitlines() if line.startswith(f"{seen:x}-"))
    assert line.split()[1] == "r--s"


def test_what_lies_beyond_a_memory_loses_the_device() -> None:
    gpu = FakeGpu()
    _, address = made(gpu)
    with pytest.raises(DeviceLost, match="1 bytes beyond its end"):
        gpu.copy(address, address + SIZE - 63, 64, 0)


def test_a_kernel_that_raises_loses_the_device() -> None:
    gpu = FakeGpu()
    _, address = made(gpu)
    gpu.launch(lambda: 1 // 0, [], [(address, 4)], 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(DeviceLost, match="a kernel failed"):
        gpu.synchronize(0)


def test_copies_go_between_host_and_device_both_ways() -> None:
    gpu = FakeGpu()
    stream = gpu.stream()
    address = gpu.allocate(1000)
    up, down = ctypes.create_string_buffer(b"hello"), ctypes.create_string_buffer(5)
    gpu.copy(address + 10, ctypes.addressof(up), 5, stream)
    gpu.copy(address, address + 10, 5, stream)
    gpu.copy(ctypes.addressof(down), address, 5, stream)
    gpu.synchronize(stream)
    assert down.raw == b"hello"


def test_poison_is_what_a_late_reader_sees() -> None:
    gpu = FakeGpu()
    _, address = made(gpu)
    puts(gpu, address, b"hello", 0)
    gpu.poison(address, 3)
    assert peek(address) == b"\xdd\xdd\xddlo"
