"""The backend beside the engine: models, their infos, requests, records, loading and unloading."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.fire import wait_until
from weftline.engine.gpus import GpuReservations
from weftline.engine.repository import Repository
from weftline.engine.serving.backend import Ask, Record
from weftline.engine.serving.config import ServedPipeline
from weftline.engine.serving.local import LocalBackend
from weftline.engine.serving.model_info import NOT_LOADED, READY, UNAVAILABLE
from weftline.errors import InputError, LimitReached, ModelError, SessionClosed, StepError, UnknownModel, WeftlineError
from weftline.nodes.urgency import SequencePart
from weftline.pipelines.placement.machine import Device, Machine

TENSORS = """weftline: 1
name: tensors
inputs: {x: "uint8[N]"}
steps:
  same: {node: echo, type: "uint8[N]", inputs: {value: x}}
outputs: {y: same.value}
limits: {deadline_ms: 5000}
"""
STREAM = """weftline: 1
name: words
inputs: {text: text}
steps:
  slow: {node: trickle, delay_ms: 30, inputs: {value: text}}
outputs: {text: slow.value}
"""
FAILS = """weftline: 1
name: fails
inputs: {x: text}
steps:
  bad: {node: fail, every: 1, inputs: {value: x}}
outputs: {y: bad.value}
"""


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


@asynccontextmanager
async def backend(folder: Path, *, records: list[Record] | None = None, **files: str) -> AsyncIterator[LocalBackend]:
    served = {}
    for name, text in files.items():
        file = folder / f"{name}.yaml"
        file.write_text(text)
        served[name] = ServedPipeline(file, ("same",) if "same:" in text else ())
    with Repository() as repository:
        one = LocalBackend(repository, served, observers=[] if records is None else [records.append])
        await one.open()
        yield one


@pytest.mark.slow
def test_a_pipeline_and_its_exposed_step_are_models(tmp_path: Path) -> None:
    async def go() -> None:
        async with backend(tmp_path, tensors=TENSORS) as models:
            assert [(one.name, one.state, one.version) for one in models.index()] == [
                ("tensors", READY, 1),
                ("tensors.same", READY, 1),
            ]
            info = models.info("tensors")
            assert [(port.name, port.type) for port in info.inputs + info.outputs] == [
                ("x", "uint8[N]"),
                ("y", "uint8[N]"),
            ]
            assert info.deadline_ms == 5000 and not info.streams
            with await models.ask(Ask("tensors.same", {"value": np.arange(5, dtype=np.uint8)})) as answer:
                assert answer.outputs["value"].tolist() == [0, 1, 2, 3, 4]

    run(go())


DIES = """
from weftline.node import BatchNode, Ports, port

class Dies(BatchNode):
    @classmethod
    def ports(cls, config, step):
        return Ports((port("value", "text"),), (port("value", "text"),))
    def __init__(self, config):
        raise RuntimeError("no weights")
    def run(self, batch):
        return batch

class Ends(Dies):
    def __init__(self, config):
        import os
        os._exit(3)
"""
CANNOT_OPEN = """weftline: 1
name: dies
inputs: {x: text}
steps:
  same: {node: "dies.py:Dies", inputs: {value: x}}
outputs: {y: same.value}
"""
ON_ONE_GPU = """weftline: 1
name: holds
inputs: {x: text}
steps:
  same: {node: %s, inputs: {value: x}, device: "fake:0", device_bytes: 1000000}
outputs: {y: same.value}
"""


@pytest.mark.slow
@pytest.mark.parametrize("why", ["there is no such file", "unknown", "no weights"])
def test_a_pipeline_that_cannot_be_loaded_leaves_the_others_serving(
    tmp_path: Path, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    bad = {"unknown": TENSORS.replace("echo", "unknown"), "no weights": CANNOT_OPEN}.get(why)
    (tmp_path / "good.yaml").write_text(TENSORS)
    if bad is not None:
        (tmp_path / "bad.yaml").write_text(bad)
    served = {name: ServedPipeline(tmp_path / f"{name}.yaml", ("same",)) for name in ("bad", "good")}

    async def go() -> None:
        with Repository() as repository:
            models = LocalBackend(repository, served)
            await models.open()
            states = {one.name: one for one in models.index()}
            assert {name: one.state for name, one in states.items()} == {
                "bad": UNAVAILABLE, "bad.same": UNAVAILABLE, "good": READY, "good.same": READY,
            }  # fmt: skip
            assert why in states["bad"].why and why in states["bad.same"].why
            with await models.ask(Ask("good", {"x": np.zeros(3, np.uint8)})):
                pass
            with pytest.raises(SessionClosed, match=r"not ready|not loaded"):
                await models.ask(Ask("bad.same", {"value": np.zeros(3, np.uint8)}))
            (tmp_path / "bad.yaml").write_text(TENSORS)
            assert await models.load("bad") == 1
            assert {one.state for one in models.index()} == {READY}
        with Repository() as repository:
            (tmp_path / "bad.yaml").write_text(bad or "weftline: 1\n")
            with pytest.raises(WeftlineError):
                await LocalBackend(repository, served, strict=True).open()
            with pytest.raises(WeftlineError):
                await LocalBackend(repository, {"bad": served["bad"]}).open()

    run(go())
    assert sum("model bad could not be loaded" in record.getMessage() for record in caplog.records) == 1


CODE = """class Broken:
    def __init__(self):
        raise RuntimeError("boom")

    def __call__(self, text: str) -> str: ...
"""
BROKEN = """weftline: 1
name: broken
inputs: {text: text}
steps:
  s: {node: function, function: "broken.py:Broken", inputs: {text: text}}
outputs: {y: s.output}
"""


@pytest.mark.slow
@pytest.mark.parametrize("strict", [True, False])
def test_the_error_of_one_of_several_pipelines_has_its_name(tmp_path: Path, strict: bool) -> None:
    (tmp_path / "broken.py").write_text(CODE)
    names = ("good", "bad") if strict else ("worse", "bad")
    served = {name: ServedPipeline(tmp_path / f"{name}.yaml") for name in names}
    for name in names:
        (tmp_path / f"{name}.yaml").write_text(TENSORS if name == "good" else BROKEN.replace("broken\n", f"{name}\n"))

    async def go() -> None:
        with Repository() as repository, pytest.raises(ModelError) as caught:
            await LocalBackend(repository, served, strict=strict).open()
        assert "model bad: step s: broken.py:Broken() failed: RuntimeError: boom" in str(caught.value)
        assert ("model worse: step s" in str(caught.value)) is not strict

    run(go())


@pytest.mark.slow
def test_what_fails_in_a_process_of_several_leaves_the_others(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    for name, node in (("good", "echo"), ("bad", "dies.py:Dies"), ("other", "echo"), ("ends", "dies.py:Ends")):
        (tmp_path / f"{name}.yaml").write_text(ON_ONE_GPU % f'"{node}"')
    machine = Machine(2, 8 << 30, (Device("fake:0", 8 << 30),))
    for names in (("good", "bad", "other"), ("good", "ends")):
        with Repository(machine=machine, gpus=GpuReservations()) as repository:
            done = dict(repository.load_together({name: tmp_path / f"{name}.yaml" for name in names}))
            bad = done.pop(names[1])
            assert isinstance(bad, ModelError) and set(done.values()) == {1}, done
            assert [entry.state for entry in repository.index()].count("failed") == 1
            assert repository.get("good").run(x="a")["y"] == "a"


@pytest.mark.slow
def test_every_request_that_ends_is_recorded_once(tmp_path: Path) -> None:
    records: list[Record] = []

    async def go() -> None:
        async with backend(tmp_path, records=records, tensors=TENSORS, words=STREAM, fails=FAILS) as models:
            with await models.ask(Ask("tensors", {"x": np.zeros(3, np.uint8)}, id="a")):
                pass
            with pytest.raises(StepError):
                await models.ask(Ask("fails", {"x": "never"}, id="b"))
            with pytest.raises(UnknownModel):
                await models.ask(Ask("unknown", {}, id="c"))
            pieces = [piece async for piece in models.stream(Ask("words", {"text": "one two"}, id="d"))]
            assert [piece.value for piece in pieces if piece.last] == ["".join(piece.value for piece in pieces[:-1])]
            left = models.stream(Ask("words", {"text": "one two three"}, id="e"))
            await anext(left)
            await left.aclose()
            late = asyncio.ensure_future(models.ask(Ask("words", {"text": "word " * 50}, id="f")))
            await asyncio.sleep(0.05)
            late.cancel()
            with pytest.raises(asyncio.CancelledError):
                await late

    run(go())
    assert [(one.ask.id, one.status) for one in records] == [
        ("a", "OK"),
        ("b", "INTERNAL"),
        ("c", "NOT_FOUND"),
        ("d", "OK"),
        ("e", "CANCELLED"),
        ("f", "CANCELLED"),
    ]
    streamed = records[3]
    assert streamed.pieces >= 2 and streamed.first_ms is not None and streamed.first_ms <= streamed.total_ms
    assert [timing.step for timing in records[0].timings] == ["same"]


@pytest.mark.slow
def test_another_version_and_files_are_refused(tmp_path: Path) -> None:
    async def go() -> None:
        async with backend(tmp_path, tensors=TENSORS) as models:
            with pytest.raises(UnknownModel, match="version 1 serves"):
                await models.ask(Ask("tensors", {"x": np.zeros(3, np.uint8)}, version="2"))
            with pytest.raises(InputError, match="a path instead of content"):
                await models.ask(Ask("tensors", {"x": tmp_path / "tensors.yaml"}))

    run(go())


@pytest.mark.slow
def test_loading_again_raises_the_version_and_unloading_ends_it(tmp_path: Path) -> None:
    async def go() -> None:
        async with backend(tmp_path, tensors=TENSORS) as models:
            assert models.info("tensors").version == 1
            assert await models.load("tensors") == 2
            assert models.info("tensors").version == 2
            await models.unload("tensors")
            assert {one.state for one in models.index()} == {UNAVAILABLE}
            with pytest.raises(SessionClosed, match="not loaded"):
                await models.ask(Ask("tensors", {"x": np.zeros(3, np.uint8)}))
            assert models.stats("tensors") == {}
            assert await models.load("tensors") == 1
            assert models.index()[0].ready

    run(go())


@pytest.mark.slow
def test_a_reload_loads_what_changed_once_for_all_that_share_it(tmp_path: Path) -> None:
    async def go() -> None:
        async with backend(tmp_path, tensors=TENSORS) as models:

            def loaded() -> list[frozenset[tuple[str, int]]]:
                return [one.loaded_nodes() for one in models.sessions().values()]

            first = loaded()
            assert first[0] == first[1] and len(first[0]) == 1, "the exposed step shares"
            (tmp_path / "tensors.yaml").write_text(TENSORS.replace("deadline_ms: 5000", "deadline_ms: 4000"))
            assert await models.load("tensors") == 2
            assert loaded() == first, "no model is touched"
            (tmp_path / "tensors.yaml").write_text(TENSORS.replace("node: echo,", "node: echo, delay_ms: 1,"))
            assert await models.load("tensors") == 3
            then = loaded()
            assert then[0] == then[1] != first[0], "loaded anew, and once"
            assert [one.version for one in models.index()] == [3, 3]

    run(go())


@pytest.mark.slow
def test_only_what_the_operator_named_can_be_loaded(tmp_path: Path) -> None:
    async def go() -> None:
        async with backend(tmp_path, tensors=TENSORS) as models:
            for name in ("../tensors", "tensors.yaml", "tensors.same", "\0", "x" * 100_000):
                for change in (models.load, models.unload):
                    with pytest.raises(UnknownModel) as found:
                        await change(name)
                    assert len(str(found.value)) < 400

    run(go())


@pytest.mark.slow
def test_a_file_that_became_wrong_leaves_the_version_that_serves(tmp_path: Path) -> None:
    async def go() -> None:
        async with backend(tmp_path, tensors=TENSORS) as models:
            (tmp_path / "tensors.yaml").write_text(TENSORS.replace("node: echo", "node: ecko"))
            with pytest.raises(WeftlineError):
                await models.load("tensors")
            with await models.ask(Ask("tensors", {"x": np.zeros(3, np.uint8)})) as answer:
                assert answer.version == 1

    run(go())


def test_a_failed_reload_is_logged_whatever_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`--watch` relies on that: such as a limit, or a server that is being closed."""

    async def go() -> None:
        async with backend(tmp_path, tensors=TENSORS) as models:
            for error in (LimitReached("64 pipelines are loaded"), SessionClosed("the repository is closed")):

                async def fail(model: str, one: object, error: WeftlineError = error) -> int:
                    raise error

                monkeypatch.setattr(models, "_load", fail)
                with pytest.raises(type(error)):
                    await models.load("tensors")

    run(go())
    logged = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert [one.partition(": ")[2] for one in logged] == ["64 pipelines are loaded", "the repository is closed"]


@pytest.mark.slow
def test_concurrent_load_and_unload_keep_a_pipeline_and_its_steps_together(tmp_path: Path) -> None:
    async def go() -> None:
        async with backend(tmp_path, tensors=TENSORS) as models:
            for _ in range(2):
                loading = asyncio.ensure_future(models.load("tensors"))
                await asyncio.sleep(0.05)
                await asyncio.gather(loading, models.unload("tensors"))
                assert len({one.state for one in models.index()}) == 1

    run(go())


@pytest.mark.slow
def test_a_load_goes_on_when_its_caller_is_cancelled(tmp_path: Path) -> None:
    async def go() -> None:
        async with backend(tmp_path, tensors=TENSORS) as models:
            await models.unload("tensors")
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(models.load("tensors"), 0.05)
            for _ in range(500):
                if all(one.ready for one in models.index()):
                    return
                await asyncio.sleep(0.02)
            pytest.fail("it is half loaded")

    run(go())


@pytest.mark.slow
def test_problems_of_a_file_are_no_mistake_of_the_loading_caller(tmp_path: Path) -> None:
    async def go() -> None:
        async with backend(tmp_path, tensors=TENSORS) as models:
            (tmp_path / "tensors.yaml").write_text("weftline: 1\nname: 7 7\n")
            with pytest.raises(
                ModelError, match=r"(?s)could not be loaded: .*tensors\.yaml:2  name: '7 7'.*expected: letters"
            ):
                await models.load("tensors")
            entry = next(one for one in models.index() if one.name == "tensors")
            assert entry.ready and "name: '7 7'" in entry.why  # the version before serves on
            await models.unload("tensors")
            assert {one.why for one in models.index()} == {NOT_LOADED}
            with pytest.raises(ModelError):
                await models.load("tensors")
            assert "name: '7 7'" in next(one.why for one in models.index() if one.name == "tensors")
            with pytest.raises(SessionClosed) as refused:  # what callers learn, admins or not
                models.info("tensors")
            assert "7 7" not in str(refused.value)

    run(go())


REMEMBERS = """weftline: 1
name: remembers
inputs: {x: text}
steps:
  keep: {node: remember, inputs: {value: x}}
outputs: {y: keep.value}
"""


def test_callers_do_not_meet_in_each_others_sequences(tmp_path: Path) -> None:
    async def go() -> None:
        async with backend(tmp_path, remembers=REMEMBERS) as models:
            start = SequencePart("1", start=True)
            with await models.ask(Ask("remembers", {"x": "mine"}, sequence=start, caller="alice")):
                pass
            with pytest.raises(InputError):
                await models.ask(Ask("remembers", {"x": "yours?"}, sequence=SequencePart("1"), caller="bob"))

    run(go())


HOLDS = '''
from dataclasses import dataclass
from weftline.node import NodeMemory, Piece, Ports, StreamNode, port

@dataclass(frozen=True, slots=True)
class HoldsConfig:
    kv_bytes: int | None = None

class Holds(StreamNode):
    """Has KV memory, 1 MiB at first without a stated size, and answers with its size."""
    heavy = True
    Config = HoldsConfig
    @classmethod
    def ports(cls, config, step):
        return Ports((port("text", "text"),), (port("text", "text", pieces=True),))
    def __init__(self, config):
        super().__init__(config)
        self.size, self.items = config.kv_bytes or 1 << 20, []
    def submit(self, item, inputs, urgency=None):
        self.items.append(item)
    def cancel(self, item):
        self.items.remove(item)
    @property
    def busy(self):
        return bool(self.items)
    def memory(self):
        return NodeMemory(0, 0, self.size, 0, 0)
    def resize_memory(self, bytes):
        self.size = bytes
        return bytes
    def round(self):
        items, self.items = self.items, []
        return [Piece(item, {"text": str(self.size)}, last=True) for item in items]
'''
TALKS = """weftline: 1
name: talks
inputs: {text: text}
steps:
  talk: {node: "holds.py:Holds", inputs: {text: text}, device: "fake:0"}
outputs: {text: talk.text}
limits: {arena_bytes: 1048576}
gpu: {reserve_bytes: 1048576, context_bytes: 1048576, arena_bytes: 1048576}
"""


@pytest.mark.slow
def test_llm_steps_loaded_together_divide_a_gpu_and_a_later_one_is_refused(
    tmp_path: Path,
) -> None:
    machine, gpus = Machine(2, 8 << 30, (Device("fake:0", 100 << 20),)), GpuReservations()
    (tmp_path / "holds.py").write_text(HOLDS)
    (tmp_path / "talks.yaml").write_text(TALKS)
    file = tmp_path / "talks.yaml"
    served = {"a": ServedPipeline(file, ("talk",)), "b": ServedPipeline(file, load=False)}

    async def go() -> None:
        with Repository(machine=machine, gpus=gpus) as repository:
            models = LocalBackend(repository, served)
            await models.open()

            def shared() -> dict[str, int]:
                kv = {name: session.stats()["kv"] for name, session in models.sessions().items()}
                return {name: one["fake:0"]["total_bytes"] for name, one in kv.items() if one}

            await asyncio.to_thread(wait_until, lambda: len(shared()) == 2, 20)
            assert len(set(shared().values())) == 1 and shared()["a"] > 40 << 20, "evenly, of all that is left"
            assert gpus.reserved_bytes["fake:0"] in range((99 << 20) - 1, (99 << 20) + 1)
            with pytest.raises(ModelError):
                await models.load("b")

    run(go())
    assert gpus.reserved_bytes == {}
