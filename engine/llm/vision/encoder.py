"""Vision encoder of a model: features of pictures, and a round's inputs with them in place.

Features are computed when a round first needs them, in one call for pictures of one shape: those of the round, and
those of requests that wait. The inputs of the call were computed beside the rounds, by
`weftline.engine.llm.vision.reader`, and are dropped after it.

Features stay in the host's memory while a request with their picture lives: a preempted prompt is computed again from
them. They take a fraction of the memory of the same tokens' keys and values. Afterwards they go to the `FeatureCache`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weftline.engine.llm.attention import Span
from weftline.engine.llm.schedule import ScheduledChunk
from weftline.engine.llm.vision.families import Family
from weftline.engine.llm.vision.features import FeatureCache, FeatureKey
from weftline.engine.llm.vision.layout import ImageLayout
from weftline.engine.llm.vision.prompt import Inputs, Pixels, PromptImage, images_within, runs_at
from weftline.errors import LimitReached, ModelError
from weftline.nodes.out_of_memory import is_out_of_memory

IMAGES_PER_CALL_MAX = 8
"""Most pictures of one call of the vision encoder."""
FEATURES_PER_CALL_MAX = 8192
"""Most features of one call; one picture alone may have more."""
PROBE_PIXELS = 32
"""Side of the picture that is encoded when the model opens."""


@dataclass(slots=True, eq=False)
class _LiveImage:
    """A picture of live requests.

    pixels:     what is encoded; None afterwards.
    held_bytes: bytes of `pixels`.
    features:   [features, width] on the host; None before it is encoded.
    read:       a round has read its features.
    users:      ids of the requests.
    """

    image: PromptImage
    pixels: Pixels | None = None
    held_bytes: int = 0
    features: Tensor | None = None
    read: bool = False
    users: set[int] = field(default_factory=set)


class ImageEncoder:
    """Computes features with the vision part of `model`.

    process: returns the encoder's inputs of a picture, uint8 [H, W, 3], in a list.
    cache:   features of pictures that no live request has.
    calls:   calls of the vision encoder so far.   encoded: pictures in them.
    held_bytes: bytes of the inputs of pictures that are not encoded yet.
    """

    def __init__(
        self,
        model: Any,
        family: Family,
        process: Callable[[np.ndarray], Sequence[Inputs]],
        layout: ImageLayout,
        cache: FeatureCache,
    ) -> None:
        self.cache = cache
        self.calls = self.encoded = self.held_bytes = 0
        self._model = model
        self._family = family
        self._process = process
        self._layout = layout
        self._embedding = model.get_input_embeddings()
        self._live: dict[FeatureKey, _LiveImage] = {}
        self._keys: dict[int, list[FeatureKey]] = {}  # by request

    def hold(self, id: int, salt: bytes, images: Sequence[PromptImage]) -> None:
        """Add the pictures of a request: they may be encoded together with those of others."""
        self._keys[id] = [(salt, image.key) for image in images]
        for key, image in zip(self._keys[id], images, strict=True):
            live = self._live.get(key)
            if live is None:
                live = self._live[key] = self._to_live(key, image)
            live.users.add(id)

    def _to_live(self, key: FeatureKey, image: PromptImage) -> _LiveImage:
        features = self.cache.take(key)
        if features is not None or image.pixels is None:
            return _LiveImage(image.without_pixels(), features=features)
        held_bytes = image.pixels.nbytes(image.part)
        self.held_bytes += held_bytes
        return _LiveImage(image.without_pixels(), image.pixels, held_bytes)

    def release(self, id: int) -> None:
        """Remove the pictures of a request that has ended; features that no other one has go to the cache."""
        for key in self._keys.pop(id, ()):
            live = self._live.get(key)
            if live is None:  # it is twice in this request
                continue
            live.users.discard(id)
            if live.users:
                continue
            del self._live[key]
            self.held_bytes -= live.held_bytes
            if live.features is not None:
                self.cache.put(key, live.features)

    def knows(self, key: FeatureKey) -> bool:
        """Return whether a picture need not be processed: a live request has it, or its features are cached.

        May be called in any thread; the answer may change until `hold`.
        """
        return key in self._live or key in self.cache

    def forget(self) -> None:
        """Drop all features; there are no requests."""
        self.cache.clear()

    def shift(self, chunks: Sequence[ScheduledChunk], spans: Sequence[Span]) -> bool:
        """Set the shift of each chunk's span; return whether a chunk has features, so that it needs `inputs`."""
        if not self._family.rotary:
            return any(True for chunk in chunks for _ in _images_in(chunk))
        for chunk, span in zip(chunks, spans, strict=True):
            if any(True for _ in _images_in(chunk)):
                return True
            rotary = chunk.sequence.rotary
            span.shift = 0 if rotary is None else rotary.shift_at(chunk.start)
        return False

    def inputs(self, chunks: Sequence[ScheduledChunk], tokens: Sequence[int], places: Sequence[int]) -> dict[str, Any]:
        """Return the model's inputs for a round: tokens, or their embeddings where rows have features; positions."""
        device = self._embedding.weight.device
        ids = torch.tensor([tokens], device=device)
        positions = {"position_ids": self._positions(chunks, places, device)}
        needed = dict.fromkeys(key for chunk in chunks for key, _ in _images_in(chunk))
        if not needed:
            return {"input_ids": ids, **positions}
        features = self._features(needed)
        embedded = self._embedding(ids)
        row = 0
        for chunk in chunks:
            stop = chunk.start + chunk.count
            for key, image in _images_in(chunk):
                for part, first in image.within(chunk.start, stop):
                    at = row + part.start - chunk.start
                    embedded[0, at : at + len(part)] = features[key][first : first + len(part)].to(device)
            row += chunk.count
        return {"inputs_embeds": embedded, **positions}

    def figures(self) -> dict[str, float]:
        """Return counters and gauges under the names that the worker reports."""
        return {
            "image_encoder_calls_total": self.calls,
            "images_encoded_total": self.encoded,
            "image_cache_hits_total": self.cache.hits,
            "image_cache_bytes": self.cache.bytes_used,
        }

    @torch.inference_mode()
    def check(self) -> None:
        """Encode a small picture; ModelError when the model's parts disagree about the number of its features."""
        try:
            self._encode(*self._black(PROBE_PIXELS, PROBE_PIXELS))
        except ModelError:
            raise
        except Exception as error:  # whatever the model's code or its processor raises
            raise ModelError(f"its vision encoder cannot be run: {type(error).__name__}: {error!s:.200}") from error
        self.calls = self.encoded = 0

    @torch.inference_mode()
    def compute_largest(self, tokens_max: int) -> None:
        """Encode pictures of the largest size, as many as a call may have: their memory use can then be measured."""
        (image,), (inputs,) = self._black(*self._layout.largest(tokens_max))
        count = max(1, min(IMAGES_PER_CALL_MAX, FEATURES_PER_CALL_MAX // image.features))
        self._encode([image] * count, [inputs] * count)

    def _black(self, height: int, width: int) -> tuple[list[PromptImage], list[Inputs]]:
        tokens = self._layout.tokens_of(height, width)
        image = PromptImage(runs_at(range(len(tokens.tokens)), tokens), tokens.grid, b"")
        return [image], list(self._process(np.zeros((height, width, 3), np.uint8)))

    def _positions(self, chunks: Sequence[ScheduledChunk], places: Sequence[int], device: Any) -> Tensor:
        """Return int64 [1, rows], or [3, 1, rows] where a sequence has pictures with rows and columns."""
        if not any(chunk.sequence.rotary is not None for chunk in chunks):
            return torch.tensor([places], device=device)
        parts = []
        for chunk in chunks:
            rotary = chunk.sequence.rotary
            line = np.arange(chunk.start, chunk.start + chunk.count)
            parts.append(np.tile(line, (3, 1)) if rotary is None else rotary.rows(chunk.start, chunk.count))
        return torch.from_numpy(np.concatenate(parts, axis=1)).to(device)[:, None]

    def _features(self, needed: Mapping[FeatureKey, None]) -> dict[FeatureKey, Tensor]:
        """Return the features of each picture, encoding those that are not yet."""
        found: dict[FeatureKey, Tensor] = {}
        for key in needed:
            live = self._live[key]
            if live.features is None:
                self._encode_or_fewer(self._group(key, needed))
            if live.features is None:
                raise RuntimeError("a picture was not encoded")
            live.read = True
            found[key] = live.features
        return found

    def _group(self, first: FeatureKey, needed: Mapping[FeatureKey, None]) -> list[_LiveImage]:
        """Return pictures of one shape to encode in one call: `first`, other needed ones, then those that wait.

        Features that no round has read yet are limited like the cache.
        """
        ahead = self.cache.bytes_max - sum(
            live.features.nbytes for live in self._live.values() if live.features is not None and not live.read
        )
        group = [self._live[first]]
        features, shape = group[0].image.features, _shape(group[0].image)
        missing = [key for key, live in self._live.items() if live.features is None and key != first]
        for key in sorted(missing, key=lambda one: one not in needed):
            if len(group) == IMAGES_PER_CALL_MAX or (len(group) + 1) * features > FEATURES_PER_CALL_MAX:
                break
            live = self._live[key]
            if _shape(live.image) != shape:
                continue
            if key not in needed:
                ahead -= features * self._feature_bytes
                if ahead < 0:
                    break
            group.append(live)
        return group

    @property
    def _feature_bytes(self) -> int:
        return int(self._embedding.weight.shape[1]) * int(self._model.dtype.itemsize)

    def _encode_or_fewer(self, group: list[_LiveImage]) -> None:
        """Encode a group; where that fails, its first picture alone, which is needed."""
        if len(group) > 1:
            try:
                self._encode_live(group)
                return
            except Exception:
                group = group[:1]
        # Outside the handler, where nothing references the tensors of the failed call.
        try:
            self._encode_live(group)
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        raise LimitReached("out of memory: there is none for a picture of this request, alone in a call")

    def _encode_live(self, group: Sequence[_LiveImage]) -> None:
        """Encode a group and drop its inputs. They are computed here only where features were evicted meanwhile."""
        sources = [(live.pixels, live.image.part) for live in group if live.pixels is not None]
        encoded = self._encode([live.image for live in group], [pixels.inputs(part) for pixels, part in sources])
        for live, (pixels, part), features in zip(group, sources, encoded, strict=True):
            pixels.drop(part)
            self.held_bytes -= live.held_bytes
            live.pixels, live.held_bytes, live.features = None, 0, features

    def _encode(self, images: Sequence[PromptImage], inputs: Sequence[Inputs]) -> list[Tensor]:
        """Return the features of pictures of one shape, [features, width] each, on the host."""
        given = {name: torch.cat([one[name] for one in inputs]) for name in inputs[0]}
        out = self._model.get_image_features(**{name: self._to_device(value) for name, value in given.items()})
        found = list(_pooled(out))
        self.calls += 1
        self.encoded += len(images)
        for image, features in zip(images, found, strict=True):
            if features.shape[0] != image.features:
                sizes = f"{features.shape[0]} features, and the prompt {image.features} tokens for them"
                raise ModelError(f"a picture has {sizes}: config.json and the image processor's settings disagree")
        return [features.to("cpu", copy=True) for features in found]  # views of the call's tensor would keep all of it

    def _to_device(self, value: Tensor) -> Tensor:
        device = self._embedding.weight.device
        return value.to(device, self._model.dtype) if value.is_floating_point() else value.to(device)


def _images_in(chunk: ScheduledChunk) -> Iterator[tuple[FeatureKey, PromptImage]]:
    """Yield the pictures with features among a chunk's tokens."""
    sequence = chunk.sequence
    if chunk.start < sequence.prompt:
        for image in images_within(sequence.images, chunk.start, chunk.start + chunk.count):
            yield (sequence.own_salt, image.key), image


def _shape(image: PromptImage) -> tuple[int, int, tuple[int, int] | None]:
    return image.features, len(image.runs), image.grid


def _pooled(out: Any) -> Any:
    """Return the features of `get_image_features`, one tensor for each picture, in any version of transformers."""
    return getattr(out, "pooler_output", out)
