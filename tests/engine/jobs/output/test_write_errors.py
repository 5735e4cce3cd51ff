from __future__ import annotations

import errno
import os

import pytest

from weftline.engine.jobs.output.files import as_output_failed
from weftline.errors import OutputFailed


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ENOSPC, "no space left on device; 30 000 rows are committed; free space and run the same command again"),
        (errno.EDQUOT, "the quota is used up; 30 000 rows are committed; free space and run the same command again"),
        (errno.EROFS, "read-only file system; 30 000 rows are committed; make it writable and run the same"),
        (errno.EIO, "input/output error; 30 000 rows are committed; check the disk and run the same command again"),
        (errno.ECONNRESET, "connection reset by peer; 30 000 rows are committed; run the same command again"),
    ],
)
def test_a_failure_says_what_is_safe_and_what_to_do(code: int, said: str) -> None:
    with pytest.raises(OutputFailed) as failure, as_output_failed("out", "part 3 could not be written", 30_000):
        raise OSError(code, os.strerror(code), "/secret/path")
    assert f"out: part 3 could not be written: {said}" in str(failure.value)
    assert "secret" not in str(failure.value)


def test_an_error_without_errno_is_reported() -> None:
    with pytest.raises(OutputFailed, match="out: x: gone; run the same command again"), as_output_failed("out", "x"):
        raise OSError("gone")


def test_other_errors_pass() -> None:
    with pytest.raises(ValueError, match="mine"), as_output_failed("out", "x"):
        raise ValueError("mine")
