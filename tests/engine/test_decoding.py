"""Pictures and recordings of many requests at a time: measured by their headers, decoded in order, within a budget."""

from __future__ import annotations

import asyncio
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from tests.engine.fire import builder
from weftline.engine.inputs import DECODE_NICE
from weftline.engine.machine import this_machine
from weftline.engine.request import RequestOptions
from weftline.engine.session import Session, Source
from weftline.errors import DeadlineExceeded, InputError, LimitReached
from weftline.nodes import image
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.render.text import explain_text

Start = Callable[[Source], Session]


def png(side: int = 2000) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (side, side), (10, 20, 30)).save(out, "PNG", compress_level=9)
    return out.getvalue()


def wav() -> bytes:
    out = io.BytesIO()
    soundfile.write(out, np.zeros(1600, np.float32), 16_000, format="WAV")
    return out.getvalue()


def shows(limits: dict[str, Any] | None = None, **options: Any) -> Any:
    p = builder(**(limits or {}))
    p.output("y", p.step("s", "echo", value=p.input("x", "image"), type="image", **options).value)
    return p


def anon_bytes() -> int:
    with Path("/proc/self/status").open() as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


class Peak(threading.Thread):
    """The most anonymous memory that this process had meanwhile, beyond what it began with."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._began = self._most = anon_bytes()
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._over.wait(0.002):
            self._most = max(self._most, anon_bytes())

    def end(self) -> int:
        self._over.set()
        self.join()
        return self._most - self._began


async def _lend(session: Session, data: bytes, options: RequestOptions | None = None) -> tuple[int, ...]:
    with await session.borrow({"x": data}, options, paths=False) as lent:
        return tuple(lent.outputs["y"].shape)


def flood(session: Session, data: bytes, count: int) -> list[Any]:
    async def main() -> list[Any]:
        return await asyncio.gather(*(_lend(session, data) for _ in range(count)), return_exceptions=True)

    return asyncio.run(main())


@pytest.mark.slow
def test_many_pictures_at_once_take_the_memory_of_few(start: Start) -> None:
    session = start(shows({"decode_bytes_max": 45_000_000, "arena_bytes": 40 << 20}))
    data = png()
    assert len(data) < 50_000
    flood(session, png(100), 1)
    peak = Peak()
    answers = flood(session, data, 16)
    taken = peak.end()
    print(f"16 pictures of 12 MB at once: {taken / 1e6:.0f} MB")
    assert answers == [(2000, 2000, 3)] * 16
    assert taken < 100e6  # 12 MB each, and 36 MB or more for each that is decoded at the time


@pytest.mark.slow
def test_a_flood_of_the_largest_pictures_stays_within_the_budget(start: Start) -> None:
    plan = make_plan(shows().build(), this_machine())
    session = start(shows())
    data = png(5000)
    peak = Peak()
    answers = flood(session, data, 60)
    taken = peak.end()
    print(f"60 pictures of 75 MB at once: {taken / 1e6:.0f} MB, of limits.decode_bytes_max {plan.decode_bytes_max}")
    assert taken < plan.decode_bytes_max + 100e6
    assert all(one == (5000, 5000, 3) or isinstance(one, LimitReached) for one in answers)


MIRROR = """weftline: 1
name: mirror
inputs: {photo: image, question: audio}
steps:
  turn: {node: function, function: "mirror.py:mirror", inputs: {photo: photo}}
  same: {node: echo, type: audio, inputs: {value: question}}
outputs: {photo: turn.output, question: same.value}
"""


@pytest.mark.slow
@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_photos_of_24_megapixels_fit_the_default_limits(start: Start, tmp_path: Path, format: str) -> None:
    (tmp_path / "mirror.yaml").write_text(MIRROR)
    (tmp_path / "mirror.py").write_text('def mirror(photo: "image") -> "image":\n    return photo[:, ::-1].copy()\n')
    out = io.BytesIO()
    Image.linear_gradient("L").resize((6000, 4000)).convert("RGB").save(out, format, compress_level=1)
    found = start(tmp_path / "mirror.yaml").run(photo=out.getvalue(), question=np.zeros(120 * 16_000, np.float32))
    assert found["photo"].shape == (4000, 6000, 3) and len(found["question"]) == 120 * 16_000


@pytest.mark.slow
def test_a_picture_that_waits_for_memory_expires_with_its_deadline(start: Start) -> None:
    session = start(shows({"decode_bytes_max": 45_000_000}))
    held = session._versions.current.inputs._decoding.enter(45_000_000)
    assert held.granted.done()
    with pytest.raises(DeadlineExceeded, match="memory for its inputs"):
        session.run(RequestOptions(deadline_ms=100), x=png())
    with pytest.raises(DeadlineExceeded, match="memory for its inputs"):
        asyncio.run(_lend(session, png(), RequestOptions(deadline_ms=100)))
    session._versions.current.inputs._decoding.give_back(45_000_000)
    assert session.run(x=png())["y"].shape == (2000, 2000, 3)


def test_pictures_beyond_the_budget_wait_in_order_and_can_be_cancelled(start: Start) -> None:
    session = start(shows({"arena_bytes": 1 << 16, "pixels_max": 4_000_000}, delay_ms=50, batch={"items_max": 1}))

    async def main() -> list[int]:
        ended: list[int] = []

        async def one(number: int) -> None:
            await _lend(session, data)
            ended.append(number)

        tasks = [asyncio.create_task(one(number)) for number in range(6)]
        await asyncio.sleep(0.2)
        tasks[4].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return ended

    data = png()
    ended = asyncio.run(main())
    assert sorted(ended) == [0, 1, 2, 3, 5] and len(ended) == 5
    assert flood(session, data, 3) == [(2000, 2000, 3)] * 3


@pytest.mark.slow
def test_what_needs_more_than_the_budget_is_refused_before_it_is_decoded(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = start(shows({"decode_bytes_max": 1 << 20}))
    monkeypatch.setattr(image, "decode_image_into", None)
    with pytest.raises(LimitReached, match=r"limits\.decode_bytes_max is 1048576"):
        session.run(x=png())


@pytest.mark.slow
def test_inputs_too_large_in_total_are_refused_before_decoding(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    p = builder(request_bytes_max=20_000_000)
    p.output("y", p.step("s", "echo", value=p.input("x", "list[image]"), type="list[image]").value)
    session = start(p)
    monkeypatch.setattr(image, "decode_image_into", None)
    with pytest.raises(LimitReached, match="24000000 bytes"):
        session.run(x=[png(), png()])


@pytest.mark.slow
def test_a_corrupt_picture_fails_with_its_input_name_and_leaves_nothing(start: Start) -> None:
    session = start(shows())
    data = png()
    for _ in range(3):
        with pytest.raises(InputError, match=r"^input x: the picture is corrupt"):
            session.run(x=data[:-2000])
    assert session.run(x=data)["y"].shape == (2000, 2000, 3)


def test_pictures_are_decoded_by_threads_that_yield_the_processor(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, decode, niced = start(shows()), image.decode_image_into, []

    def noted(*arguments: Any) -> Any:
        niced.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return decode(*arguments)

    monkeypatch.setattr(image, "decode_image_into", noted)
    assert flood(session, png(300), 1) == [(300, 300, 3)]
    assert niced == [min(19, os.getpriority(os.PRIO_PROCESS, 0) + DECODE_NICE)]


def test_only_pictures_grow_arenas_and_the_plan_shows_decoding_memory() -> None:
    p = builder()
    p.output("y", p.step("s", "echo", value=p.input("x", "text")).value)
    plain, pictures = make_plan(p.build(), this_machine()), make_plan(shows().build(), this_machine())
    assert plain.ingress_arena_bytes == plain.limits.arena_bytes and not plain.decode_bytes_max
    assert pictures.ingress_arena_bytes >= 2 * 75_000_000
    assert "Decoding" not in explain_text(plain)
    assert "Decoding of pictures and recordings: at most" in explain_text(pictures)
    assert np.isclose(pictures.decode_bytes_max, 25e6 * 18, rtol=0.1)


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("kind", ["image", "audio"])
def test_a_slow_read_of_a_named_file_does_not_block_the_event_loop(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    p = builder()
    p.output("y", p.step("s", "echo", value=p.input("x", kind), type=kind).value)
    session = start(p)
    file = tmp_path / "x"
    file.write_bytes(png(10) if kind == "image" else wav())
    others_ran = threading.Event()
    read_bytes = Path.read_bytes
    waited: list[bool] = []

    def slow(path: Path) -> bytes:
        waited.append(others_ran.wait(1))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", slow)

    async def main() -> Any:
        asked = asyncio.create_task(session.arun(x=str(file)))
        while not waited and not asked.done():
            await asyncio.sleep(0.01)
            others_ran.set()
        return await asked

    assert asyncio.run(main())["y"].size
    assert waited == [True]
