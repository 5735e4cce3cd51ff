import io
import re
from typing import Any

import pytest
from whisper.utils import WriteSRT, WriteVTT

from weftline.nodes.subtitles import srt, vtt

SEGMENTS = [
    {"start": 0.0, "end": 1.5, "text": " How many red circles are there?"},
    {"start": 3599.9996, "end": 3661.0404, "text": "Two."},
]


def written(writer: Any, segments: list[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer(".").write_result({"segments": segments}, file=out)
    return out.getvalue()


def test_subtitles_are_those_of_openai_whisper() -> None:
    assert srt(SEGMENTS) + "\n" == written(WriteSRT, SEGMENTS)
    with_hours = re.sub(r"(?<![:\d])(\d\d:\d\d\.)", r"00:\1", written(WriteVTT, SEGMENTS))  # which it leaves out
    assert vtt(SEGMENTS) + "\n" == with_hours


def test_times_have_hours_and_milliseconds() -> None:
    assert srt(SEGMENTS).startswith("1\n00:00:00,000 --> 00:00:01,500\nHow many")
    assert "2\n01:00:00,000 --> 01:01:01,040\nTwo.\n" in srt(SEGMENTS)
    assert vtt(SEGMENTS).startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHow many")
    assert "100:00:00,000 --> 100:00:00,001" in srt([{"start": 360_000, "end": 360_000, "text": "a"}])


def test_no_segments_are_no_cues() -> None:
    assert (srt([]), vtt([])) == ("", "WEBVTT\n")
    assert (srt([{"start": 0, "end": 1, "text": "  "}]), vtt([{"start": 0, "end": 1, "text": ""}])) == ("", "WEBVTT\n")


def test_times_never_run_backwards() -> None:
    segments = [{"start": 2.0, "end": 1.0, "text": "a"}, {"start": 1.5, "end": 3.0, "text": "b"}]
    assert re.findall(r"\S+ --> \S+", srt(segments)) == [
        "00:00:02,000 --> 00:00:02,001",
        "00:00:02,000 --> 00:00:03,000",
    ]


@pytest.mark.parametrize("ends", ["\n\n", "\r\n\r\n", "\r", "\u2028\u2028", " \n \n"])
def test_a_text_with_blank_lines_stays_one_cue(ends: str) -> None:
    segments = [{"start": 0, "end": 1, "text": f"a{ends}2\n00:00:00,000 --> 00:00:09,000\nb"}]
    assert srt(segments).count(" --> ") == 1 and "\n\n" not in srt(segments)
    assert srt([{"start": 0, "end": 1, "text": "a ---> b"}]).count("-->") == 1
    assert vtt(segments).count("-->") == 1 and vtt(segments).count("\n\n") == 1


def test_marks_of_webvtt_are_escaped() -> None:
    text = "<b>a</b> & b --> c"
    assert "&lt;b&gt;a&lt;/b&gt; &amp; b --&gt; c\n" in vtt([{"start": 0, "end": 1, "text": text}])
    assert "<b>a</b> & b -> c\n" in srt([{"start": 0, "end": 1, "text": text}])
