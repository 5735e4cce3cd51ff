"""Server-sent events: whole ones out of any chunks, and limits."""

from __future__ import annotations

import pytest

from weftline.engine.llm.external.events import EventParser, InvalidEvents

STREAM = b'data: {"a":1}\n\n: ping\n\ndata:b\r\n\r\nevent: x\nid: 4\ndata: c\ndata: d\n\n\n\ndata: [DONE]\n\ndata: open'
EVENTS = [b'{"a":1}', b"b", b"c\nd", b"[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_in_chunks_of_any_size(size: int) -> None:
    parser = EventParser(1000)
    chunks = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    assert [event for chunk in chunks for event in parser.feed(chunk)] == EVENTS


@pytest.mark.parametrize("data", [b"data: " + b"x" * 40, b"x" * 40 + b"\n", b"data: xxxxxxxxx\n" * 4])
def test_a_long_line_or_event_is_refused_before_its_end(data: bytes) -> None:
    assert list(EventParser(1000, len(data)).feed(data)) == []
    with pytest.raises(InvalidEvents, match="longer than 32 bytes"):
        list(EventParser(1000, 32).feed(data))


def test_a_response_is_limited_as_a_whole_with_its_comments() -> None:
    parser = EventParser(30)
    assert list(parser.feed(b": ping\n\n" * 3)) == []
    with pytest.raises(InvalidEvents, match="too long"):
        list(parser.feed(b": ping\n\n"))
