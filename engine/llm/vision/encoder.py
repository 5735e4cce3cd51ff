"""Vision encoder of a model: features of pictures, and a round's inputs with them in place.

Features are computed when a round first needs them, in one call for pictures of one shape: those of the round, and
those of requests that wait. They stay in the host's memory (`FeatureCache`), those of a picture that is read in several
rounds until its last one. A picture whose features were evicted, as may happen before a preempted prompt is computed
again, is encoded again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weftline.engine.llm.attention import Span
from weftline.engine.llm.schedule import ScheduledChunk
from weftline.engine.llm.vision.families import Family
from weftline.engine.llm.vision.features import FeatureCache, FeatureKey
from weftline.engine.llm.vision.layout import ImageLayout
from weftline.engine.llm.vision.prompt import PromptImage, to_prompt_image
from weftline.errors import LimitReached, ModelError
from weftline.nodes.out_of_memory import is_out_of_memory

IMAGES_PER_CALL_MAX = 8
"""Most pictures of one call of the vision encoder."""
FEATURES_PER_CALL_MAX = 8192
"""Most features of one call; one picture alone may have more."""
PROBE_PIXELS = 32
"""Side of the picture that is encoded when the model opens."""


class ImageEncoder:
    """Computes features with the vision part of `model`.

    processor: transformers' image processor.   cache: its entries are tensors on the host.
    calls:     calls of the vision encoder so far.   encoded: pictures in them.
    """

    def __init__(self, model: Any, family: Family, processor: Any, layout: ImageLayout, cache: FeatureCache) -> None:
        self.cache = cache
        self.calls = self.encoded = 0
        self._model = model
        self._family = family
        self._processor = processor
        self._layout = layout
        self._embedding = model.get_input_embeddings()
        self._pending: dict[FeatureKey, tuple[int, PromptImage]] = {}  # of live requests, not encoded yet
        self._held: dict[int, int] = {}  # bytes of the pixels of each live request
        self._partial: dict[FeatureKey, tuple[int, Tensor]] = {}  # request and features of pictures read in part

    def hold(self, id: int, salt: bytes, images: Sequence[PromptImage]) -> None:
        """Announce the pictures of a request: they may be encoded together with those of others."""
        self._held[id] = sum(image.pixels.nbytes for image in images)
        for image in images:
            self._pending.setdefault((salt, image.key), (id, image))

    def release(self, id: int) -> None:
        """Forget the pictures of a request that has ended."""
        self._held.pop(id, None)
        self._pending = {key: one for key, one in self._pending.items() if one[0] != id}
        self._partial = {key: one for key, one in self._partial.items() if one[0] != id}

    def held_bytes(self) -> int:
        """Return the bytes of the pixels of live requests."""
        return sum(self._held.values())

    def forget(self) -> None:
        """Drop all features."""
        self.cache.clear()
        self._partial.clear()

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
        needed = {key: image for chunk in chunks for key, image in _images_in(chunk)}
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
                if image.stop > stop:  # its next chunk needs them, also where the cache is too small
                    self._partial[key] = (chunk.sequence.id, features[key])
                else:
                    self._partial.pop(key, None)
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
            self._encode([self._black(PROBE_PIXELS, PROBE_PIXELS)])
        except ModelError:
            raise
        except Exception as error:  # whatever the model's code or its processor raises
            raise ModelError(f"its vision encoder cannot be run: {type(error).__name__}: {error!s:.200}") from error
        self.calls = self.encoded = 0

    @torch.inference_mode()
    def compute_largest(self, tokens_max: int) -> None:
        """Encode pictures of the largest size, as many as a call may have: their memory use can then be measured."""
        one = self._black(*self._layout.largest(tokens_max))
        self._encode([one] * max(1, min(IMAGES_PER_CALL_MAX, FEATURES_PER_CALL_MAX // one.features)))

    def _black(self, height: int, width: int) -> PromptImage:
        tokens = self._layout.tokens_of(height, width)
        return to_prompt_image(range(len(tokens.tokens)), tokens, np.zeros((height, width, 3), np.uint8), b"")

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

    def _features(self, needed: dict[FeatureKey, PromptImage]) -> dict[FeatureKey, Tensor]:
        """Return the features of each picture, encoding those that are not cached."""
        found: dict[FeatureKey, Tensor] = {}
        missing: dict[FeatureKey, PromptImage] = {}
        for key, image in needed.items():
            features = self._partial[key][1] if key in self._partial else self.cache.get(key)
            if features is None:
                missing[key] = image
            else:
                found[key] = features
        while missing:
            group = self._group(missing)
            for key, features in zip(group, self._encode_or_fewer(group, missing), strict=False):
                self._pending.pop(key, None)
                self.cache.put(key, features)
                if key in needed:
                    found[key] = features
                    missing.pop(key)
        return found

    def _group(self, missing: dict[FeatureKey, PromptImage]) -> dict[FeatureKey, PromptImage]:
        """Return pictures of one shape to encode in one call: missing ones first, then those of waiting requests."""
        first = next(iter(missing.values()))
        waiting = ((key, image) for key, (_, image) in self._pending.items() if key not in self.cache)
        group: dict[FeatureKey, PromptImage] = {}
        most = max(first.features, min(FEATURES_PER_CALL_MAX, self.cache.bytes_max // self._feature_bytes))
        for key, image in (*missing.items(), *waiting):
            if len(group) == IMAGES_PER_CALL_MAX or (len(group) + 1) * first.features > most:
                break
            if _shape(image) == _shape(first):
                group[key] = image
        return group

    @property
    def _feature_bytes(self) -> int:
        return int(self._embedding.weight.shape[1]) * int(self._model.dtype.itemsize)

    def _encode_or_fewer(
        self, group: dict[FeatureKey, PromptImage], missing: dict[FeatureKey, PromptImage]
    ) -> list[Tensor]:
        """Encode a group; where that fails, its first picture alone, which is a missing one."""
        images = list(group.values())
        if len(images) > 1:
            try:
                return self._encode(images)
            except Exception:
                images = images[:1]
        # Outside the handler, where nothing references the tensors of the failed call.
        try:
            return self._encode(images)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        raise LimitReached("out of memory: there is none for a picture of this request, alone in a call")

    def _encode(self, images: Sequence[PromptImage]) -> list[Tensor]:
        """Return the features of pictures of one shape, [features, width] each, on the host."""
        processed = [self._process(image.pixels) for image in images]
        given = {name: torch.cat([one[name] for one in processed]) for name in processed[0]}
        out = self._model.get_image_features(**{name: self._to_device(value) for name, value in given.items()})
        found = list(_pooled(out))
        self.calls += 1
        self.encoded += len(images)
        for image, features in zip(images, found, strict=True):
            if features.shape[0] != image.features:
                sizes = f"{features.shape[0]} features, and the prompt {image.features} tokens for them"
                raise ModelError(f"a picture has {sizes}: config.json and the image processor's settings disagree")
        return [features.to("cpu", copy=True) for features in found]  # views of the call's tensor would keep all of it

    def _process(self, pixels: np.ndarray) -> dict[str, Tensor]:
        """Return the model's inputs for one picture, each with a leading axis to join them at."""
        found = self._processor(images=[torch.tensor(pixels)], input_data_format="channels_last", return_tensors="pt")
        names = ("pixel_values", "image_grid_thw", "pixel_attention_mask")
        return {name: found[name] for name in names if name in found}

    def _to_device(self, value: Tensor) -> Tensor:
        device = self._embedding.weight.device
        return value.to(device, self._model.dtype) if value.is_floating_point() else value.to(device)


def _images_in(chunk: ScheduledChunk) -> Iterator[tuple[FeatureKey, PromptImage]]:
    """Yield the pictures with features among a chunk's tokens."""
    sequence = chunk.sequence
    if chunk.start < sequence.prompt:
        for image in sequence.images:
            if image.overlaps(chunk.start, chunk.start + chunk.count):
                yield (sequence.own_salt, image.key), image


def _shape(image: PromptImage) -> tuple[int, int, tuple[int, int] | None]:
    return image.features, len(image.runs), image.grid


def _pooled(out: Any) -> Any:
    """Return the features of `get_image_features`, one tensor for each picture, in any version of transformers."""
    return getattr(out, "pooler_output", out)
