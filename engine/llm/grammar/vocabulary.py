"""Tokenizer vocabulary in the form that llguidance expects.

Control tokens and the padding of the logits are no text: no constraint ever allows them, whatever it says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weftline.errors import ModelError


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as the parser knows it.

    tokenizer: llguidance's.   size: columns of the logits.   words: 32-bit words of a mask's row.
    ends:      tokens that end a text.   silent: ids below `size` that are no text, `ends` among them.
    plain:     int32 [words], the bits of all that are.
    """

    tokenizer: Any
    size: int
    words: int
    ends: frozenset[int]
    silent: frozenset[int]
    plain: Tensor


def read_vocabulary(tokenizer: Any, size: int, ends: frozenset[int]) -> Vocabulary | ModelError:
    """Return the tokenizer's tables, or why there are none; about a second for 150 000 tokens."""
    from llguidance.hf import from_tokenizer

    known = len(tokenizer)
    if not ends or max(ends) >= size:
        return ModelError("structured output: the model has no end-of-text token among its logits")
    try:
        made = from_tokenizer(tokenizer, n_vocab=max(known, size), eos_token=sorted(ends), slices=None)
        silent = {token for token in range(size) if token >= known or made.is_special_token(token)} | ends
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's own panics are no Exceptions
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return ModelError(f"structured output: the model's tokenizer cannot be used: {reason:.200}")
    words = (max(known, size) + 31) // 32
    bits = torch.ones(words * 32, dtype=torch.bool)
    bits[sorted(silent)] = False
    bits[size:] = False
    weights = 1 << torch.arange(32, dtype=torch.int64)
    plain = (bits.view(words, 32) * weights).sum(dim=1).to(torch.int32)
    return Vocabulary(made, size, words, ends, frozenset(silent), plain)
