import io
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.jobs.sources import text_reader
from weftline.engine.jobs.sources.text_reader import LineBlock, blocks
from weftline.errors import InputError


class Pipe:
    """Gives no more than a few bytes at a time."""

    def __init__(self, data: bytes, seed: int) -> None:
        self._stream, self._random = io.BytesIO(data), random.Random(seed)

    def read(self, size_bytes: int) -> bytes:
        return self._stream.read(self._random.randint(1, min(size_bytes, 7)))


@given(lengths=st.lists(st.integers(0, 40)), end=st.booleans(), seed=st.integers(0, 9), start=st.integers(0, 99))
def test_a_file_is_cut_the_same_from_every_block_on(lengths: list[int], end: bool, seed: int, start: int) -> None:
    data = b"\n".join(b"x" * length for length in lengths) + b"\n" * end
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_reader, "BLOCK_BYTES", 10)
        found = list(blocks(Pipe(data, seed), "a"))
        assert b"".join(block.data for block in found) == data
        assert all(block.data.endswith(b"\n") for block in found[:-1])
        for number, block in enumerate(found):
            assert block.line == 1 + data[: block.byte].count(b"\n")
            again = io.BytesIO(data[block.byte :])
            assert list(blocks(again, "a", block.byte, block.line)) == found[number:]


def test_blocks_are_no_larger_than_they_need_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_reader, "BLOCK_BYTES", 4)
    assert list(blocks(io.BytesIO(b"a\nb\nc\nlonger\ndd"), "a")) == [
        LineBlock(b"a\nb\n", 0, 1), LineBlock(b"c\n", 4, 3), LineBlock(b"longer\n", 6, 4), LineBlock(b"dd", 13, 5),
    ]  # fmt: skip


def test_a_broken_stream_is_reported_with_its_line() -> None:
    class Broken:
        def read(self, size_bytes: int) -> bytes:
            raise OSError(5, "Input/output error")

    with pytest.raises(InputError, match="a, near line 7: cannot be read: Input/output error"):
        list(blocks(Broken(), "a", 100, 7))
