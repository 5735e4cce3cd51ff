"""Formatting of figures for people, and escaping of untrusted text.

Ids, reasons and values come from data sets. `harmless` returns bounded text without characters that move a cursor,
change the reading direction or cannot be encoded. It does not escape HTML; the template does.
"""

from __future__ import annotations

import math
import re

_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\uffff\ud800-\udfff]"
)
"""Control characters but tab and line feed, direction marks, invisible characters, and halves of surrogate pairs."""


def duration(seconds: float) -> str:
    """Return a time in its two largest units: 4.2s, 42s, 1m11s, 2h05m, 3d04h."""
    if not math.isfinite(seconds):
        return "?"
    seconds = max(seconds, 0.0)
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if not hours:
        return f"{minutes}m{whole % 60:02}s"
    return f"{hours}h{minutes % 60:02}m" if not days else f"{days}d{hours % 24:02}h"


def rate(per_s: float) -> str:
    """Return a rate with as many digits as matter: 1234, 12.3, 1.23, 0.012, 0."""
    if not math.isfinite(per_s) or per_s <= 0:
        return "0"
    return f"{per_s:.0f}" if per_s >= 99.5 else f"{per_s:.1f}" if per_s >= 9.95 else f"{per_s:.3g}"


def milliseconds(ms: float) -> str:
    """Return milliseconds with as many digits as matter: 0.043, 2.31, 45.2, 1204."""
    return f"{ms:.3f}" if ms < 1 else f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 1000 else f"{ms:.0f}"


def percent(share: float) -> str:
    """Return a share with one digit, rounded down: what is not all done is never 100.0 %."""
    return f"{math.floor(share * 1000 + 1e-9) / 10:.1f} %"


def counted(count: float, noun: str) -> str:
    """Return '1 row', '2 rows'."""
    return f"{count:.0f} {noun}{'' if count == 1 else 's'}"


def harmless(text: str, chars_max: int) -> str:
    """Return a text of at most about `chars_max` characters; what cannot be seen is written as an escape."""
    kept = text if len(text) <= chars_max else text[:chars_max]
    kept = _UNSEEN.sub(_escape, kept.replace("\r\n", "\n"))
    return kept if len(text) <= chars_max else f"{kept} … ({len(text)} characters)"


def one_line(text: str, chars_max: int) -> str:
    """Return a text as `harmless` does, with every run of white space as one space."""
    return " ".join(harmless(text, chars_max).split())


def as_name(text: str, chars_max: int) -> str:
    """Return a name or a path as `harmless` does, with line feeds and tabs as escapes: all of it, on one line."""
    return harmless(text, chars_max).replace("\n", "\\n").replace("\t", "\\t")


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")
