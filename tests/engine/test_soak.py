"""Everything at once for a while: load, deaths, cancels, failures, slow readers. Nothing is left and nothing grows."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import psutil
import pytest

from tests.engine.fire import STEPS, builder, descriptors, function, memory_maps, settled, wait_until
from weftline.engine.request import RequestOptions
from weftline.engine.session import Session, Source
from weftline.errors import WeftlineError
from weftline.nodes.urgency import SequencePart

SOAK_S = 20.0
GROWN_BYTES_MAX = 20_000_000
"""Most that this process may have grown by, between a quarter and the end of the time."""

Start = Callable[[Source], Session]


@pytest.mark.slow
def test_twenty_seconds_of_mixed_faults_leave_memory_and_descriptors_flat(start: Start) -> None:
    p = builder(arena_bytes=16 << 20, stream_bytes_max=50_000, stall_max_ms=500, requests_max=200)
    x, text, texts = p.input("x", "float32[N]"), p.input("text", "text"), p.input("texts", "list[text]")
    batch = {"items_max": 4, "wait_max_ms": 2}
    first = p.step("first", "function", x=x, batch=batch, **function("copied"))
    second = p.step("second", "function", x=first.output, batch=batch, instances=2, **function("halves"))
    picky = p.step("picky", "function", text=text, retry=1, fallback={"output": "sorry"}, **function("picky"))
    each = p.step("each", f"{STEPS}:Fragile", value=texts, map="value", batch=batch, folder="/nowhere")
    report = p.step("report", "trickle", value=text, pieces=30, piece_bytes=4000, delay_ms=1, when="text != 'bad'")
    p.output("y", second.output)
    p.output("said", picky.output)
    p.output("each", each.value)
    p.output("report", report.value)
    q = builder("sequences")
    q.output("y", q.step("s", "remember", value=q.input("x", "text"), instances=2).value)
    session, remembering = start(p), start(q)
    rng = random.Random(27)
    xs = [np.full(size, size, np.float32) for size in (10, 6_000, 30_000)]
    ends: Counter[str] = Counter()
    me = psutil.Process()
    stop_s = time.monotonic() + SOAK_S

    async def caller() -> None:
        while time.monotonic() < stop_s:
            x, text = rng.choice(xs), rng.choice(["good", "bad"])
            request = {"x": x, "text": text, "texts": ["a"] * rng.randrange(3)}
            deadline_ms = rng.choice([None, None, 30, 300])

            async def ask(x: np.ndarray = x, text: str = text, deadline_ms: float | None = deadline_ms) -> None:
                answer = await session.arun(
                    RequestOptions(deadline_ms=deadline_ms, priority=rng.randrange(-5, 5)),
                    **request,  # noqa: B023
                )
                assert answer["y"].shape == (len(x) // 2,) and (answer["y"] == x[0] + 1).all()
                assert answer["said"] == ("sorry" if text == "bad" else "GOOD")
                assert (answer["report"] is None) == (text == "bad")

            async def read() -> None:
                async for _ in session.astream(**request):  # noqa: B023
                    await asyncio.sleep(rng.choice([0, 0, 0.001]))

            task = asyncio.create_task(rng.choice([ask, ask, read])())
            try:
                if rng.random() < 0.2:
                    await asyncio.sleep(0.03 * rng.random())
                    task.cancel()
                await asyncio.wait_for(task, 30)
                ends["answered"] += 1
            except asyncio.CancelledError:
                ends["cancelled"] += 1
            except WeftlineError as error:
                ends[type(error).__name__] += 1

    async def sequence(number: int) -> None:
        while time.monotonic() < stop_s:
            id = f"q{number} {rng.random()}"
            try:
                for place in range(5):
                    part = SequencePart(id, start=place == 0, end=place == 4)
                    answer = await remembering.arun(RequestOptions(sequence=part), x=str(place))
                    assert answer["y"] == " ".join(map(str, range(place + 1)))
                    await asyncio.sleep(0.005)
                ends["sequences"] += 1
            except WeftlineError as error:
                ends[f"sequence {type(error).__name__}"] += 1

    async def killer() -> None:
        while time.monotonic() < stop_s - 3:
            await asyncio.sleep(1.5)
            victim = rng.choice([session, session, remembering])
            pids = victim.pids()
            if pids:
                os.kill(rng.choice(list(pids.values())), signal.SIGKILL)

    seen: list[tuple[float, int, int, int]] = []

    async def watch() -> None:
        while time.monotonic() < stop_s:
            await asyncio.sleep(0.5)
            seen.append((SOAK_S - (stop_s - time.monotonic()), me.memory_info().rss, descriptors(), memory_maps()))

    async def everything() -> None:
        callers = [caller() for _ in range(16)] + [sequence(number) for number in range(4)]
        await asyncio.wait_for(asyncio.gather(*callers, killer(), watch()), SOAK_S + 40)

    asyncio.run(everything())
    for one in (session, remembering):
        wait_until(lambda one=one: one.ready and settled(one), 20)  # type: ignore[misc]
    early = [one for one in seen if one[0] > SOAK_S / 4][:4]
    late = seen[-4:]
    grown = min(one[1] for one in late) - min(one[1] for one in early)
    deaths = session.stats()["worker_deaths"] + remembering.stats()["worker_deaths"]
    print(f"{dict(ends)}; {deaths} deaths; {grown / 1e6:.1f} MB more; descriptors {early[0][2]} then {late[-1][2]}")
    assert ends["answered"] > 50 and ends["sequences"] > 20 and deaths >= 5
    assert set(ends) <= {
        "answered", "cancelled", "sequences", "WorkerDied", "DeadlineExceeded", "LimitReached",
        "sequence WorkerDied", "sequence InputError",
    }  # fmt: skip
    assert grown < GROWN_BYTES_MAX
    assert abs(late[-1][2] - early[0][2]) <= 20 and late[-1][3] <= max(one[3] for one in early) + 2
    assert session.stats()["arena"]["stale_total"] == 0
