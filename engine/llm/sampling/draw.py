"""Draw of one token per row: temperature, top-k, top-p, min-p and typical filters.

    settings = DrawSettings(temperature, seed, position, top_p=top_p)
    tokens = draw(logits, settings)

The drawn token has the largest logit / temperature + Gumbel noise among those that pass the filters; of equal ones the
lowest id. `draw` never waits for the device and has no shape that depends on data, so a CUDA graph can contain it. On a
GPU it is one kernel without sorting (`weftline.engine.llm.kernels.draw`). The torch operations here define the result;
with filters they sort whole rows. `try_draw` sorts only the largest logits of each row and returns for which rows that
was enough.

Filters apply in this order, as in transformers; probabilities are relative to what the previous filter kept. Tokens
with equal logits are kept or removed together, so the result does not depend on the device's sort order.

    top-k     the k likeliest
    top-p     the likeliest, until their probabilities reach p          (nucleus sampling; Holtzman et al. 2020)
    min-p     those with at least p times the largest probability       (Nguyen et al. 2024)
    typical   those whose surprise -log(p) is nearest the expected surprise, until their probabilities reach p
                                                                        (Meister et al. 2022)

The noise is counter-based: a hash of seed, position and token id, without state. A draw is therefore the same in any
batch, after a preemption, with or without draft tokens, and on any device. The hash is integer arithmetic with
overflow; only the logarithms of the final uniform number round and may differ in the last bit between devices. Seed and
position pass the 64-bit finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, with Stafford's constants) once
each, which gives two 32-bit keys; the token passes lowbias32 (Wellons, hash-prospector), with one key before its first
and one before its second multiplication.

The log-probability of a token is its logit, before any processing, minus the log-sum-exp of its row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

COLD = 1e-5
"""Temperatures below it count as 0: float32 cannot distinguish other tokens' probabilities from 0."""


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """Draw settings of each row; all tensors are [rows], on the logits' device. None: off for all rows.

    temperature: float32; 0 takes the likeliest.   seed, position: int64, what the row's noise comes from.
    top_k: int64, 0 is off.   top_p, typical_p: float32, 1 is off.   min_p: float32, 0 is off.
    """

    temperature: Tensor
    seed: Tensor
    position: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    typical_p: Tensor | None = None

    @property
    def narrows(self) -> bool:
        return any(one is not None for one in (self.top_k, self.top_p, self.min_p, self.typical_p))


@cache
def draw_kernel(device: torch.device) -> Callable[..., Tensor] | None:
    """Return the draw kernel for `device`; None where torch operations are used."""
    from weftline.engine.llm.kernels.availability import available

    if available(device) is not None:
        return None
    from weftline.engine.llm.kernels.draw import draw_tokens

    return draw_tokens


def draw(logits: Tensor, settings: DrawSettings) -> Tensor:
    """Return a token for each row, int64 [rows]; `logits`, float32 [rows, vocabulary], is not changed."""
    kernel = draw_kernel(logits.device)
    if kernel is not None:
        return kernel(
            *(logits, settings.temperature, settings.seed, settings.position),
            *(settings.top_k, settings.top_p, settings.min_p, settings.typical_p),
        )
    if settings.narrows:
        return try_draw(logits, settings, logits.shape[1])[0]
    keys = to_keys(settings.seed, settings.position)
    warm = settings.temperature >= COLD
    scale = torch.where(warm, settings.temperature, 1.0)[:, None]
    tokens = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)[None]
    return torch.cat([_best(logits[at] / scale[at], keys[at], tokens, warm[at]) for at in row_blocks(logits)])


def try_draw(logits: Tensor, settings: DrawSettings, count: int) -> tuple[Tensor, Tensor]:
    """Draw from the `count` largest logits of each row; also return bool [rows]: whether they sufficed.

    The token of a row is valid only where they sufficed, as they always do when `count` is the vocabulary.
    """
    warm = settings.temperature >= COLD
    if draw_kernel(logits.device) is not None:
        return draw(logits, settings), torch.ones_like(warm)
    scale = torch.where(warm, settings.temperature, 1.0)[:, None]
    whole = count >= logits.shape[1]
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True) if whole else logits.topk(count)
    ordered = ordered / scale
    mass = None if whole or settings.top_p is None else log_sum_exp(logits, scale)
    ordered = keep_likely(ordered, mass, settings.top_k, settings.top_p, settings.min_p)
    enough = torch.ones_like(warm) if whole else ~warm | (ordered[:, -1] == -torch.inf)
    if settings.typical_p is not None:
        ordered = keep_typical(ordered, settings.typical_p)
    keys = to_keys(settings.seed, settings.position)
    place = _best(ordered, keys, tokens.to(torch.int32), warm)
    return tokens.gather(1, place[:, None])[:, 0], enough


def _best(values: Tensor, keys: Tensor, tokens: Tensor, warm: Tensor) -> Tensor:
    """Return the columns with the largest noisy value, int64 [rows]; `values` is overwritten."""
    # Waits are finite and positive, so a cold row keeps its exact values and its argmax is drawn.
    return values.addcmul_(to_log_waits(to_uniforms(keys, tokens)), -warm.to(values.dtype)[:, None]).argmax(-1)


def keep_likely(
    ordered: Tensor, mass: Tensor | None, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """Set what top-k, top-p and min-p remove to -inf in `ordered`, and return it.

    ordered: float [rows, count], each row falling; overwritten.
    mass:    float [rows], log of the sum of exp over the whole row, where `ordered` has only its beginning; None where
             it has all of it.
    top_k:   int64 [rows], 0 is off.   top_p: float [rows], 1 is off.   min_p: float [rows], 0 is off. None: all off.

    With only the largest logits the result is valid where the last column is -inf: nothing beyond it passes then.
    """
    lowest = ordered[:, -1].clone()
    if top_k is not None:
        count = ordered.shape[1]
        last = torch.where(top_k > 0, top_k, count).clamp(max=count) - 1
        ordered = _keep(ordered, ordered.gather(1, last[:, None]))
        if mass is not None:  # what top-k keeps is everything if it removes the last column
            mass = torch.where(ordered[:, -1] < lowest, ordered.logsumexp(-1), mass)
    if top_p is not None:
        probabilities = ordered.softmax(-1) if mass is None else (ordered - mass[:, None]).exp()
        kept = _reach(probabilities, top_p)
        floor = ordered.gather(1, kept - 1)
        ordered = _keep(ordered, floor.masked_fill((top_p >= 1)[:, None], -torch.inf))
    if min_p is not None:
        ordered = _keep(ordered, ordered[:, :1] + min_p[:, None].log())
    return ordered


def keep_typical(ordered: Tensor, typical_p: Tensor) -> Tensor:
    """Set what typical sampling removes to -inf in `ordered`, and return it.

    ordered: float [rows, count], all that is left of each row, in any order; overwritten.
    typical_p: float [rows], 1 is off.
    """
    logs = ordered.log_softmax(-1)
    probabilities = logs.exp()
    expected = -(probabilities * logs.masked_fill(probabilities == 0, 0)).sum(-1, keepdim=True)
    distance = (-logs - expected).abs_()
    nearest, at = distance.sort(dim=-1)
    kept = _reach(probabilities.gather(1, at), typical_p)
    beyond = (distance > nearest.gather(1, kept - 1)) & (typical_p < 1)[:, None]
    return ordered.masked_fill_(beyond, -torch.inf)


def _reach(probabilities: Tensor, goal: Tensor) -> Tensor:
    """Return the number of leading probabilities that reach `goal` [rows], at least 1; int64 [rows, 1]."""
    before = probabilities.cumsum(-1).sub_(probabilities)
    return (before < goal[:, None]).sum(-1, keepdim=True).clamp(min=1)


def _keep(ordered: Tensor, floor: Tensor) -> Tensor:
    return ordered.masked_fill_(ordered < floor, -torch.inf)


_GOLDEN_64 = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 / golden ratio, as a signed number: keeps neighbouring places apart (Knuth, TAOCP 6.4)."""
_FIRST_64, _SECOND_64 = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)
_GOLDEN_32 = 0x9E3779B1 - (1 << 32)
_FIRST_32, _SECOND_32 = 0x7FEB352D, 0x846CA68B - (1 << 32)
_STEP = 2.0**-31
_LARGEST = 1 - 2.0**-24
"""Largest float32 below 1."""
_SMALL = 2.0**-12
"""Below it log(1 - u) loses digits, and -u - u^2 / 2 has all that a float32 holds."""


def to_keys(seed: Tensor, position: Tensor) -> Tensor:
    """Return int32 [rows, 2], the keys of rows with this `seed` and `position`, both int64 [rows]."""
    mixed = _mix64(_mix64(seed + _GOLDEN_64) + position * _GOLDEN_64)
    return mixed.view(torch.int32).view(-1, 2)


def to_uniforms(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return float32 [rows, count], uniform over 0 to 1 and never either, in steps of 2^-31 near 0.

    keys: int32 [rows, 2].   tokens: int32 [1, count] or [rows, count].
    """
    bits = (tokens * _GOLDEN_32) ^ keys[:, :1]
    shifted = torch.empty_like(bits)
    bits ^= _shift(bits, 16, shifted)
    bits *= _FIRST_32
    bits ^= _shift(bits, 15, shifted)
    bits += keys[:, 1:]
    bits *= _SECOND_32
    bits ^= _shift(bits, 16, shifted)
    return _shift(bits, 1, shifted).to(torch.float32).mul_(_STEP).add_(_STEP / 2).clamp_(max=_LARGEST)


def to_log_waits(uniforms: Tensor) -> Tensor:
    """Return float32 of the same shape: log(-log(1 - u)), the logarithm of a wait at rate 1. `uniforms` is overwritten.

    Its negative is Gumbel noise: the largest of logit - log(wait) is a draw from the softmax of the logits, since the
    wait at rate exp(logit) that ends first is (Gumbel 1954; Maddison, Tarlow and Minka 2014). Short waits decide, so
    they are the ones that are exact: a token of probability 2^-31 still has its chance.
    """
    small = uniforms < _SMALL
    near = uniforms * 0.5
    near.add_(1.0).mul_(uniforms)
    waits = uniforms.neg_().add_(1.0).log_().neg_()
    return torch.where(small, near, waits, out=waits).log_()


def _shift(bits: Tensor, count: int, out: Tensor) -> Tensor:
    """Shift int32 to the right with zeros coming in, which torch does for no signed type."""
    return torch.bitwise_right_shift(bits, count, out=out).bitwise_and_((1 << (32 - count)) - 1)


def _mix64(value: Tensor) -> Tensor:
    value = (value ^ ((value >> 30) & ((1 << 34) - 1))) * _FIRST_64
    value = (value ^ ((value >> 27) & ((1 << 37) - 1))) * _SECOND_64
    return value ^ ((value >> 31) & ((1 << 33) - 1))


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
