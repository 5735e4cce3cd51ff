"""Node whisper with models of CTranslate2 beside openai-whisper with the same weights, and beside faster-whisper."""

import json
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import ctranslate2
import faster_whisper
import numpy as np
import pytest
import whisper

from benchmarks.whisper_conversion import convert, tokenizer
from tests.nodes.model_files import broken
from tests.nodes.test_whisper_decoding import DIMS, EXAMPLES, MODEL, QUESTION, made, noise, opened, sounds
from weftline.errors import ModelError
from weftline.nodes.audio import decode_audio
from weftline.nodes.contract import Batch, ConfigError, OpenContext, StepContext
from weftline.nodes.whisper import Whisper, WhisperConfig
from weftline.nodes.whisper_ctranslate2 import Sizes, read_sizes

RECORDINGS = [noise(seconds, seed) for seed, seconds in enumerate((1.0, 3.9, 0.5, 2.2))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a random model of 4 s windows: model.pt, and `ct2` with the same weights in float32."""
    folder = made(tmp_path_factory.mktemp("whisper"), DIMS)
    convert(whisper.load_model(str(folder / "model.pt"), device="cpu"), folder / "ct2")
    return folder


def fast(folder: Path, model: str = "ct2", **options: Any) -> Whisper:
    node = Whisper(WhisperConfig(model, **options))
    node.open(OpenContext(folder, items_max=4))
    return node


def plain(text: str) -> str:
    """Return a text without control tokens: openai-whisper keeps those that random weights write, others do not."""
    return re.sub(r"<\|\w+\|>", "", text)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"timestamps": "segment"}, {"timestamps": "word"}, {"timestamps": "word", "timestamp_tokens": False},
        {"beams": 3}, {"prompt": "red circles", "language": "de"}, {"tokens_max": 3},
        {"prompt": "red circles " * 12}, {"prompt": "red circles " * 5, "tokens_max": 3, "language": "en"},
    ],
    ids=str,
)  # fmt: skip
def test_answers_are_those_of_openai_whisper_with_the_same_weights(folder: Path, options: dict[str, Any]) -> None:
    wishes = {"language": ["de", "auto", "fr", "en"], "task": ["translate", None, "transcribe", None]}
    batch = Batch({"audio": RECORDINGS, **wishes})
    found, wanted = fast(folder, **options).run(batch), opened(folder, **options).run(batch)
    assert [plain(text) for text in found["text"]] == [plain(text) for text in wanted["text"]]
    assert found["language"] == wanted["language"] and len(set(found["text"])) == 4
    for ours, theirs in zip(found["segments"], wanted["segments"], strict=True):
        assert [near(segment) for segment in ours] == [segment | {"text": plain(segment["text"])} for segment in theirs]
    json.dumps(found)  # no number of numpy's


def near(segment: dict[str, Any]) -> dict[str, Any]:
    """Return what a segment equals apart from the last digits of likelihoods."""
    numbers = {name: pytest.approx(segment[name], abs=2e-3) for name in ("no_speech", "logprob")}
    if "words" in segment:
        words = [word | {"probability": pytest.approx(word["probability"], abs=2e-3)} for word in segment["words"]]
        return segment | numbers | {"words": words}
    return segment | numbers


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("words", [True, False])
def test_a_window_of_30_seconds_has_the_segments_of_faster_whisper(tmp_path: Path, words: bool) -> None:
    folder = made(tmp_path, replace(DIMS, n_audio_ctx=1500))
    convert(whisper.load_model(str(folder / "model.pt"), device="cpu"), folder / "ct2")
    node = fast(folder, timestamps="word" if words else "segment", language="en", vad=False)
    answers = node.run(Batch({"audio": RECORDINGS}))
    theirs = faster_whisper.WhisperModel(str(folder / "ct2"), "cpu", compute_type="float32", local_files_only=True)
    theirs.max_length = DIMS.n_text_ctx
    several = 0
    for segments, samples in zip(answers["segments"], RECORDINGS, strict=True):
        found, _ = theirs.transcribe(
            samples, "en", beam_size=1, temperature=0.0, condition_on_previous_text=False, word_timestamps=words,
            no_speech_threshold=None, log_prob_threshold=None, compression_ratio_threshold=None,
        )  # fmt: skip
        seconds = len(samples) / 16_000
        wanted = [
            (plain(one.text).strip(), round(min(one.start, seconds), 3), round(min(one.end, seconds), 3))
            for one in found
        ]
        own = [(plain(one["text"]), one["start"], one["end"]) for one in segments]
        assert own == wanted[: len(own)]  # faster-whisper also decodes rests below 0.1 s
        several += len(own) > 1
    assert several


def test_the_bundled_model_in_int8_hears_the_question_without_torch(tmp_path: Path) -> None:
    convert(whisper.load_model(str(MODEL / "model.pt"), device="cpu"), tmp_path / "ct2", "int8")
    script = (
        "import sys; sys.modules['torch'] = sys.modules['whisper'] = None\n"
        "from pathlib import Path; from weftline.nodes.audio import decode_audio\n"
        "from weftline.nodes.contract import Batch, OpenContext\n"
        "from weftline.nodes.whisper import Whisper, WhisperConfig\n"
        "node = Whisper(WhisperConfig('ct2', timestamps='word', timestamp_tokens=False, precision='int8'))\n"
        f"node.open(OpenContext(Path({str(tmp_path)!r}))); node.warm_up()\n"
        f"recording = decode_audio(Path({str(EXAMPLES / 'data' / 'question.wav')!r}).read_bytes())\n"
        "first = node.run(Batch({'audio': [recording]}))\n"
        "print(first['text'][0], [word['word'] for word in first['segments'][0][0]['words']])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    words = [" How", " many", " red", " circles", " are", " there?"]
    assert done.stdout.strip() == f"How many red circles are there? {words}", done.stderr


@pytest.mark.parametrize("timestamps", ["none", "segment", "word"])
def test_windows_without_speech_have_no_text(tmp_path: Path, timestamps: str) -> None:
    convert(whisper.load_model(str(MODEL / "model.pt"), device="cpu"), tmp_path / "ct2")
    options: dict[str, Any] = {"timestamps": timestamps, "timestamp_tokens": False, "vad": timestamps == "word"}
    question, silence, faint, _, both = sounds()
    answer = fast(tmp_path, **options).run(Batch({"audio": [question, silence, faint, both]}))
    assert answer["text"] == [QUESTION, "", "", QUESTION]
    assert [len(segments) for segments in answer["segments"]] == [1, 0, 0, 1]
    kept = fast(tmp_path, no_speech_threshold=None, **options).run(Batch({"audio": [silence]}))
    assert kept["text"] == ["What is the weather"] and kept["segments"][0][0]["no_speech"] > 0.9


def test_the_tokens_that_are_never_written_are_those_of_openai_whisper(folder: Path) -> None:
    network = whisper.load_model(str(folder / "model.pt"), device="cpu")
    task = whisper.decoding.DecodingTask(network, whisper.DecodingOptions(language="en", fp16=False))
    assert set(fast(folder)._network._suppressed) == set(task._get_suppress_tokens())


def test_a_batch_gives_what_each_recording_gives_alone(folder: Path) -> None:
    node = fast(folder, timestamps="word")
    together = node.run(Batch({"audio": RECORDINGS}))
    for place, samples in enumerate(RECORDINGS):
        alone = node.run(Batch({"audio": [samples]}))
        assert alone["text"] == [together["text"][place]]
        [segments] = alone["segments"]
        assert [near(one) for one in segments] == together["segments"][place]


def test_asleep_the_model_leaves_the_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = fast(folder)
    asked = Mock()
    monkeypatch.setattr(node._network.model, "model", asked)
    assert node.sleep("host") and not node.sleep("nothing")
    node.wake()
    assert asked.mock_calls == [call.unload_model(to_cpu=True), call.load_model()]


def check(base: Path, model: str = "ct2", **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Whisper.ports(WhisperConfig(model, **options), StepContext(base))
    return caught.value


def test_wrong_options_are_named_when_checked(folder: Path) -> None:
    Whisper.ports(WhisperConfig("ct2", precision="int8", timestamps="word", tokens_max=24), StepContext(folder))
    assert "float32, bfloat16, float16, int8" in check(folder, precision="tf32").expected
    assert "CTranslate2" in check(folder, "model.pt", precision="int8").fix
    assert check(folder, tokens_max=25).expected == "from 1 to 24"
    assert "which ct2 does not have" in str(check(folder, language="yue"))


def test_a_precision_that_the_device_does_not_have_is_a_model_error(folder: Path) -> None:
    if "float16" in ctranslate2.get_supported_compute_types("cpu"):
        pytest.skip("this processor has float16")
    with pytest.raises(ModelError, match=r"found float16, expected what CTranslate2 has on cpu: auto, float32.*int8"):
        fast(folder, precision="float16")


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("config.json", None, "and no config.json"),
        ("vocabulary.json", None, "has no vocabulary.json"),
        ("tokenizer.json", None, r"tokenizer\.json is missing"),
        ("tokenizer.json", b"{}", r"tokenizer\.json has no <\|startoftranscript\|>"),
        ("vocabulary.json", b"{}", "has no vocabulary.json that is a list"),
        ("vocabulary.json", b"[]", r"has no <\|startoftranscript\|> at 50258"),
        ("preprocessor_config.json", b"[]", "is no JSON object"),
        (
            "preprocessor_config.json",
            b'{"feature_size": 2000000}',
            "feature_size in m/preprocessor_config.json is 2000000",
        ),
        ("model.bin", b"\x06\0\0\0\x0a\0BertModel\0", "holds a 'BertModel', expected a WhisperSpec"),
        ("model.bin", b"PK\x03\x04", "no version of CTranslate2's format"),
    ],
)
def test_folders_that_lack_something_are_refused_when_checked(
    folder: Path, tmp_path: Path, name: str, content: bytes | None, found: str
) -> None:
    shutil.copytree(folder / "ct2", tmp_path / "m")
    if content is None:
        (tmp_path / "m" / name).unlink()
    else:
        (tmp_path / "m" / name).write_bytes(content)
    error = check(tmp_path, "m")
    assert error.option == "model" and re.search(found, str(error))


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("suppress_ids_begin", [51865], r"has suppress_ids_begin \[51865\]"),
        ("suppress_ids_begin", ..., "has no suppress_ids_begin"),
        ("lang_ids", [50259, 10**9], r"has lang_ids \[50259, 10"),
        ("lang_ids", ..., "has no lang_ids"),
        ("alignment_heads", [[100, 100]], r"alignment_heads .* are \[\[100, 100\]\]"),
        ("alignment_heads", [[1, -1]], r"alignment_heads .* are \[\[1, -1\]\]"),
        ("alignment_heads", [[1, 2]], r"alignment_heads .* are \[\[1, 2\]\]"),
        ("alignment_heads", [[1, 0]] * 2, r"alignment_heads .* are \[\[1, 0\], \[1, 0\]\]"),
        ("alignment_heads", ..., "alignment_heads .* are None"),
    ],
)  # fmt: skip
def test_settings_that_ctranslate2_does_not_check_are_checked(
    folder: Path, tmp_path: Path, name: str, value: Any, found: str
) -> None:
    shutil.copytree(folder / "ct2", tmp_path / "m")
    settings = json.loads((tmp_path / "m" / "config.json").read_text()) | {name: value}
    (tmp_path / "m" / "config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not ...}))
    assert re.search(found, str(check(tmp_path, "m", timestamps="word")))
    with pytest.raises(ModelError, match=found):  # a signal would end the process here
        fast(tmp_path, "m", timestamps="word").warm_up()


def test_heads_that_align_words_are_checked_for_words_only(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "ct2", tmp_path / "m")
    settings = json.loads((tmp_path / "m" / "config.json").read_text()) | {"alignment_heads": [[10, 12]]}
    (tmp_path / "m" / "config.json").write_text(json.dumps(settings))
    batch = Batch({"audio": RECORDINGS[:1]})
    assert fast(tmp_path, "m", timestamps="segment").run(batch) == fast(folder, timestamps="segment").run(batch)


def test_sizes_that_no_whisper_has_are_refused_when_checked(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "ct2", tmp_path / "m")
    data = (tmp_path / "m" / "model.bin").read_bytes()
    claimed = data.replace(struct.pack("<BII", 2, 48, 32), struct.pack("<BII", 2, 2, 768))  # decoder's positions
    (tmp_path / "m" / "model.bin").write_bytes(claimed)
    assert "text context of m/model.bin are 2" in str(check(tmp_path, "m"))


def test_a_tokenizer_of_another_whisper_is_refused_when_checked(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "ct2", tmp_path / "m")
    tokenizer(False, 99).save(str(tmp_path / "m" / "tokenizer.json"))
    error = check(tmp_path, "m")
    assert "has <|startoftranscript|> at 50257" in error.found and "at 50258" in error.expected


def test_a_vocabulary_may_be_a_text_file(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "ct2", tmp_path / "m")
    words = json.loads((tmp_path / "m" / "vocabulary.json").read_text())
    (tmp_path / "m" / "vocabulary.json").unlink()
    (tmp_path / "m" / "vocabulary.txt").write_text("\n".join(words))
    batch = Batch({"audio": RECORDINGS[:1]})
    assert fast(tmp_path, "m").run(batch) == fast(folder).run(batch)


def test_sizes_are_read_and_no_damage_of_headers_is_anything_but_a_reason(folder: Path, tmp_path: Path) -> None:
    sizes = read_sizes(folder / "ct2" / "model.bin")
    assert sizes == Sizes(bands=80, positions=200, text_context=48, vocabulary=51865, text_heads=2, text_layers=2)
    assert (sizes.multilingual, sizes.languages) == (True, 99)
    data = (folder / "ct2" / "model.bin").read_bytes()
    refused = 0
    for number, harmed in enumerate([data + b"x", *broken(data, truncations=60)]):
        (tmp_path / "model.bin").write_bytes(harmed)
        try:
            read_sizes(tmp_path / "model.bin")
        except ValueError as error:
            assert str(error)
            refused += 1
        else:
            assert number > 60  # a flipped bit may leave a sound file
    assert refused > 90


def test_an_english_only_model_is_known_when_checked(tmp_path: Path) -> None:
    folder = made(tmp_path, replace(DIMS, n_vocab=51864))
    convert(whisper.load_model(str(folder / "model.pt"), device="cpu"), folder / "ct2")
    assert "English-only" in str(check(folder, language="de"))
    assert fast(folder).run(Batch({"audio": [noise(1, 0)]}))["language"] == ["en"]


def test_a_model_is_a_step_of_a_pipeline(tmp_path: Path) -> None:
    from weftline.engine.session import load

    convert(whisper.load_model(str(MODEL / "model.pt"), device="cpu"), tmp_path / "ct2")
    (tmp_path / "p.yaml").write_text(
        "weftline: 1\nname: p\ninputs: {audio: audio}\nsteps:\n"
        "  hear: {node: whisper, model: ct2, inputs: {audio: audio}}\noutputs: {text: hear.text}\n"
    )
    recording: np.ndarray = decode_audio((EXAMPLES / "data" / "question.wav").read_bytes())
    with load(tmp_path / "p.yaml").open() as session:
        assert session.run(audio=recording)["text"] == "How many red circles are there?"
