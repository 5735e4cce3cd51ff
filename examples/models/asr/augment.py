"""What a room, a microphone and a telephone do to speech: seeded, cheap, in numpy.

One call of `augment` is one imagined recording: a little faster or slower, a little reverberant, silence before and
after, noise of one kind at a drawn signal-to-noise ratio, sometimes a narrow band, and any loudness. All randomness
comes from the generator that is passed in: the same generator state gives the same samples.

    order:  speed -> room -> silence around -> noise -> band -> loudness
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy.fft
from scipy.signal import oaconvolve

from examples.models.speech import SAMPLE_RATE_HZ, Audio

NOISES = ("white", "pink", "brown", "hum", "babble")


@dataclass(frozen=True, slots=True)
class Conditions:
    """How hard the imagined recordings are. Probabilities are per recording and independent.

    untouched:     probability that nothing is done but to set the loudness.
    noise:         probability of noise; its ratio to the speech is uniform in snr_db_min..snr_db_max.
    speed:         probability of playing up to 12 % faster or slower, pitch included.
    room, band:    probability of reverberation, of a narrowed band.
    silence_s_max: longest silence on each side, in seconds.
    filled:        probability that the noise or silence after the speech lasts up to the longest allowed recording.
    """

    untouched: float = 0.15
    noise: float = 0.8
    snr_db_min: float = 5.0
    snr_db_max: float = 40.0
    kinds: tuple[str, ...] = NOISES
    speed: float = 0.5
    room: float = 0.25
    band: float = 0.15
    silence_s_max: float = 0.7
    filled: float = 0.06


GENTLE = Conditions(untouched=0.4, noise=0.5, snr_db_min=15.0, speed=0.3, room=0.1, band=0.0, silence_s_max=0.4)
"""Where a training run begins: attention finds the words sooner in recordings like these."""


def noise_bank(speech: Sequence[Audio], seed: int, seconds: int = 40) -> dict[str, Audio]:
    """Return one long track per name in NOISES, each float32[seconds * 16000] with a mean square of 1.

    Babble is ten talkers out of `speech` at once, so it holds the very words that are to be recognised.
    """
    rng = np.random.default_rng(seed)
    length = seconds * SAMPLE_RATE_HZ
    bank = {kind: _coloured(rng, length, power) for kind, power in (("white", 0.0), ("pink", 0.5), ("brown", 1.0))}
    times = np.arange(length) / SAMPLE_RATE_HZ
    drift = 1 + 0.2 * np.sin(2 * np.pi * times / 7)
    bank["hum"] = drift * sum(
        np.sin(2 * np.pi * mains * (k + 1) * times + rng.uniform(0, 6.28)) / (k + 1) ** rng.uniform(0.5, 1.5)
        for mains in (50, 60)
        for k in range(12)
    ) + 0.02 * rng.standard_normal(length)
    bank["hum"][: length // 2] += 0.3 * bank["pink"][: length // 2]  # half of the track is a fan as well
    talkers = np.zeros(length)
    for _ in range(10):
        said = np.concatenate([speech[int(rng.integers(len(speech)))] for _ in range(seconds)])
        talkers += np.resize(said, length) / (np.sqrt(np.mean(said**2)) + 1e-9) * rng.uniform(0.5, 1.0)
    bank["babble"] = talkers
    return {kind: (track / np.sqrt(np.mean(track**2))).astype(np.float32) for kind, track in bank.items()}


def augment(
    audio: Audio, rng: np.random.Generator, bank: Mapping[str, Audio], longest: int, conditions: Conditions
) -> Audio:
    """Return an imagined recording of `audio`: a fresh float32[<= longest] within [-1, 1]; `audio` is not changed."""
    if rng.random() < conditions.untouched:
        return _set_loudness(audio[:longest], rng)
    if rng.random() < conditions.speed:
        audio = _play_faster(audio, rng.uniform(0.89, 1.12))
    power = float(np.mean(audio**2)) + 1e-12
    if rng.random() < conditions.room:
        audio = _reverberate(audio, rng)
    room = max(longest - len(audio), 0)
    before = min(int(rng.uniform(0, conditions.silence_s_max) * SAMPLE_RATE_HZ), room)
    after = min(int(rng.uniform(0, conditions.silence_s_max) * SAMPLE_RATE_HZ), room - before)
    if rng.random() < conditions.filled:
        after = int(rng.uniform(0, room - before))
    signal = np.pad(audio[:longest], (before, after))
    if rng.random() < conditions.noise:
        ratio = 10 ** (rng.uniform(conditions.snr_db_min, conditions.snr_db_max) / 10)
        signal = signal + _cut(bank[conditions.kinds[int(rng.integers(len(conditions.kinds)))]], len(signal), rng) * (
            np.float32(np.sqrt(power / ratio))
        )
    if rng.random() < conditions.band:
        telephone = rng.random() < 0.5
        signal = _band(signal, 300.0 if telephone else 50.0, 3400.0 if telephone else rng.uniform(3500, 7500))
    return _set_loudness(signal, rng)


def nothing_said(rng: np.random.Generator, bank: Mapping[str, Audio], longest: int) -> Audio:
    """Return a recording without speech: near silence or noise, float32[<= longest]."""
    length = int(rng.integers(SAMPLE_RATE_HZ // 2, longest // 2))
    kind = str(rng.choice(["white", "pink", "brown", "hum"]))
    level = 10 ** (rng.uniform(-100, -10) / 20)
    return np.asarray(np.clip(_cut(bank[kind], length, rng) * level, -1, 1), dtype=np.float32)


def _coloured(rng: np.random.Generator, length: int, power: float) -> npt.NDArray[np.float64]:
    """Noise whose amplitude falls with frequency ** power, flat below 20 Hz."""
    spectrum = np.fft.rfft(rng.standard_normal(length))
    hertz = np.maximum(np.fft.rfftfreq(length, 1 / SAMPLE_RATE_HZ), 20.0)
    return np.asarray(np.fft.irfft(spectrum / hertz**power, length), dtype=np.float64)


def _cut(track: Audio, length: int, rng: np.random.Generator) -> Audio:
    start = int(rng.integers(0, len(track) - length))
    return track[start : start + length]


def _play_faster(audio: Audio, factor: float) -> Audio:
    # Linear interpolation: its faint images are one more imperfection of a microphone, at a tenth of the cost.
    moments = np.arange(0, len(audio) - 1, factor)
    return np.asarray(np.interp(moments, np.arange(len(audio)), audio), dtype=np.float32)


def _reverberate(audio: Audio, rng: np.random.Generator) -> Audio:
    length = int(rng.uniform(0.05, 0.3) * SAMPLE_RATE_HZ)
    echo = rng.standard_normal(length) * np.exp(-6.9 * np.arange(length) / length)  # falls by 60 dB
    echo *= rng.uniform(0.1, 0.6) / np.sqrt(np.sum(echo**2))
    echo[0] = 1.0
    return np.asarray(oaconvolve(audio, echo.astype(np.float32)), dtype=np.float32)


def _band(audio: Audio, low_hz: float, high_hz: float) -> Audio:
    length = scipy.fft.next_fast_len(len(audio), real=True)
    spectrum = scipy.fft.rfft(audio, length)
    hertz = scipy.fft.rfftfreq(length, 1 / SAMPLE_RATE_HZ)
    keep = 1 / (1 + (low_hz / np.maximum(hertz, 1.0)) ** 8) / (1 + (hertz / high_hz) ** 16)
    return np.asarray(scipy.fft.irfft(spectrum * keep.astype(np.float32), length)[: len(audio)], dtype=np.float32)


def _set_loudness(audio: Audio, rng: np.random.Generator) -> Audio:
    peak = float(np.max(np.abs(audio))) + 1e-9
    return (audio * np.float32(10 ** (rng.uniform(-26, -0.1) / 20) / peak)).astype(np.float32)
