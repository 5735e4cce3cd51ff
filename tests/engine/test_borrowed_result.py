"""Borrowed outputs: read in place and released once, also without an explicit release."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from weftline.engine.protocol.packed import PendingTensor
from weftline.engine.session import Session, load
from weftline.errors import InputError
from weftline.pipelines.spec.builder import Builder
from weftline.shm.spec import TensorSpec

MIB = 1 << 20


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    pipeline = Builder("lending")
    x = pipeline.input("x", "uint8[N]")
    pipeline.output("y", pipeline.step("same", "echo", value=x, type="uint8[N]").value)
    with load(pipeline).open() as opened:
        yield opened


def leased(session: Session) -> int:
    return int(session.stats()["arena"]["leased_bytes"])


def test_an_output_is_a_view_until_it_is_released(session: Session) -> None:
    async def ask() -> None:
        answer = await session.borrow({"x": np.arange(MIB, dtype=np.uint8)})
        assert not answer.outputs["y"].flags.owndata and not answer.outputs["y"].flags.writeable
        assert np.array_equal(answer.outputs["y"], np.arange(MIB, dtype=np.uint8))
        assert leased(session) >= MIB
        answer.release()
        answer.release()
        assert leased(session) == 0 and answer.outputs == {}

    asyncio.run(ask())


def test_an_answer_that_is_dropped_releases_its_memory(session: Session) -> None:
    async def ask() -> None:
        answer = await session.borrow({"x": np.zeros(MIB, np.uint8)})
        del answer
        gc.collect()
        for _ in range(200):
            if leased(session) == 0:
                return
            await asyncio.sleep(0.01)
        pytest.fail(f"{leased(session)} bytes are still leased")

    asyncio.run(ask())


def test_a_pending_tensor_is_read_once_straight_into_shared_memory(session: Session) -> None:
    read: list[int] = []

    def fill(buffer: memoryview) -> None:
        read.append(len(buffer))
        buffer[:] = bytes([7]) * len(buffer)

    async def ask(size: int) -> np.ndarray:
        with await session.borrow({"x": PendingTensor(TensorSpec("uint8", (size,)), fill)}, paths=False) as answer:
            return np.array(answer.outputs["y"])

    assert (asyncio.run(ask(2 * MIB)) == 7).all()
    assert (asyncio.run(ask(3)) == 7).all()
    assert read == [2 * MIB, 3]


def test_a_pending_tensor_whose_bytes_are_gone_fails_and_holds_nothing(session: Session) -> None:
    def gone(buffer: memoryview) -> None:
        raise InputError("the region is shorter than it was")

    async def ask() -> None:
        await session.borrow({"x": PendingTensor(TensorSpec("uint8", (MIB,)), gone)}, paths=False)

    with pytest.raises(InputError, match="shorter than it was"):
        asyncio.run(ask())
    assert leased(session) == 0


def test_a_pending_tensor_of_another_type_is_refused_before_it_is_read(session: Session) -> None:
    def never(buffer: memoryview) -> None:
        raise AssertionError("it was read")

    async def ask(spec: TensorSpec) -> None:
        await session.borrow({"x": PendingTensor(spec, never)}, paths=False)

    with pytest.raises(InputError, match=r"input x: found float32\[4\], expected uint8\[N\]"):
        asyncio.run(ask(TensorSpec("float32", (4,))))
    with pytest.raises(InputError, match="the limit is"):
        asyncio.run(ask(TensorSpec("uint8", (1 << 33,))))


def test_one_that_is_cancelled_while_its_inputs_are_copied_leaves_nothing(session: Session) -> None:
    async def ask() -> None:
        asking = asyncio.ensure_future(session.borrow({"x": np.zeros(16 * MIB, np.uint8)}))
        await asyncio.sleep(0)  # it is copying now, in a thread
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        for _ in range(200):
            if leased(session) == 0:
                return
            await asyncio.sleep(0.01)
        pytest.fail(f"{leased(session)} bytes are still leased")

    asyncio.run(ask())


def test_what_came_over_a_network_names_no_file(session: Session, tmp_path: Path) -> None:
    file = tmp_path / "x.npy"
    np.save(file, np.zeros(4, np.uint8))

    async def ask(paths: bool) -> int:
        with await session.borrow({"x": file}, paths=paths) as answer:
            return int(answer.outputs["y"].size)

    assert asyncio.run(ask(True)) == 4
    with pytest.raises(InputError, match="a path instead of content"):
        asyncio.run(ask(False))
