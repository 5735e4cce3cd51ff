"""Speech to train and test the bundled recogniser on: espeak-ng voices, split before anything is trained.

A `Voice` is one way of speaking: an English accent (`language`), a speaker (`variant`), a speed, a pitch. Accents and
speakers are split once, here, in constants: `HELD_OUT_VARIANTS` are speakers that no training recording ever uses,
`HELD_OUT_PAIRS` are further accent-and-speaker pairs whose parts are known but whose combination is not. Left out on
purpose are whispering, robotic, echoing and monstrous variants that a person would hardly follow.

    >>> audio = synthesise("How many red circles are there?", DEFAULT_VOICES[0])   # float32[samples], 16 kHz
"""

import io
import random
import shutil
import subprocess
import wave
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.signal import resample_poly

SAMPLE_RATE_HZ = 16_000
Audio = npt.NDArray[np.float32]
"""One channel, 16 kHz, nominally within [-1, 1]."""

LANGUAGES = (
    "en-gb", "en-us", "en-gb-scotland", "en-gb-x-gbclan", "en-gb-x-rp", "en-gb-x-gbcwmd", "en-029", "en-us-nyc",
)  # fmt: skip
TRAIN_VARIANTS = (
    "", "m1", "m2", "m3", "m4", "m6", "m7", "m8", "f1", "f2", "f3", "f5", "Alex", "Andrea", "Andy", "Annie", "Denis",
    "Diogo", "Gene", "Hugo", "Marco", "Mario", "Mike", "Nguyen", "Storm", "adam", "antonio", "aunty", "belinda",
    "benjamin", "croak", "edward", "grandpa", "klatt", "klatt4", "max", "michel", "paul", "quincy", "rob", "sandro",
    "steph",
)  # fmt: skip
"""Speakers in the training data; the empty name is the accent's own speaker."""

HELD_OUT_VARIANTS = ("m5", "f4", "david", "Jacky", "grandma", "robert", "linda", "Gene2", "victor")
"""Speakers outside the training data. Some resemble a trained one (Gene2, linda), some nothing in it (m5, Jacky)."""

HELD_OUT_PAIRS = frozenset(
    (language, variant)
    for language in LANGUAGES
    for variant in TRAIN_VARIANTS
    if variant and zlib.crc32(f"{language}+{variant}".encode()) % 10 == 0
)
"""About one in ten of the pairs of a known accent and a known speaker. A checksum decides, so no taste does."""


@dataclass(frozen=True, slots=True)
class Voice:
    """One way of speaking, in espeak-ng's own terms.

    language:  an accent, one of LANGUAGES.
    variant:   a speaker, one of TRAIN_VARIANTS or HELD_OUT_VARIANTS.
    speed_wpm: words per minute, espeak-ng's default is 175.
    pitch:     0 to 99, default 50, relative to the speaker.
    amplitude: 0 to 200, default 100.
    """

    language: str = "en-gb"
    variant: str = ""
    speed_wpm: int = 175
    pitch: int = 50
    amplitude: int = 100

    @property
    def name(self) -> str:
        """The value of espeak-ng's -v option, such as 'en-us+f4'."""
        if not self.variant:
            return self.language
        # espeak-ng 1.51 drops the variant of 'en-gb+f4' without a word; the same accent named 'en' keeps it.
        return f"{'en' if self.language == 'en-gb' else self.language}+{self.variant}"

    @property
    def held_out(self) -> bool:
        """Whether training must not use this accent and speaker together."""
        return self.variant in HELD_OUT_VARIANTS or (self.language, self.variant) in HELD_OUT_PAIRS


DEFAULT_VOICES = (Voice("en-gb"), Voice("en-us"))
"""What `espeak-ng "..."` and `espeak-ng -v en-us "..."` sound like with no further options."""


def voice_names(split: str) -> list[tuple[str, str]]:
    """Return the (language, variant) pairs of `split`, 'train' or 'held_out', in a fixed order."""
    if split not in ("train", "held_out"):
        raise ValueError(f"voice split {split!r}: expected 'train' or 'held_out'")
    pairs = [(language, variant) for language in LANGUAGES for variant in TRAIN_VARIANTS + HELD_OUT_VARIANTS]
    return [pair for pair in pairs if Voice(*pair).held_out == (split == "held_out")]


def draw_voice(rng: random.Random, split: str) -> Voice:
    """Draw a voice of `split`; one in eight training voices is a default voice with default settings."""
    if split == "train" and rng.random() < 0.125:
        return rng.choice(DEFAULT_VOICES)
    names = voice_names(split)
    if split == "held_out" and rng.random() < 0.6:  # unseen speakers are the harder and the more telling half
        names = [pair for pair in names if pair[1] in HELD_OUT_VARIANTS]
    language, variant = rng.choice(names)
    return Voice(language, variant, rng.randint(120, 200), rng.randint(20, 80), rng.randint(60, 140))


def espeak_available() -> bool:
    """Tell whether the espeak-ng program is installed."""
    return shutil.which("espeak-ng") is not None


def synthesise(text: str, voice: Voice) -> Audio:
    """Return `text` spoken by `voice`: float32[samples] at 16 kHz, owned by the caller. Blocks for some 10 ms.

    Raises RuntimeError if espeak-ng is missing or fails. The same text and voice give the same samples.
    """
    command = ["espeak-ng", "-v", voice.name, "-s", str(voice.speed_wpm), "-p", str(voice.pitch)]
    command += ["-a", str(voice.amplitude), "--stdin", "--stdout"]
    try:
        done = subprocess.run(command, input=text.encode(), capture_output=True, timeout=30, check=False)
    except FileNotFoundError as error:
        raise RuntimeError("espeak-ng: program not found; install it (Debian: apt-get install espeak-ng)") from error
    if done.returncode != 0 or len(done.stdout) <= 44:
        said = done.stderr.decode(errors="replace").strip() or "nothing on stderr"
        raise RuntimeError(f"espeak-ng -v {voice.name}: exit {done.returncode}, {len(done.stdout)} bytes, said: {said}")
    with wave.open(io.BytesIO(done.stdout)) as reader:
        rate_hz = reader.getframerate()
        samples = np.frombuffer(reader.readframes(len(done.stdout)), dtype="<i2")
    divisor = int(np.gcd(rate_hz, SAMPLE_RATE_HZ))
    resampled = resample_poly(samples.astype(np.float64) / 32768, SAMPLE_RATE_HZ // divisor, rate_hz // divisor)
    return np.asarray(resampled, dtype=np.float32)


def write_wav(path: Path, audio: Audio) -> None:
    """Write `audio` as 16-bit mono 16 kHz WAV; louder than [-1, 1] is clipped."""
    with wave.open(str(path), "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(SAMPLE_RATE_HZ)
        writer.writeframes((np.clip(audio, -1, 1) * 32767).astype("<i2").tobytes())


def read_wav(path: Path) -> Audio:
    """Return a 16-bit mono 16 kHz WAV file as float32[samples]; other kinds raise ValueError."""
    with wave.open(str(path)) as reader:
        found = (reader.getnchannels(), reader.getsampwidth() * 8, reader.getframerate())
        if found != (1, 16, SAMPLE_RATE_HZ):
            raise ValueError(f"{path}: {found[0]} channels, {found[1]} bits, {found[2]} Hz; expected 1, 16, 16000")
        samples = np.frombuffer(reader.readframes(reader.getnframes()), dtype="<i2")
    return samples.astype(np.float32) / np.float32(32768)
