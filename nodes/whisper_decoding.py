"""Whisper decoder: windows of many recordings in batches, with their segments and words.

One queue holds the windows of all recordings; each call of the encoder and of the decoder takes as many as a batch has.
A row of a batch has the language and the task of its recording. A recording's language is detected on its first window.
The network is one of openai-whisper (`whisper_torch.py`) or of CTranslate2 (`whisper_ctranslate2.py`).

Segments follow openai-whisper's `transcribe` with temperature 0 and without the previous window's text, on each window
alone: a window is decoded again from the end of its last complete segment, and what was decoded of a window without
speech is left out (`is_silence`), with and without segments. Two rules differ. A rest without speech (`has_speech`) or
shorter than 0.1 s is not decoded, and a window is decoded as often as it has seconds, or DECODES times, at most.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from weftline.nodes.ports import AUDIO_HZ
from weftline.nodes.voice_activity import Span, has_speech

HOP = 160
"""Samples from one mel frame to the next; the encoder halves the frame rate: 320 samples an audio context position."""

FRAMES_S = AUDIO_HZ // HOP
"""Mel frames in a second."""

REST_FRAMES_MIN = 10
"""Shortest rest of a window that is decoded, in mel frames: no word is shorter than 0.1 s."""

DECODES = 4
"""Most decodes of a window of few seconds; a longer one is decoded once for each second at most."""


def mel_frames(samples: int) -> int:
    """Return the number of mel frames of a window; one position of the encoder at least."""
    return max(samples // HOP, 2)


@dataclass(slots=True, eq=False)
class Recording:
    """A recording of a batch.

    samples:   float32[samples], an array or a torch tensor on the device.
    language:  code of the language; '' until it is detected.
    task:      'transcribe' or 'translate'.
    regions:   where speech is, in samples; None: anywhere.
    windows:   parts that are decoded, ascending.
    cancelled: returns whether its request was cancelled; its windows are not decoded then.
    """

    samples: Any
    language: str
    task: str
    regions: Sequence[Span] | None = None
    windows: list[Window] = field(default_factory=list)
    cancelled: Callable[[], bool] = lambda: False

    @property
    def text(self) -> str:
        return " ".join(text for window in self.windows if (text := window.text.strip()))

    @property
    def segments(self) -> list[dict[str, Any]]:
        return [segment for window in self.windows for segment in window.segments]


@dataclass(slots=True, eq=False)
class Window:
    """A part of a recording, and what was decoded of it so far.

    start, end: in samples.
    mel:        float32[bands, frames] without padding, where the window may be decoded more than once.
    seek:       mel frames that are done.
    decodes:    number of times it was decoded.
    spoken_s:   end of the last word, in seconds from its start.
    """

    recording: Recording
    start: int
    end: int
    mel: Any = None
    seek: int = 0
    decodes: int = 0
    spoken_s: float = 0.0
    text: str = ""
    segments: list[dict[str, Any]] = field(default_factory=list)

    @property
    def samples(self) -> Any:
        return self.recording.samples[self.start : self.end]

    @property
    def frames(self) -> int:
        return mel_frames(self.end - self.start)

    @property
    def rest(self) -> int:
        """Number of mel frames that are not done."""
        return self.frames - self.seek

    @property
    def last(self) -> bool:
        """Return True if the next decode is the last permitted one."""
        return self.decodes + 1 >= max(math.ceil(self.frames / FRAMES_S), DECODES)


@dataclass(frozen=True, slots=True)
class Search:
    """Options of the search for a window's tokens, and of its rule for silence.

    prompt:     text before the recording.
    beams:      width of the beam search; 1 is greedy.
    tokens_max: most tokens, at most half of the text context.
    timestamps: the model writes timestamp tokens.
    no_speech_threshold, logprob_threshold: those of `is_silence`.
    """

    prompt: str
    beams: int
    tokens_max: int
    timestamps: bool
    no_speech_threshold: float | None = None
    logprob_threshold: float | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found of a window.

    tokens:         without the first ones and the end token.
    text:           theirs, without timestamps and surrounding spaces.
    no_speech_prob: probability that the window has no speech.
    avg_logprob:    mean log-likelihood of a token, the end token included.
    """

    tokens: list[int]
    text: str
    no_speech_prob: float
    avg_logprob: float


def is_silence(found: Found, search: Search) -> bool:
    """Return True for a window without speech, by the rule of openai-whisper's `transcribe`.

    Its no_speech_prob is above `no_speech_threshold`, and its avg_logprob not above `logprob_threshold`. Without the
    first threshold no window is silence; without the second one the first decides alone.
    """
    if search.no_speech_threshold is None or not found.no_speech_prob > search.no_speech_threshold:
        return False
    return search.logprob_threshold is None or not found.avg_logprob > search.logprob_threshold


class Network(Protocol):
    """A Whisper network with its tokenizer. `mels` and `states` are arrays of its framework, a row for each window.

    multilingual: it has languages and tasks.
    languages:    number of its languages, those first in LANGUAGES.
    positions:    positions of the encoder in a full window, 320 samples each.
    text_context: most tokens of the decoder.
    """

    multilingual: bool
    languages: int
    positions: int
    text_context: int

    def samples(self, recording: Any) -> Any:
        """Return a recording's samples as an array that can be sliced and given to `mels`."""

    def mels(self, pieces: Sequence[Any]) -> Any:
        """Return the spectrograms of windows with silence after them, float32[windows, bands, 2 * positions]."""

    def own_mels(self, pieces: Sequence[Any]) -> list[Any]:
        """Return the spectrogram of each window's own frames, float32[bands, mel_frames(samples)]."""

    def padded(self, mels: Sequence[Any]) -> Any:
        """Return spectrograms with zeros after them, as in `transcribe`, float32[windows, bands, 2 * positions]."""

    def encode(self, mels: Any) -> Any:
        """Return the encoder's states."""

    def rows(self, states: Any) -> Sequence[Any]:
        """Return the states of each row alone, as `align` reads them."""

    def detect(self, states: Any, rows: Sequence[int]) -> list[str]:
        """Return the likeliest language of each of the rows; the network is multilingual."""

    def search(self, states: Any, recordings: Sequence[Recording], search: Search) -> Sequence[Found]:
        """Return what is said in each row; a row begins with the language and the task of its recording."""

    def tokenizer(self, recording: Recording) -> Any:
        """Return a tokenizer for a language and a task, with openai-whisper's `decode`, `eot`, `timestamp_begin`."""

    def align(
        self, row: Any, recording: Recording, segments: list[dict[str, Any]], frames: int, spoken_s: float
    ) -> None:
        """Add `words` to segments and move their times to those of the words, as `add_word_timestamps` does."""


class WindowDecoder:
    """Decodes windows.

    windows_max: most windows of one call.
    segments:    compute windows as `transcribe` does, again from the end of the last complete segment.
    words:       align words.
    """

    def __init__(self, network: Network, search: Search, windows_max: int, segments: bool, words: bool) -> None:
        self._network = network
        self._search = search
        self._windows_max = windows_max
        self._segments = segments
        self._words = words
        self._timed = segments or words  # windows are padded as in `transcribe`

    def decode(self, recordings: Sequence[Recording]) -> None:
        """Decode all windows of the recordings; sets their languages, texts and segments."""
        queue = deque(window for recording in recordings for window in recording.windows)
        while queue:
            group: list[Window] = []
            while queue and len(group) < self._windows_max:
                window = queue.popleft()
                if not window.recording.cancelled():
                    group.append(window)
            if group:
                queue.extendleft(reversed(self._decode(group)))

    def _decode(self, windows: Sequence[Window]) -> list[Window]:
        """Decode windows in one batch; return those of which a rest is to be decoded."""
        network = self._network
        states = network.encode(self._rests(windows) if self._timed else _whole(network, windows))
        self._detect(windows, states)
        results = network.search(states, [window.recording for window in windows], self._search)
        rows = network.rows(states) if self._words else [None] * len(windows)
        return [
            window
            for window, row, result in zip(windows, rows, results, strict=True)
            if self._store(window, row, result)
        ]

    def _rests(self, windows: Sequence[Window]) -> Any:
        """Return the spectrograms of what is not done of the windows."""
        new = [window for window in windows if window.mel is None]
        if new:
            for window, mel in zip(new, self._network.own_mels([one.samples for one in new]), strict=True):
                window.mel = mel
        return self._network.padded([window.mel[:, window.seek :] for window in windows])

    def _detect(self, windows: Sequence[Window], states: Any) -> None:
        """Set the languages that are not known, each by its recording's first window with silence after it."""
        first: dict[int, int] = {}
        for row, window in enumerate(windows):
            if not window.recording.language:
                first.setdefault(id(window.recording), row)
        if not first:
            return
        unknown, rows = [windows[row] for row in first.values()], [*first.values()]
        if self._timed:
            states, rows = self._network.encode(_whole(self._network, unknown)), [*range(len(unknown))]
        for window, language in zip(unknown, self._network.detect(states, rows), strict=True):
            window.recording.language = language

    def _store(self, window: Window, states: Any, result: Found) -> bool:
        """Add a result to its window; return whether a rest of it is to be decoded."""
        if is_silence(result, self._search):
            window.mel = None
            return False
        if not self._timed:
            whole = {"start": 0.0, "end": (window.end - window.start) / AUDIO_HZ, "text": result.text}
            window.text, window.segments = result.text, [_segment(window, whole, result)]
            return False
        tokenizer = self._network.tokenizer(window.recording)
        parts, done, ended = [Part(0, window.rest, result.tokens)], window.rest, True
        if self._segments:
            begin = tokenizer.timestamp_begin
            parts, done, ended = split_at_timestamps(result.tokens, begin, window.rest, window.last)
        found = [_raw_segment(window.seek, part, tokenizer) for part in parts]
        if self._words:
            self._network.align(states, window.recording, found, window.rest, window.spoken_s)
            ends = [word["end"] for segment in found for word in segment["words"]]
            window.spoken_s = float(ends[-1] if ends else found[-1]["end"])
        spoken = [one for one in found if one["start"] != one["end"] and one["text"].strip()]
        window.text += "".join(one["text"] for one in spoken)
        window.segments += [_segment(window, one, result) for one in spoken]
        reached = 0 if ended or not self._words else round(window.spoken_s * FRAMES_S)
        window.seek = reached if reached > window.seek else window.seek + done
        window.decodes += 1
        return self._has_rest(window)

    def _has_rest(self, window: Window) -> bool:
        more = self._segments and window.rest >= REST_FRAMES_MIN
        regions = window.recording.regions
        if more and (regions is None or has_speech(regions, window.start + window.seek * HOP, window.end)):
            return True
        window.mel = None
        return False


def _whole(network: Network, windows: Sequence[Window]) -> Any:
    return network.mels([window.samples for window in windows])


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of a segment. start, end: mel frames from where decoding began."""

    start: int
    end: int
    tokens: list[int]


def split_at_timestamps(tokens: list[int], begin: int, frames: int, last: bool) -> tuple[list[Part], int, bool]:
    """Return the segments of decoded tokens, the number of mel frames they complete, and whether nothing is left.

    Two timestamps in a row end a segment and begin the next; one timestamp at the end means no speech after it.
    Otherwise the segment after the last pair is incomplete: it is left out, and its frames are to be decoded again.

    begin:  first timestamp token; each further one is 2 frames later.
    frames: number of frames that were decoded.
    last:   they are not decoded again, so an incomplete segment counts.
    """
    stamped = [token >= begin for token in tokens]
    cuts = [at for at in range(1, len(tokens)) if stamped[at - 1] and stamped[at]]
    ended = stamped[-2:] == [False, True]
    if not cuts:
        stamps = [token for token in tokens if token > begin]
        return [Part(0, 2 * (stamps[-1] - begin) if stamps else frames, tokens)], frames, ended or last
    if ended or last:
        cuts.append(len(tokens))
    parts = []
    for first, cut in zip([0, *cuts], cuts, strict=False):
        final = tokens[cut - 1]
        parts.append(
            Part(2 * (tokens[first] - begin), 2 * (final - begin) if final >= begin else frames, tokens[first:cut])
        )
    done = frames if ended or last else parts[-1].end
    return parts, done, ended or last


def _raw_segment(seek: int, part: Part, tokenizer: Any) -> dict[str, Any]:
    """Return a segment as `Network.align` reads it; times in seconds from the start of the window."""
    return {
        "seek": seek,
        "start": (seek + part.start) / FRAMES_S,
        "end": (seek + part.end) / FRAMES_S,
        "text": tokenizer.decode([token for token in part.tokens if token < tokenizer.eot]),
        "tokens": part.tokens,
    }


def _segment(window: Window, found: dict[str, Any], result: Found) -> dict[str, Any]:
    """Return a segment with times in seconds from the start of the recording, none after the end of its window."""

    def time(seconds: float) -> float:
        return round(min(window.start / AUDIO_HZ + float(seconds), window.end / AUDIO_HZ), 3)

    segment = {
        "start": time(found["start"]),
        "end": time(found["end"]),
        "text": found["text"].strip(),
        "no_speech": _finite(result.no_speech_prob),
        "logprob": _finite(result.avg_logprob),
    }
    if "words" in found:
        segment["words"] = [
            {
                "word": word["word"],
                "start": time(word["start"]),
                "end": time(word["end"]),
                "probability": _finite(word["probability"]),
            }
            for word in found["words"]
        ]
    return segment


def _finite(value: float) -> float | None:
    return round(float(value), 4) if math.isfinite(value) else None
