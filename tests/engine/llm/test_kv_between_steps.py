"""Two language models share a budget: memory moves to the one that is short, and answers do not change."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from weftline.engine.request import RequestOptions
from weftline.engine.session import load
from weftline.errors import InputError
from weftline.pipelines.spec.builder import Builder

MIB = 1 << 20
QUESTION = "The photo shows: 2 red circles, 1 blue star. How many stars are there? "


@pytest.mark.slow
def test_memory_moves_to_the_step_that_is_short_without_changing_answers() -> None:
    pipeline = Builder("two", limits={"kv_bytes": {"cpu": 4 * MIB}}, base_dir=Path(__file__).parents[3])
    prompt = pipeline.input("prompt", "text")
    sampling = {"tokens_max": 120, "ignore_eos": True}
    for name in ("small", "large"):
        step = pipeline.step(
            name, "llm", model="examples/models/shapes-chat", inputs={"prompt": prompt}, sampling=sampling, share=False
        )
        pipeline.output(name, step.text)
    with load(pipeline).open() as session, ThreadPoolExecutor(12) as pool:
        workers = session.pids()
        alone = session.run(RequestOptions(outputs=["small"]), prompt=QUESTION)["small"]
        kv = session.stats()["kv"]["cpu"]
        assert kv["held_bytes"] == {"small": MIB, "large": MIB}, "a quarter of 4 MiB each, and half is unassigned"
        asked, most, until_s = [], 0, time.monotonic() + 60
        while most <= MIB and time.monotonic() < until_s:
            while sum(not one.done() for one in asked) < 12:
                asked.append(
                    pool.submit(
                        session.run, RequestOptions(outputs=["small"]), prompt=QUESTION + "x" * (len(asked) % 50)
                    )
                )
            kv = session.stats()["kv"]["cpu"]
            assert sum(kv["held_bytes"].values()) + kv["unassigned_bytes"] == 4 * MIB
            most = max(most, kv["held_bytes"]["small"])
            time.sleep(0.02)
        assert most > MIB
        assert asked[0].result()["small"] == alone
        assert len({one.result()["small"] for one in asked}) > 1
        assert session.pids() == workers, "no worker was restarted for it"


@pytest.mark.slow
def test_a_prompt_longer_than_the_initial_memory_gets_unassigned_memory() -> None:
    pipeline = Builder("two", limits={"kv_bytes": {"cpu": 4 * MIB}}, base_dir=Path(__file__).parents[3])
    prompt = pipeline.input("prompt", "text")
    for name in ("small", "large"):
        step = pipeline.step(
            name,
            "llm",
            model="examples/models/shapes-chat",
            inputs={"prompt": prompt},
            sampling={"tokens_max": 4},
            share=False,
        )
        pipeline.output(name, step.text)
        pipeline.output(f"{name}_usage", step.usage)
    with load(pipeline).open() as session:
        held = session.stats()["kv"]["cpu"]["held_bytes"]
        assert held == {"small": MIB, "large": MIB}, "256 tokens each"
        found = session.run(RequestOptions(outputs=["small_usage"]), prompt=QUESTION * 25)["small_usage"]
        assert found["prompt_tokens"] > 256
        assert session.stats()["kv"]["cpu"]["held_bytes"]["small"] > MIB
        with pytest.raises(InputError, match="shorten it"):
            session.run(RequestOptions(outputs=["small"]), prompt=QUESTION * 60)
