import json
import socket
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import whisper
from whisper.model import ModelDimensions

from tests.nodes.device_values import DEVICE, Bench, moves_of_modules
from tests.nodes.model_files import Harm, broken
from weftline.errors import ModelError
from weftline.nodes.contract import Batch, ConfigError, OpenContext, StepContext
from weftline.nodes.voice_activity import speech_regions
from weftline.nodes.whisper import Whisper, WhisperConfig
from weftline.nodes.whisper_file import LANGUAGES, halve
from weftline.nodes.whisper_torch import log_mels

DIMS = ModelDimensions(
    n_mels=80, n_audio_ctx=50, n_audio_state=32, n_audio_head=2, n_audio_layer=1,
    n_vocab=51864, n_text_ctx=24, n_text_state=32, n_text_head=2, n_text_layer=1,
)  # fmt: skip
"""A model that hears one second: 50 positions of 320 samples."""

SECOND = 16_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("whisper")
    network = whisper.model.Whisper(DIMS)
    with torch.no_grad():
        network.decoder.positional_embedding.normal_()  # untrained, it is whatever lay in memory
    torch.save({"dims": asdict(DIMS), "model_state_dict": network.state_dict()}, folder / "model.pt")
    return folder


@pytest.fixture(scope="module")
def node(folder: Path) -> Whisper:
    node = Whisper(WhisperConfig("model.pt"))
    node.open(OpenContext(folder, items_max=4))
    node.warm_up()
    return node


def tone(seconds: float, hertz: float = 300) -> np.ndarray:
    return np.sin(2 * np.pi * hertz * np.arange(int(seconds * SECOND)) / SECOND).astype(np.float32)


def reference(folder: Path, samples: np.ndarray) -> str:
    """openai-whisper's own decoding of one window, through its own loader."""
    network = whisper.load_model(str(folder / "model.pt"), device="cpu")
    mel = whisper.log_mel_spectrogram(whisper.pad_or_trim(samples, DIMS.n_audio_ctx * 320))
    options = whisper.DecodingOptions(language="en", without_timestamps=True, fp16=False)
    return whisper.decode(network, mel, options).text


def test_a_batch_gives_what_whisper_gives_one_by_one(folder: Path, node: Whisper) -> None:
    items = [tone(0.5), tone(1.0, 700), tone(0.1, 90)]
    answers = node.run(Batch({"audio": items}))
    assert answers["text"] == [reference(folder, samples) for samples in items]
    assert any(answers["text"]) and answers["language"] == ["en"] * 3
    assert [len(segments) for segments in answers["segments"]] == [1, 1, 1]


@pytest.mark.parametrize("bands", [80, 128])
def test_spectrograms_of_a_batch_are_bit_for_bit_those_one_by_one(bands: int) -> None:
    samples = np.random.default_rng(0).standard_normal((3, SECOND)).astype(np.float32)
    samples *= np.array([[1e-4], [0.1], [1.0]], np.float32)  # each has a loudest bin of its own
    one_by_one = torch.stack([whisper.log_mel_spectrogram(row, bands) for row in samples])
    assert torch.equal(log_mels(torch.from_numpy(samples), bands), one_by_one)


def test_recordings_on_device_and_host_have_equal_results(
    folder: Path, node: Whisper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found_on_the_host(samples: np.ndarray) -> list[tuple[int, int]]:
        assert isinstance(samples, np.ndarray)
        return speech_regions(samples)

    monkeypatch.setattr("weftline.nodes.whisper.speech_regions", found_on_the_host)
    items = [tone(0.5), np.concatenate([tone(0.9), np.zeros(1600, np.float32), tone(0.9, 700)]), tone(0.1, 90)]
    there, bench = Whisper(WhisperConfig("model.pt")), Bench()
    there.open(OpenContext(folder, DEVICE, items_max=4))
    there.warm_up()
    wanted = node.run(Batch({"audio": items}))
    near = [bench.put(item) for item in items]
    assert there.run(Batch({"audio": near})) == wanted
    assert there.run(Batch({"audio": [near[0], items[1], near[2]]})) == wanted
    assert there.sleep("host") and not there.sleep("nothing")
    there.wake()
    assert there.run(Batch({"audio": near})) == wanted
    timed = []
    for device in ("cpu", DEVICE):
        timer = Whisper(WhisperConfig("model.pt", timestamps="word"))
        timer.open(OpenContext(folder, device, items_max=4))
        timed.append(timer.run(Batch({"audio": items if device == "cpu" else near})))
    assert timed[0] == timed[1] and "words" in timed[0]["segments"][1][0]
    assert Whisper.device_ports(there.config, Whisper.ports(there.config, StepContext(folder))) == {"audio"}


def test_asleep_its_weights_are_in_host_memory_and_awake_where_they_were(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper = Whisper(WhisperConfig("model.pt"))
    sleeper.open(OpenContext(folder))
    sleeper._network._device = "cuda:1"
    moves = moves_of_modules(monkeypatch)
    assert sleeper.sleep("host") and moves == ["cpu"]
    sleeper.wake()
    assert moves == ["cpu", "cuda:1"]


def test_halved_weights_change_no_number_of_a_float16_call(folder: Path) -> None:
    network = whisper.load_model(str(folder / "model.pt"), device="cpu")
    mel = log_mels(torch.from_numpy(tone(1.0))[None], 80).half()
    words = torch.tensor([[50257, 50362]])
    with torch.inference_mode():
        network.decoder.positional_embedding.normal_()  # untrained, it is whatever lay in memory
        states = network.encoder(mel)
        said = network.decoder(words, states)
        assert said.isfinite().all()
        halve(network)
        assert network.encoder.conv1.weight.dtype == torch.float16
        assert torch.equal(network.encoder(mel), states) and torch.equal(network.decoder(words, states), said)


def test_a_recording_longer_than_the_model_hears_is_cut_and_joined(folder: Path, node: Whisper) -> None:
    samples = np.concatenate([tone(0.9), np.zeros(1600, np.float32), tone(0.9, 700), tone(0.5, 90)])
    answer = node.run(Batch({"audio": [samples]}))
    segments = answer["segments"][0]
    assert len(segments) >= 3 and segments[0]["start"] == 0 and segments[-1]["end"] == len(samples) / SECOND
    first = samples[: round(segments[0]["end"] * SECOND)]
    assert segments[0]["text"] == reference(folder, first)
    assert answer["text"][0] == " ".join(segment["text"] for segment in segments if segment["text"])


def test_a_folder_with_model_pt_is_a_model(folder: Path) -> None:
    node = Whisper(WhisperConfig("."))
    node.open(OpenContext(folder))
    assert node.run(Batch({"audio": [tone(0.3)]}))["language"] == ["en"]


def test_ports_are_known_without_the_model_and_wrong_options_are_named(folder: Path) -> None:
    ports = Whisper.ports(WhisperConfig("base.en"), StepContext(folder))
    assert [port.name for port in ports.inputs] == ["audio", "language", "task"]
    assert [(port.name, port.optional) for port in ports.inputs][1:] == [("language", True), ("task", True)]
    assert [str(port.type) for port in ports.outputs] == ["text", "text", "json"]
    timed = Whisper.ports(WhisperConfig("base.en", timestamps="segment"), StepContext(folder))
    assert [f"{port.name}: {port.type}" for port in timed.outputs[3:]] == ["srt: text", "vtt: text"]
    for config, option in (
        (WhisperConfig("absent.pt"), "model"),
        (WhisperConfig("tiny", task="sing"), "task"),
        (WhisperConfig("tiny", beams=0), "beams"),
        (WhisperConfig("tiny", timestamps="letter"), "timestamps"),
        (WhisperConfig("tiny", language="klingon"), "language"),
        (WhisperConfig("tiny.en", language="de"), "language"),
        (WhisperConfig("tiny.en", task="translate"), "task"),
        (WhisperConfig("model.pt", tokens_max=0), "tokens_max"),
        (WhisperConfig("base.en", tokens_max=225), "tokens_max"),
    ):
        with pytest.raises(ConfigError) as caught:
            Whisper.ports(config, StepContext(folder))
        assert caught.value.option == option


def test_more_tokens_than_half_the_text_context_are_refused_at_open(folder: Path) -> None:
    half = DIMS.n_text_ctx // 2
    assert Whisper.ports(WhisperConfig("model.pt", tokens_max=half + 1), StepContext(folder))  # not known before
    with pytest.raises(ModelError, match=f"tokens_max: found {half + 1}, expected at most {half}"):
        Whisper(WhisperConfig("model.pt", tokens_max=half + 1)).open(OpenContext(folder))
    Whisper(WhisperConfig("model.pt", tokens_max=half)).open(OpenContext(folder))


def test_a_published_name_without_network_or_cache_is_a_model_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object, **options: object) -> None:
        raise OSError("network is unreachable")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    with pytest.raises(ModelError, match=r"tiny\.en is not in openai-whisper's cache"):
        Whisper(WhisperConfig("tiny.en")).open(OpenContext(tmp_path))


def test_a_user_without_a_home_folder_has_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ModelError, match=r"tiny\.en .* cannot be fetched: Could not determine home directory"):
        Whisper(WhisperConfig("tiny.en")).open(OpenContext(tmp_path))


def test_a_cached_checkpoint_of_the_wrong_hash_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object, **options: object) -> None:
        raise OSError("network is unreachable")

    (tmp_path / "whisper").mkdir()
    (tmp_path / "whisper" / "tiny.en.pt").write_bytes(b"not the checkpoint")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    with pytest.raises(ModelError), pytest.warns(UserWarning, match="SHA256"):
        Whisper(WhisperConfig("tiny.en")).open(OpenContext(tmp_path))


@pytest.mark.slow
def test_every_truncation_and_header_flip_fails_fast_with_a_reason(folder: Path, tmp_path: Path) -> None:
    data = (folder / "model.pt").read_bytes()
    refused = 0
    for candidate in broken(data, truncations=100, flips=range(0, 320, 4)):
        (tmp_path / "model.pt").write_bytes(candidate)
        started = time.process_time()
        try:
            Whisper(WhisperConfig("model.pt")).open(OpenContext(tmp_path))
        except ModelError as error:
            refused += 1
            assert str(error).startswith("model.pt") and str(tmp_path) not in str(error)
        assert time.process_time() - started < 1
    assert refused >= 100


def test_a_pickle_that_would_run_code_does_not_run_it(tmp_path: Path) -> None:
    torch.save({"dims": asdict(DIMS), "model_state_dict": Harm(tmp_path / "ran")}, tmp_path / "model.pt")
    with pytest.raises(ModelError, match="not weights"):
        Whisper(WhisperConfig("model.pt")).open(OpenContext(tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"n_audio_state": 1 << 40},
        {"n_vocab": -1},
        {"n_audio_layer": 3},
        {"n_mels": 81},
        {"n_audio_head": 3},
        {"n_text_ctx": "24"},
    ],
)
def test_dims_that_do_not_fit_the_weights_are_refused_first(
    folder: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    checkpoint = torch.load(folder / "model.pt", weights_only=True)
    checkpoint["dims"] |= change
    torch.save(checkpoint, tmp_path / "model.pt")
    started = time.process_time()
    with pytest.raises(ModelError, match=r"model\.pt"):
        Whisper(WhisperConfig("model.pt")).open(OpenContext(tmp_path))
    assert time.process_time() - started < 1


def test_other_checkpoints_are_no_whisper(tmp_path: Path) -> None:
    for content in ({"dims": {}, "model_state_dict": {"a": torch.ones(1)}}, {"weights": {}}, [1]):
        torch.save(content, tmp_path / "model.pt")
        with pytest.raises(ModelError, match="no Whisper checkpoint"):
            Whisper(WhisperConfig("model.pt")).open(OpenContext(tmp_path))


@pytest.mark.parametrize("options", [{"language": "de"}, {"task": "translate"}])
def test_an_english_model_in_a_file_refuses_other_languages_at_open(folder: Path, options: dict[str, str]) -> None:
    config = WhisperConfig("model.pt", **options)
    assert Whisper.ports(config, StepContext(folder))  # not known before
    with pytest.raises(ModelError, match=rf"{next(iter(options))}: .*, but model\.pt is English-only"):
        Whisper(config).open(OpenContext(folder))


def test_an_english_model_accepts_english_only(node: Whisper) -> None:
    wishes = {"language": ["en", "auto", "de", "en"], "task": [None, "transcribe", None, "translate"]}
    answers = node.run(Batch({"audio": [tone(0.3)] * 4, **wishes}))
    assert answers["language"][:2] == ["en", "en"]
    assert all("English-only" in str(error) for error in answers["text"][2:])


def test_the_languages_are_those_of_openai_whisper() -> None:
    assert tuple(whisper.tokenizer.LANGUAGES) == LANGUAGES


def converted(folder: Path, **keys: object) -> torch.nn.Module:
    """Write a random Whisper in Hugging Face's form and return its network."""
    from transformers import WhisperConfig as HubConfig
    from transformers import WhisperForConditionalGeneration

    torch.manual_seed(3)
    config = HubConfig(
        vocab_size=51864, num_mel_bins=80, d_model=16, encoder_layers=2, encoder_attention_heads=2, decoder_layers=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=50,
        max_target_positions=24,
    )  # fmt: skip
    network = WhisperForConditionalGeneration(config).eval()
    network.save_pretrained(folder)
    if keys:
        known = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**known, **keys}))
    return network


def test_hugging_faces_form_of_a_model_gives_the_same_states_and_logits(tmp_path: Path) -> None:
    wanted = converted(tmp_path / "m")
    Whisper.ports(WhisperConfig("m"), StepContext(tmp_path))
    node = Whisper(WhisperConfig("m"))
    node.open(OpenContext(tmp_path))
    mels, ids = torch.randn(2, 80, 100), torch.tensor([[50257, 7, 9], [50257, 50358, 3]])
    with torch.inference_mode():
        found = wanted(input_features=mels, decoder_input_ids=ids)
        states = node._network.model.encoder(mels)
        torch.testing.assert_close(states, found.encoder_last_hidden_state, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(node._network.model.decoder(ids, states), found.logits, atol=1e-5, rtol=1e-5)
    assert isinstance(node.run(Batch({"audio": [tone(0.5)]}))["text"][0], str)


def with_heads(folder: Path, heads: object) -> None:
    known = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**known, "alignment_heads": heads}))


def test_alignment_heads_of_hugging_faces_form_are_used(tmp_path: Path) -> None:
    converted(tmp_path / "m")
    found = []
    for heads in (None, [[0, 1]], [[1, 0], [0, 0]]):
        with_heads(tmp_path / "m", heads)
        node = Whisper(WhisperConfig("m", timestamps="word", timestamp_tokens=False))
        node.open(OpenContext(tmp_path))
        found.append(node._network.model.alignment_heads.to_dense().int().tolist())
        [[segment]] = node.run(Batch({"audio": [tone(0.9)]}))["segments"]
        assert segment["words"] and segment["words"][-1]["end"] <= 0.9
    assert found == [[[0, 0], [1, 1]], [[0, 1], [0, 0]], [[1, 0], [1, 0]]]  # the first is openai-whisper's default


@pytest.mark.parametrize("heads", [[], "all", [[0]], [[0, 2]], [[2, 0]], [[0, -1]], [[True, 0]], [[0.0, 0]]])
def test_alignment_heads_that_are_none_are_refused_when_checked(tmp_path: Path, heads: object) -> None:
    converted(tmp_path / "m")
    with_heads(tmp_path / "m", heads)
    with pytest.raises(ConfigError, match=r"alignment_heads in m/generation_config\.json") as caught:
        Whisper.ports(WhisperConfig("m"), StepContext(tmp_path))
    assert caught.value.option == "model"


def test_a_folder_of_an_english_model_refuses_other_languages_when_checked(tmp_path: Path) -> None:
    converted(tmp_path / "m")
    with pytest.raises(ConfigError, match="de, but m is English-only"):
        Whisper.ports(WhisperConfig("m", language="de"), StepContext(tmp_path))


@pytest.mark.parametrize(
    ("keys", "found"),
    [({"model_type": "wav2vec2"}, "config.json of a wav2vec2"), ({"vocab_size": 60000}, "vocab_size .* is 60000")],
)
def test_a_folder_of_no_whisper_is_refused_when_checked(tmp_path: Path, keys: dict[str, object], found: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty has no model.pt and no config.json"):
        Whisper.ports(WhisperConfig("empty"), StepContext(tmp_path))
    converted(tmp_path / "m", **keys)
    with pytest.raises(ConfigError, match=found) as caught:
        Whisper.ports(WhisperConfig("m"), StepContext(tmp_path))
    assert caught.value.option == "model" and "Whisper" in caught.value.expected


def test_files_and_names_that_are_no_checkpoint_are_refused_when_checked(tmp_path: Path) -> None:
    (tmp_path / "ggml-base.bin").write_bytes(b"lmgg" * 100)
    with pytest.raises(ConfigError, match="is no torch checkpoint"):
        Whisper.ports(WhisperConfig("ggml-base.bin"), StepContext(tmp_path))
    with pytest.raises(ConfigError) as caught:
        Whisper.ports(WhisperConfig("openai/whisper-base.en"), StepContext(tmp_path))
    assert "write base.en" in caught.value.fix
    with pytest.raises(ConfigError) as caught:
        Whisper.ports(WhisperConfig("Systran/faster-whisper-base"), StepContext(tmp_path))
    assert "hf://Systran/faster-whisper-base@REVISION" in caught.value.fix
    (tmp_path / "models").mkdir()
    with pytest.raises(ConfigError) as caught:
        Whisper.ports(WhisperConfig("models/whisper-mine"), StepContext(tmp_path))
    assert not caught.value.fix
