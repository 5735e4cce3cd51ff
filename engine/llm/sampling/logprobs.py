"""Log-probabilities returned to the caller, before logits processing.

A row's are its logits less the log of the sum of their exps; only the chosen token's and the likeliest ones' ever
leave the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weftline.engine.llm.sampling.mass import log_mass

LOGPROB_MIN = -9999.0
"""What is told of a token without a chance: JSON has no infinities. Published APIs use the same number."""

Told = tuple[float, tuple[tuple[int, float], ...]]
"""A token's log-probability, and the likeliest tokens with theirs."""


def tell(logits: Tensor, tokens: Tensor, tops: list[int]) -> list[Told]:
    """Return what is told of each row's token; waits for the device.

    logits: float32 [rows, vocabulary].   tokens: int64 [rows], on the same device.
    tops:   how many likeliest tokens each row wants to know.
    """
    total = log_mass(logits)[:, None]
    chosen = logits.gather(1, tokens[:, None])
    values, ids = logits.topk(min(max(tops, default=0), logits.shape[1]))
    logs = torch.cat([chosen, values], dim=1).sub_(total).nan_to_num_(nan=LOGPROB_MIN).clamp_(min=LOGPROB_MIN, max=0.0)
    names = ids.tolist()
    return [
        (row[0], tuple(zip(names[at][:top], row[1 : 1 + top], strict=False)))
        for at, (row, top) in enumerate(zip(logs.tolist(), tops, strict=True))
    ]
