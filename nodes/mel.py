"""Batched log-mel spectrograms on the device of the samples.

The arithmetic is openai-whisper's log_mel_spectrogram, whose loudest bin is the loudest of all it is given: here it is
each window's own, so that a window's spectrogram does not depend on the others. On the CPU the bits are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
