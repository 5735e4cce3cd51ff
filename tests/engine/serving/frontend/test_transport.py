"""Frames are decoded whole and in order, at any segmentation of the byte stream."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.serving.frontend.transport import FrameDecoder, frame


@given(st.lists(st.binary(max_size=300)), st.lists(st.integers(1, 400), min_size=1))
def test_messages_come_out_however_the_stream_is_cut(bodies: list[bytes], cuts: list[int]) -> None:
    stream, decoder, found = b"".join(frame(body) for body in bodies), FrameDecoder(300), []
    at = 0
    while stream:
        size = cuts[at % len(cuts)]
        found += decoder.feed(stream[:size])
        stream, at = stream[size:], at + 1
    assert found == bodies


def test_a_message_too_long_is_refused_when_it_is_announced() -> None:
    decoder = FrameDecoder(300)
    assert decoder.feed(frame(b"x" * 300)) == [b"x" * 300]
    with pytest.raises(ValueError, match="301"):
        decoder.feed((301).to_bytes(4, "little"))
