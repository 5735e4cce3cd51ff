"""Segments, words and languages of node whisper beside openai-whisper's own `transcribe`, with random weights."""

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import whisper
from whisper.model import ModelDimensions

from weftline.errors import InputError
from weftline.nodes.audio import decode_audio
from weftline.nodes.contract import Batch, ConfigError, OpenContext, StepContext
from weftline.nodes.ports import AUDIO_HZ
from weftline.nodes.voice_activity import Span, speech_regions, speech_windows
from weftline.nodes.whisper import Whisper, WhisperConfig
from weftline.nodes.whisper_decoding import Found, Part, Recording, Window, WindowDecoder, split_at_timestamps
from weftline.nodes.whisper_torch import log_mels

DIMS = ModelDimensions(
    n_mels=80, n_audio_ctx=200, n_audio_state=32, n_audio_head=2, n_audio_layer=1,
    n_vocab=51865, n_text_ctx=48, n_text_state=32, n_text_head=2, n_text_layer=2,
)  # fmt: skip
"""A multilingual model of 4 s windows."""

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = EXAMPLES / "models" / "spoken-questions"


def randomise(network: torch.nn.Module) -> None:
    """Spread the likelihoods and the attention, so that different recordings have different transcripts."""
    with torch.no_grad():
        network.encoder.conv1.weight.mul_(8)
        network.encoder.conv2.weight.mul_(8)
        network.decoder.positional_embedding.normal_(0, 1)
        network.decoder.token_embedding.weight.normal_(0, 0.3)
        for block in network.decoder.blocks:
            block.cross_attn.out.weight.mul_(8)
            block.cross_attn.query.weight.mul_(6)


def made(folder: Path, dims: ModelDimensions) -> Path:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    network = whisper.model.Whisper(dims)
    randomise(network)
    torch.save({"dims": asdict(dims), "model_state_dict": network.state_dict()}, folder / "model.pt")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("whisper"), DIMS)


def opened(folder: Path, **options: Any) -> Whisper:
    node = Whisper(WhisperConfig("model.pt", **options))
    node.open(OpenContext(folder, items_max=4))
    return node


def noise(seconds: float, seed: int) -> np.ndarray:
    """Return noise of steady level whose colour depends on the seed."""
    white = np.random.default_rng(seed).normal(0, 0.1, int(seconds * AUDIO_HZ))
    tone = np.sin(np.arange(len(white)) * (0.05 + 0.11 * seed))
    return (white / (1 + seed) + 0.3 * tone).astype(np.float32)


def reference(folder: Path, samples: np.ndarray, words: bool, **options: Any) -> dict[str, Any]:
    """Return the answer of openai-whisper's `transcribe`, through its own loader."""
    network = whisper.load_model(str(folder / "model.pt"), device="cpu")
    frames = 2 * network.dims.n_audio_ctx
    module = importlib.import_module("whisper.transcribe")
    with pytest.MonkeyPatch.context() as patch:  # its windows have 30 s
        patch.setattr(module, "N_FRAMES", frames)
        patch.setattr(module, "N_SAMPLES", frames * 160)
        settings = {"no_speech_threshold": None, "logprob_threshold": None, **options}
        found: dict[str, Any] = whisper.transcribe(
            network, samples, word_timestamps=words, temperature=0.0, condition_on_previous_text=False,
            compression_ratio_threshold=None, fp16=False, max_initial_timestamp=3000 / frames, **settings,
        )  # fmt: skip
    return found


def times(segments: Sequence[dict[str, Any]], start_s: float, end_s: float) -> list[Any]:
    """Return texts and times of openai-whisper's segments as `own` does: from `start_s`, none after `end_s`."""

    def time(seconds: float) -> float:
        return round(min(start_s + float(seconds), end_s), 3)

    return [
        (
            one["text"].strip(),
            time(one["start"]),
            time(one["end"]),
            [
                (word["word"], time(word["start"]), time(word["end"]), pytest.approx(word["probability"], abs=2e-3))
                for word in one.get("words", ())
            ],
        )
        for one in segments
        if one["text"].strip()
    ]


def own(segments: Sequence[dict[str, Any]]) -> list[Any]:
    """Return texts and times of the node's segments."""
    return [
        (one["text"], one["start"], one["end"], [tuple(word.values()) for word in one.get("words", ())])
        for one in segments
    ]


def piecewise(folder: Path, samples: np.ndarray, window: Span, words: bool, **options: Any) -> dict[str, Any]:
    """Return what `transcribe` finds in a window, without rests that have no speech or are shorter than 0.1 s."""
    start, end = window
    last_s = (min(speech_regions(samples[:end])[-1][1], end) - start) / AUDIO_HZ
    found = reference(folder, samples[start:end], words, **options)
    return found | {
        "segments": [one for one in found["segments"] if one["seek"] == 0 or one["seek"] / 100 < last_s - 0.1]
    }


@pytest.mark.slow(but_first=2)
@pytest.mark.parametrize(("positions", "timestamps"), [(200, "word"), (200, "segment"), (1500, "word")])
def test_a_batch_has_the_segments_and_words_of_transcribe(tmp_path: Path, positions: int, timestamps: str) -> None:
    folder = made(tmp_path, replace(DIMS, n_audio_ctx=positions))
    items = [noise(seconds, seed) for seed, seconds in enumerate((1.0, 3.9, 0.5, 2.2))]
    answers = opened(folder, timestamps=timestamps).run(Batch({"audio": items}))
    several = 0
    for place, samples in enumerate(items):
        wanted = piecewise(folder, samples, (0, len(samples)), timestamps == "word")
        assert own(answers["segments"][place]) == times(wanted["segments"], 0.0, len(samples) / AUDIO_HZ)
        assert answers["language"][place] == wanted["language"]
        assert answers["text"][place] == "".join(one["text"] for one in wanted["segments"]).strip()
        several += len({segment["seek"] for segment in wanted["segments"]}) > 1
    assert len(set(answers["text"])) > 1
    assert several or timestamps == "segment"  # some windows were decoded again from their last word


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("timestamps", ["word", "segment"])
def test_windows_of_a_long_recording_share_batches_with_others(folder: Path, timestamps: str) -> None:
    silence = np.zeros(20 * AUDIO_HZ, np.float32)
    long = np.concatenate([silence[:AUDIO_HZ], noise(3, 7), silence, noise(3.2, 8)])
    short = noise(3, 4)
    answers = opened(folder, timestamps=timestamps, language="en").run(Batch({"audio": [long, short]}))
    windows = speech_windows(long, speech_regions(long), 4 * AUDIO_HZ)
    assert len(windows) == 2
    wanted = [own_of(folder, long, window, timestamps) for window in windows]
    assert own(answers["segments"][0]) == wanted[0] + wanted[1]
    assert own(answers["segments"][1]) == own_of(folder, short, (0, len(short)), timestamps)
    starts = [segment["start"] for segment in answers["segments"][0]]
    assert starts == sorted(starts) and starts[-1] > 23


def own_of(folder: Path, samples: np.ndarray, window: Span, timestamps: str) -> list[Any]:
    found = piecewise(folder, samples, window, timestamps == "word", language="en")
    return times(found["segments"], window[0] / AUDIO_HZ, window[1] / AUDIO_HZ)


def test_spectrograms_of_windows_are_those_of_transcribe(folder: Path) -> None:
    node = opened(folder, timestamps="segment", vad=False)
    items = [noise(4, 1), noise(1.3, 2), noise(0.01, 3)]
    windows = [
        Window(Recording(samples, "en", "transcribe"), 0, len(samples), seek=seek)
        for samples, seek in zip(items, (0, 40, 0), strict=True)
    ]
    for window, samples, mel in zip(windows, items, node._decoder(node._search)._rests(windows), strict=True):
        wanted = whisper.log_mel_spectrogram(samples, padding=4 * AUDIO_HZ)[:, window.seek : window.frames]
        torch.testing.assert_close(mel[:, : window.rest], wanted, atol=1e-5, rtol=1e-5)
        assert not mel[:, window.rest :].any()


def test_languages_and_tasks_of_a_batch_are_those_of_each_request(folder: Path) -> None:
    items = [noise(2, seed) for seed in range(3)]
    wishes = {"language": ["de", "auto", "fr"], "task": ["translate", None, "transcribe"]}
    answers = opened(folder).run(Batch({"audio": items, **wishes}))
    network = whisper.load_model(str(folder / "model.pt"), device="cpu")
    for place, samples in enumerate(items):
        mel = whisper.log_mel_spectrogram(whisper.pad_or_trim(samples, DIMS.n_audio_ctx * 320))
        language = {"auto": None}.get(wishes["language"][place] or "", wishes["language"][place])
        task = wishes["task"][place] or "transcribe"
        options = whisper.DecodingOptions(language=language, task=task, without_timestamps=True, fp16=False)
        wanted = whisper.decode(network, mel, options)
        assert (answers["text"][place], answers["language"][place]) == (wanted.text, wanted.language)
    alone = opened(folder, language="de").run(Batch({"audio": items[:1]}))
    assert alone["language"] == ["de"] and alone["text"] != answers["text"][:1]  # the task makes a difference


@pytest.mark.parametrize(
    ("options", "decoding"), [({"prompt": "red circles"}, {"prompt": "red circles"}), ({"beams": 2}, {"beam_size": 2})]
)
def test_rows_of_several_languages_are_searched_with_a_prompt_and_beams(
    folder: Path, options: dict[str, Any], decoding: dict[str, Any]
) -> None:
    items, languages = [noise(2, 1), noise(3, 2)], ["de", "fr"]
    answers = opened(folder, **options).run(Batch({"audio": items, "language": languages}))
    network = whisper.load_model(str(folder / "model.pt"), device="cpu")
    for text, samples, language in zip(answers["text"], items, languages, strict=True):
        mel = whisper.log_mel_spectrogram(whisper.pad_or_trim(samples, DIMS.n_audio_ctx * 320))
        chosen = whisper.DecodingOptions(language=language, without_timestamps=True, fp16=False, **decoding)
        assert text == whisper.decode(network, mel, chosen).text
    timed = opened(folder, timestamps="word", **options).run(Batch({"audio": items, "language": languages}))
    assert all(segment["words"] for segments in timed["segments"] for segment in segments)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_words_in_half_precision_are_near_those_in_float32(precision: str) -> None:
    samples = decode_audio((EXAMPLES / "data" / "question.wav").read_bytes())
    found = []
    for chosen in ("float32", precision):
        node = Whisper(WhisperConfig(str(MODEL), timestamps="word", timestamp_tokens=False, precision=chosen))
        node.open(OpenContext(EXAMPLES))
        [[segment]] = node.run(Batch({"audio": [samples]}))["segments"]
        found.append(segment["words"])
    for one, other in zip(*found, strict=True):
        assert one["word"] == other["word"] and abs(one["start"] - other["start"]) <= 0.1
        assert abs(one["probability"] - other["probability"]) < 0.05


def test_spectrograms_are_computed_in_float32(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precisions = []

    def seen(samples: torch.Tensor, bands: int) -> torch.Tensor:
        precisions.append(torch.is_autocast_enabled("cpu"))
        return log_mels(samples, bands)

    monkeypatch.setattr("weftline.nodes.whisper_torch.log_mels", seen)
    for timestamps in ("none", "word"):
        opened(folder, timestamps=timestamps, precision="bfloat16").run(Batch({"audio": [noise(1, 0)]}))
    assert precisions == [False] * 3  # with timestamps once more for the language


def test_a_wrong_language_or_task_fails_its_request_only(folder: Path) -> None:
    wishes = {"language": ["klingon", "de", "yue"], "task": ["transcribe", "sing", "transcribe"]}
    batch = Batch({"audio": [noise(1, 0)] * 3, **wishes})
    answers = opened(folder, timestamps="segment").run(batch)
    for outputs in answers.values():
        assert all(isinstance(one, InputError) for one in outputs)
    found = [str(one) for one in answers["text"]]
    assert "'klingon'" in found[0] and "'sing'" in found[1] and "'yue'" in found[2]
    assert opened(folder).run(Batch({"audio": [noise(1, 0)], "language": [" DE "]}))["language"] == ["de"]


def test_the_language_of_a_long_recording_is_that_of_its_first_window(folder: Path) -> None:
    node = opened(folder)
    seen = {node.run(Batch({"audio": [noise(3, seed)]}))["language"][0]: seed for seed in range(30)}
    print(seen)
    assert len(seen) > 1
    first, second = list(seen.values())[:2]
    gap = np.zeros(4 * AUDIO_HZ, np.float32)
    for one, other in ((first, second), (second, first)):
        both = np.concatenate([noise(3, one), gap, noise(3, other)])
        answer = node.run(Batch({"audio": [both]}))
        assert len(answer["segments"][0]) == 2
        head = both[: round(answer["segments"][0][0]["end"] * AUDIO_HZ)]
        assert answer["language"] == node.run(Batch({"audio": [head]}))["language"]


def test_silence_of_a_long_recording_is_not_decoded_unless_vad_is_off(folder: Path) -> None:
    silence = np.zeros(7 * AUDIO_HZ, np.float32)
    answer = opened(folder, timestamps="segment").run(Batch({"audio": [silence]}))
    assert answer == {"text": [""], "language": [""], "segments": [[]], "srt": [""], "vtt": ["WEBVTT\n"]}
    assert opened(folder, language="en").run(Batch({"audio": [silence]}))["language"] == ["en"]
    assert len(opened(folder, vad=False).run(Batch({"audio": [silence]}))["segments"][0]) == 2


def test_windows_of_a_cancelled_request_are_not_decoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = opened(folder, vad=False)
    decoded: list[int] = []
    decode = WindowDecoder._decode

    def counted(decoder: WindowDecoder, windows: Any) -> Any:
        decoded.append(len(windows))
        return decode(decoder, windows)

    monkeypatch.setattr(WindowDecoder, "_decode", counted)
    batch = Batch({"audio": [noise(18, 0), noise(1, 1)]}, cancelled=lambda item: item == 0 and bool(decoded))
    answers = node.run(batch)
    assert decoded == [4, 1] or decoded == [4]
    assert len(answers["text"]) == 2 and len(answers["segments"][1]) == 1


def test_words_of_the_bundled_model_are_those_of_openai_whisper() -> None:
    samples = decode_audio((EXAMPLES / "data" / "question.wav").read_bytes())
    node = Whisper(WhisperConfig(str(MODEL), timestamps="word", timestamp_tokens=False))
    node.open(OpenContext(EXAMPLES))
    answer = node.run(Batch({"audio": [samples]}))
    wanted = reference(MODEL, samples, True, without_timestamps=True, language="en")
    assert own(answer["segments"][0]) == times(wanted["segments"][:1], 0.0, 9.0)
    assert answer["text"] == ["How many red circles are there?"]
    words = answer["segments"][0][0]["words"]
    assert [word["word"] for word in words] == [" How", " many", " red", " circles", " are", " there?"]
    assert min(word["probability"] for word in words) > 0.9
    json.dumps(answer)  # no number of numpy's


def test_the_bundled_model_finds_questions_between_pauses() -> None:
    samples = decode_audio((EXAMPLES / "data" / "question.wav").read_bytes())
    pause = np.random.default_rng(0).normal(0, 1e-3, 6 * AUDIO_HZ).astype(np.float32)
    recording = np.concatenate([pause, samples, pause, pause, samples, pause])
    node = Whisper(WhisperConfig(str(MODEL), timestamps="word", timestamp_tokens=False))
    node.open(OpenContext(EXAMPLES, items_max=8))
    answer = node.run(Batch({"audio": [recording]}))
    assert answer["text"] == ["How many red circles are there? How many red circles are there?"]
    seconds = len(samples) / AUDIO_HZ
    for segment, begin in zip(answer["segments"][0], (6.0, 18.0 + seconds), strict=True):
        assert begin - 0.5 < segment["start"] < segment["end"] < begin + seconds + 0.5
    assert answer["srt"][0].count(" --> ") == answer["vtt"][0].count(" --> ") == 2


def sounds() -> list[np.ndarray]:
    """Return a question, silence, faint noise, the question 50 dB quieter, and the question before 18 s of silence."""
    question = decode_audio((EXAMPLES / "data" / "question.wav").read_bytes())
    silence = np.zeros(18 * AUDIO_HZ, np.float32)
    faint = np.random.default_rng(0).normal(0, 0.01, 2 * AUDIO_HZ).astype(np.float32)
    return [question, silence[: 2 * AUDIO_HZ], faint, question * 0.003, np.concatenate([question, silence])]


QUESTION = "How many red circles are there?"


@pytest.mark.parametrize(
    ("timestamps", "vad"), [("none", True), ("none", False), ("segment", True), ("segment", False), ("word", True)]
)
def test_windows_without_speech_have_no_text(timestamps: str, vad: bool) -> None:
    node = Whisper(WhisperConfig(str(MODEL), timestamps=timestamps, timestamp_tokens=False, vad=vad))
    node.open(OpenContext(EXAMPLES, items_max=4))
    answer = node.run(Batch({"audio": sounds()}))
    texts = [text for place, text in enumerate(answer["text"]) if place != 3]
    assert texts == [QUESTION, "", "", QUESTION] and "shapes" in answer["text"][3]
    assert [len(segments) for segments in answer["segments"]][:3] == [1, 0, 0]
    assert len(answer["segments"][4]) == 1
    if timestamps != "none":
        assert (answer["srt"][1], answer["vtt"][1]) == ("", "WEBVTT\n")


@pytest.mark.parametrize(
    ("no_speech", "logprob", "silent"),
    [(0.6, -1.0, True), (None, -1.0, False), (0.99, -1.0, False), (0.6, -2.0, False), (0.6, None, True)],
)
def test_thresholds_of_silence_are_those_of_transcribe(
    no_speech: float | None, logprob: float | None, silent: bool
) -> None:
    samples = sounds()[1]
    options = {"no_speech_threshold": no_speech, "logprob_threshold": logprob}
    node = Whisper(WhisperConfig(str(MODEL), timestamps="segment", timestamp_tokens=False, vad=False, **options))
    node.open(OpenContext(EXAMPLES))
    [text] = node.run(Batch({"audio": [samples]}))["text"]
    wanted = reference(MODEL, samples, False, without_timestamps=True, language="en", **options)
    assert text == wanted["text"].strip() and (text == "") == silent


@pytest.mark.parametrize(("option", "value"), [("no_speech_threshold", 1.5), ("logprob_threshold", 1.0),
                                               ("no_speech_threshold", float("nan"))])  # fmt: skip
def test_thresholds_that_are_no_likelihoods_are_refused(option: str, value: float) -> None:
    with pytest.raises(ConfigError, match=option):
        Whisper.ports(WhisperConfig(str(MODEL), **{option: value}), StepContext(EXAMPLES))  # type: ignore[arg-type]


@pytest.mark.slow
def test_aligning_words_keeps_the_number_of_threads() -> None:
    """numba's start sets the threads of the whole process; it starts once in a process."""
    script = (
        "import torch, numpy as np; from pathlib import Path; from weftline.nodes.contract import Batch, OpenContext\n"
        "from weftline.nodes.whisper import Whisper, WhisperConfig\n"
        "node = Whisper(WhisperConfig('models/spoken-questions', timestamps='word'))\n"
        f"node.open(OpenContext(Path({str(EXAMPLES)!r}), threads=1)); node.warm_up()\n"
        "node.run(Batch({'audio': [np.sin(np.arange(16000, dtype=np.float32))]})); print(torch.get_num_threads())"
    )
    environment = {"OMP_NUM_THREADS": "2", "NUMBA_NUM_THREADS": "2", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=EXAMPLES.parent, env=environment
    )
    assert done.stdout.strip() == "1", done.stderr


BEGIN = 1000


@pytest.mark.parametrize(
    ("tokens", "last", "parts", "done", "ended"),
    [
        ([1000, 5, 1040], False, [(0, 80, [1000, 5, 1040])], 200, True),
        ([1000, 5], False, [(0, 200, [1000, 5])], 200, False),
        ([1000, 5, 1040, 1040, 6, 1060], False, [(0, 80, [1000, 5, 1040]), (80, 120, [1040, 6, 1060])], 200, True),
        ([1000, 5, 1040, 1040, 6], False, [(0, 80, [1000, 5, 1040])], 80, False),
        ([1000, 5, 1040, 1040, 6], True, [(0, 80, [1000, 5, 1040]), (80, 200, [1040, 6])], 200, True),
        ([], False, [(0, 200, [])], 200, False),
    ],
)
def test_tokens_are_split_at_pairs_of_timestamps(
    tokens: list[int], last: bool, parts: list[tuple[int, int, list[int]]], done: int, ended: bool
) -> None:
    found = split_at_timestamps(tokens, BEGIN, 200, last)
    assert found == ([Part(*part) for part in parts], done, ended or last)


def test_no_window_is_decoded_more_often_than_it_has_seconds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = opened(folder, timestamps="segment", language="en")
    count = 0
    tokenizer = whisper.tokenizer.get_tokenizer(True, num_languages=99)
    begin, word = tokenizer.timestamp_begin, tokenizer.encode(" word")[0]

    def search(states: torch.Tensor, recordings: Sequence[Recording], search: object) -> list[Found]:
        nonlocal count
        count += 1
        tokens = [begin, word, begin + 5, begin + 5, word]  # a segment of 0.1 s, and one without an end
        return [Found(tokens, "", 0.0, -1.0)]

    monkeypatch.setattr(node._network, "search", search)
    [segments] = node.run(Batch({"audio": [noise(3.9, 0)]}))["segments"]
    assert count == 4
    assert [segment["start"] for segment in segments] == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert segments[-1]["end"] == 3.9
