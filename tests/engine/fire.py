"""What tests of faults in real processes share: a gate, many callers at once, and waiting for what must come."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weftline.engine.request import RequestOptions
from weftline.engine.result import Result
from weftline.engine.session import Session
from weftline.errors import WeftlineError
from weftline.pipelines.spec.builder import Builder

HERE = Path(__file__).parent
STEPS = "fire_steps.py"
HUNG_S = 40.0
"""A request that has not ended after so long hangs."""


class Gate:
    """A `Gated` step seen from outside: closed, its calls wait; what each was given is on record."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    @property
    def options(self) -> dict[str, str]:
        return {"folder": str(self.folder)}

    def close(self) -> None:
        (self.folder / "hold").touch()

    def open(self) -> None:
        (self.folder / "hold").unlink(missing_ok=True)

    def calls(self, of: str = "values") -> list[list[Any]]:
        """Return what each call was given, in order."""
        notes = self.folder / "calls"
        lines = notes.read_text().splitlines() if notes.exists() else []
        return [json.loads(line)[of] for line in lines]

    def seen(self) -> list[str]:
        """Return every item that the node was given, in order."""
        return [value for call in self.calls() for value in call]


def builder(name: str = "fire", slo: Mapping[str, Any] | None = None, **limits: Any) -> Builder:
    return Builder(name, base_dir=HERE, limits={"arena_bytes": 4 << 20, **limits}, slo=slo)


def function(name: str, **more: Any) -> dict[str, Any]:
    """Return what makes a step of a function of `fire_steps.py`: `p.step("s", **function("shout"), text=x)`."""
    return {"function": f"{STEPS}:{name}", **more}


def ask(session: Session, options: RequestOptions | None = None, /, **request: Any) -> Result | WeftlineError:
    """Return the answer, or the error."""
    try:
        return session.run(options, **request)
    except WeftlineError as error:
        return error


def together(
    session: Session, requests: Sequence[Mapping[str, Any]], options: Sequence[RequestOptions | None] = ()
) -> list[Result | WeftlineError]:
    """Run all of these requests at once, with the options of each; AssertionError when one hangs."""

    async def one(request: Mapping[str, Any], options: RequestOptions | None) -> Result | WeftlineError:
        try:
            return await session.arun(options, **request)
        except WeftlineError as error:
            return error

    async def every() -> list[Result | WeftlineError]:
        asked = [
            asyncio.create_task(one(*each)) for each in zip(requests, options or [None] * len(requests), strict=True)
        ]
        _, hung = await asyncio.wait(asked, timeout=HUNG_S)
        assert not hung, f"{len(hung)} of {len(asked)} requests hang: {session.stats()}"
        return [task.result() for task in asked]

    return asyncio.run(every())


def outputs(answers: Sequence[Result | WeftlineError], name: str = "y") -> list[Any]:
    """Return one output of each answer; of an error its class's name."""
    return [answer[name] if isinstance(answer, Result) else type(answer).__name__ for answer in answers]


def batches(answers: Sequence[Result | WeftlineError], step: str = "s") -> list[int]:
    """Return how many items shared the call that answered each request at a step."""
    return [
        timing.batch
        for answer in answers
        if isinstance(answer, Result)
        for timing in answer.timings
        if timing.step == step and timing.outcome == "ok"
    ]


def wait_until(condition: Callable[[], Any], seconds: float = 20.0, what: str = "") -> float:
    """Wait until the condition holds and return how many seconds that took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"not within {seconds} s {what}"
        time.sleep(0.002)
    return time.monotonic() - started


def settled(session: Session) -> bool:
    """Whether nothing of any request is left: not open, waiting, leased, or owed to a caller."""
    stats, requests = session.stats(), session.stats()["requests"]
    ended = requests["ok"] + requests["failed"] + requests["cancelled"] + requests["expired"]
    return (
        requests["open"] == 0
        and requests["admitted"] == ended
        and not any(stats["queued"].values())
        and stats["arena"]["leased_bytes"] == 0
        and session._current.runtime.scheduler.idle()
        and not session._current.runtime._listeners
    )


def descriptors() -> int:
    gc.collect()
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def memory_maps() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:weftline")
