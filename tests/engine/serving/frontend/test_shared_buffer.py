"""Shared buffers: write permissions, placement, values inline in a message, and release of blocks."""

from __future__ import annotations

import asyncio
import mmap
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from weftline.engine.protocol.packed import PendingTensor
from weftline.engine.serving.frontend.messages import NO_BLOCK
from weftline.engine.serving.frontend.shared_buffer import (
    THREAD_COPY_BYTES,
    PackedValues,
    SharedBuffer,
    attach_request_buffer,
    create_request_buffer,
    detach,
    own_bytes,
    unpack_inputs,
    unpack_outputs,
)
from weftline.errors import InputError, LimitReached
from weftline.nodes.detections import Detections
from weftline.shm.arena import HostArena
from weftline.shm.spec import TensorSpec


@pytest.fixture
def buffers() -> Iterator[tuple[HostArena, SharedBuffer]]:
    """The reader's side and the writer's side of one request buffer."""
    reader = create_request_buffer(1 << 20)
    buffer = SharedBuffer(attach_request_buffer(os.dup(reader.fd)))
    yield reader, buffer
    detach(reader)
    detach(buffer.arena)


def test_only_the_ingress_process_can_write_its_buffer(buffers: tuple[HostArena, SharedBuffer]) -> None:
    reader, buffer = buffers
    with pytest.raises(TypeError):
        reader.buffer[0] = 1
    with pytest.raises(PermissionError):
        mmap.mmap(reader.fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.ftruncate(reader.fd, 4096)
    buffer.arena.buffer[0] = 7
    assert reader.buffer[0] == 7


def test_the_engines_own_cannot_be_written_by_the_reader() -> None:
    with HostArena.create(4096) as answers, pytest.raises(PermissionError):
        attach_request_buffer(os.dup(answers.fd))


def test_large_values_are_in_the_buffer_and_small_ones_inline(buffers: tuple[HostArena, SharedBuffer]) -> None:
    reader, buffer = buffers
    values: dict[str, Any] = {
        "large": np.arange(20_000, dtype=np.float32),
        "small": np.arange(4),
        "text": "ü" * 20_000,
        "list": [np.full(3000, at) for at in range(3)],
        "mixed": [b"\x00", "a", None, 3, {"a": [1]}],
        "found": Detections(np.ones((1, 4), np.float32), np.ones(1, np.float32), np.zeros(1, np.int32), ("cat",)),
        "view": memoryview(b"z" * 50_000),
    }
    laid = buffer.place(PackedValues(values))
    sent = laid.write()
    assert sent["large"].place is not None and sent["small"].data is not None and sent["text"].place is not None
    found = unpack_outputs(sent, reader)
    assert np.array_equal(found["large"], values["large"]) and np.array_equal(found["small"], values["small"])
    assert [one.tolist() for one in found["list"]] == [one.tolist() for one in values["list"]]
    assert (found["text"], found["mixed"], found["view"]) == (values["text"], values["mixed"], b"z" * 50_000)
    assert found["found"].to_json() == values["found"].to_json()
    assert not found["large"].flags.writeable
    buffer.free(laid.block)
    assert buffer.taken_bytes == 0


def test_values_without_a_free_block_travel_inside_the_message(buffers: tuple[HostArena, SharedBuffer]) -> None:
    reader, buffer = buffers
    first = buffer.place(PackedValues({"x": np.zeros(200_000, np.float32)}))
    second = buffer.place(PackedValues({"x": np.ones(200_000, np.float32)}))
    assert (first.block != NO_BLOCK, second.block) == (True, NO_BLOCK)
    assert np.array_equal(unpack_outputs(second.write(), reader)["x"], np.ones(200_000, np.float32))
    buffer.free(first.block)
    buffer.free(second.block)


@pytest.fixture
def large_buffers() -> Iterator[tuple[HostArena, SharedBuffer]]:
    reader = create_request_buffer(4 * THREAD_COPY_BYTES)
    buffer = SharedBuffer(attach_request_buffer(os.dup(reader.fd)))
    yield reader, buffer
    detach(reader)
    detach(buffer.arena)


def test_large_values_wait_for_room_fair_by_caller(large_buffers: tuple[HostArena, SharedBuffer]) -> None:
    _, buffer = large_buffers
    values = PackedValues({"x": memoryview(bytes(3 * THREAD_COPY_BYTES))})
    order: list[str] = []

    async def place(caller: str) -> None:
        placement = await buffer.place_in_turn(values, caller, 10)
        order.append(caller)
        await asyncio.sleep(0.01)
        buffer.free(placement.block)

    async def script() -> None:
        first = await buffer.place_in_turn(values, "greedy", 10)
        waiting = [asyncio.create_task(place(caller)) for caller in ("greedy", "greedy", "other")]
        await asyncio.sleep(0.01)
        with pytest.raises(LimitReached, match=r"memory for inputs for 0\.01 s"):
            await buffer.place_in_turn(values, "late", 0.01)
        small = await buffer.place_in_turn(PackedValues({"x": np.zeros(20_000)}), "third", 0)
        huge = await buffer.place_in_turn(PackedValues({"x": memoryview(bytes(5 * THREAD_COPY_BYTES))}), "third", 0)
        assert small.block != NO_BLOCK == huge.block
        assert not order
        buffer.free(first.block)
        await asyncio.gather(*waiting)

    asyncio.run(script())
    assert order == ["other", "greedy", "greedy"]


def test_large_bytes_are_copied_before_their_block_is_free(large_buffers: tuple[HostArena, SharedBuffer]) -> None:
    reader, buffer = large_buffers
    photo = os.urandom(THREAD_COPY_BYTES)

    def read(**values: Any) -> tuple[dict[str, Any], bool]:
        placement = buffer.place(PackedValues(values))
        inputs = unpack_inputs(placement.write(), reader)
        owned = asyncio.run(own_bytes(inputs))
        buffer.arena.buffer[:] = bytes(buffer.arena.size_bytes)  # as a hostile process would
        buffer.free(placement.block)
        return owned

    found, all_read = read(photo=memoryview(photo), name="a", more=[photo, photo])
    assert all_read and found["photo"] == photo and found["photo"].readonly
    assert found["name"] == "a" and [bytes(one) for one in found["more"]] == [photo, photo]
    assert read(photo=memoryview(photo), tensor=np.zeros(20_000))[1] is False
    assert read(text="a") == ({"text": "a"}, False)


def test_a_block_goes_back_once(buffers: tuple[HostArena, SharedBuffer]) -> None:
    _, buffer = buffers
    laid = buffer.place(PackedValues({"x": np.zeros(20_000, np.float32)}))
    buffer.free(laid.block)
    with pytest.raises(KeyError):
        buffer.free(laid.block)


@pytest.mark.parametrize("value", [object(), {(1, 2): 3}, np.array([object()]), {"a": b"x"}, 1 << 70, {object()}])
def test_what_cannot_travel_is_an_input_error_that_names_the_input(
    buffers: tuple[HostArena, SharedBuffer], value: object
) -> None:
    _, buffer = buffers
    with pytest.raises(InputError, match="input photo"):
        buffer.place(PackedValues({"photo": value}))


def test_a_cancelled_copy_raises_only_after_it_has_ended() -> None:
    reader = create_request_buffer(4 << 20)
    buffer = SharedBuffer(attach_request_buffer(os.dup(reader.fd)))
    done: list[bool] = []

    def read_into(buffer: memoryview) -> None:
        time.sleep(0.1)
        done.append(True)

    async def script() -> None:
        copying = asyncio.create_task(
            buffer.place(PackedValues({"x": PendingTensor(TensorSpec("uint8", (2 << 20,)), read_into)})).awrite()
        )
        await asyncio.sleep(0.02)
        copying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await copying
        assert done

    asyncio.run(script())
    detach(reader)
    detach(buffer.arena)


def test_views_outlive_a_detached_buffer() -> None:
    reader = create_request_buffer(1 << 16)
    buffer = SharedBuffer(attach_request_buffer(os.dup(reader.fd)))
    laid = buffer.place(PackedValues({"x": np.full(10_000, 3, np.int32)}))
    found = unpack_outputs(laid.write(), reader)["x"]
    detach(reader)
    detach(reader)  # twice is once
    detach(buffer.arena)
    del reader, buffer, laid
    assert found.sum() == 30_000
