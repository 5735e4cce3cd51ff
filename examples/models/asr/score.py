"""How well a recogniser hears: word error rate and exact sentences, always through stock `whisper.decode`.

Before words are compared both sides are lower-cased, punctuation goes, and American spellings become British, since
the two sound alike.
"""

import string
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import whisper

from examples.models.asr.network import LONGEST
from examples.models.speech import Audio

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class Score:
    """Counts over one set of recordings. A sentence is exact when no word of it is wrong."""

    sentences: int
    exact: int
    words: int
    errors: int

    @property
    def word_error_rate(self) -> float:
        return self.errors / max(self.words, 1)

    @property
    def sentence_accuracy(self) -> float:
        return self.exact / max(self.sentences, 1)

    def __add__(self, other: "Score") -> "Score":
        return Score(
            self.sentences + other.sentences,
            self.exact + other.exact,
            self.words + other.words,
            self.errors + other.errors,
        )

    def row(self, label: str) -> str:
        """Return a Markdown table row: label, sentences, word error rate, exact sentences."""
        return f"| {label} | {self.sentences} | {self.word_error_rate:.2%} | {self.sentence_accuracy:.1%} |"


def words(text: str) -> list[str]:
    """Return the words of `text` as they are compared."""
    return text.lower().translate(_NO_PUNCTUATION).replace("color", "colour").split()


def word_errors(said: Sequence[str], recognised: Sequence[str]) -> int:
    """Return the fewest edits of words that turn `said` into `recognised` (Levenshtein 1966)."""
    row = list(range(len(recognised) + 1))
    for i, word in enumerate(said, start=1):
        previous, row[0] = row[0], i
        for j, other in enumerate(recognised, start=1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (word != other))
    return row[-1]


def score_one(said: str, recognised: str) -> Score:
    """Return the counts of one sentence."""
    errors = word_errors(words(said), words(recognised))
    return Score(1, int(errors == 0), len(words(said)), errors)


def transcribe(model: whisper.Whisper, recordings: Sequence[Audio], at_once: int = 25) -> list[str]:
    """Return what `model` hears in each recording: greedy stock decoding without timestamps, in single precision."""
    options = whisper.DecodingOptions(language="en", without_timestamps=True, fp16=False)
    texts: list[str] = []
    for start in range(0, len(recordings), at_once):
        padded = [whisper.pad_or_trim(np.asarray(audio), LONGEST) for audio in recordings[start : start + at_once]]
        mel = torch.stack([whisper.log_mel_spectrogram(audio) for audio in padded])
        texts += [result.text for result in whisper.decode(model, mel, options)]
    return texts


def score(model: whisper.Whisper, recordings: Sequence[Audio], said: Sequence[str]) -> list[Score]:
    """Return one Score per recording, in order."""
    return [score_one(text, recognised) for text, recognised in zip(said, transcribe(model, recordings), strict=True)]


def total(scores: Sequence[Score]) -> Score:
    """Return the sum of `scores`."""
    return sum(scores, Score(0, 0, 0, 0))
