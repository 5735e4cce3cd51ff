"""Pictures and videos inside a prompt's tokens.

A chat template writes one placeholder token for each picture. `expand` replaces it by the tokens that the picture takes
up, and returns where the features of the vision encoder go:

    rendered   [user, <image>, what, is, it]
    expanded   [user, <image>, <image>, <image>, <image>, what, is, it]      runs: [range(1, 5)]

A picture of several tiles has a run for each. A video is a sequence of pictures, its parts: the encoder computes each
by itself, so that a long video needs no more memory in a call. Nothing here imports a framework.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The tokens of one picture in a prompt.

    tokens: all of them.
    runs:   which of them have features, as ranges of indices in `tokens`.
    grid:   rows and columns of the features of a picture, or of each run of a video, for positions in three dimensions;
            None without.
    """

    tokens: tuple[int, ...]
    runs: tuple[range, ...]
    grid: tuple[int, int] | None = None


Inputs = Mapping[str, Any]
"""Inputs of the vision encoder for one picture, by name: tensors with a leading axis to join them at."""


class Pixels:
    """A picture, uint8 [H, W, 3], or the frames of a video, [N, H, W, 3], until the vision encoder has read them.

    process: returns the encoder's inputs of the picture, or of each part of the video.
    parts:   how many there are.
    """

    def __init__(self, pixels: np.ndarray, process: Callable[[np.ndarray], Sequence[Inputs]], parts: int = 1) -> None:
        self._pixels: np.ndarray | None = pixels
        self._process = process
        self._parts: list[Inputs] = []
        self._count = parts

    def inputs(self, part: int = 0) -> Inputs:
        """Return the encoder's inputs of a part; the first call computes all of them and drops the pixels."""
        if self._pixels is not None:
            self._parts = list(self._process(self._pixels))
            self._pixels = None
        return self._parts[part]

    def drop(self, part: int = 0) -> None:
        """Drop the inputs of a part that is encoded."""
        self._parts[part] = {}

    def nbytes(self, part: int = 0) -> int:
        """Return the bytes that are kept for a part."""
        if self._pixels is not None:
            return self._pixels.nbytes // self._count
        return sum(one.nbytes for one in self._parts[part].values())


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """A picture of a prompt, or a part of a video.

    runs:   ranges of prompt tokens that have its features, in order.
    grid:   rows and columns of its features, for positions in three dimensions; None without.
    key:    hash of its pixels and of the settings that process them.
    pixels: what is encoded; None once the encoder holds it.
    part:   its number in the video; 0 for a picture.
    time:   its position in time, after that of the video's first part.
    """

    runs: tuple[range, ...]
    grid: tuple[int, int] | None
    key: bytes
    pixels: Pixels | None = None
    part: int = 0
    time: int = 0

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


def expand(ids: Sequence[int], items: Mapping[int, Sequence[ImageTokens]]) -> tuple[list[int], dict[int, list[range]]]:
    """Return the prompt with each placeholder replaced by its tokens, and the ranges of these by placeholder.

    items: the tokens of each occurrence of a placeholder, in order.

    ValueError: a placeholder occurs more or less often.
    """
    for placeholder, own in items.items():
        if (found := sum(token == placeholder for token in ids)) != len(own):
            raise ValueError(f"{found} placeholders for {len(own)} pictures or videos")
    following = {placeholder: iter(own) for placeholder, own in items.items()}
    spans: dict[int, list[range]] = {placeholder: [] for placeholder in items}
    tokens: list[int] = []
    for token in ids:
        if token not in following:
            tokens.append(token)
            continue
        one = next(following[token]).tokens
        spans[token].append(range(len(tokens), len(tokens) + len(one)))
        tokens += one
    return tokens, spans


def runs_at(span: range, tokens: ImageTokens) -> tuple[range, ...]:
    """Return the ranges of prompt tokens with features, of tokens at `span` of the prompt."""
    return tuple(range(span.start + run.start, span.start + run.stop) for run in tokens.runs)


def content_key(pixels: np.ndarray, settings: bytes) -> bytes:
    """Return the SHA-256 of a picture's pixels and of the settings that process them."""
    found = hashlib.sha256(settings)
    found.update(repr(pixels.shape).encode())
    found.update(np.ascontiguousarray(pixels).data)
    return found.digest()


def images_within(images: Sequence[PromptImage], start: int, stop: int) -> Iterator[PromptImage]:
    """Yield the pictures with features among the tokens from `start` to before `stop`; `images` are in order."""
    for at in range(bisect_right(images, start, key=lambda image: image.stop), len(images)):
        if images[at].start >= stop:
            return
        if images[at].overlaps(start, stop):
            yield images[at]


def page_key(images: Sequence[PromptImage], start: int, stop: int) -> bytes:
    """Return what a page's key has besides its tokens: the pictures whose features are in it; b'' for none."""
    inside = images_within(images, start, stop)
    return b"".join(image.key + f"{image.start}:{image.stop}:{image.time};".encode() for image in inside)
