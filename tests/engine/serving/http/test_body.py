import gzip
import tracemalloc
import zlib

import pytest

from weftline.engine.serving.http.body import _WINDOW, decompressed
from weftline.engine.serving.http.errors import HttpError

GZIP, DEFLATE = _WINDOW["gzip"], _WINDOW["deflate"]
LIMIT = 1 << 20


def test_what_fits_comes_out() -> None:
    assert decompressed(gzip.compress(bytes(LIMIT)), GZIP, LIMIT) == bytes(LIMIT)
    assert decompressed(zlib.compress(b"hello"), DEFLATE, LIMIT) == b"hello"
    assert decompressed(gzip.compress(b"", mtime=0), GZIP, LIMIT) == b""


@pytest.mark.parametrize("inside_bytes", [LIMIT + 1, 100 << 20])
def test_a_bomb_is_never_unpacked(inside_bytes: int) -> None:
    bomb = gzip.compress(bytes(inside_bytes), 1)
    tracemalloc.start()
    try:
        with pytest.raises(HttpError, match="message_bytes_max") as refused:
            decompressed(bomb, GZIP, LIMIT)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refused.value.code == 413
    assert peak_bytes < 4 * LIMIT


@pytest.mark.parametrize(
    "body", [b"", b"hello", gzip.compress(b"hello", mtime=0)[:-4], gzip.compress(b"hello", mtime=0) + b"more"]
)
def test_what_is_no_gzip_is_refused(body: bytes) -> None:
    with pytest.raises(HttpError):
        decompressed(body, GZIP, LIMIT)
