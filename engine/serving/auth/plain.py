"""Sanitiser of untrusted text for display: one line, bounded, no control characters.

Used for error messages in responses and for log lines. Scrubbing applies to any text: a client's own value that looks
like a path becomes `(path)` too, since the origin of a text is unknown here.
"""

from __future__ import annotations

import re
from functools import lru_cache

SCANNED_CHARS_MAX = 4096
"""Most characters that patterns are applied to; the rest is dropped."""

SHORT_CHARS = 512
"""Longest text whose result is kept."""

_UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    r"\U000e0000-\U000e007f]"
)
_LINES = re.compile(r"\s*[\r\n]\s*")
_TRACEBACK = re.compile(r"traceback.*", re.IGNORECASE | re.DOTALL)
_REST = r"[^\s'\"`<>(){}\[\]|,;:]"  # of a path, up to what ends one in a sentence
_ROOTS = "bin|boot|data|dev|etc|home|lib|lib64|media|mnt|opt|proc|root|run|sbin|srv|sys|tmp|usr|var"
_SCRUBS = tuple(
    (re.compile(pattern, re.IGNORECASE), shown)
    for pattern, shown in (
        (r"\bfile \"[^\"]*\"?(?:, line \d+)?(?:, in [\w<>.]+)?", "(code)"),
        (r"wl_[\w-]{16,}|bearer\s+(?!TOKEN(?![\w.~+/=-]))[\w.~+/=-]+|\bsk-[\w-]{16,}", "(token)"),
        (r"\b[0-9a-f]{40,}\b", "(digest)"),
        (r"0x[0-9a-f]{4,}", "(address)"),
        (r"\b[a-z][a-z0-9+.-]{0,20}://[^\s'\"`<>]*(?<![:.,;])", "(address)"),
        (r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?![\w.])", "(address)"),
        (r"(['\"`])(?:~[\w-]*|\.{1,2})?/[^'\"`]*\1|(['\"`])[a-z]:\\[^'\"`]*\2", "(path)"),  # may have spaces inside
        (rf"\b[a-z]:\\{_REST}*|\\\\[\w.-]+\\{_REST}*", "(path)"),
        (rf"(?<!\w)(?:~[\w-]*|\.{{1,2}})?/++{_REST[:-1]}/]+/{_REST}*", "(path)"),
        (rf"(?<![\w<)\]/])(?:~[\w-]*|\.{{1,2}})?/++{_REST[:-1]}/]+", "(path)"),
        (rf"[\w.~-]{{0,40}}/(?:{_ROOTS})/{_REST}*", "(path)"),
        (rf"(?<![\w./-])(?:[\w.-]{{1,200}}/){{1,64}}[\w.-]{{0,200}}\.[a-z]\w{{0,11}}(?![\w-])(?:/{_REST}*)?", "(path)"),
        (r"\bweftline(?:\.\w+){2,}", "(internal)"),
        (r"\b(?:pid|tid)[ :=#]*\d+", "a process"),
    )
)


def one_line(text: str, chars_max: int) -> str:
    """Return `text` as one line of at most `chars_max` characters, with control and invisible characters escaped."""
    if len(text) > chars_max:
        text = text[: max(0, chars_max - 3)] + "..."
    if text.isascii() and text.isprintable():
        return text
    return _UNPRINTABLE.sub(_escaped, text)[: chars_max * 2]


def scrubbed(text: str, chars_max: int) -> str:
    """Return `text` as one line without paths, addresses, tokens, tracebacks and internal names.

    The patterns take some 100 us; a short text, such as that of a refusal, is looked up among the last ones.
    """
    return _short_scrubbed(text, chars_max) if len(text) <= SHORT_CHARS else _scrubbed(text, chars_max)


def _scrubbed(text: str, chars_max: int) -> str:
    text = _LINES.sub("; ", text[:SCANNED_CHARS_MAX].strip())
    text = _TRACEBACK.sub("(more)", _UNPRINTABLE.sub(_escaped, text))
    for pattern, shown in _SCRUBS:
        text = pattern.sub(shown, text)
    return text if len(text) <= chars_max else text[: chars_max - 3] + "..."


_short_scrubbed = lru_cache(1024)(_scrubbed)


def redacted(text: str) -> str:
    """Replace everything that looks like a token, for logs."""
    return _TOKEN.sub("(token)", text)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


_TOKEN = _SCRUBS[1][0]
