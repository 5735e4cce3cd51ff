"""Whisper node: speech recognition (A. Radford et al., 2022), run by openai-whisper.

Checkpoints of openai-whisper or Hugging Face of any size work. The window length follows the model's own dims and may
be below 30 s. A longer recording is split at its quietest positions and the texts are joined. The windows of all items
of a batch are decoded together. On a GPU the spectrograms are computed there, from samples that are uploaded once or
are already on the device.

The log-mel arithmetic is openai-whisper's log_mel_spectrogram, except that the loudest bin is taken per window: a
window's spectrogram does not depend on the others. On the CPU the bits are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from weftline.node import (
    AUDIO_HZ,
    Batch,
    BatchNode,
    ConfigError,
    MissingPackage,
    ModelError,
    OpenContext,
    Outputs,
    Ports,
    StepContext,
    as_array,
    as_torch,
    port,
)
from weftline.nodes.device_tensors import offload
from weftline.nodes.model_file import find_model
from weftline.nodes.precision import PRECISIONS, check_precision, computing_in
from weftline.nodes.whisper_file import KNOWN, PUBLISHED_TEXT_CONTEXT, check_whisper, load_whisper

if TYPE_CHECKING:
    import torch


RANGE = 8.0
"""Powers of ten below a window's loudest bin at which a bin is cut off, as in openai-whisper."""


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


LOOK_BACK = 0.25
"""Share of a window, at its end, that is searched for the split: a word is rarely longer than that."""

SPOT = 800
"""Samples of one loudness measurement, 50 ms at 16 kHz: shorter than the pause between two words."""


def split_windows(samples: np.ndarray, window: int) -> list[tuple[int, int]]:
    """Return (start, end) of consecutive windows of at most `window` samples that cover `samples`."""
    windows = []
    start = 0
    while len(samples) - start > window:
        end = start + _quietest(samples[start : start + window])
        windows.append((start, end))
        start = end
    return [*windows, (start, len(samples))]


def _quietest(window: np.ndarray) -> int:
    """Return the middle of the quietest spot in the last part of `window`, after its start."""
    tail = window[int(len(window) * (1 - LOOK_BACK)) :]
    spots = len(tail) // SPOT
    if spots == 0:
        return len(window)
    loudness = np.square(tail[: spots * SPOT].reshape(spots, SPOT), dtype=np.float32).sum(axis=1)
    return len(window) - len(tail) + int(loudness.argmin()) * SPOT + SPOT // 2


HOP = 160
"""Samples from one mel frame to the next; the encoder halves the frame rate: 320 samples an audio context position."""


@dataclass(frozen=True, slots=True)
class WhisperConfig:
    """Options of `whisper`.

    model:      a checkpoint (.pt), a folder with model.pt, or a folder of Hugging Face's Whisper (config.json and
                *.safetensors), relative to the pipeline file; or one of openai-whisper's names (tiny, base.en,
                large-v3, turbo ...), from its cache or downloaded by it with its checksum.
    language:   spoken language, such as 'en'; None: detected by a multilingual model.
    task:       'transcribe', or 'translate' into English.
    prompt:     text before the recording: names and spellings to expect.
    beams:      width of the beam search; 1 is greedy.
    tokens_max: most tokens for one window, at most half of the model's text context; None means that half.
    precision:  number format of the network: 'auto' (float16 on a GPU, float32 on the CPU), 'float32', 'tf32' (GPUs
                only), 'bfloat16' or 'float16'. Compared with float32 on the CPU, with random weights in the sizes of
                'tiny', states of the encoder moved by 0.6 % in bfloat16 and 0.08 % in float16, and the likeliest next
                tokens were the same. TF32 was not measured.
    """

    model: str
    language: str | None = None
    task: str = "transcribe"
    prompt: str = ""
    beams: int = 1
    tokens_max: int | None = None
    precision: str = "auto"


class Whisper(BatchNode):
    """Transcribes recordings."""

    Config: ClassVar[type[Any]] = WhisperConfig
    extra: ClassVar[str] = "whisper"
    heavy: ClassVar[bool] = True
    batch_default: ClassVar[tuple[int, float]] = (8, 5.0)

    _model: Any = None
    _device: str  # as torch calls it
    _precision: str = "float32"
    _options: Any = None
    _windows_max: int = 1

    @classmethod
    def ports(cls, config: WhisperConfig, step: StepContext) -> Ports:
        path = find_model(config.model, step.base_dir)
        if path is None and config.model not in KNOWN:
            expected = f"a file, a folder with model.pt or config.json, or one of {', '.join(KNOWN)}"
            short = config.model.rpartition("/")[2].removeprefix("whisper-")
            fix = f"write {short}: names of the hub are not fetched" if short in KNOWN else ""
            raise ConfigError("model", f"there is no {config.model}", expected, fix)
        if path is not None:
            check_whisper(path, config.model)
        if config.task not in ("transcribe", "translate"):
            raise ConfigError("task", f"{config.task!r:.40}", "transcribe or translate")
        check_precision(config.precision, ("auto", *PRECISIONS))
        if config.beams < 1:
            raise ConfigError("beams", f"{config.beams}", "a count from 1")
        published = find_model(config.model, step.base_dir) is None
        tokens_max = PUBLISHED_TEXT_CONTEXT // 2 if published else None  # otherwise it is in the checkpoint
        if config.tokens_max is not None and not 1 <= config.tokens_max <= (tokens_max or config.tokens_max):
            expected = f"from 1 to {tokens_max}" if tokens_max else "a count from 1"
            raise ConfigError("tokens_max", f"{config.tokens_max}", expected)
        return Ports(
            inputs=(port("audio", "audio", about="the recording"),),
            outputs=(
                port("text", "text", about="the transcript"),
                port("language", "text", about="code of the language, such as en"),
                port("segments", "json", about="for each window: start_s, end_s, text, no_speech, logprob"),
            ),
        )

    @classmethod
    def device_ports(cls, config: WhisperConfig, ports: Ports) -> frozenset[str]:
        return frozenset({"audio"})

    def open(self, context: OpenContext) -> None:
        try:
            import torch
            import whisper
        except ImportError:
            raise MissingPackage("openai-whisper", self.extra) from None
        torch.set_num_threads(max(context.threads, 1))
        self._device = context.framework_device
        by_device = "float16" if self._device.startswith("cuda") else "float32"
        self._precision = by_device if self.config.precision == "auto" else self.config.precision
        self._model = load_whisper(self.config.model, context, self._precision == "float16")
        half = self._model.dims.n_text_ctx // 2  # the other half is for the prompt and the control tokens
        if (self.config.tokens_max or 0) > half:
            found = f"tokens_max: found {self.config.tokens_max}, expected at most {half}"
            raise ModelError(f"{found}, half of the text context of {self.config.model}")
        self._options = self._decoding(whisper)
        self._windows_max = max(context.items_max, 1)

    def _decoding(self, whisper: Any) -> Any:
        """Return openai-whisper's decoding options. ModelError: unknown language."""
        language = self.config.language or (None if self._model.is_multilingual else "en")
        if language is not None and language not in whisper.tokenizer.LANGUAGES:
            raise ModelError(f"language {language!r:.40} is not one of Whisper's; write a code such as en or de")
        return whisper.DecodingOptions(
            task=self.config.task,
            language=language,
            prompt=self.config.prompt or None,
            beam_size=self.config.beams if self.config.beams > 1 else None,
            sample_len=self.config.tokens_max,
            without_timestamps=True,
            fp16=self._precision == "float16",
        )

    def warm_up(self) -> None:
        from dataclasses import replace

        options, self._options = self._options, replace(self._options, sample_len=2)
        try:
            self._decode([np.zeros(AUDIO_HZ, np.float32)])
        finally:
            self._options = options

    def run(self, batch: Batch) -> Outputs:
        recordings = [_sliceable(samples) for samples in batch["audio"]]
        spans = [self._cut(samples) for samples in recordings]
        pieces = [samples[a:b] for samples, parts in zip(recordings, spans, strict=True) for a, b in parts]
        results: list[Any] = []
        for start in range(0, len(pieces), self._windows_max):
            results += self._decode(pieces[start : start + self._windows_max])
        remaining = iter(results)
        decoded = [[(a, b, next(remaining)) for a, b in parts] for parts in spans]
        return {
            "text": [" ".join(result.text for _, _, result in parts if result.text) for parts in decoded],
            "language": [parts[0][2].language for parts in decoded],
            "segments": [[_segment(*part) for part in parts] for parts in decoded],
        }

    def sleep(self, keep: str) -> bool:
        if keep != "host":
            return False
        offload(self._model)
        return True

    def wake(self) -> None:
        self._model.to(self._device)

    def close(self) -> None:
        self._model = None

    @property
    def _window(self) -> int:
        """Number of samples in one window of the model."""
        return int(self._model.dims.n_audio_ctx) * 2 * HOP

    def _cut(self, samples: Any) -> list[tuple[int, int]]:
        """Return the windows of a recording; a long one on the device is copied to the host for that."""
        there = not isinstance(samples, np.ndarray) and len(samples) > self._window
        return split_windows(as_array(samples) if there else samples, self._window)

    def _decode(self, pieces: Sequence[Any]) -> list[Any]:
        """Return openai-whisper's result for each window, an array or a device tensor of at most the context."""
        import torch
        import whisper

        there = not all(isinstance(piece, np.ndarray) for piece in pieces)
        with torch.inference_mode():
            samples = torch.zeros((len(pieces), self._window), device=self._device if there else "cpu")
            for row, piece in zip(samples, pieces, strict=True):
                row[: len(piece)] = as_torch(piece)
            mels = log_mels(samples.to(self._device), self._model.dims.n_mels)
            if self._precision == "float16":  # openai-whisper's own option
                found: list[Any] = whisper.decode(self._model, mels, self._options)
                return found
            with computing_in(self._precision, self._device):
                states = self._model.encoder(mels).float()  # decode accepts float32 only
                found = whisper.decode(self._model, states, self._options)
        return found


def _sliceable(samples: Any) -> Any:
    return samples if isinstance(samples, np.ndarray) else as_torch(samples)


def _segment(start: int, end: int, result: Any) -> dict[str, Any]:
    return {
        "start_s": round(start / AUDIO_HZ, 3),
        "end_s": round(end / AUDIO_HZ, 3),
        "text": result.text,
        "no_speech": _finite(result.no_speech_prob),
        "logprob": _finite(result.avg_logprob),
    }


def _finite(value: float) -> float | None:
    return round(float(value), 4) if math.isfinite(value) else None
