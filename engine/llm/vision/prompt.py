"""Pictures inside a prompt's tokens.

A chat template writes one placeholder token for each picture. `expand` replaces it by the tokens that the picture takes
up, and returns where the features of the vision encoder go:

    rendered   [user, <image>, what, is, it]
    expanded   [user, <image>, <image>, <image>, <image>, what, is, it]      runs: [range(1, 5)]

A picture of several tiles has a run for each. Nothing here imports a framework.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The tokens of one picture in a prompt.

    tokens: all of them.
    runs:   which of them have features, as ranges of indices in `tokens`.
    grid:   rows and columns of the features, for positions in three dimensions; None without.
    """

    tokens: tuple[int, ...]
    runs: tuple[range, ...]
    grid: tuple[int, int] | None = None


class Pixels:
    """A picture for the vision encoder: its pixels, uint8 [H, W, 3], then what the image processor makes of them.

    process: returns the encoder's inputs by name, as tensors.
    """

    def __init__(self, pixels: np.ndarray, process: Callable[[np.ndarray], Mapping[str, Any]]) -> None:
        self._pixels: np.ndarray | None = pixels
        self._process = process
        self._inputs: Mapping[str, Any] = {}

    def inputs(self) -> Mapping[str, Any]:
        """Return the encoder's inputs; the first call computes them and drops the pixels."""
        if self._pixels is not None:
            self._inputs = self._process(self._pixels)
            self._pixels = None
        return self._inputs

    @property
    def nbytes(self) -> int:
        """Return the bytes of what is kept."""
        return self._pixels.nbytes if self._pixels is not None else sum(one.nbytes for one in self._inputs.values())


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """A picture of a prompt.

    runs:   ranges of prompt tokens that have its features, in order.
    grid:   rows and columns of its features, for positions in three dimensions; None without.
    key:    hash of its pixels and of the settings that process them.
    pixels: what is encoded; None once the encoder holds it.
    """

    runs: tuple[range, ...]
    grid: tuple[int, int] | None
    key: bytes
    pixels: Pixels | None = None

    @property
    def start(self) -> int:
        """Return the index of its first token with features."""
        return self.runs[0].start

    @property
    def stop(self) -> int:
        """Return the index behind its last token with features."""
        return self.runs[-1].stop

    @property
    def features(self) -> int:
        """Return the number of its tokens with features."""
        return sum(map(len, self.runs))

    def without_pixels(self) -> PromptImage:
        """Return the same picture without what is encoded."""
        return replace(self, pixels=None)

    def within(self, start: int, stop: int) -> Iterator[tuple[range, int]]:
        """Yield the prompt tokens from `start` to before `stop` that have features, and the number of the first one."""
        done = 0
        for run in self.runs:
            part = range(max(run.start, start), min(run.stop, stop))
            if part:
                yield part, done + part.start - run.start
            done += len(run)

    def overlaps(self, start: int, stop: int) -> bool:
        """Return whether a token from `start` to before `stop` has features of the picture."""
        return any(True for _ in self.within(start, stop))


def expand(ids: Sequence[int], placeholder: int, images: Sequence[ImageTokens]) -> tuple[list[int], list[range]]:
    """Return the prompt with each placeholder replaced by its picture's tokens, and where each picture is.

    ValueError: another number of placeholders than of pictures.
    """
    found = sum(token == placeholder for token in ids)
    if found != len(images):
        raise ValueError(f"{found} placeholders for {len(images)} pictures")
    following = iter(images)
    tokens: list[int] = []
    spans: list[range] = []
    for token in ids:
        if token != placeholder:
            tokens.append(token)
            continue
        own = next(following).tokens
        spans.append(range(len(tokens), len(tokens) + len(own)))
        tokens += own
    return tokens, spans


def to_prompt_image(span: range, tokens: ImageTokens, pixels: Pixels, key: bytes) -> PromptImage:
    """Return a picture at `span` of a prompt."""
    runs = tuple(range(span.start + run.start, span.start + run.stop) for run in tokens.runs)
    return PromptImage(runs, tokens.grid, key, pixels)


def content_key(pixels: np.ndarray, settings: bytes) -> bytes:
    """Return the SHA-256 of a picture's pixels and of the settings that process them."""
    found = hashlib.sha256(settings)
    found.update(repr(pixels.shape).encode())
    found.update(np.ascontiguousarray(pixels).data)
    return found.digest()


def page_key(images: Sequence[PromptImage], start: int, stop: int) -> bytes:
    """Return what a page's key has besides its tokens: the pictures whose features are in it; b'' for none."""
    inside = [image for image in images if image.overlaps(start, stop)]
    return b"".join(image.key + f"{image.start}:{image.stop};".encode() for image in inside)
