"""Sampling kernel: temperature, top-k, top-p, min-p and typical, without a sort.

It draws the tokens of `weftline.engine.llm.sampling.draw`, which defines what is drawn. Each narrowing keeps the
tokens whose score is above a threshold, where the score is the scaled logit, or for typical sampling the negative
distance from the expected surprise. A token is kept exactly if the weight of the tokens with higher scores is below a
goal: a number of tokens (top-k) or a share of the probability (top-p, typical). That is monotone in the score, so the
threshold is found by search: each pass over the row weighs what lies above three pivots and keeps the quarter that
holds the threshold (compare FlashInfer's rejection sampling with two pivots, Ye and others 2025). Pivots are *order
numbers*: the bits of a float32 as an integer that sorts as the float does. The search ends when one token or one
number is left: after 5 to 8 passes for logits of usual shape, after 17 in any case.

Where all tokens that can be kept are few, as they are for logits of usual shape, they are collected first: three passes
over the row, and all others over what was collected. A row pays only for the narrowing that it asks for.

The token is the largest scaled logit + Gumbel noise among those kept, from the same hash as the
reference. Equal scores: the lowest token. Tokens with equal logits stay or go together.
A row with NaN or infinity gives a token where it has one; a row of -inf gives token 0. Both must be refused by the
caller, as must the reference's.

Thresholds depend on rounded sums of probabilities. Where a goal is met within a few 1e-7 of it, the kernel and the
reference may keep one token (or one group of equal ones) more or less, as the reference does on two devices.
"""

from __future__ import annotations

import torch
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from weftline.engine.llm.kernels.launch import Launch, jit, jit_unspecialised, need

TILE = 4096
"""Logits read at a time: 8 for each thread, two loads of 16 bytes."""
WARPS = 16
COLD = tl.constexpr(1e-5)
"""As in `weftline.engine.llm.sampling.draw`."""

_BELOW_ALL = tl.constexpr(-2139095042)
"""One less than the order number of minus infinity."""
_TOKENS, _SHARES, _TYPICAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# the numbers of weftline.engine.llm.sampling.draw
_GOLDEN_64, _FIRST_64 = tl.constexpr(0x9E3779B97F4A7C15), tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND_64 = tl.constexpr(0x94D049BB133111EB)
_GOLDEN_32, _FIRST_32, _SECOND_32 = tl.constexpr(0x9E3779B1), tl.constexpr(0x7FEB352D), tl.constexpr(0x846CA68B)
_STEP, _LARGEST, _SMALL = tl.constexpr(2.0**-31), tl.constexpr(1 - 2.0**-24), tl.constexpr(2.0**-12)


@jit
def order_of(numbers: tl.tensor) -> tl.tensor:
    """Map float32 to int32 of the same order; both zeros map to one value. NaN is not allowed."""
    bits = tl.where(numbers == 0.0, 0.0, numbers).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def scaled_logits(logits: tl.tensor, at: tl.tensor, vocabulary: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Load logits / temperature; NaN becomes inf, elements after the row's end -inf."""
    numbers = tl.load(logits + at, mask=at < vocabulary, other=float("-inf"))
    return tl.div_rn(tl.where(numbers != numbers, float("inf"), numbers), temperature)


@jit
def mix64(value: tl.tensor) -> tl.tensor:
    """Apply the 64-bit finalizer of SplitMix64 to uint64."""
    value = (value ^ (value >> 30)) * _FIRST_64
    value = (value ^ (value >> 27)) * _SECOND_64
    return value ^ (value >> 31)


@jit
def log_waits(tokens: tl.tensor, first_key: tl.tensor, second_key: tl.tensor) -> tl.tensor:
    """Return log(-log(1 - u)) of int32 `tokens`, float32; keys: uint32."""
    bits = (tokens.to(tl.uint32) * _GOLDEN_32) ^ first_key
    bits = (bits ^ (bits >> 16)) * _FIRST_32
    bits = ((bits ^ (bits >> 15)) + second_key) * _SECOND_32
    bits = bits ^ (bits >> 16)
    uniforms = tl.minimum((bits >> 1).to(tl.int32).to(tl.float32) * _STEP + _STEP / 2, _LARGEST)
    near = (uniforms * 0.5 + 1.0) * uniforms
    return tl.log(tl.where(uniforms < _SMALL, near, -tl.log(1.0 - uniforms)))


@jit
def typical_order(numbers: tl.tensor, top: tl.tensor, log_total: tl.tensor, expected: tl.tensor) -> tl.tensor:
    """Return the order numbers of -|surprise - expected|, the score of typical sampling."""
    return order_of(-tl.abs(log_total - (numbers - top) - expected))


@jit
def is_enough(
    cut: tl.tensor,
    tokens: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    top: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    limited: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Return whether the `tokens` above `cut` (total `weight`) fit a tile and include every kept token."""
    by_min_p = (min_p > 0.0) & (top + tl.log(tl.where(min_p > 0.0, min_p, 1.0)) > cut)
    by_top_p = (top_p < 1.0) & (weight >= top_p * total)
    # with top-k, top-p is of what top-k leaves
    return (tokens <= TILE) & tl.where(limited, tokens >= top_k, by_top_p | by_min_p)


@jit
def search(
    logits: tl.tensor,
    vocabulary: tl.tensor,
    temperature: tl.tensor,
    top: tl.tensor,
    floor: tl.tensor,
    log_total: tl.tensor,
    expected: tl.tensor,
    goal: tl.tensor,
    inside: tl.tensor,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Return (int64 `low`, tokens above it): tokens are kept whose order number is above `low`.

    Tokens of order numbers above `floor` count, which are `inside`. `goal`: int32 tokens or float32 weight, of which
    less than this may lie above a kept token; the largest token has weight 1 before it is divided by the total.
    """
    low = floor
    peak = top
    reach = 1.0
    if KIND == _TYPICAL:
        low = tl.full((), _BELOW_ALL, tl.int64)
        peak = top - top
        reach = 0.25
    # nothing lies above the highest, so that it is kept
    high = order_of(peak).to(tl.int64)
    above_low = inside
    above_high = inside - inside
    turn = inside - inside
    while (high - low > 1) & (above_low - above_high > 1):
        # the first pivots are where thresholds usually are
        span = high - low
        one = tl.where(turn == 0, order_of(peak - 16.0 * reach).to(tl.int64), low + span // 4)
        two = tl.where(turn == 0, order_of(peak - 6.0 * reach).to(tl.int64), low + span // 2)
        three = tl.where(turn == 0, order_of(peak - 2.0 * reach).to(tl.int64), high - (span + 3) // 4)
        one = tl.minimum(tl.maximum(one, low), high)
        two = tl.minimum(tl.maximum(two, low), high)
        three = tl.minimum(tl.maximum(three, low), high)
        tokens_one = tl.zeros([TILE], tl.int32)
        tokens_two = tl.zeros([TILE], tl.int32)
        tokens_three = tl.zeros([TILE], tl.int32)
        weights_one = tl.zeros([TILE], tl.float32)
        weights_two = tl.zeros([TILE], tl.float32)
        weights_three = tl.zeros([TILE], tl.float32)
        for start in tl.range(0, vocabulary, TILE):
            numbers = scaled_logits(logits, start + tl.arange(0, TILE), vocabulary, temperature)
            order = order_of(numbers)
            if KIND == _TYPICAL:
                order = tl.where(order > floor, typical_order(numbers, top, log_total, expected), _BELOW_ALL)
            is_one = order > one.to(tl.int32)
            is_two = order > two.to(tl.int32)
            is_three = order > three.to(tl.int32)
            tokens_one += is_one.to(tl.int32)
            tokens_two += is_two.to(tl.int32)
            tokens_three += is_three.to(tl.int32)
            if KIND != _TOKENS:
                weights = tl.exp(numbers - top)
                weights_one += tl.where(is_one, weights, 0.0)
                weights_two += tl.where(is_two, weights, 0.0)
                weights_three += tl.where(is_three, weights, 0.0)
        above_one = tl.sum(tokens_one, 0)
        above_two = tl.sum(tokens_two, 0)
        above_three = tl.sum(tokens_three, 0)
        if KIND == _TOKENS:
            kept_one = above_one < goal
            kept_two = above_two < goal
            kept_three = above_three < goal
        else:
            kept_one = tl.sum(weights_one, 0) < goal
            kept_two = tl.sum(weights_two, 0) < goal
            kept_three = tl.sum(weights_three, 0) < goal
        # the lowest that is kept lies above the highest pivot that is not
        new_low = tl.where(kept_one, low, tl.where(kept_two, one, tl.where(kept_three, two, three)))
        new_high = tl.where(kept_one, one, tl.where(kept_two, two, tl.where(kept_three, three, high)))
        new_above_low = tl.where(
            kept_one, above_low, tl.where(kept_two, above_one, tl.where(kept_three, above_two, above_three))
        )
        above_high = tl.where(
            kept_one, above_one, tl.where(kept_two, above_two, tl.where(kept_three, above_three, above_high))
        )
        above_low = new_above_low
        low = new_low
        high = new_high
        turn += 1
    return low, above_low


# settings are parts of one tensor, whose addresses may be multiples of 16 bytes or not
@jit_unspecialised("temperatures", "seeds", "positions", "top_ks", "top_ps", "min_ps", "typical_ps")
def draw_rows(
    logits: tl.tensor,
    out: tl.tensor,
    temperatures: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    typical_ps: tl.tensor,
    values: tl.tensor,
    names: tl.tensor,
    logits_row: tl.tensor,
    vocabulary: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Sample the token of one row (program axis 0). values, names: [rows, TILE], collected candidates."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_row
    temperature = tl.load(temperatures + row)
    warm = temperature >= COLD
    temperature = tl.where(warm, temperature, 1.0)
    # the row as it is searched and drawn from: its logits, or what was collected
    source = logits
    count = vocabulary + 0
    divisor = temperature
    collected = False
    floor = tl.full((), _BELOW_ALL, tl.int64)
    typical_floor = tl.full((), _BELOW_ALL, tl.int64)
    top = tl.full((), 0.0, tl.float32)
    log_total = tl.full((), 0.0, tl.float32)
    expected = tl.full((), 0.0, tl.float32)
    typical = False

    if top_ks is not None:
        top_k = tl.load(top_ks + row)
        top_p = tl.load(top_ps + row)
        min_p = tl.load(min_ps + row)
        typical_p = tl.load(typical_ps + row)
        limited = (top_k > 0) & (top_k < vocabulary)
        typical = typical_p < 1.0
        if limited | (top_p < 1.0) | (min_p > 0.0) | typical:
            largest = tl.full([TILE], float("-inf"), tl.float32)
            for start in tl.range(0, vocabulary, TILE):
                numbers = scaled_logits(logits, start + tl.arange(0, TILE), vocabulary, temperature)
                largest = tl.maximum(largest, numbers)
            top = tl.max(largest, 0)
            usable = (top < float("inf")) & (top > float("-inf"))
            typical = typical & usable
            row_total = tl.full((), 0.0, tl.float32)
            if usable & (limited | (top_p < 1.0) | (min_p > 0.0)):
                near, middle, far = top - 3.0, top - 7.0, top - 12.0
                tokens_near = tl.zeros([TILE], tl.int32)
                tokens_middle = tl.zeros([TILE], tl.int32)
                tokens_far = tl.zeros([TILE], tl.int32)
                weights_near = tl.zeros([TILE], tl.float32)
                weights_middle = tl.zeros([TILE], tl.float32)
                weights_far = tl.zeros([TILE], tl.float32)
                sums = tl.zeros([TILE], tl.float32)
                for start in tl.range(0, vocabulary, TILE):
                    numbers = scaled_logits(logits, start + tl.arange(0, TILE), vocabulary, temperature)
                    weights = tl.exp(numbers - top)
                    sums += weights
                    tokens_near += (numbers > near).to(tl.int32)
                    tokens_middle += (numbers > middle).to(tl.int32)
                    tokens_far += (numbers > far).to(tl.int32)
                    weights_near += tl.where(numbers > near, weights, 0.0)
                    weights_middle += tl.where(numbers > middle, weights, 0.0)
                    weights_far += tl.where(numbers > far, weights, 0.0)
                row_total = tl.sum(sums, 0)
                by = (row_total, top, top_k, top_p, min_p, limited)
                is_near = is_enough(near, tl.sum(tokens_near, 0), tl.sum(weights_near, 0), *by, TILE)
                is_middle = is_enough(middle, tl.sum(tokens_middle, 0), tl.sum(weights_middle, 0), *by, TILE)
                is_far = is_enough(far, tl.sum(tokens_far, 0), tl.sum(weights_far, 0), *by, TILE)
                collected = is_near | is_middle | is_far
                if collected:
                    cut = tl.where(is_near, near, tl.where(is_middle, middle, far))
                    values += row * TILE
                    names += row * TILE
                    place = tl.full((), 0, tl.int32)
                    for start in tl.range(0, vocabulary, TILE):
                        at = start + tl.arange(0, TILE)
                        numbers = scaled_logits(logits, at, vocabulary, temperature)
                        chosen = numbers > cut
                        places = place + tl.cumsum(chosen.to(tl.int32), 0) - 1
                        tl.store(values + places, numbers, mask=chosen)
                        tl.store(names + places, at, mask=chosen)
                        place += tl.sum(chosen.to(tl.int32), 0)
                    # what other threads of the program stored is read from here on
                    tl.debug_barrier()
                    source = values
                    count = place
                    divisor = tl.full((), 1.0, tl.float32)
            left = count
            if limited & usable:
                floor, left = search(
                    *(source, count, divisor, top, floor, log_total, expected, top_k.to(tl.int32), left),
                    KIND=_TOKENS,
                    TILE=TILE,
                )
            if (top_p < 1.0) & usable:
                total = row_total
                if limited:
                    sums = tl.zeros([TILE], tl.float32)
                    for start in tl.range(0, count, TILE):
                        numbers = scaled_logits(source, start + tl.arange(0, TILE), count, divisor)
                        sums += tl.where(order_of(numbers) > floor, tl.exp(numbers - top), 0.0)
                    total = tl.sum(sums, 0)
                goal = top_p * total
                floor, left = search(
                    *(source, count, divisor, top, floor, log_total, expected, goal, left),
                    KIND=_SHARES,
                    TILE=TILE,
                )
            if (min_p > 0.0) & usable:
                floor = tl.maximum(floor, order_of(top + tl.log(min_p)).to(tl.int64) - 1)
            if typical:
                sums = tl.zeros([TILE], tl.float32)
                surprises = tl.zeros([TILE], tl.float32)
                counts = tl.zeros([TILE], tl.int32)
                for start in tl.range(0, count, TILE):
                    numbers = scaled_logits(source, start + tl.arange(0, TILE), count, divisor)
                    kept = order_of(numbers) > floor
                    weights = tl.where(kept, tl.exp(numbers - top), 0.0)
                    sums += weights
                    surprises += tl.where(weights > 0.0, weights * (top - numbers), 0.0)
                    counts += kept.to(tl.int32)
                total = tl.sum(sums, 0)
                log_total = tl.log(total)
                expected = log_total + tl.sum(surprises, 0) / total
                # the nearest is kept even if the goal is so small that it is 0
                goal = tl.maximum(typical_p * total, 1e-37)
                typical_floor, left = search(
                    *(source, count, divisor, top, floor, log_total, expected, goal, tl.sum(counts, 0)),
                    KIND=_TYPICAL,
                    TILE=TILE,
                )

    mixed = mix64(
        mix64(tl.load(seeds + row).to(tl.uint64) + _GOLDEN_64) + tl.load(positions + row).to(tl.uint64) * _GOLDEN_64
    )
    first_key = mixed.to(tl.uint32)
    second_key = (mixed >> 32).to(tl.uint32)
    best = tl.full([TILE], float("-inf"), tl.float32)
    token = tl.zeros([TILE], tl.int32)
    for start in tl.range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        numbers = scaled_logits(source, at, count, divisor)
        if top_ks is not None:  # noqa: SIM102 (decided when it is compiled, the next when it runs)
            if collected:
                at = tl.load(names + at, mask=at < count, other=0)
        score = numbers
        if warm:
            score = numbers - log_waits(at, first_key, second_key)
        if top_ks is not None:
            kept = order_of(numbers) > floor
            if typical:
                kept = kept & (typical_order(numbers, top, log_total, expected) > typical_floor)
            score = tl.where(kept, score, float("-inf"))
        better = score > best
        best = tl.where(better, score, best)
        token = tl.where(better, at, token)
    winner = tl.min(tl.where(best == tl.max(best, 0), token, 0x7FFFFFFF), 0)
    tl.store(out + row, winner.to(tl.int64))


def draw_tokens(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    typical_p: Tensor | None = None,
) -> Tensor:
    """Sample a token per row, int64 [rows]; logits: float32 [rows, vocabulary] with dense rows.

    The rest as in `weftline.engine.llm.sampling.draw.DrawSettings`.
    """
    out, launch = draw_launch(logits, temperature, seed, position, top_k, top_p, min_p, typical_p)
    launch.run()
    return out


def draw_launch(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    typical_p: Tensor | None = None,
    tile: int = TILE,
) -> tuple[Tensor, Launch]:
    """Prepare the launch of `draw_tokens`; return its uninitialised output and the launch.

    There are two compiled forms: for rounds that narrow, in which what is None is switched off, and for others.
    """
    need(
        logits.dim() == 2 and logits.dtype == torch.float32 and logits.stride(1) == 1,
        f"logits: wants dense rows of float32 [rows, vocabulary], is {logits.dtype} {tuple(logits.shape)}",
    )
    rows, vocabulary = logits.shape
    need(vocabulary > 0, "logits: wants a vocabulary of at least 1")
    narrows = any(one is not None for one in (top_k, top_p, min_p, typical_p))
    settings = {
        "temperatures": (temperature, torch.float32, 1.0),
        "seeds": (seed, torch.int64, 0),
        "positions": (position, torch.int64, 0),
        "top_ks": (top_k, torch.int64, 0),
        "top_ps": (top_p, torch.float32, 1.0),
        "min_ps": (min_p, torch.float32, 0.0),
        "typical_ps": (typical_p, torch.float32, 1.0),
    }
    arguments: dict[str, object] = {}
    for name, (given, dtype, off) in settings.items():
        if given is None and narrows:
            given = torch.full((rows,), off, dtype=dtype, device=logits.device)
        good = given is None or (given.shape == (rows,) and given.dtype == dtype and given.is_contiguous())
        need(good, f"{name}: wants dense {dtype} [{rows}]")
        arguments[name] = given
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    arguments |= {
        "logits": logits,
        "out": out,
        "values": torch.empty(rows, tile, dtype=torch.float32, device=logits.device) if narrows else None,
        "names": torch.empty(rows, tile, dtype=torch.int32, device=logits.device) if narrows else None,
        "logits_row": logits.stride(0),
        "vocabulary": vocabulary,
        "TILE": tile,
    }
    return out, Launch(draw_rows, (rows,), arguments, WARPS)
