"""The stock `openai` client against the bundled speech recogniser."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile

from tests.engine.serving.http.hosted import Hosted, hosted_pipelines
from weftline.engine.serving.config import ServedPipeline

EXAMPLES = Path(__file__).resolve().parents[4] / "examples"
EARS = f"""
weftline: 1
name: ears
inputs:
  audio: {{type: audio, seconds_max: 60}}
  language: {{type: text, optional: true}}
  task: {{type: text, optional: true}}
steps:
  hear:
    node: whisper
    model: {EXAMPLES}/models/spoken-questions
    timestamps: word
    timestamp_tokens: false
    inputs: {{audio: audio, language: language, task: task}}
outputs: {{text: hear.text, language: hear.language, segments: hear.segments}}
"""
QUESTION = "How many red circles are there?"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    folder = tmp_path_factory.mktemp("pipelines")
    (folder / "ears.yaml").write_text(EARS)
    served = {"ears": ServedPipeline(folder / "ears.yaml")}
    with hosted_pipelines(served) as endpoint:
        yield endpoint


def long_recording(format: str, silence_s: float = 12.0) -> tuple[str, bytes]:
    samples, rate = soundfile.read(EXAMPLES / "data" / "question.wav", dtype="float32")
    out = io.BytesIO()
    pause = np.zeros(int(silence_s * rate), np.float32)
    soundfile.write(out, np.concatenate([samples, pause, samples]), rate, format=format)
    return f"a.{format.lower()}", out.getvalue()


@pytest.mark.parametrize("format", ["WAV", "MP3"])
def test_a_long_recording_has_words_of_its_own_times(client: openai.OpenAI, format: str) -> None:
    found = client.audio.transcriptions.create(
        model="ears", file=long_recording(format), response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )  # fmt: skip
    assert (found.text, found.language) == (f"{QUESTION} {QUESTION}", "en")
    assert abs(found.duration - 16.155) < 0.1
    assert found.words is not None and found.segments is not None
    assert [one.word for one in found.words] == QUESTION.split() * 2
    assert found.segments[0].end < 2.1 and found.segments[1].start > 13.5
    starts = [one.start for one in found.words]
    assert starts == sorted(starts)


def test_subtitles_have_a_cue_for_each_question(client: openai.OpenAI) -> None:
    for format in ("srt", "vtt"):
        text = client.audio.transcriptions.create(model="ears", file=long_recording("WAV"), response_format=format)
        assert text.count(" --> ") == text.count(QUESTION) == 2


@pytest.mark.parametrize("seconds", [2, 30])
def test_silence_has_no_transcript_in_any_format(client: openai.OpenAI, seconds: int) -> None:
    out = io.BytesIO()
    soundfile.write(out, np.zeros(seconds * 16_000, np.float32), 16_000, format="WAV")
    for format, wanted in {"text": "", "srt": "", "vtt": "WEBVTT\n"}.items():
        found: Any = client.audio.transcriptions.create(
            model="ears",
            file=("a.wav", out.getvalue()),
            response_format=format,  # type: ignore[call-overload]
        )
        assert found.strip() == wanted.strip()
    verbose = client.audio.transcriptions.create(
        model="ears", file=("a.wav", out.getvalue()), response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )  # fmt: skip
    assert (verbose.text, verbose.segments, verbose.words) == ("", [], [])


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
def test_what_the_model_lacks_is_refused_by_name(client: openai.OpenAI) -> None:
    recording = long_recording("WAV")
    with pytest.raises(openai.BadRequestError, match="language: found 'de', but the model is English-only"):
        client.audio.transcriptions.create(model="ears", file=recording, language="de")
    with pytest.raises(openai.BadRequestError, match="task: found translate, but the model is English-only"):
        client.audio.translations.create(model="ears", file=recording)
    with pytest.raises(openai.BadRequestError, match="seconds_max is 60"):
        client.audio.transcriptions.create(model="ears", file=long_recording("WAV", 70.0))
