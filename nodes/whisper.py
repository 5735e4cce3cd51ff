"""Whisper node: speech recognition (A. Radford et al., 2022), run by openai-whisper.

Checkpoints in openai-whisper's format work, or in Hugging Face's, of any size: their own dims are honoured, so a model
may listen to less than 30 s at a time. A recording longer than that is cut at its quietest spots and the texts are
joined. The windows of all items of a batch are decoded together. On a GPU their spectrograms are made there, from
samples that are uploaded once, or lie there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

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
from weftline.nodes.mel import log_mels
from weftline.nodes.model_file import find_model
from weftline.nodes.near import rest
from weftline.nodes.precision import PRECISIONS, check_precision, computing_in
from weftline.nodes.whisper_file import KNOWN, PUBLISHED_TEXT_CONTEXT, check_whisper, load_whisper
from weftline.nodes.windows import cut

HOP = 160
"""Samples from one mel frame to the next; the encoder halves the frame rate: 320 samples an audio context position."""


@dataclass(frozen=True, slots=True)
class WhisperConfig:
    """Options of `whisper`.

    model:      a checkpoint (.pt), a folder with model.pt, or a folder of Hugging Face's Whisper (config.json and
                *.safetensors), relative to the pipeline file; or one of openai-whisper's names (tiny, base.en,
                large-v3, turbo ...), from its cache or downloaded by it with its checksum.
    language:   what is spoken, such as 'en'; None lets a multilingual model decide.
    task:       'transcribe', or 'translate' into English.
    prompt:     text the recording is taken to continue: names and spellings to expect.
    beams:      width of the beam search; 1 is greedy.
    tokens_max: most tokens for one window, at most half of the model's text context; None means that half.
    precision:  what the network computes in: 'auto' (float16 on a GPU, float32 on the CPU), 'float32', 'tf32' (GPUs
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
        tokens_max = PUBLISHED_TEXT_CONTEXT // 2 if published else None  # another's context is in its checkpoint
        if config.tokens_max is not None and not 1 <= config.tokens_max <= (tokens_max or config.tokens_max):
            expected = f"from 1 to {tokens_max}" if tokens_max else "a count from 1"
            raise ConfigError("tokens_max", f"{config.tokens_max}", expected)
        return Ports(
            inputs=(port("audio", "audio", about="what was said"),),
            outputs=(
                port("text", "text", about="the words"),
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
        half = self._model.dims.n_text_ctx // 2  # the rest is for the prompt and the marks before the text
        if (self.config.tokens_max or 0) > half:
            found = f"tokens_max: found {self.config.tokens_max}, expected at most {half}"
            raise ModelError(f"{found}, half of the text context of {self.config.model}")
        self._options = self._decoding(whisper)
        self._windows_max = max(context.items_max, 1)

    def _decoding(self, whisper: Any) -> Any:
        """Return openai-whisper's own options; ModelError when the model does not know the language."""
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
        rest = iter(results)
        heard = [[(a, b, next(rest)) for a, b in parts] for parts in spans]
        return {
            "text": [" ".join(result.text for _, _, result in parts if result.text) for parts in heard],
            "language": [parts[0][2].language for parts in heard],
            "segments": [[_segment(*part) for part in parts] for parts in heard],
        }

    def sleep(self, keep: str) -> bool:
        if keep != "host":
            return False
        rest(self._model)
        return True

    def wake(self) -> None:
        self._model.to(self._device)

    def close(self) -> None:
        self._model = None

    @property
    def _window(self) -> int:
        """Samples the model hears at a time."""
        return int(self._model.dims.n_audio_ctx) * 2 * HOP

    def _cut(self, samples: Any) -> list[tuple[int, int]]:
        """Return where a recording is cut; of one on the device that is too long, the host looks at a copy."""
        there = not isinstance(samples, np.ndarray) and len(samples) > self._window
        return cut(as_array(samples) if there else samples, self._window)

    def _decode(self, pieces: Sequence[Any]) -> list[Any]:
        """Return openai-whisper's result for each window of at most the model's context, arrays or tensors there."""
        import torch
        import whisper

        there = not all(isinstance(piece, np.ndarray) for piece in pieces)
        with torch.inference_mode():
            samples = torch.zeros((len(pieces), self._window), device=self._device if there else "cpu")
            for row, piece in zip(samples, pieces, strict=True):
                row[: len(piece)] = as_torch(piece)
            mels = log_mels(samples.to(self._device), self._model.dims.n_mels)
            if self._precision == "float16":  # openai-whisper computes so by itself
                found: list[Any] = whisper.decode(self._model, mels, self._options)
                return found
            with computing_in(self._precision, self._device):
                heard = self._model.encoder(mels).float()  # decode takes no other states
                found = whisper.decode(self._model, heard, self._options)
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
