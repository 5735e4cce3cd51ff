"""Cache-blocked passes over rows of logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_CPU_ELEMENTS = 1 << 17
"""Logits worked on at a time on a CPU: 512 KB, which is several times as fast as memory."""


def parts(logits: Tensor) -> Iterator[slice]:
    """Yield the rows of `logits` [rows, vocabulary] that are to be worked on together; depends on the shape alone."""
    rows, vocabulary = logits.shape
    step = max(1, _CPU_ELEMENTS // vocabulary) if logits.device.type == "cpu" else max(1, rows)
    return (slice(at, at + step) for at in range(0, max(1, rows), step))


def log_mass(logits: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return float [rows], the log of the sum of exp(logits / scale) over each row; scale: [rows, 1], None is 1."""
    return torch.cat(
        [(logits[at] if scale is None else logits[at] / scale[at]).logsumexp(-1) for at in parts(logits)]
    )  # fmt: skip
