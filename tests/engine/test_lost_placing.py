"""Inputs that are copied in a thread when their request and their asyncio loop end: their memory is free afterwards."""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from weftline.engine.inputs import RequestInputs
from weftline.engine.session import load
from weftline.pipelines.spec.builder import Builder


def test_inputs_of_a_loop_that_ended_are_released(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pipeline = Builder("copied", base_dir=tmp_path)
    pipeline.output("y", pipeline.step("s", "echo", type="float32[N]", value=pipeline.input("x", "float32[N]")).value)
    place = RequestInputs.place

    def slow(*arguments: object) -> object:
        placed = place(*arguments)  # type: ignore[arg-type]
        time.sleep(0.2)
        return placed

    async def give_up() -> None:
        async with asyncio.timeout(0.05):
            await session.arun(x=np.zeros(1 << 20, np.float32))

    with load(pipeline).open() as session:
        monkeypatch.setattr(RequestInputs, "place", slow)
        with pytest.raises(TimeoutError):
            asyncio.run(give_up())
        assert session.stats()["arena"]["leased_bytes"] == 0
