"""Token masks of a round: bits from the matchers, applied to the logits.

`fill_masks` needs no logits and can run while the device computes them; `Masks.apply` waits only for the copy of its
bits. A row of 150 000 tokens is 19 KB of bits. `Vocabulary` is the tokenizer in the form that llguidance expects.
Control tokens and padding of the logits are not text: no constraint ever allows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

import numpy
import torch
from torch import Tensor

from weftline.engine.llm.grammar.matcher import Matcher
from weftline.errors import InputError, ModelError, StepError, WeftlineError, first_line

TASK_MIN = 4
"""Fewest matchers that are worth a task of their own for an executor."""
TASKS_MAX = 4


@dataclass(frozen=True, slots=True)
class Masks:
    """The masks of one round.

    rows:   those rows of the logits that are constrained, rising.
    bits:   int32 [rows, words] in host memory; bit i % 32 of word i // 32 says whether token i may come.
    size:   columns that the logits must have.
    taken:  how many of each sequence's drafts its grammar allows; one number for each entry of the list of matchers.
    failed: errors by index in the list of matchers; their rows are not constrained.
    """

    rows: tuple[int, ...]
    bits: Tensor
    size: int
    taken: tuple[int, ...] = ()
    failed: dict[int, WeftlineError] = field(default_factory=dict)

    def apply(self, logits: Tensor) -> None:
        """Set forbidden tokens of `logits` [rows, size] to -inf in place; any float dtype and device."""
        if not self.rows:
            return
        if logits.shape[1] != self.size:
            raise ValueError(f"logits with {logits.shape[1]} columns; the masks are for {self.size}")
        if logits.device.type == "cpu":
            forbidden = forbidden_here(self.bits)[:, : self.size]
        else:
            forbidden = forbidden_there(self.bits.to(logits.device, non_blocking=True))[:, : self.size]
        if len(self.rows) == logits.shape[0]:
            logits.masked_fill_(forbidden, -torch.inf)
        else:
            rows = torch.tensor(self.rows, device=logits.device)
            logits[rows] = logits[rows].masked_fill(forbidden, -torch.inf)


def forbidden_here(bits: Tensor) -> Tensor:
    """Unpack host `bits` to the forbidden tokens, bool [rows, 32 * words]."""
    inverse = numpy.invert(bits.numpy()).view(numpy.uint8)  # least significant byte first, as on all we run on
    return torch.from_numpy(numpy.unpackbits(inverse, axis=1, bitorder="little")).view(torch.bool)


def forbidden_there(bits: Tensor) -> Tensor:
    """Unpack `bits` on their device to the forbidden tokens, bool [rows, 32 * words]."""
    places = torch.arange(32, device=bits.device, dtype=torch.int32)
    return ((bits[:, :, None] >> places) & 1).eq(0).flatten(1)


def fill_masks(
    matchers: Sequence[Matcher | None],
    drafts: Sequence[Sequence[int]] = (),
    executor: Executor | None = None,
    tasks_max: int = TASKS_MAX,
    pinned: bool = False,
) -> Masks:
    """Compute the masks of a round without changing the matchers; errors are in `failed`.

    matchers: one for each sequence, None where it is not constrained.
    drafts:   the tokens each sequence is to be checked with, empty for none. A sequence with k drafts has k + 1 rows,
              one after the other: before the first draft, and after each. Rows after a draft that the grammar refuses
              allow everything: they are never reached.
    executor: threads to fill in, with at most `tasks_max` tasks at a time; None: here.
    pinned:   whether the bits lie in memory that a GPU can fetch by itself.
    """
    checked = drafts or [()] * len(matchers)
    ends = list(accumulate(1 + len(some) for some in checked))  # of each sequence's rows, constrained or not
    found = [(place, matcher) for place, matcher in enumerate(matchers) if matcher is not None]
    rows = [row for place, _ in found for row in range(ends[place] - 1 - len(checked[place]), ends[place])]
    words, size = (found[0][1].words, found[0][1].vocabulary) if found else (0, 0)
    bits = torch.empty((len(rows), words), dtype=torch.int32, pin_memory=pinned)
    jobs, at = [], 0
    for place, matcher in found:
        jobs.append(_Job(place, matcher, bits[at : at + 1 + len(checked[place])], checked[place]))
        at += 1 + len(checked[place])
    taken = [len(some) for some in checked]
    failed: dict[int, WeftlineError] = {}
    for place, outcome in _run(jobs, executor, tasks_max):
        taken[place] = outcome if isinstance(outcome, int) else 0
        if not isinstance(outcome, int):
            failed[place] = outcome
    return Masks(tuple(rows), bits, size, tuple(taken), failed)


def apply_masks(logits: Tensor, matchers: Sequence[Matcher | None]) -> dict[int, WeftlineError]:
    """Mask `logits` [len(matchers), vocabulary] in place; return the errors of failed rows.

    Rows without a matcher, and rows that failed, are left as they are.
    """
    masks = fill_masks(matchers, pinned=logits.device.type == "cuda")
    masks.apply(logits)
    return masks.failed


@dataclass(frozen=True, slots=True)
class _Job:
    place: int
    matcher: Matcher
    rows: Tensor
    drafts: Sequence[int]

    def fill(self) -> int:
        """Fill the rows, return the number of allowed draft tokens, and roll the matcher back."""
        taken = 0
        self.matcher.fill(self.rows[0])
        try:
            for token in self.drafts:
                if not self.matcher.accept(token):
                    break
                taken += 1
                self.matcher.fill(self.rows[taken])
        finally:
            self.matcher.rollback(taken)
        self.rows[taken + 1 :] = -1
        return taken


def _run(jobs: list[_Job], executor: Executor | None, tasks_max: int) -> Iterator[tuple[int, int | WeftlineError]]:
    width = max(TASK_MIN, -(-len(jobs) // tasks_max))
    slices = [jobs[at : at + width] for at in range(0, len(jobs), width)]
    if executor is None or len(slices) < 2:
        return chain.from_iterable(map(_fill_all, slices))
    return chain.from_iterable(executor.map(_fill_all, slices))


def _fill_all(jobs: list[_Job]) -> list[tuple[int, int | WeftlineError]]:
    outcomes: list[tuple[int, int | WeftlineError]] = []
    for job in jobs:
        try:
            outcomes.append((job.place, job.fill()))
        except Exception as error:  # must fail only its own sequence
            job.rows.fill_(-1)
            failure = (
                error if isinstance(error, InputError) else StepError(f"the constraint failed: {type(error).__name__}")
            )
            outcomes.append((job.place, failure))
    return outcomes


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
