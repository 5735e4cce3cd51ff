"""Whisper networks of openai-whisper, on torch.

The log-mel arithmetic is openai-whisper's log_mel_spectrogram, except that the loudest bin is taken per window: a
window's spectrogram does not depend on the others. On the CPU the bits are the same. Words are aligned by
openai-whisper's `add_word_timestamps`, on the states that the encoder has computed already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from weftline.nodes.device_tensors import as_torch, offload
from weftline.nodes.precision import computing_in
from weftline.nodes.whisper_decoding import HOP, Found, Recording, Search, mel_frames

if TYPE_CHECKING:
    import torch
    from whisper.decoding import DecodingOptions

RANGE = 8.0
"""Powers of ten below a window's loudest bin at which a bin is cut off, as in openai-whisper."""

REACH_FRAMES = 3
"""Mel frames after a window into which the transform of its last frame reaches."""

MAX_INITIAL_CONTEXT = 1500
"""Positions of a 30 s window; openai-whisper counts its latest first timestamp, 1 s, in shares of such a window."""


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


class TorchNetwork:
    """A network of openai-whisper.

    model:     whisper.model.Whisper on `device`.
    device:    as torch calls it.
    precision: 'float32', 'tf32', 'bfloat16' or 'float16'; spectrograms are float32 in every precision.
    """

    def __init__(self, model: Any, device: str, precision: str) -> None:
        self.model = model
        self.multilingual = bool(model.is_multilingual)
        self.languages = int(model.num_languages)
        self.positions = int(model.dims.n_audio_ctx)
        self.text_context = int(model.dims.n_text_ctx)
        self._device = device
        self._precision = precision

    def samples(self, recording: Any) -> Any:
        return recording if isinstance(recording, np.ndarray) else as_torch(recording)

    def mels(self, pieces: Sequence[Any]) -> torch.Tensor:
        return self._mels(pieces, 0)

    def own_mels(self, pieces: Sequence[Any]) -> list[torch.Tensor]:
        found = zip(pieces, self._mels(pieces, REACH_FRAMES), strict=True)
        return [mel[:, : mel_frames(len(piece))].clone() for piece, mel in found]

    def padded(self, mels: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        made = torch.zeros((len(mels), self.model.dims.n_mels, 2 * self.positions), device=self._device)
        for row, mel in zip(made, mels, strict=True):
            row[:, : mel.shape[1]] = mel
        return made

    def encode(self, mels: torch.Tensor) -> torch.Tensor:
        import torch

        half = self._precision == "float16"
        groups = torch.split(mels, 1 if self._device == "cpu" else len(mels))  # one stays in a processor's cache
        with self._computing():
            states = torch.cat([self.model.encoder(group.half() if half else group) for group in groups])
        return states if half else states.float()  # decoding accepts nothing else

    def rows(self, states: torch.Tensor) -> Sequence[torch.Tensor]:
        return list(states)

    def detect(self, states: torch.Tensor, rows: Sequence[int]) -> list[str]:
        with self._computing():
            _, found = self.model.detect_language(states[list(rows)])
        return [max(likelihoods, key=likelihoods.get) for likelihoods in found]

    def search(self, states: torch.Tensor, recordings: Sequence[Recording], search: Search) -> Sequence[Found]:
        import torch
        from whisper.decoding import DecodingTask

        task = DecodingTask(self.model, self._options(search))

        def write(features: torch.Tensor, tokens: torch.Tensor) -> tuple[list[str], None]:
            if self.multilingual:
                known = [self.tokenizer(recording).sot_sequence for recording in recordings]
                tokens[:, task.sot_index : task.sot_index + len(known[0])] = torch.tensor(known)
            return [recording.language for recording in recordings], None

        task._detect_language = write  # the step between the encoder and the search that sets a row's first tokens
        if task.n_group > 1:  # openai-whisper repeats the tokens for its beams and not the states: one row works only
            task._get_audio_features = lambda states: states.repeat_interleave(task.n_group, dim=0)
        with self._computing():
            found: Any = task.run(states)
        return [Found(one.tokens, one.text, one.no_speech_prob, one.avg_logprob) for one in found]

    def tokenizer(self, recording: Recording) -> Any:
        from whisper.tokenizer import get_tokenizer

        options = {"language": recording.language, "task": recording.task} if self.multilingual else {}
        return get_tokenizer(self.multilingual, num_languages=self.languages, **options)

    def align(
        self, row: torch.Tensor, recording: Recording, segments: list[dict[str, Any]], frames: int, spoken_s: float
    ) -> None:
        from whisper.timing import add_word_timestamps

        with self._computing():
            add_word_timestamps(
                segments=segments,
                model=_Encoded(self.model),
                tokenizer=self.tokenizer(recording),
                mel=row,
                num_frames=frames,
                last_speech_timestamp=spoken_s,
            )

    def sleep(self) -> None:
        offload(self.model)

    def wake(self) -> None:
        self.model.to(self._device)

    def _options(self, search: Search) -> DecodingOptions:
        from whisper.decoding import DecodingOptions

        return DecodingOptions(
            language="en",  # the recording's own is written over it
            prompt=search.prompt or None,
            beam_size=search.beams if search.beams > 1 else None,
            sample_len=search.tokens_max,
            without_timestamps=not search.timestamps,
            max_initial_timestamp=MAX_INITIAL_CONTEXT / self.positions,
            fp16=self._precision == "float16",
        )

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Have the network compute in its precision, without gradients; float16 is openai-whisper's own option."""
        import torch

        precision = "float32" if self._precision == "float16" else self._precision
        with torch.inference_mode(), computing_in(precision, self._device):
            yield

    def _mels(self, pieces: Sequence[Any], margin: int) -> torch.Tensor:
        """Return float32[windows, bands, frames + margin] of windows with silence after them."""
        import torch

        there = not all(isinstance(piece, np.ndarray) for piece in pieces)
        length = (2 * self.positions + margin) * HOP
        samples = torch.zeros((len(pieces), length), device=self._device if there else "cpu")
        for row, piece in zip(samples, pieces, strict=True):
            row[: len(piece)] = as_torch(piece)
        return log_mels(samples.to(self._device), self.model.dims.n_mels)


class _Encoded:
    """A network whose input is the encoder's states; otherwise the network itself."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, states: torch.Tensor, tokens: torch.Tensor) -> Any:
        return self._model.decoder(tokens, states)
