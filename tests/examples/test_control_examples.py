"""The examples of control flow and of a step that remembers answer rightly in worker processes."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ultralytics")
pytest.importorskip("transformers")

from examples.control_flow import colour, kind
from weftline.engine.request import RequestOptions
from weftline.engine.result import Result
from weftline.engine.session import Session, load

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
PHOTO = EXAMPLES / "data" / "photo.png"
COLOURS = {"red": 2, "blue": 2, "green": 1, "yellow": 1}


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with load(EXAMPLES / "control_flow.yaml").open() as session:
        yield session


def ran(result: Result) -> set[str]:
    return {timing.step for timing in result.timings if timing.outcome == "ok"}


@pytest.mark.slow
def test_a_question_about_colours_is_answered_from_the_crops_alone(session: Session) -> None:
    result = session.run(photo=PHOTO)
    assert result["answer"] == "I see blue (2), red (2), green (1), yellow (1)."
    assert {name: result["colours"].count(name) for name in COLOURS} == COLOURS
    assert [box["name"].split()[0] for box in result["boxes"]] == result["colours"]
    assert "colours" in ran(result) and not ran(result) & {"count", "chat_prompt", "chat"}
    assert result["verdict"]["action"] == "allow"


@pytest.mark.slow
def test_a_question_about_numbers_needs_no_language_model(session: Session) -> None:
    result = session.run(photo=PHOTO, question="How many objects are there?")
    assert result["answer"] == "There are 6 objects."
    assert "count" in ran(result) and not ran(result) & {"colours", "chat_prompt", "chat"}


def test_any_other_question_goes_to_the_language_model(session: Session) -> None:
    result = session.run(RequestOptions(outputs=["answer"]), photo=PHOTO, question="How many red circles are there?")
    assert result["answer"] == "There are 2 red circles."
    assert {"chat_prompt", "chat"} <= ran(result) and not ran(result) & {"colours", "count"}


def test_a_picture_with_nothing_in_it_is_answered_too(session: Session) -> None:
    result = session.run(photo=np.full((240, 320, 3), 128, np.uint8))
    assert result["answer"] == "There is nothing to see." and result["colours"] is None and result["boxes"] == []


def test_the_functions_tell_colours_and_questions_apart() -> None:
    for name, rgb in {
        "red": (200, 30, 30),
        "yellow": (240, 220, 40),
        "blue": (20, 30, 90),
        "grey": (90, 90, 92),
    }.items():
        assert colour(np.full((8, 8, 3), rgb, np.uint8)) == name
    assert [kind(text) for text in ("What colours?", "How many shapes?", "Is it red?", "")] == [
        "colours", "count", "other", "other",
    ]  # fmt: skip


@pytest.mark.slow
def test_each_sensor_is_judged_by_its_own_readings() -> None:
    ended = subprocess.run(
        [sys.executable, EXAMPLES / "stateful.py"], cwd=EXAMPLES.parent, capture_output=True, text=True, timeout=100
    )
    assert ended.stdout == "cellar: 9.5 is unusual; the mean is now 4.95\n", ended.stderr
