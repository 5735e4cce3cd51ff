"""Tokens of texts, and what becomes of a text with more of them than a model reads.

Nothing is cut unless a step or a request asks for it (`Overflow`): a longer text is refused with its number of tokens,
loses tokens at one end, or becomes overlapping windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from weftline.errors import ContextOverflow, InputError
from weftline.nodes.contract import ConfigError

TEXT_CHARS_MAX = 4 << 20
"""Most characters of a text that is split into tokens: some seconds of work; books have fewer."""

SIDES = ("error", "end", "start")
"""Values of option `overflow`: a longer text is refused, or is cut at its end or its start."""

WINDOWS = "windows"
"""A further value of option `overflow`, where an answer about a text is one about its parts."""

Text = str | tuple[str, str]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Overflow:
    """Rule for a text that is longer than a limit.

    side:   one of SIDES.
    tokens: a limit below the model's; None: the model's.
    """

    side: str = "error"
    tokens: int | None = None


def check_overflow(overflow: str, known: Sequence[str] = SIDES) -> None:
    """Raise ConfigError unless option `overflow` is one of `known`."""
    if overflow not in known:
        raise ConfigError("overflow", f"{overflow!r:.40}", f"one of {', '.join(known)}")


def read_overflow(value: Any, default: Overflow) -> Overflow | InputError:
    """Return the rule in a request's input `overflow`: one of SIDES, or {side, tokens}; None: the default.

    Returns an InputError where it is neither.
    """
    if value is None:
        return default
    stated = value if isinstance(value, Mapping) else {"side": value}
    side, tokens = stated.get("side", "end"), stated.get("tokens")
    if side not in SIDES or set(stated) - {"side", "tokens"}:
        expected = f"expected one of {', '.join(SIDES)}, or an object with side and tokens"
        return InputError(f"overflow: found {value!r:.60}, {expected}", param="overflow")
    if tokens is not None and (type(tokens) is not int or tokens < 1):
        return InputError(f"overflow.tokens: found {tokens!r:.40}, expected a count from 1", param="overflow")
    return Overflow(side, tokens)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text, or a pair of texts, as a model reads it.

    ids, types: token ids and token types, special tokens included.
    tokens:     number of tokens of the whole text; those beyond `ids` were cut.
    """

    ids: Sequence[int]
    types: Sequence[int]
    tokens: int

    @property
    def cut(self) -> int:
        return max(self.tokens - len(self.ids), 0)


def usage_of(encoded: Sequence[Encoded]) -> dict[str, int]:
    """Return the value of an output `usage`: tokens that the model reads, and those that were cut."""
    return {
        "prompt_tokens": sum(len(one.ids) for one in encoded),
        "truncated_tokens": sum(one.cut for one in encoded),
    }


USAGE_ABOUT = "prompt_tokens: tokens that the model read; truncated_tokens: those that were cut"
TOKENS_ABOUT = "token ids of the model in place of the text, read as they are: no prefix, no special tokens are added"
OVERFLOW_ABOUT = "instead of the option: error, end, start, or an object with side and tokens, the number that is kept"


@dataclass(frozen=True, slots=True)
class Rows:
    """Padded rows. ids, mask: int64 [rows, tokens], mask 1 at real tokens. owner: which text each row belongs to."""

    ids: np.ndarray
    mask: np.ndarray
    owner: tuple[int, ...]

    def part(self, start: int, end: int) -> Rows:
        """Return the rows from `start` to before `end`."""
        return Rows(self.ids[start:end], self.mask[start:end], self.owner[start:end])


class TextTokens:
    """A tokenizer of the `tokenizers` library with the model's limit on tokens.

    tokens_max: most tokens of a text or a pair of texts, special tokens included.
    pad:        the padding token.
    types:      the model's inputs have token_type_ids.
    """

    def __init__(self, tokenizer: Any, tokens_max: int, pad: int, types: bool = False) -> None:
        self._tokenizer, self._tokens_max, self.pad, self.types = tokenizer, tokens_max, pad, types
        tokenizer.no_padding()

    def encode(self, texts: Sequence[Text], overflows: Sequence[Overflow | InputError]) -> list[Encoded | InputError]:
        """Return the tokens of each text, or the error of one that is too long, by the rule for each.

        A pair of texts is cut token by token in its longer text. An error instead of a rule is returned.
        """
        overflows = [_too_many_chars(text) or one for text, one in zip(texts, overflows, strict=True)]
        texts = ["" if isinstance(one, InputError) else text for text, one in zip(texts, overflows)]
        self._tokenizer.no_truncation()
        whole = self._tokenizer.encode_batch(list(texts))
        return [self._fitted(*one) for one in zip(texts, whole, overflows, strict=True)]

    def from_ids(self, ids: Any, overflow: Overflow | InputError) -> Encoded | InputError:
        """Return token ids of a request as an encoded text, cut by the rule, or the error that refuses them."""
        if isinstance(overflow, InputError):
            return overflow
        limit = self._limit(overflow)
        if isinstance(limit, InputError):
            return limit
        vocabulary = self._tokenizer.get_vocab_size()
        if not isinstance(ids, list) or not ids:
            return InputError(f"tokens: found {ids!r:.40}, expected a list of token ids", param="tokens")
        for place, one in enumerate(ids):
            if type(one) is not int or not 0 <= one < vocabulary:
                found = f"found {one!r:.40} at {place}, expected token ids of the model, 0 to {vocabulary - 1}"
                return InputError(f"tokens: {found}; send text, or ids of its own tokenizer", param="tokens")
        if len(ids) > limit and overflow.side == "error":
            return too_long(len(ids), limit)
        kept = ids[-limit:] if overflow.side == "start" else ids[:limit]
        return Encoded(kept, [0] * len(kept), len(ids))

    def windows(self, texts: Sequence[str]) -> Rows:
        """Return all of each text as rows: one, or for a long text several that overlap by a quarter."""
        self._tokenizer.enable_truncation(self._tokens_max, stride=self._tokens_max // 4)
        lists: list[list[int]] = []
        owner: list[int] = []
        for place, encoded in enumerate(self._tokenizer.encode_batch(list(texts))):
            windows = [encoded, *encoded.overflowing]
            lists += [window.ids or [self.pad] for window in windows]
            owner += [place] * len(windows)
        return Rows(*pad_rows(lists, self.pad), tuple(owner))

    def rows(self, encoded: Sequence[Encoded]) -> Rows:
        """Return encoded texts as rows, one for each."""
        return Rows(*pad_rows([one.ids for one in encoded], self.pad), tuple(range(len(encoded))))

    def _fitted(self, text: Text, whole: Any, overflow: Overflow | InputError) -> Encoded | InputError:
        if isinstance(overflow, InputError):
            return overflow
        tokens, limit = len(whole.ids), self._limit(overflow)
        if isinstance(limit, InputError):
            return limit
        if tokens > limit and overflow.side == "error":
            return too_long(tokens, limit, "pair" if isinstance(text, tuple) else "text")
        if tokens > limit:
            direction = "left" if overflow.side == "start" else "right"
            self._tokenizer.enable_truncation(limit, strategy="longest_first", direction=direction)
            whole = self._tokenizer.encode(*text) if isinstance(text, tuple) else self._tokenizer.encode(text)
            if len(whole.ids) > limit:  # the library cuts nothing then
                return InputError(f"overflow.tokens: found {limit}, fewer than the special tokens", param="overflow")
        return Encoded(whole.ids or [self.pad], whole.type_ids or [0], tokens)

    def _limit(self, overflow: Overflow) -> int | InputError:
        """Return the most tokens of a text by a rule: the rule's own, or the model's."""
        if overflow.tokens is not None and overflow.tokens > self._tokens_max:
            found = f"found {overflow.tokens}, expected at most {self._tokens_max}, the limit of the model"
            return InputError(f"overflow.tokens: {found}", param="overflow")
        return overflow.tokens or self._tokens_max


def _too_many_chars(text: Text) -> InputError | None:
    chars = len(text) if isinstance(text, str) else sum(map(len, text))
    if chars <= TEXT_CHARS_MAX:
        return None
    return InputError(f"the text has {chars} characters, and at most {TEXT_CHARS_MAX} are accepted; split it")


def too_long(tokens: int, limit: int, what: str = "text") -> InputError:
    """Return the error for a text that has more tokens than a model reads."""
    return ContextOverflow(
        f"the {what} has {tokens} tokens, and the model reads at most {limit}\n"
        "    fix: shorten or split it, or set `overflow: end` to cut it, or for classifications `windows` to read all"
    )


def of_fitting(
    encoded: Sequence[Encoded | InputError], compute: Callable[[list[Encoded]], Sequence[Result]]
) -> list[Result | InputError]:
    """Return the results of `compute` for the texts that fit, called once if there are any; else their errors."""
    fitting = [one for one in encoded if isinstance(one, Encoded)]
    results = iter(compute(fitting) if fitting else ())
    return [one if isinstance(one, InputError) else next(results) for one in encoded]


def pad_rows(lists: Sequence[Sequence[int]], pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Return lists as int64 [rows, tokens], padded at their ends, and the mask: 1 at tokens, 0 at padding."""
    longest = max(map(len, lists), default=1)
    ids = np.full((len(lists), longest), pad, np.int64)
    mask = np.zeros((len(lists), longest), np.int64)
    for row, tokens in enumerate(lists):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
    return ids, mask
