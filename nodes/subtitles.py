"""Subtitles in the formats SRT (SubRip) and WebVTT, from segments with `start` and `end` in seconds and a `text`.

Segments without text have no cue. A cue begins no earlier than the one before and lasts at least a millisecond, as
players require. Its text is on lines of their own: blank lines would end it, `-->` would begin a new one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Segments = Sequence[Mapping[str, Any]]

_ARROW = re.compile(r"-{2,}>")
_LINE_ENDS = re.compile(r"[\r\n\x0b\x0c\x85\u2028\u2029]+\s*")


def srt(segments: Segments) -> str:
    """Return the cues of `segments` as SRT: numbered from 1, times with a comma."""
    cues = (
        f"{number}\n{_time(start, ',')} --> {_time(end, ',')}\n{_ARROW.sub('->', text)}\n"
        for number, (start, end, text) in enumerate(_cues(segments), 1)
    )
    return "\n".join(cues)


def vtt(segments: Segments) -> str:
    """Return the cues of `segments` as WebVTT: times with a point; &, < and > are escaped."""
    cues = (f"{_time(start, '.')} --> {_time(end, '.')}\n{_escaped(text)}\n" for start, end, text in _cues(segments))
    return "\n".join(["WEBVTT\n", *cues])


def _cues(segments: Segments) -> Iterator[tuple[int, int, str]]:
    """Yield start and end in milliseconds, and text."""
    earliest = 0
    for segment in segments:
        text = _LINE_ENDS.sub("\n", str(segment["text"]).replace("\x00", "")).strip()
        start = max(round(float(segment["start"]) * 1000), earliest)
        if text:
            yield start, max(round(float(segment["end"]) * 1000), start + 1), text
            earliest = start


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _time(milliseconds: int, point: str) -> str:
    """Return hours (two digits or more), minutes, seconds and milliseconds."""
    seconds, rest = divmod(milliseconds, 1000)
    minutes, second = divmod(seconds, 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{second:02d}{point}{rest:03d}"
