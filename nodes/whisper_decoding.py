"""Whisper decoder: windows of many recordings in batches, with their segments and words.

One queue holds the windows of all recordings; each call of the encoder and of the decoder takes as many as a batch has.
A row of a batch has the language and the task of its recording. A recording's language is detected on its first window.

Segments follow openai-whisper's `transcribe` with temperature 0 and without the previous window's text, on each window
alone: a window is decoded again from the end of its last complete segment. Two rules differ. A rest without speech
(`has_speech`) or shorter than 0.1 s is not decoded, and a window is decoded as often as it has seconds, or DECODES
times, at most. Words are aligned by openai-whisper's `add_word_timestamps`, on the states that the encoder has computed
already.

The log-mel arithmetic is openai-whisper's log_mel_spectrogram, except that the loudest bin is taken per window: a
window's spectrogram does not depend on the others. On the CPU the bits are the same.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from weftline.nodes.device_tensors import as_torch
from weftline.nodes.ports import AUDIO_HZ
from weftline.nodes.precision import computing_in
from weftline.nodes.voice_activity import Span, has_speech

if TYPE_CHECKING:
    import torch

HOP = 160
"""Samples from one mel frame to the next; the encoder halves the frame rate: 320 samples an audio context position."""

FRAMES_S = AUDIO_HZ // HOP
"""Mel frames in a second."""

RANGE = 8.0
"""Powers of ten below a window's loudest bin at which a bin is cut off, as in openai-whisper."""

REST_FRAMES_MIN = 10
"""Shortest rest of a window that is decoded, in mel frames: no word is shorter than 0.1 s."""

DECODES = 4
"""Most decodes of a window of few seconds; a longer one is decoded once for each second at most."""


def log_mels(samples: torch.Tensor, bands: int) -> torch.Tensor:
    """Return float32 [windows, bands, samples / 160] of float32 [windows, samples] at 16 kHz, on the same device."""
    import torch
    from whisper.audio import HOP_LENGTH, N_FFT, mel_filters

    window = torch.hann_window(N_FFT).to(samples.device)
    spectrum = torch.stft(samples, N_FFT, HOP_LENGTH, window=window, return_complex=True)
    power = spectrum[..., :-1].abs() ** 2
    levels = torch.clamp(mel_filters(samples.device, bands) @ power, min=1e-10).log10()
    levels = torch.maximum(levels, levels.amax(dim=(-2, -1), keepdim=True) - RANGE)
    return (levels + 4.0) / 4.0


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
        """Number of mel frames; one position of the encoder at least."""
        return max((self.end - self.start) // HOP, 2)

    @property
    def rest(self) -> int:
        """Number of mel frames that are not done."""
        return self.frames - self.seek

    @property
    def last(self) -> bool:
        """Return True if the next decode is the last permitted one."""
        return self.decodes + 1 >= max(math.ceil(self.frames / FRAMES_S), DECODES)


class WindowDecoder:
    """Decodes windows with a network of openai-whisper.

    options:     openai-whisper's DecodingOptions; language and task are those of each recording.
    windows_max: most windows of one call.
    segments:    compute windows as `transcribe` does, again from the end of the last complete segment.
    words:       align words.
    """

    def __init__(
        self, model: Any, options: Any, device: str, precision: str, windows_max: int, segments: bool, words: bool
    ) -> None:
        self._model = model
        self._options = options
        self._device = device
        self._precision = precision
        self._windows_max = windows_max
        self._segments = segments
        self._words = words
        self._timed = segments or words  # windows are padded as in `transcribe`

    @property
    def _positions(self) -> int:
        """Number of mel frames of a full window."""
        return 2 * int(self._model.dims.n_audio_ctx)

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
        import torch

        with torch.inference_mode():
            mels = self._rests(windows) if self._timed else self._mels(windows, 0)
            states = self._encode(mels)
            self._detect(windows, states)
            results = self._search(windows, states)
            return [
                window
                for window, row, result in zip(windows, states, results, strict=True)
                if self._store(window, row, result)
            ]

    def _computing(self) -> Any:
        """Return the context of the network's calls; spectrograms are float32 in every precision."""
        half = self._precision == "float16"  # openai-whisper's own option
        return nullcontext() if half else computing_in(self._precision, self._device)

    def _encode(self, mels: torch.Tensor) -> torch.Tensor:
        half = self._precision == "float16"
        with self._computing():
            states: torch.Tensor = self._model.encoder(mels.half() if half else mels)
        return states if half else states.float()  # decoding accepts nothing else

    def _mels(self, windows: Sequence[Window], margin: int) -> torch.Tensor:
        """Return float32[windows, bands, frames + margin] of the windows with silence after them."""
        import torch

        pieces = [window.samples for window in windows]
        there = not all(isinstance(piece, np.ndarray) for piece in pieces)
        length = (self._positions + margin) * HOP
        samples = torch.zeros((len(pieces), length), device=self._device if there else "cpu")
        for row, piece in zip(samples, pieces, strict=True):
            row[: len(piece)] = as_torch(piece)
        return log_mels(samples.to(self._device), self._model.dims.n_mels)

    def _rests(self, windows: Sequence[Window]) -> torch.Tensor:
        """Return float32[windows, bands, frames]: what is not done of the windows, and zeros as in `transcribe`."""
        import torch

        new = [window for window in windows if window.mel is None]
        if new:
            margin = 3  # frames: as many as the transform of the last one reaches into
            for window, mel in zip(new, self._mels(new, margin), strict=True):
                window.mel = mel[:, : window.frames].clone()
        mels = torch.zeros((len(windows), self._model.dims.n_mels, self._positions), device=self._device)
        for row, window in zip(mels, windows, strict=True):
            row[:, : window.rest] = window.mel[:, window.seek :]
        return mels

    def _detect(self, windows: Sequence[Window], states: torch.Tensor) -> None:
        """Set the languages that are not known, each by its recording's first window with silence after it."""
        first: dict[int, int] = {}
        for row, window in enumerate(windows):
            if not window.recording.language:
                first.setdefault(id(window.recording), row)
        if not first:
            return
        unknown = [windows[row] for row in first.values()]
        states = self._encode(self._mels(unknown, 0)) if self._timed else states[list(first.values())]
        with self._computing():
            _, found = self._model.detect_language(states)
        for window, likelihoods in zip(unknown, found, strict=True):
            window.recording.language = max(likelihoods, key=likelihoods.get)

    def _search(self, windows: Sequence[Window], states: torch.Tensor) -> list[Any]:
        """Return openai-whisper's result for each row; every row begins with its own language and task."""
        import torch
        from whisper.decoding import DecodingTask

        languages = [window.recording.language for window in windows]
        task = DecodingTask(self._model, self._options)

        def write(features: torch.Tensor, tokens: torch.Tensor) -> tuple[list[str], None]:
            if self._model.is_multilingual:
                known = [self._tokenizer(window.recording).sot_sequence for window in windows]
                tokens[:, task.sot_index : task.sot_index + len(known[0])] = torch.tensor(known)
            return languages, None

        task._detect_language = write  # the step between the encoder and the search that sets a row's first tokens
        if task.n_group > 1:  # openai-whisper repeats the tokens for its beams and not the states: one row works only
            task._get_audio_features = lambda states: states.repeat_interleave(task.n_group, dim=0)
        with self._computing():
            found: list[Any] = task.run(states)
        return found

    def _tokenizer(self, recording: Recording) -> Any:
        from whisper.tokenizer import get_tokenizer

        model = self._model
        options = {"language": recording.language, "task": recording.task} if model.is_multilingual else {}
        return get_tokenizer(model.is_multilingual, num_languages=model.num_languages, **options)

    def _store(self, window: Window, states: torch.Tensor, result: Any) -> bool:
        """Add a result to its window; return whether a rest of it is to be decoded."""
        if not self._timed:
            whole = {"start": 0.0, "end": (window.end - window.start) / AUDIO_HZ, "text": result.text}
            window.text, window.segments = result.text, [_segment(window, whole, result)]
            return False
        tokenizer = self._tokenizer(window.recording)
        parts, done, ended = [Part(0, window.rest, result.tokens)], window.rest, True
        if self._segments:
            begin = tokenizer.timestamp_begin
            parts, done, ended = split_at_timestamps(result.tokens, begin, window.rest, window.last)
        found = [_raw_segment(window.seek, part, tokenizer) for part in parts]
        if self._words:
            self._align(window, states, tokenizer, found)
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

    def _align(self, window: Window, states: torch.Tensor, tokenizer: Any, segments: list[dict[str, Any]]) -> None:
        """Add `words` to segments and move their times to those of the words."""
        from whisper.timing import add_word_timestamps

        with self._computing():
            add_word_timestamps(
                segments=segments,
                model=_Encoded(self._model),
                tokenizer=tokenizer,
                mel=states,
                num_frames=window.rest,
                last_speech_timestamp=window.spoken_s,
            )
        ends = [word["end"] for segment in segments for word in segment["words"]]
        window.spoken_s = float(ends[-1] if ends else segments[-1]["end"])


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
    """Return a segment as `add_word_timestamps` reads it; times in seconds from the start of the window."""
    return {
        "seek": seek,
        "start": (seek + part.start) / FRAMES_S,
        "end": (seek + part.end) / FRAMES_S,
        "text": tokenizer.decode([token for token in part.tokens if token < tokenizer.eot]),
        "tokens": part.tokens,
    }


def _segment(window: Window, found: dict[str, Any], result: Any) -> dict[str, Any]:
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


class _Encoded:
    """A network whose input is the encoder's states; otherwise the network itself."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, states: torch.Tensor, tokens: torch.Tensor) -> Any:
        return self._model.decoder(tokens, states)
