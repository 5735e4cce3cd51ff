"""Task text-to-speech of node transformers gives the recordings of transformers' own pipeline."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
import torch
import transformers

from tests.engine.serving.http.hosted import hosted
from tests.nodes import random_models
from tests.nodes.random_models import opened, pipeline, refused
from weftline.engine.repository import Repository
from weftline.engine.serving.config import ServedPipeline
from weftline.engine.serving.local import LocalBackend
from weftline.errors import InputError
from weftline.nodes.audio import resample
from weftline.nodes.contract import Batch

TASK = "text-to-speech"
TEXTS = ["Hello, world", "a", "nine birds sing louder"]


def spoken(folder: Path, text: str, seed: int = 0, **options: Any) -> np.ndarray:
    """Return what transformers' pipeline says after its random generator was seeded."""
    own = pipeline(folder, TASK)
    transformers.set_seed(seed)
    return np.asarray(own(text, forward_params=options)["audio"]).reshape(-1)


@pytest.mark.parametrize(("speakers", "speaker"), [(1, None), (3, 2)])
def test_recordings_are_those_of_the_pipeline(tmp_path: Path, speakers: int, speaker: int | None) -> None:
    random_models.save_vits(tmp_path / "m", speakers)
    node = opened(tmp_path, TASK, speaker=speaker, seed=7)
    options = {} if speaker is None else {"speaker_id": speaker}
    for text, found in zip(TEXTS, node.run(Batch({"text": TEXTS}))["audio"], strict=True):
        wanted = spoken(tmp_path, text, 7, **options)
        assert found.dtype == np.float32 and wanted.std() > 1e-4
        np.testing.assert_allclose(found, wanted, atol=1e-5)
        np.testing.assert_array_equal(node.run(Batch({"text": [text]}))["audio"][0], found)


def test_a_faster_voice_is_shorter_and_the_pipelines_too(tmp_path: Path) -> None:
    random_models.save_vits(tmp_path / "m")
    node = opened(tmp_path, TASK, speed=2.0)
    usual, slow = node.run(Batch({"text": TEXTS[:1] * 2, "speed": [None, 0.5]}))["audio"]
    np.testing.assert_allclose(usual, spoken(tmp_path, TEXTS[0], speaking_rate=2.0), atol=1e-5)
    np.testing.assert_allclose(slow, spoken(tmp_path, TEXTS[0], speaking_rate=1.0), atol=1e-5)
    assert len(usual) < len(slow)


def test_recordings_of_other_rates_are_resampled(tmp_path: Path) -> None:
    random_models.save_vits(tmp_path / "m", rate_hz=22_050)
    (found,) = opened(tmp_path, TASK).run(Batch({"text": TEXTS[:1]}))["audio"]
    np.testing.assert_allclose(found, resample(spoken(tmp_path, TEXTS[0]), 22_050, 16_000), atol=1e-5)


def test_a_text_without_letters_and_a_wrong_speed_fail_alone(tmp_path: Path) -> None:
    random_models.save_vits(tmp_path / "m")
    batch = Batch({"text": ["!?", "a", "a", "a" * 4097], "speed": [1, 1, 9, True]})
    found = opened(tmp_path, TASK).run(batch)["audio"]
    assert [type(one) for one in found] == [InputError, np.ndarray, InputError, InputError]
    assert "no character" in str(found[0]) and "from 0.25 to 4" in str(found[2])


def test_options_and_packages_are_checked(tmp_path: Path) -> None:
    folder = random_models.save_vits(tmp_path / "m")
    assert refused(tmp_path, TASK, speed=5.0).option == "speed"
    assert refused(tmp_path, TASK, seed=-1).option == "seed"
    assert "the model has one" in refused(tmp_path, TASK, speaker=0).expected
    for setting, package in (("phonemize", "phonemizer"), ("is_uroman", "uroman")):
        settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"phonemize": False, setting: True}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        error = refused(tmp_path, TASK)
        assert f"package {package}" in error.found and f"pip install {package}" in error.fix
    random_models.save_vits(tmp_path / "m", 2)
    assert refused(tmp_path, TASK).option == "speaker"
    assert refused(tmp_path, TASK, speaker=2).expected == "a number from 0 to 1"


def test_noise_is_that_of_the_seed_whatever_was_drawn_before(tmp_path: Path) -> None:
    random_models.save_vits(tmp_path / "m")
    one, other = opened(tmp_path, TASK, seed=1), opened(tmp_path, TASK, seed=2)
    first = one.run(Batch({"text": TEXTS[:1]}))["audio"][0]
    torch.randn(5)
    np.testing.assert_array_equal(one.run(Batch({"text": TEXTS[:1]}))["audio"][0], first)
    second = other.run(Batch({"text": TEXTS[:1]}))["audio"][0]
    assert len(second) != len(first) or not np.array_equal(second, first)


@pytest.mark.slow
def test_a_server_speaks_as_the_pipeline_does(tmp_path: Path) -> None:
    random_models.save_vits(tmp_path / "m")
    file = tmp_path / "p.yaml"
    file.write_text(
        "weftline: 1\nname: p\ninputs: {text: text, speed: {type: json, optional: true}}\noutputs: {audio: s.audio}\n"
        "steps: {s: {node: transformers, task: text-to-speech, model: m, inputs: {text: text, speed: speed}}}\n"
    )
    with Repository() as repository:

        async def open_backend() -> LocalBackend:
            backend = LocalBackend(repository, {"p": ServedPipeline(file)})
            await backend.open()
            return backend

        with hosted(open_backend) as endpoint, openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="-") as client:
            speech = client.audio.speech
            response = speech.create(model="p", voice="-", input=TEXTS[2], response_format="wav", speed=0.5)
    samples, rate = soundfile.read(io.BytesIO(response.content), dtype="float32")
    assert rate == 16_000
    np.testing.assert_allclose(samples, spoken(tmp_path, TEXTS[2], speaking_rate=0.5), atol=1e-4)
