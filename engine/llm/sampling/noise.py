"""Counter-based random numbers for sampling: a hash of seed, position and token.

It is a hash, not a generator: there is no state to carry along, so a draw is the same in any company, after a
preemption, behind guesses or without them, and on any device. All of it is whole-number arithmetic that wraps around;
only the last steps, from a uniform number to its logarithms, round, and may differ in the last bit between devices.

Source of the hash: seed and place go through the 64-bit finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014,
with Stafford's constants), once each, which gives two 32-bit keys; the token goes through lowbias32 (Wellons,
hash-prospector), with one key before its first and one before its second multiplication.

Nothing here waits for a device or has a shape that depends on data, so that a CUDA graph can hold it.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
