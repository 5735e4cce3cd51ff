"""What callers see of an exception in a step's code: file, line and frames, however they ask."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weftline.engine.request import RequestOptions
from weftline.engine.session import OpenablePipeline, load
from weftline.errors import ModelError, RemoteTraceback, StepError, WeftlineError, traceback_of
from weftline.pipelines.spec.builder import Builder

STEPS = '''
from weftline.node import BatchNode, Piece, Ports, StreamNode, port


def helper(text):
    raise LookupError("no entry " + text)

def fails(text: str) -> str:
    return helper(text) if text != "fine" else text

def together(text: str) -> str:
    return [helper(one) if one == "bad" else one for one in text]

class Kept:
    """Cannot be made."""
    def __init__(self):
        helper("at open")
    def __call__(self, text: str) -> str:
        return text

class Node(BatchNode):
    @classmethod
    def ports(cls, config, step):
        return Ports((port("text", "text"),), (port("text", "text"),))
    def run(self, batch):
        helper("in run")

class Opens(Node):
    def open(self, context):
        helper("at open")

class Warms(Node):
    def warm_up(self):
        helper("at warm-up")

class Streams(StreamNode):
    @classmethod
    def ports(cls, config, step):
        return Ports((port("text", "text"),), (port("text", "text", pieces=True),))
    def open(self, context):
        self.items = []
    def submit(self, item, inputs):
        self.items.append(item)
    def cancel(self, item):
        self.items.remove(item)
    @property
    def busy(self):
        return bool(self.items)
    def round(self):
        helper("in a round")
'''


@pytest.fixture
def pipeline(tmp_path: Path) -> Callable[..., OpenablePipeline]:
    (tmp_path / "steps.py").write_text(STEPS)

    def pipeline(name: str, **options: Any) -> OpenablePipeline:
        made = Builder("test", base_dir=tmp_path)
        given = {"text": made.input("x", "text")}
        if name[0].isupper() and name != "Kept":
            step = made.step("a", f"steps.py:{name}", **given)
            made.output("y", step.text)
        else:
            step = made.step("a", "function", function=f"steps.py:{name}", **options, **given)
            made.output("y", step.output)
        return load(made)

    return pipeline


def printed(error: WeftlineError) -> str:
    """Return what Python prints of an uncaught error; it begins with the step's frames."""
    text = traceback_of(error)
    assert isinstance(error.__cause__, RemoteTraceback) and error.__cause__.text == text
    first = next(line for line in text.splitlines() if line.startswith("  File "))
    assert "steps.py" in first and "in helper" in text
    return "".join(traceback.format_exception(error))


def test_the_four_ways_of_asking_bring_the_steps_frames(pipeline: Callable[..., OpenablePipeline]) -> None:
    with pipeline("fails").open() as session:
        with pytest.raises(StepError, match="step a: LookupError: no entry bad") as run:
            session.run(x="bad")
        with pytest.raises(StepError) as arun:
            asyncio.run(session.arun(x="bad"))
        with pytest.raises(StepError) as stream:
            list(session.stream(x="bad"))
        with pytest.raises(StepError) as mapped:
            list(session.map([{"x": "fine"}, {"x": "bad"}]))
        for one in (run, arun, stream, mapped):
            text = printed(one.value)
            assert 'steps.py", line 9, in fails' in text and 'steps.py", line 6, in helper' in text
            assert "LookupError: no entry bad" in text
        assert session.run(x="fine")["y"] == "fine"


@pytest.mark.slow
def test_a_pipelines_own_map_brings_them_too(pipeline: Callable[..., OpenablePipeline]) -> None:
    with pytest.raises(StepError, match="row 1") as caught:
        list(pipeline("fails").map([{"x": "fine"}, {"x": "bad"}]))
    assert "in fails" in printed(caught.value)


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("name", ["together", "Node", "Streams"])
def test_batches_classes_and_rounds_bring_them(pipeline: Callable[..., OpenablePipeline], name: str) -> None:
    options = {"batched": True} if name == "together" else {}
    with pipeline(name, **options).open() as session, pytest.raises(StepError) as caught:
        session.run(x="bad")
    assert "in helper" in printed(caught.value)


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("name", ["Kept", "Opens", "Warms"])
def test_what_cannot_be_opened_brings_them(pipeline: Callable[..., OpenablePipeline], name: str) -> None:
    with pytest.raises(ModelError, match=r"step a: .*no entry at") as caught:
        pipeline(name).open()
    assert "LookupError" in printed(caught.value)


def test_a_module_that_cannot_be_imported_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("def f(text: str) -> str:\n    return text\n\nraise OSError('gone')\n")
    made = Builder("test", base_dir=tmp_path)
    made.output("y", made.step("a", "function", function="late.py:f", text=made.input("x", "text")).output)
    with pytest.raises(ModelError) as caught:
        load(made).open()
    assert 'late.py", line 4, in <module>' in traceback_of(caught.value)


def test_a_refusal_of_the_engine_has_none(pipeline: Callable[..., OpenablePipeline]) -> None:
    with pipeline("fails").open() as session, pytest.raises(WeftlineError) as caught:
        session.run(RequestOptions(deadline_ms=0), x="fine")
    assert traceback_of(caught.value) == ""
