"""Cache of image features by content, within a limit of bytes; least recently used ones are evicted first.

It has the features of pictures that no request uses now: those of live requests belong to the encoder.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

FeatureKey = tuple[bytes, bytes]
"""The caller's salt and the picture's key: timing reveals nothing about another caller's pictures."""


@dataclass(slots=True)
class FeatureCache:
    """bytes_max: most bytes of all entries; a larger entry is not kept. hits, misses: look-ups so far."""

    bytes_max: int
    bytes_used: int = 0
    hits: int = 0
    misses: int = 0
    _entries: OrderedDict[FeatureKey, Any] = field(default_factory=OrderedDict)

    def __contains__(self, key: FeatureKey) -> bool:
        return key in self._entries

    def take(self, key: FeatureKey) -> Any | None:
        """Remove and return the features of a picture, or None; counts the look-up."""
        found = self._entries.pop(key, None)
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        self.bytes_used -= found.nbytes
        return found

    def put(self, key: FeatureKey, features: Any) -> None:
        """Add features (a tensor) as the most recently used ones, evicting others as needed."""
        if features.nbytes > self.bytes_max or key in self._entries:
            return
        while self.bytes_used + features.nbytes > self.bytes_max:
            _, old = self._entries.popitem(last=False)
            self.bytes_used -= old.nbytes
        self._entries[key] = features
        self.bytes_used += features.nbytes

    def clear(self) -> None:
        self._entries.clear()
        self.bytes_used = 0
