"""Pipelines are reloaded when their files change, once for each change, and the old version serves meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.weftline.served import Served, ask, serving, wait_until
from weftline.engine.serving import watch as watching
from weftline.engine.serving.config import GrpcConfig, ServeConfig, ServedPipeline
from weftline.engine.serving.server import Server
from weftline.engine.serving.watch import RETURNED_S, SETTLED_S, Changes, State, files_of, state_of
from weftline.errors import LimitReached

A, B, EMPTY = (1, 5, 9), (2, 6, 9), (3, 7, 0)


def due(*looks: tuple[float, State]) -> list[float]:
    changes = Changes({"a": A})
    return [time_s for time_s, state in looks if changes.due(state, time_s)]


def test_a_change_counts_once_when_nothing_has_changed_for_a_moment() -> None:
    soon, late = 1 + SETTLED_S / 2, 1 + SETTLED_S + 0.01
    assert due((0, {"a": A}), (1, {"a": B}), (soon, {"a": B}), (late, {"a": B}), (9, {"a": B})) == [late]
    assert due((1, {"a": B}), (soon, {"a": A}), (9, {"a": A})) == [], "it is as it was"
    assert due((1, {"a": B}), (late, {"a": (2, 8, 9)}), (late + 1, {"a": (2, 8, 9)})) == [late + 1]


@pytest.mark.parametrize("state", [(), EMPTY])
def test_a_file_that_is_missing_or_empty_has_time_to_come_back(state: tuple[int, ...]) -> None:
    back = 1 + RETURNED_S / 2
    assert due((1, {"a": state}), (back, {"a": state}), (back + 0.1, {"a": B}), (back + 1, {"a": B})) == [back + 1]
    gone = 1 + RETURNED_S + 0.1
    assert due((1, {"a": state}), (gone, {"a": state}), (gone + 9, {"a": state})) == [gone]


def test_files_that_join_are_no_change_and_changes_meanwhile_are() -> None:
    changes = Changes({"a": A})
    assert not changes.due({"a": B}, 1) and changes.due({"a": B}, 9)
    changes.include({"a": B, "b": A})
    assert not changes.due({"a": B, "b": A}, 20)
    changes.include({"a": A, "b": A, "c": A})
    assert not changes.due({"a": A, "b": A, "c": A}, 30) and changes.due({"a": A, "b": A, "c": A}, 40)


@pytest.mark.parametrize("error", [PermissionError(13, "not allowed"), LimitReached("full"), ValueError("wrong")])
def test_no_error_ends_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """Neither one of looking at the files, which lasts for some looks, nor one of a reload."""
    file = tmp_path / "p.yaml"
    file.write_text("1")
    reloads: list[str] = []
    fails, looks, state_of = {4, 5}, itertools.count(), watching.state_of

    def look(files: Iterable[Path]) -> watching.State:
        number = next(looks)
        if number % 12 == 0:
            file.write_text(f"{number}")
        if number in fails and isinstance(error, OSError):
            raise error
        return state_of(files)

    async def reload(name: str) -> None:
        reloads.append(name)
        if len(reloads) == 1:
            raise error

    async def go() -> None:
        task = asyncio.create_task(watching.Watch({"p": file}).run(lambda name: True, reload))
        while len(reloads) < 3:
            assert not task.done(), task
            await asyncio.sleep(0.01)
        task.cancel()

    monkeypatch.setattr(watching, "state_of", look)
    monkeypatch.setattr(watching, "POLL_S", 0.01)
    monkeypatch.setattr(watching, "SETTLED_S", 0.02)
    asyncio.run(asyncio.wait_for(go(), 20))
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == (not isinstance(error, LimitReached)), logged  # a reload has reported its WeftlineErrors


def test_a_file_that_is_saved_while_the_server_starts_is_reloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models may take a minute to load, and the file was read before."""
    file = tmp_path / "p.yaml"
    text = (
        "weftline: 1\nname: p\ninputs: {x: text}\nsteps: {e: {node: echo, inputs: {value: x}}}\noutputs: {y: e.value}\n"
    )
    file.write_text(text)

    async def go() -> None:
        server = Server(ServeConfig({"p": ServedPipeline(file)}, grpc=GrpcConfig(port=0), watch=True))
        load = server.backend.open

        async def load_and_save() -> None:
            await load()
            file.write_text(text.replace("y: e.value", "z: e.value"))

        monkeypatch.setattr(server.backend, "open", load_and_save)
        try:
            await server.open()
            while server.backend.index()[0].version < 2:
                await asyncio.sleep(0.02)
            assert [one.name for one in server.backend.info("p").outputs] == ["z"]
        finally:
            await server.close()

    monkeypatch.setattr(watching, "POLL_S", 0.05)
    asyncio.run(asyncio.wait_for(go(), 15))


OWN = """
from weftline.node import BatchNode, Ports, port

class Loud(BatchNode):
    @classmethod
    def ports(cls, config, step):
        return Ports((port("value", "text"),), (port("value", "text"),))
    def run(self, batch):
        return {"value": [value.upper() for value in batch["value"]]}
"""
INNER = """weftline: 1
name: inner
inputs: {x: text}
steps:
  loud: {node: "own.py:Loud", share: true, inputs: {value: x}}
outputs: {y: loud.value}
"""
OUTER = """weftline: 1
name: shout
inputs: {words: text}
steps:
  inner: {pipeline: inner.yaml, inputs: {x: words}}
  say: {node: template, template: "said {{v}}", inputs: {v: inner.y}}
outputs: {said: say.text}
"""


def write(folder: Path) -> Path:
    (folder / "own.py").write_text(OWN)
    (folder / "inner.yaml").write_text(INNER)
    (folder / "shout.yaml").write_text(OUTER)
    return folder / "shout.yaml"


def test_sub_pipelines_and_python_files_are_watched(tmp_path: Path) -> None:
    file = write(tmp_path)
    assert {path.name for path in files_of(file)} == {"shout.yaml", "inner.yaml", "own.py"}
    file.write_text(OUTER.replace("template:", "unknown:"))
    assert {path.name for path in files_of(file)} >= {"shout.yaml", "inner.yaml"}
    before = state_of(files_of(file))
    write_beside(file).replace(file)
    assert state_of(files_of(file)) != before
    file.unlink()
    assert state_of({file}) == {str(file): ()}


def write_beside(file: Path) -> Path:
    new = file.with_suffix(".new")
    new.write_text(file.read_text())
    return new


def workers(it: Served) -> set[int]:
    it.look()
    return {one.pid for one in it.family if one.is_running()}


@pytest.mark.slow
def test_a_saved_file_is_served_and_an_error_leaves_the_old_version(tmp_path: Path) -> None:
    file = write(tmp_path)
    with serving(tmp_path, str(file), "--port", "0", "--watch") as it:
        it.wait_up()
        with it.client() as client:
            assert ask(client, "hello") == "said HELLO"
            before = workers(it)
            file.write_text(OUTER.replace("said {{v}}", "given {{v}}"))
            wait_until(lambda: ask(client, "hello") == "given HELLO", "the new template")
            it.wait_err("shout: version 2 serves (no model loaded)")
            assert workers(it) == before

            file.write_text(OUTER.replace("node: template", "node: tempelate"))
            it.wait_err("shout.yaml:6")
            time.sleep(1.5)
            assert ask(client, "hello") == "given HELLO" and it.err.count("could not be loaded") == 1

            file.unlink()
            time.sleep(0.7)
            file.write_text(OUTER)
            wait_until(lambda: ask(client, "hello") == "said HELLO", "the file that came back")
            (tmp_path / "own.py").write_text(OWN.replace("upper()", "title()"))
            wait_until(lambda: ask(client, "hello") == "said Hello", "the new code")
            it.wait_err("2 steps loaded in")
            assert it.err.count("could not be loaded") == 1
            (tmp_path / "inner.yaml").write_text(INNER.replace("value: x", "value: z"))
            it.wait_err("inner.yaml:5")
            assert ask(client, "hello") == "said Hello"
        it.signal()
        assert it.wait_end() == 0
