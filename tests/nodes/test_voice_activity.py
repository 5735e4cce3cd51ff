from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from weftline.nodes.audio import decode_audio
from weftline.nodes.ports import AUDIO_HZ
from weftline.nodes.voice_activity import FRAME, PAD_S, has_speech, speech_regions, speech_windows, split_windows

QUESTION = Path(__file__).parents[2] / "examples" / "data" / "question.wav"
PAD = int(PAD_S * AUDIO_HZ)


@pytest.fixture(scope="module")
def speech() -> np.ndarray:
    return decode_audio(QUESTION.read_bytes())


def noise(seconds: float, level_db: float, seed: int = 0) -> np.ndarray:
    samples = np.random.default_rng(seed).standard_normal(int(seconds * AUDIO_HZ)) * 10 ** (level_db / 20)
    return samples.astype(np.float32)


def sequence(*parts: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Return parts in a row, and the place of each."""
    ends = np.cumsum([len(part) for part in parts]).tolist()
    return np.concatenate(parts), list(zip([0, *ends], ends, strict=False))


@pytest.mark.parametrize("background_db", [-200.0, -70.0, -50.0])
def test_speech_between_pauses_is_found(speech: np.ndarray, background_db: float) -> None:
    samples, places = sequence(noise(5, 0) * 0, speech, noise(8, 0) * 0, speech, noise(3, 0) * 0)
    regions = speech_regions(samples + noise(len(samples) / AUDIO_HZ, background_db))
    assert len(regions) == 2
    for (start, end), (begin, stop) in zip(regions, (places[1], places[3]), strict=True):
        assert begin - FRAME <= start < begin + AUDIO_HZ // 4  # the recording has silence of its own
        assert stop - 1.0 * AUDIO_HZ < end <= stop + FRAME


def test_one_sentence_in_minutes_of_noise_is_found(speech: np.ndarray) -> None:
    samples, places = sequence(np.zeros(90 * AUDIO_HZ, np.float32), speech, np.zeros(90 * AUDIO_HZ, np.float32))
    [(start, end)] = speech_regions(samples + noise(len(samples) / AUDIO_HZ, -45))
    assert abs(start - places[1][0]) < 0.1 * AUDIO_HZ and places[1][1] - 0.5 * AUDIO_HZ < end <= places[1][1]


def test_quiet_speech_beside_a_loud_passage_far_away_is_kept(speech: np.ndarray) -> None:
    quiet, pause = speech * 10 ** (-35 / 20), np.zeros(40 * AUDIO_HZ, np.float32)
    samples, places = sequence(noise(3, -3), pause, quiet)
    regions = speech_regions(samples + noise(len(samples) / AUDIO_HZ, -85))
    assert len(regions) == 2 and has_speech(regions, *places[2])


def test_a_little_quiet_talk_after_much_loud_music_is_kept(speech: np.ndarray) -> None:
    beats = 0.05 + np.abs(np.sin(np.arange(90 * AUDIO_HZ, dtype=np.float32) / 4000))
    samples, places = sequence(noise(90, -15) * beats, np.tile(speech * 10 ** (-25 / 20), 4))
    regions = speech_regions(samples + noise(len(samples) / AUDIO_HZ, -75))
    found = sum(min(end, places[1][1]) - max(start, places[1][0]) for start, end in regions if end > places[1][0])
    assert found > 0.9 * 4 * len(speech)


@pytest.mark.parametrize("level_db", [-10.0, -60.0])
def test_levels_that_are_all_alike_leave_nothing_out(level_db: float) -> None:
    samples = noise(20, level_db)
    assert speech_regions(samples) == [(0, len(samples))]


def test_speech_in_loud_noise_leaves_nothing_out(speech: np.ndarray) -> None:
    samples, _ = sequence(np.zeros(4 * AUDIO_HZ, np.float32), speech, np.zeros(4 * AUDIO_HZ, np.float32))
    noisy = samples + noise(len(samples) / AUDIO_HZ, -25)
    assert speech_regions(noisy) == [(0, len(noisy))]


def test_silence_has_no_regions() -> None:
    assert speech_regions(np.zeros(10 * AUDIO_HZ, np.float32)) == []
    assert speech_regions(noise(10, -80)) == []
    assert speech_regions(np.zeros(0, np.float32)) == []
    assert speech_regions(np.zeros(FRAME - 1, np.float32)) == [(0, FRAME - 1)]  # too short for a level


def test_a_click_is_no_speech_and_a_pause_in_a_sentence_no_silence(speech: np.ndarray) -> None:
    click = np.zeros(5 * AUDIO_HZ, np.float32)
    click[2 * AUDIO_HZ : 2 * AUDIO_HZ + 200] = 0.9
    words, _ = sequence(noise(0.5, -10), np.zeros(int(0.8 * AUDIO_HZ), np.float32), noise(0.5, -10, 1))
    samples, places = sequence(click, words, click * 0)
    [(start, end)] = speech_regions(samples)
    assert abs(start - places[1][0]) <= FRAME and abs(end - places[1][1]) <= FRAME


def test_equal_samples_have_equal_regions_in_any_memory(speech: np.ndarray) -> None:
    samples, _ = sequence(speech, np.zeros(3 * AUDIO_HZ, np.float32), speech)
    frozen = samples.copy()
    frozen.flags.writeable = False
    assert speech_regions(samples) == speech_regions(frozen) == speech_regions(samples)


def test_a_recording_is_measured_block_by_block(speech: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, _ = sequence(speech, np.zeros(3 * AUDIO_HZ, np.float32), speech, speech)
    whole = speech_regions(samples)
    monkeypatch.setattr("weftline.nodes.voice_activity.BLOCK_FRAMES", 7)
    assert speech_regions(samples) == whole


def test_windows_hold_as_many_regions_as_fit_with_silence_around() -> None:
    samples = noise(60, -20)
    second = AUDIO_HZ
    regions = [
        (2 * second, 4 * second),
        (6 * second, 8 * second),
        (20 * second, 21 * second),
        (59 * second, 60 * second),
    ]
    windows = speech_windows(samples, regions, 10 * second)
    assert windows == [
        (2 * second - PAD, 8 * second + PAD),
        (20 * second - PAD, 21 * second + PAD),
        (59 * second - PAD, 60 * second),
    ]
    assert speech_windows(samples, regions, 60 * second) == [(2 * second - PAD, 60 * second)]
    assert speech_windows(samples, [], 10 * second) == []


def test_a_region_longer_than_a_window_is_split_without_a_gap() -> None:
    samples = noise(60, -20)
    windows = speech_windows(samples, [(AUDIO_HZ, 34 * AUDIO_HZ), (35 * AUDIO_HZ, 36 * AUDIO_HZ)], 10 * AUDIO_HZ)
    assert windows[0][0] == AUDIO_HZ - PAD and windows[-1][1] == 36 * AUDIO_HZ + PAD
    assert all(0 < end - start <= 10 * AUDIO_HZ for start, end in windows)
    assert all(end == start for (_, end), (start, _) in pairwise(windows[:4]))


def test_a_part_has_speech_where_a_region_covers_three_frames() -> None:
    regions = [(1000, 5000)]
    assert has_speech(regions, 0, 1000 + 3 * FRAME) and has_speech(regions, 5000 - 3 * FRAME, 9000)
    assert not has_speech(regions, 0, 1000 + 3 * FRAME - 1) and not has_speech(regions, 5000, 9000)


def test_cuts_fall_into_silence_and_leave_nothing_out() -> None:
    samples = np.ones(100_000, np.float32)
    samples[14_000:15_000] = 0
    pieces = split_windows(samples, 16_000)
    assert 14_000 <= pieces[0][1] <= 15_000
    assert pieces[0][0] == 0 and pieces[-1][1] == 100_000
    assert all(end == start for (_, end), (start, _) in pairwise(pieces))
    assert all(0 < end - start <= 16_000 for start, end in pieces)
    assert split_windows(samples[:5], 16_000) == [(0, 5)]
