"""The recogniser's voices, imagined recordings and scores, and the shipped model through the stock package."""

import random
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
import whisper

from examples.models.asr import corpus
from examples.models.asr.augment import NOISES, Conditions, augment, noise_bank, nothing_said
from examples.models.asr.network import LONGEST, Recogniser, Vocabulary, log_mel
from examples.models.asr.score import score_one, transcribe, word_errors
from examples.models.language import phrasings, say, targets
from examples.models.speech import (
    DEFAULT_VOICES,
    HELD_OUT_PAIRS,
    HELD_OUT_VARIANTS,
    SAMPLE_RATE_HZ,
    TRAIN_VARIANTS,
    Voice,
    draw_voice,
    espeak_available,
    read_wav,
    synthesise,
    voice_names,
    write_wav,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = EXAMPLES / "models" / "spoken-questions" / "model.pt"
DEMO = EXAMPLES / "data" / "question.wav"
needs_espeak = pytest.mark.skipif(not espeak_available(), reason="the espeak-ng program is not installed")


def tone(seconds: float, hertz: float = 220.0) -> np.ndarray:
    times = np.arange(int(seconds * SAMPLE_RATE_HZ)) / SAMPLE_RATE_HZ
    return (0.4 * np.sin(2 * np.pi * hertz * times)).astype(np.float32)


def test_no_voice_is_both_trained_and_held_out() -> None:
    train, held_out = set(voice_names("train")), set(voice_names("held_out"))
    assert not train & held_out
    assert not {variant for _, variant in train} & set(HELD_OUT_VARIANTS)
    assert not set(TRAIN_VARIANTS) & set(HELD_OUT_VARIANTS)
    assert HELD_OUT_PAIRS
    assert held_out > HELD_OUT_PAIRS


def test_default_voices_are_trained_on() -> None:
    assert {(voice.language, voice.variant) for voice in DEFAULT_VOICES} <= set(voice_names("train"))


def test_drawn_voices_belong_to_their_split() -> None:
    rng = random.Random(5)
    assert not any(draw_voice(rng, "train").held_out for _ in range(300))
    assert all(draw_voice(rng, "held_out").held_out for _ in range(300))


def test_an_unknown_split_of_voices_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 'train' or 'held_out'"):
        voice_names("test")


def test_no_training_sentence_is_a_held_out_question() -> None:
    held_out = {say(form, wording, t).text for form, wording in phrasings("held_out") for t in targets(form)}
    rng = random.Random(7)
    drawn = [corpus.training_sentence(rng) for _ in range(3000)] + [corpus.altered_sentence(rng) for _ in range(3000)]
    assert not held_out & set(drawn)
    assert len(set(drawn)) > 500


def test_a_british_voice_with_a_speaker_gets_the_name_espeak_needs() -> None:
    assert Voice("en-gb").name == "en-gb"
    assert Voice("en-gb", "f4").name == "en+f4"
    assert Voice("en-us", "f4").name == "en-us+f4"


@needs_espeak
@pytest.mark.slow
def test_synthesised_speech_is_16_khz_and_as_long_as_speech_is() -> None:
    slow = synthesise("How many red circles are there?", Voice("en-us", speed_wpm=120))
    fast = synthesise("How many red circles are there?", Voice("en-us", speed_wpm=200))
    assert slow.dtype == np.float32 and slow.ndim == 1
    assert 2.2 < len(slow) / SAMPLE_RATE_HZ < 3.2
    assert 1.2 < len(fast) / SAMPLE_RATE_HZ < 2.0
    assert 0.1 < np.abs(slow).max() <= 1.05


@needs_espeak
@pytest.mark.slow
def test_every_speaker_sounds_different_in_every_accent() -> None:
    said = {pair: synthesise("Red.", Voice(*pair)).tobytes() for pair in voice_names("held_out")}
    assert len(set(said.values())) == len(said)


@needs_espeak
@pytest.mark.slow
def test_the_same_text_and_voice_give_the_same_samples() -> None:
    voice = Voice("en-029", "m5", 150, 40)
    assert np.array_equal(synthesise("A blue star.", voice), synthesise("A blue star.", voice))


@needs_espeak
@pytest.mark.slow
def test_a_voice_espeak_does_not_know_is_named_in_the_error() -> None:
    with pytest.raises(RuntimeError, match="xx-nowhere"):
        synthesise("Hello.", Voice("xx-nowhere"))


@needs_espeak
@pytest.mark.slow
def test_a_corpus_is_read_back_as_it_was_made(tmp_path: Path) -> None:
    corpus.build(tmp_path, "small", 3, seed=9, draw=corpus.draw_held_out)
    made = corpus.load(tmp_path, "small")
    assert len(made.clips) == 3 and all(clip.voice.held_out for clip in made.clips)
    again = synthesise(made.clips[2].text, made.clips[2].voice)
    assert np.abs(np.clip(again, -1, 1) - made.audio(2)).max() < 1e-4


def test_a_missing_corpus_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="train_asr record"):
        corpus.load(tmp_path, "train")


def test_the_same_seed_imagines_the_same_recording() -> None:
    bank = noise_bank([tone(1)], seed=3, seconds=10)
    hard = Conditions(untouched=0, noise=1, speed=1, room=1, band=1)
    first, same, other = (augment(tone(2), np.random.default_rng(s), bank, LONGEST, hard) for s in (1, 1, 2))
    assert np.array_equal(first, same)
    assert not np.array_equal(first, other)
    assert first.dtype == np.float32 and np.abs(first).max() <= 1


def test_imagined_recordings_never_outgrow_what_the_model_hears() -> None:
    bank = noise_bank([tone(1)], seed=3, seconds=10)
    rng = np.random.default_rng(4)
    for seconds in (0.2, 7.9, 9.0):
        assert 0 < len(augment(tone(seconds), rng, bank, LONGEST, Conditions(filled=0.5))) <= LONGEST
        assert 0 < len(nothing_said(rng, bank, LONGEST)) <= LONGEST


@pytest.mark.parametrize("kind", NOISES)
def test_noise_comes_at_the_ratio_that_was_asked_for(kind: str) -> None:
    bank = noise_bank([tone(1)], seed=3, seconds=10)
    only = Conditions(
        untouched=0, noise=1, snr_db_min=10, snr_db_max=10, kinds=(kind,), speed=0, room=0, band=0, silence_s_max=0,
        filled=0,
    )  # fmt: skip
    clean = tone(2)
    noisy = augment(clean, np.random.default_rng(6), bank, LONGEST, only)
    # Undo the loudness: the tone's own share of the recording is what correlates with it.
    share = float(noisy @ clean / (clean @ clean))
    noise = noisy - share * clean
    ratio_db = 10 * np.log10(np.mean((share * clean) ** 2) / np.mean(noise**2))
    assert ratio_db == pytest.approx(10, abs=4 if kind in ("babble", "hum") else 1)


def test_a_batch_of_spectrograms_equals_whispers_own_one_by_one() -> None:
    audio = torch.from_numpy(np.stack([tone(2), 0.01 * tone(2, 440)]))
    batched = log_mel(audio)
    for one, row in zip(audio, batched, strict=True):
        assert torch.allclose(row, whisper.log_mel_spectrogram(one), atol=1e-5)


def test_an_exported_network_says_what_the_trained_one_says(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trained = Recogniser(Vocabulary.of(["How many red stars are there?"])).eval()
    trained.export(tmp_path / "model.pt")
    stock = whisper.load_model(str(tmp_path / "model.pt"), device="cpu")
    mel = log_mel(torch.from_numpy(np.resize(tone(3), LONGEST))[None])
    used = list(trained.vocabulary.used)
    with torch.no_grad():
        features = trained.encode(mel)
        compact = trained.whisper.decoder(torch.tensor([[0, 1]]), features)
        full = stock.decoder(torch.tensor([[used[0], used[1]]]), stock.encoder(mel))
    assert torch.allclose(full[..., used], compact[..., :-1], atol=0.02)
    unused = next(token for token in range(51864) if token not in trained.vocabulary.used)
    assert torch.allclose(full[..., unused], compact[..., -1], atol=0.02)


def test_training_goes_on_from_an_exported_network_without_a_change(tmp_path: Path) -> None:
    vocabulary = Vocabulary.of(["Which stars are there?"])
    first, second = Recogniser(vocabulary), Recogniser(vocabulary)
    first.export(tmp_path / "first.pt")
    second.adopt(tmp_path / "first.pt")
    second.export(tmp_path / "second.pt")
    states = [torch.load(tmp_path / name, weights_only=True)["model_state_dict"] for name in ("first.pt", "second.pt")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(
    ("recognised", "errors"),
    [
        ("how many red stars", 0),
        ("How many stars?", 1),
        ("How many red red stars?", 1),
        ("How any red star", 2),
        ("", 4),
    ],
)
def test_word_errors_are_counted_by_edits(recognised: str, errors: int) -> None:
    assert score_one("How many red stars?", recognised).errors == errors


def test_american_spelling_is_no_error() -> None:
    assert score_one("What colour is the star?", "What color is the star?").exact == 1
    assert word_errors(["a", "b"], ["b", "a"]) == 2


def test_wav_files_keep_their_samples_and_other_kinds_are_refused(tmp_path: Path) -> None:
    write_wav(tmp_path / "tone.wav", tone(0.5))
    assert np.abs(read_wav(tmp_path / "tone.wav") - tone(0.5)).max() < 1e-4
    with wave.open(str(tmp_path / "other.wav"), "wb") as other:
        other.setparams((2, 2, 8000, 0, "NONE", "not compressed"))
        other.writeframes(bytes(400))
    with pytest.raises(ValueError, match=r"other\.wav: 2 channels, 16 bits, 8000 Hz; expected 1, 16, 16000"):
        read_wav(tmp_path / "other.wav")


def test_the_shipped_model_is_small_and_plain() -> None:
    assert MODEL.stat().st_size <= 16_000_000
    checkpoint = torch.load(MODEL, map_location="cpu", weights_only=True)
    assert set(checkpoint) == {"dims", "model_state_dict"}
    assert checkpoint["dims"]["n_vocab"] == 51864 and checkpoint["dims"]["n_mels"] == 80
    assert {tensor.dtype for tensor in checkpoint["model_state_dict"].values()} == {torch.float16}


def test_stock_whisper_hears_the_demo_question() -> None:
    model = whisper.load_model(str(MODEL), device="cpu")
    assert transcribe(model, [read_wav(DEMO)]) == ["How many red circles are there?"]


@needs_espeak
@pytest.mark.slow
def test_stock_whisper_hears_the_default_voices_saying_held_out_phrasings() -> None:
    model = whisper.load_model(str(MODEL), device="cpu")
    said = ["How many blue stars do you see here?", "Are there yellow triangles in the photo?"]
    recordings = [synthesise(text, voice) for text in said for voice in DEFAULT_VOICES]
    assert transcribe(model, recordings) == [text for text in said for _ in DEFAULT_VOICES]
