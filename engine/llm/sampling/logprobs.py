"""Log-probabilities of tokens, from the logits before any processing.

The log-probability of a token is its logit minus the logsumexp of its row. Only the chosen token's and the top ones'
leave the device. On a CPU, rows are processed in blocks that fit its caches.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

LOGPROB_MIN = -9999.0
"""Log-probability reported for impossible tokens: JSON has no infinities. Published APIs use the same number."""

TokenLogprobs = tuple[float, tuple[tuple[int, float], ...]]
"""A token's log-probability, and the top tokens with theirs."""


def token_logprobs(logits: Tensor, tokens: Tensor, tops: list[int]) -> list[TokenLogprobs]:
    """Return the log-probabilities of each row's token and its top tokens; waits for the device.

    logits: float32 [rows, vocabulary].   tokens: int64 [rows], on the same device.
    tops:   number of top tokens to return for each row.
    """
    total = log_sum_exp(logits)[:, None]
    chosen = logits.gather(1, tokens[:, None])
    values, ids = logits.topk(min(max(tops, default=0), logits.shape[1]))
    logs = torch.cat([chosen, values], dim=1).sub_(total).nan_to_num_(nan=LOGPROB_MIN).clamp_(min=LOGPROB_MIN, max=0.0)
    names = ids.tolist()
    return [
        (row[0], tuple(zip(names[at][:top], row[1 : 1 + top], strict=False)))
        for at, (row, top) in enumerate(zip(logs.tolist(), tops, strict=True))
    ]


_CPU_ELEMENTS = 1 << 17
"""Logits per block on a CPU: 512 KB, which its caches hold and so several times as fast as memory."""


def row_blocks(logits: Tensor) -> Iterator[slice]:
    """Yield slices of the rows of `logits` [rows, vocabulary] to process as one block; depends on the shape only."""
    rows, vocabulary = logits.shape
    step = max(1, _CPU_ELEMENTS // vocabulary) if logits.device.type == "cpu" else max(1, rows)
    return (slice(at, at + step) for at in range(0, max(1, rows), step))


def log_sum_exp(logits: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return float [rows], the log of the sum of exp(logits / scale) over each row; scale: [rows, 1], None is 1."""
    return torch.cat(
        [(logits[at] if scale is None else logits[at] / scale[at]).logsumexp(-1) for at in row_blocks(logits)]
    )  # fmt: skip
