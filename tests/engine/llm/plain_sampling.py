"""What sampling options mean, one row at a time in plain Python: slow, and nothing of it comes from the engine."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

from weftline.engine.llm.params import SamplingParams

_ALL = (1 << 64) - 1
_LOW = (1 << 32) - 1


def _mix64(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _ALL
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _ALL
    return value ^ value >> 31


def uniform(seed: int, position: int, token: int) -> float:
    key = _mix64(_mix64(seed + 0x9E3779B97F4A7C15 & _ALL) + position * 0x9E3779B97F4A7C15 & _ALL)
    bits = token * 0x9E3779B1 & _LOW ^ key & _LOW
    bits = (bits ^ bits >> 16) * 0x7FEB352D & _LOW
    bits = (bits ^ bits >> 15) + (key >> 32) & _LOW
    bits = bits * 0x846CA68B & _LOW
    bits = bits ^ bits >> 16
    return min(((bits >> 1) + 0.5) / (1 << 31), 1 - 2**-24)


def edited(
    logits: list[float],
    tokens: list[int],
    prompt: int,
    draft: tuple[int, ...],
    params: SamplingParams,
    ends: frozenset[int],
    banned: tuple[tuple[int, ...], ...] = (),
) -> list[float]:
    """Return the logits after penalties, biases and prohibitions."""
    out, answer = list(logits), [*tokens[prompt:], *draft]
    times = Counter(answer)
    for token in {*tokens, *draft}:
        rate = params.repetition_penalty
        out[token] = out[token] * rate if out[token] < 0 else out[token] / rate
    for token, count in times.items():
        out[token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in params.logit_bias.items():
        out[int(token)] += bias
    for token in range(len(out)):
        if params.allowed_token_ids and token not in {*params.allowed_token_ids, *ends}:
            out[token] = -math.inf
        if len(answer) < params.tokens_min and token in {*params.stop_token_ids, *ends}:
            out[token] = -math.inf
        for word in banned:
            if word[-1] == token and (len(word) == 1 or tuple(answer[1 - len(word) :]) == word[:-1]):
                out[token] = -math.inf
    return out


def shares(logits: dict[int, float]) -> dict[int, float]:
    most = max(logits.values())
    total = sum(math.exp(value - most) for value in logits.values())
    return {token: math.exp(value - most) / total for token, value in logits.items()}


def kept(logits: list[float], params: SamplingParams) -> tuple[dict[int, float], bool]:
    """Return what is left to draw from, logits by token, and whether no rounding could make a difference."""
    left = {token: value / params.temperature for token, value in enumerate(logits) if value > -math.inf}
    clear = True
    if params.top_k and params.top_k < len(left):
        floor = sorted(left.values())[-params.top_k]
        left = {token: value for token, value in left.items() if value >= floor}
    if params.top_p < 1:
        part = shares(left)
        chosen, clear = _reach(sorted(left, key=lambda token: -left[token]), part, params.top_p)
        left = {token: left[token] for token in chosen}
    if params.min_p > 0:
        floor = max(left.values()) + math.log(params.min_p)
        clear &= all(abs(value - floor) > 1e-4 for value in left.values())
        left = {token: value for token, value in left.items() if value >= floor}
    if params.typical_p < 1:
        part = shares(left)
        expected = -sum(share * math.log(share) for share in part.values() if share > 0)
        away = {token: abs(-math.log(share) - expected) for token, share in part.items() if share > 0}
        order = sorted(away, key=lambda token: away[token])
        chosen, sure = _reach(order, part, params.typical_p)
        apart = all(away[b] - away[a] > 1e-4 for a, b in pairwise(order[: len(chosen) + 1]))
        clear, left = clear and sure and apart, {token: left[token] for token in chosen}
    return left, clear


def drawn(left: dict[int, float], seed: int, position: int) -> int:
    """Return the token with the largest logit + Gumbel noise."""
    return max(left, key=lambda token: left[token] - math.log(-math.log1p(-uniform(seed, position, token))))


def _reach(order: list[int], part: dict[int, float], goal: float) -> tuple[list[int], bool]:
    total, chosen = 0.0, []
    for token in order:
        chosen.append(token)
        total += part[token]
        if abs(total - goal) < 1e-5:
            return chosen, False
        if total >= goal:
            break
    return chosen, True
