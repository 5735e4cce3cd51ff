"""Tokenisation of texts: padded batches, and overlapping windows for long texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weftline.errors import MissingPackage, ModelError

FILE_BYTES_MAX = 64 << 20
"""Largest tokenizer.json taken; the largest multilingual ones are about 20 MB."""


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
    """A tokenizer of the `tokenizers` library with a limit on tokens, which it must not exceed: models have tables."""

    def __init__(self, tokenizer: Any, tokens_max: int, pad: int) -> None:
        self._tokenizer, self._tokens_max, self._pad = tokenizer, tokens_max, pad
        tokenizer.no_padding()

    def rows(self, texts: Sequence[str], windows_max: int = 1) -> Rows:
        """Return `texts` as rows: one for each, or for a long text up to `windows_max` that overlap by a quarter.

        What lies beyond the last window is left out.
        """
        stride = self._tokens_max // 4 if windows_max > 1 else 0
        self._tokenizer.enable_truncation(self._tokens_max, stride=stride)
        lists: list[list[int]] = []
        owner: list[int] = []
        for place, encoded in enumerate(self._tokenizer.encode_batch(list(texts))):
            windows = [encoded, *encoded.overflowing][:windows_max]
            lists += [window.ids or [self._pad] for window in windows]
            owner += [place] * len(windows)
        longest = max(map(len, lists), default=1)
        ids = np.full((len(lists), longest), self._pad, np.int64)
        mask = np.zeros((len(lists), longest), np.int64)
        for row, tokens in enumerate(lists):
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        return Rows(ids, mask, tuple(owner))


def load_tokenizer(folder: Path, shown: str) -> Any:
    """Return the tokenizer in `folder`/tokenizer.json; ModelError when it is missing or corrupt."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingPackage("tokenizers", "onnx") from None
    path = folder / "tokenizer.json"
    if not path.is_file() or path.stat().st_size > FILE_BYTES_MAX:
        raise ModelError(f"{shown} has no tokenizer.json of at most {FILE_BYTES_MAX} bytes")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{shown}/tokenizer.json is corrupt: {str(error).splitlines()[0]:.200}") from None
