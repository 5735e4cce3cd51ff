"""Token masks of a round: bits from the matchers, applied to the logits.

`apply_masks` runs once the logits of the round exist. A row of 150 000 tokens is 19 KB of bits. `Vocabulary` is the
tokenizer in the form that llguidance expects. Control tokens and padding of the logits are not text: no constraint ever
allows them. Tokens of marks around tool calls and reasoning are allowed where a grammar refers to them by id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from weftline.engine.llm.answer_syntax import MARKS
from weftline.engine.llm.grammar.matcher import Matcher
from weftline.errors import InputError, ModelError, StepError, WeftlineError, first_line


def apply_masks(logits: Tensor, matchers: Sequence[Matcher | None]) -> dict[int, WeftlineError]:
    """Set forbidden tokens of `logits` [len(matchers), vocabulary] to -inf in place; return errors by row.

    The logits may have any float dtype and device. Rows without a matcher, and rows that failed, are left as they are.
    """
    found = [(row, matcher) for row, matcher in enumerate(matchers) if matcher is not None]
    if not found:
        return {}
    words, size = found[0][1].words, found[0][1].vocabulary
    if logits.shape[1] != size:
        raise ValueError(f"logits with {logits.shape[1]} columns; the masks are for {size}")
    bits = torch.empty((len(found), words), dtype=torch.int32, pin_memory=logits.device.type == "cuda")
    failed: dict[int, WeftlineError] = {}
    for (row, matcher), mask in zip(found, bits, strict=True):
        try:
            matcher.fill(mask)
        except Exception as error:  # must fail only its own sequence
            mask.fill_(-1)
            unexpected = StepError(f"the constraint failed: {type(error).__name__}")
            failed[row] = error if isinstance(error, InputError) else unexpected
    if logits.device.type == "cpu":
        forbidden = unpack_on_host(bits)[:, :size]
    else:
        forbidden = unpack_on_device(bits.to(logits.device, non_blocking=True))[:, :size]
    if len(found) == logits.shape[0]:
        logits.masked_fill_(forbidden, -torch.inf)
    else:
        rows = torch.tensor([row for row, _ in found], device=logits.device)
        logits[rows] = logits[rows].masked_fill(forbidden, -torch.inf)
    return failed


def unpack_on_host(bits: Tensor) -> Tensor:
    """Unpack host `bits` to the forbidden tokens, bool [rows, 32 * words]."""
    inverse = numpy.invert(bits.numpy()).view(numpy.uint8)  # least significant byte first, as on all we run on
    return torch.from_numpy(numpy.unpackbits(inverse, axis=1, bitorder="little")).view(torch.bool)


def unpack_on_device(bits: Tensor) -> Tensor:
    """Unpack `bits` on their device to the forbidden tokens, bool [rows, 32 * words]."""
    places = torch.arange(32, device=bits.device, dtype=torch.int32)
    return ((bits[:, :, None] >> places) & 1).eq(0).flatten(1)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokenizer tables for the parser.

    tokenizer: llguidance's.   size: columns of the logits.   words: 32-bit words of a mask's row.
    ends:      tokens that end a text.   silent: ids below `size` that are not text, `ends` among them.
    plain:     int32 [words], the bits of all text tokens.
    """

    tokenizer: Any
    size: int
    words: int
    ends: frozenset[int]
    silent: frozenset[int]
    plain: Tensor


def read_vocabulary(tokenizer: Any, size: int, ends: frozenset[int]) -> Vocabulary | ModelError:
    """Build the tokenizer's tables, or return an error; about a second for 150 000 tokens."""
    from llguidance.hf import from_tokenizer

    known = len(tokenizer)
    if not ends or max(ends) >= size:
        return ModelError("structured output: the model has no end-of-text token among its logits")
    try:
        made = from_tokenizer(tokenizer, n_vocab=max(known, size), eos_token=sorted(ends), slices=None)
        silent = {token for token in range(size) if token >= known or made.is_special_token(token)} | ends
        added = tokenizer.added_tokens_decoder.items()
        silent -= {token for token, one in added if one.content in MARKS and token not in ends}
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's own panics are no Exceptions
        return ModelError(f"structured output: the model's tokenizer cannot be used: {first_line(error):.200}")
    words = (max(known, size) + 31) // 32
    bits = torch.ones(words * 32, dtype=torch.bool)
    bits[sorted(silent)] = False
    bits[size:] = False
    weights = 1 << torch.arange(32, dtype=torch.int64)
    plain = (bits.view(words, 32) * weights).sum(dim=1).to(torch.int32)
    return Vocabulary(made, size, words, ends, frozenset(silent), plain)
