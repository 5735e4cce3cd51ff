"""Frames are decoded whole and in order, at any segmentation of the byte stream."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.serving.frontend.transport import JOINED_BYTES, FrameDecoder, FrontendTransport, frame


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


class Writes:
    """An asyncio transport that keeps what is written."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int) -> None:
        """Keep everything."""


def test_messages_of_one_turn_of_the_loop_leave_in_one_write() -> None:
    async def script() -> None:
        transport, written = FrontendTransport(lambda body: None, lambda reason: None, 1 << 20), Writes()
        transport.connection_made(written)  # type: ignore[arg-type]
        transport.send(b"a")
        transport.send(b"b")
        assert written.writes == []
        await asyncio.sleep(0)
        transport.send(b"c")
        await asyncio.sleep(0)
        assert written.writes == [frame(b"a") + frame(b"b"), frame(b"c")]
        large = bytes(JOINED_BYTES)
        transport.send(b"d")
        transport.send(large)
        assert written.writes[2:] == [frame(b"d") + frame(large)]
        await asyncio.sleep(0)
        assert len(written.writes) == 3

    asyncio.run(script())
