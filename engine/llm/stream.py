"""One answer's tokens, turned into text piece by piece.

A token need not be whole characters, and the last characters so far may be the beginning of a stop string. Both are
held back until the next tokens decide; what was given out is never taken back, and all pieces together are the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What decoders give for the first bytes of a character whose other bytes are still to come."""
_UNFINISHED_TOKENS_MAX = 8
"""After so many tokens the bytes will never become a character; the longest one has 4."""


class TextStream:
    """Turns tokens into pieces of text, ending before the first of the `stop` strings. `decode` takes token ids."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._before = ""  # the text of _ids up to _read: decoded again with each new token, since neighbours matter
        self._read = 0
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Return the text that `token` settles; empty while it, or the end of what came before, is held back."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(_UNFINISHED) and len(self._ids) - self._read < _UNFINISHED_TOKENS_MAX:
            return ""
        return self._settle(self._take(text), final=False)

    def finish(self) -> str:
        """Return what was held back: the answer has ended."""
        if self.stopped:
            return ""
        return self._settle(self._take(self._decode(self._ids)), final=True)

    def _take(self, text: str) -> str:
        """Return what `text`, that of all kept ids, adds to what was taken; keep only the newest ids as context."""
        new = text[len(self._before) :]
        self._ids = self._ids[self._read :]
        self._before = self._decode(self._ids)
        self._read = len(self._ids)
        return new

    def _settle(self, new: str, final: bool) -> str:
        text = self._held + new
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = 0 if final else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` could be the beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
