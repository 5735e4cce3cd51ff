"""Transcripts in the response formats of /v1/audio/transcriptions and /v1/audio/translations.

The formats with times need an output `segments` (json): a list of objects with `start` and `end` in seconds and a
`text`, and `words` (`word`, `start`, `end`) where words have times. Node `whisper` returns it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weftline.engine.serving.http.errors import unsupported
from weftline.engine.serving.openai.bodies import GRANULARITIES
from weftline.engine.serving.openai.completions import finite
from weftline.errors import StepError
from weftline.nodes.subtitles import srt, vtt

Segments = Sequence[Mapping[str, Any]]

SUBTITLES: Mapping[str, Callable[[Segments], str]] = {"srt": srt, "vtt": vtt}
"""Response formats that are subtitles."""


def segments_of(model: str, value: Any) -> Segments:
    """Return the segments of a model's answer; StepError if they are none."""
    found = [] if value is None else value
    if not isinstance(found, list) or not all(_is_timed(one, "text") for one in found):
        raise StepError(f"model {model} returned segments that are no list of objects with start, end and text")
    return found


def verbose_json(segments: Segments, fields: Mapping[str, Any], granularities: Sequence[str]) -> dict[str, Any]:
    """Return the body of response format `verbose_json`: `fields`, and segments and words as requested.

    HttpError: words are requested, and the segments have none.
    """
    body = dict(fields)
    if "segment" in granularities:
        body["segments"] = [_segment(number, one) for number, one in enumerate(segments)]
    if "word" in granularities:
        if not all(_has_words(one) for one in segments):
            why = "the model's segments have no words; its operator sets them, such as with timestamps: word of whisper"
            raise unsupported(GRANULARITIES, why)
        body["words"] = [
            {"word": word["word"].strip(), "start": word["start"], "end": word["end"]}
            for one in segments
            for word in one["words"]
        ]
    return body


def _segment(number: int, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a segment in OpenAI's form; its tokens are not known here. seek: start in frames of 10 ms."""
    text = found["text"].encode()
    return {
        "id": number,
        "seek": round(found["start"] * 100),
        "tokens": [],
        "start": found["start"],
        "end": found["end"],
        "text": found["text"],
        "temperature": 0.0,
        "avg_logprob": finite(found.get("logprob"), "a log-probability"),
        "compression_ratio": round(len(text) / len(zlib.compress(text)), 4),
        "no_speech_prob": finite(found.get("no_speech"), "the probability of no speech"),
    }


def _is_timed(found: Any, text: str) -> bool:
    if not isinstance(found, Mapping) or not isinstance(found.get(text), str):
        return False
    times: list[Any] = [found.get(name) for name in ("start", "end")]
    return all(type(one) in (int, float) and math.isfinite(one) for one in times)


def _has_words(segment: Mapping[str, Any]) -> bool:
    words = segment.get("words")
    return isinstance(words, list) and all(_is_timed(word, "word") for word in words)
