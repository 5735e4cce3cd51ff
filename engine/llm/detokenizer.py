"""Incremental detokenisation of one sequence.

A token need not be whole characters, and the last characters so far may be the beginning of a stop string. Both are
held back until the next tokens decide; returned text is never revised, and all parts together are the text.

Each token is decoded once. Where a token is the same bytes wherever it stands, its bytes come from a table
(`BytesDecoder`: byte-level BPE, and SentencePiece with byte fallback). Every other tokenizer decodes a new token
together with the one before (`WindowDecoder`).
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Decoders' output for an incomplete character."""
_UNFINISHED_TOKENS_MAX = 8
"""Tokens after which incomplete bytes are final; the longest character has 4 bytes."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's space."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Decoder(Protocol):
    """Incremental decoding of one answer: `push` returns the text that a token settles, `finish` what is left."""

    def push(self, token: int) -> str: ...

    def finish(self) -> str: ...


@dataclass(frozen=True, slots=True)
class TokenName:
    """Name of a token in lists of log-probabilities.

    text: its text; bytes that are no character by themselves are written as \\xf0; of a control token its name.
    data: its bytes; None for a control token that is left out of texts.
    """

    text: str
    data: bytes | None


class TokenTexts(dict[int, str | bytes]):
    """Each token's own text by id, looked up once: a str, or bytes where it is not valid UTF-8 by itself.

    strips: one leading space of a text is removed.
    """

    def __init__(self, spell: Callable[[int], bytes], strips: bool = False) -> None:
        super().__init__()
        self._spell = spell
        self.strips = strips

    def __missing__(self, token: int) -> str | bytes:
        spelled = self._spell(token)
        try:
            text: str | bytes = spelled.decode()
        except UnicodeDecodeError:
            text = spelled
        self[token] = text
        return text


class BytesDecoder:
    """Decodes tokens that stand for the same bytes everywhere; bytes that cannot become a character are U+FFFD."""

    __slots__ = ("_held", "_strips", "_texts")

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._strips = texts.strips
        self._held = b""  # the beginning of a character

    def push(self, token: int) -> str:
        text = self._texts[token]
        if text.__class__ is not str or self._held:
            text = self._join(text.encode() if isinstance(text, str) else text, final=False)
        return self._strip(text) if self._strips and text else text

    def bytes_of(self, token: int) -> bytes:
        text = self._texts[token]
        return text if isinstance(text, bytes) else text.encode()

    def finish(self) -> str:
        text = self._join(b"", final=True)
        return self._strip(text) if self._strips and text else text

    def _join(self, data: bytes, final: bool) -> str:
        data = self._held + data
        text, used = utf_8_decode(data, "replace", final)
        self._held = data[used:]
        return text

    def _strip(self, text: str) -> str:
        self._strips = False
        return text.removeprefix(" ")


class WindowDecoder:
    """Decodes a new token with the tokens before it, where a token's text depends on its neighbours.

    decode:  token ids to text.
    alone:   texts of single tokens by id, kept for all answers of one tokenizer; None: of this answer only.
    skipped: tokens that `decode` leaves out.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        alone: dict[int, str] | None = None,
        skipped: frozenset[int] = frozenset(),
    ) -> None:
        self._decode = decode
        self._alone = {} if alone is None else alone
        self._skipped = skipped
        self._ids: list[int] = []
        self._before = ""  # the text of _ids up to _read
        self._read = 0

    def push(self, token: int) -> str:
        if token in self._skipped:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(_UNFINISHED) and len(self._ids) - self._read < _UNFINISHED_TOKENS_MAX:
            return ""
        return self._take(text)

    def finish(self) -> str:
        return self._take(self._decode(self._ids)) if len(self._ids) > self._read else ""

    def _take(self, text: str) -> str:
        """Return what `text`, that of all kept ids, adds to what was taken; keep only the newest ids as context."""
        new = text[len(self._before) :]
        context = self._ids[self._read :]
        before = self._text(context)
        if before:
            self._ids, self._before = context, before
        else:  # without text it is no context: a space at its end would count as one at the beginning of the answer
            self._before = text
        self._read = len(self._ids)
        return new

    def _text(self, ids: list[int]) -> str:
        if len(ids) != 1:
            return self._decode(ids)
        text = self._alone.get(ids[0])
        if text is None:
            text = self._alone[ids[0]] = self._decode(ids)
        return text


class TextStream:
    """Converts tokens to text incrementally, ending before the first of the `stop` strings: `matched`, '' for none."""

    def __init__(self, decoder: Decoder, stop: Sequence[str] = ()) -> None:
        self._decoder = decoder
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False
        self.matched = ""

    def push(self, token: int) -> str:
        """Return the text that `token` settles; empty while it, or the end of what came before, is held back."""
        new = self._decoder.push(token)
        return self._settle(new, final=False) if self._stop and new else new

    def finish(self) -> str:
        """Return the held-back text at the end of the answer."""
        return "" if self.stopped else self._settle(self._decoder.finish(), final=True)

    def _settle(self, new: str, final: bool) -> str:
        text = self._held + new
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, self.matched = min(found, key=lambda one: one[0])
            self.stopped, self._held = True, ""
            return text[:at]
        keep = 0 if final else max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def token_texts(backend: Any, state: Any, skipped: frozenset[str]) -> TokenTexts | None:
    """Return the texts of a fast tokenizer's tokens, or None where they depend on their neighbours.

    backend: a `tokenizers.Tokenizer`.   state: its decoder, as JSON.   skipped: names of tokens that are left out.
    """
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    if [part["type"] for part in parts] == ["ByteLevel"]:
        spelled, strips = _spelled_in_bytes, False
    elif _is_byte_fallback(parts):
        spelled, strips = _spelled_with_fallback, len(parts) == 4
    else:
        return None
    name_of = backend.id_to_token

    def spell(token: int) -> bytes:
        name = name_of(token)
        return b"" if name is None or name in skipped else spelled(name)

    return TokenTexts(spell, strips)


def _is_byte_fallback(parts: list[dict[str, Any]]) -> bool:
    """Return whether decoders are those of SentencePiece with byte fallback, as of Llama 2 and Gemma."""
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    joined = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    space = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    return parts in ([space, *joined], [space, *joined, strip])


def _spelled_with_fallback(name: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(name)
    return bytes([int(byte[1], 16)]) if byte else name.replace(_SPACE, " ").encode()


def _byte_letters() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_letters()


def _spelled_in_bytes(name: str) -> bytes:
    try:
        return bytes([_BYTES[letter] for letter in name])
    except KeyError:  # a token that was added beside the vocabulary, with letters of its own
        return name.encode()


def overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` could be the beginning of `stop`."""
    if stop[0] not in text:
        return 0
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
