"""Positions of tokens in three dimensions (M-RoPE, Qwen2-VL, arXiv 2409.12191, section 2.1).

A text token has its position three times. A picture's tokens share a time, and each has its row and column:

    text  text  picture of 2 x 3 tokens          text
    0     1     2  2  2  2  2  2      (time)     5
    0     1     2  2  2  3  3  3      (row)      5       continues after the longer side: 2 + max(2, 3)
    0     1     2  3  4  2  3  4      (column)   5

A picture thus advances the position by less than its number of tokens; `shift` is the difference for all later ones.

The parts of a video follow each other in time, at distances of the model, and share rows and columns:

    video of 3 parts of 1 x 2 tokens, 2 apart          text
    2  2  4  4  6  6                          (time)   4
    2  2  2  2  2  2                          (row)    4
    2  3  2  3  2  3                          (column) 4

As in transformers' `generate` (5.23), the text continues after the longer side of a part, not after the video's time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weftline.engine.llm.vision.prompt import PromptImage


class RotaryPositions:
    """Positions of one sequence's tokens. shift: added to the index of each token behind the last picture."""

    def __init__(self, images: Sequence[PromptImage]) -> None:
        parts: list[np.ndarray] = []
        known = position = first = 0
        for image in images:
            rows, columns = image.grid or (1, image.features)
            if image.part == 0:
                parts.append(_line(position, image.start - known))
                first = position + image.start - known
            row, column = np.divmod(np.arange(rows * columns), columns)
            parts.append(first + np.stack([np.full_like(row, image.time), row, column]))
            known = image.start + rows * columns
            position = first + max(rows, columns)
        self._known = np.concatenate(parts, axis=1) if parts else np.zeros((3, 0), np.int64)
        self.shift = position - known

    def shift_at(self, start: int) -> int:
        """Return the difference of position and index of the text from token `start` to the next picture."""
        return self.shift if start >= self._known.shape[1] else int(self._known[0, start]) - start

    def rows(self, start: int, count: int) -> np.ndarray:
        """Return the positions of `count` tokens from `start` on, int64 [3, count]."""
        inside = self._known[:, start : start + count]
        first = start + inside.shape[1]
        return np.concatenate([inside, _line(first + self.shift, count - inside.shape[1])], axis=1)


def _line(first: int, count: int) -> np.ndarray:
    return np.broadcast_to(np.arange(first, first + count, dtype=np.int64), (3, count))
