"""The flagship: real models in real processes, equal plans both ways, and answers that follow the picture."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import weftline
from examples.models import scenes
from examples.models.language import Thing
from weftline.engine.request import RequestOptions
from weftline.errors import InputError, PipelineError

EXAMPLES = Path(__file__).parents[2] / "examples"
ASSISTANT = EXAMPLES / "voice_photo_assistant.yaml"
QUESTION = EXAMPLES / "data/question.wav"
PHOTO = EXAMPLES / "data/photo.png"


@pytest.fixture(scope="module")
def session() -> Iterator[weftline.Session]:
    with weftline.load(ASSISTANT).open() as opened:
        yield opened


def test_the_python_and_the_yaml_form_give_equal_plans() -> None:
    spec = importlib.util.spec_from_file_location("voice_photo_assistant", EXAMPLES / "voice_photo_assistant.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert weftline.load(module.build()).plan == weftline.load(ASSISTANT).plan


def test_the_shipped_recording_and_picture_are_answered_rightly(session: weftline.Session) -> None:
    result = session.run(question=QUESTION, photo=PHOTO)
    assert result["transcript"] == "How many red circles are there?"
    assert result["detections"].describe().startswith("2 red circles")
    assert result["answer"] == "There are 2 red circles."
    assert result["verdict"]["action"] == "allow"
    assert {timing.step for timing in result.timings} == {"hear", "see", "answer_prompt", "answer", "guard"}


def test_another_picture_gives_another_answer(session: weftline.Session) -> None:
    plain = np.full((320, 320, 3), 235, np.uint8)
    assert session.run(question=QUESTION, photo=plain)["answer"] == "There are 0 red circles."
    things = [Thing("red", "circle")] * 4 + [Thing("blue", "star")]
    import random

    four = scenes.render(things, random.Random(11), size=(480, 480))
    assert session.run(question=QUESTION, photo=four.image)["answer"] == "There are 4 red circles."


def test_only_what_is_wanted_runs(session: weftline.Session) -> None:
    result = session.run(RequestOptions(outputs=["transcript"]), question=QUESTION, photo=PHOTO)
    assert list(result) == ["transcript"]
    assert [timing.step for timing in result.timings] == ["hear"]


def test_outputs_arrive_as_they_become_known(session: weftline.Session) -> None:
    pieces = list(session.stream(question=QUESTION, photo=PHOTO))
    assert {piece.output for piece in pieces if piece.last} == {"transcript", "detections", "answer", "verdict"}
    assert [piece.output for piece in pieces][-1] in ("answer", "verdict")


def test_an_invalid_picture_is_refused_and_the_next_request_is_answered(session: weftline.Session) -> None:
    with pytest.raises(InputError, match="input photo"):
        session.run(question=QUESTION, photo=b"\x89PNG\r\n\x1a\nrubbish")
    assert session.run(question=QUESTION, photo=PHOTO)["answer"] == "There are 2 red circles."


def test_other_models_need_only_other_names_and_a_pickle_also_trust(tmp_path: Path) -> None:
    text = ASSISTANT.read_text().replace("models/spoken-questions", "base.en")
    text = text.replace("models/shapes-detector", "yolo11n.pt").replace("models/shapes-chat", "Qwen/Qwen3-0.6B")
    text = text.replace("models/guardrail", str(EXAMPLES / "models/guardrail"))
    path = tmp_path / "real.yaml"
    path.write_text(text)
    with pytest.raises(PipelineError, match="trust_pickle") as refused:
        weftline.load(path)
    assert len(refused.value.problems) == 1
    path.write_text(text.replace("model: yolo11n.pt\n", "model: yolo11n.pt\n    trust_pickle: true\n"))
    assert [step.name for step in weftline.load(path).plan.steps] == ["hear", "see", "answer_prompt", "answer", "guard"]


@pytest.mark.slow
def test_the_demo_prints_the_four_answers_and_draws_the_picture(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--out", str(tmp_path)]
    demo = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)
    for word in ("transcript", "detections", "answer", "verdict", "hear", "see", "guard"):
        assert f"\n{word}" in f"\n{demo.stdout}" or f" {word} " in demo.stdout
    assert Image.open(tmp_path / "annotated.png").size == Image.open(PHOTO).size
