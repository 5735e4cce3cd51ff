"""The log with a reader that stalls, and what others write to standard error."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.engine.fire import wait_until
from weftline.engine.serving.log_writer import QUEUE_BYTES_MAX, LogWriter
from weftline.engine.serving.logs import JsonLines

ROOT = str(Path(__file__).parents[3])


@contextmanager
def writing() -> Iterator[tuple[LogWriter, int]]:
    """Yield a writer and the end of its pipe that reads."""
    read, write = os.pipe()
    writer = LogWriter(write)
    writer.setFormatter(JsonLines())
    os.close(write)
    try:
        yield writer, read
    finally:
        os.close(read)
        writer.close()


def log(writer: LogWriter, text: str) -> None:
    writer.handle(logging.LogRecord("weftline.test", logging.INFO, "", 0, text, None, None))


def test_a_stalled_reader_delays_no_caller_and_drops_are_reported() -> None:
    with writing() as (writer, read):
        text = "x" * 3900
        count = QUEUE_BYTES_MAX // len(text) + 200
        started_s = time.monotonic()
        for _ in range(count):
            log(writer, text)
        assert time.monotonic() - started_s < 5
        assert writer.dropped > 100
        dropped, lines = writer.dropped, b""
        while lines.count(b"\n") < count - dropped + 1:
            lines += os.read(read, 1 << 20)
        *kept, report = (json.loads(line) for line in lines.splitlines())
        assert len(kept) == count - dropped and all(one["message"] == text for one in kept)
        assert report["message"] == (
            f"{dropped} lines of the log were dropped, because standard error was not read in time"
        )
        log(writer, "again")
        assert json.loads(os.read(read, 1 << 16))["message"] == "again" and writer.dropped == dropped


def test_a_reader_that_is_gone_costs_lines_and_no_more() -> None:
    with writing() as (writer, read):
        gone = os.dup(read)
        os.close(gone)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, read)  # the pipe has no reader any more
        os.close(null)
        for _ in range(3):
            log(writer, "lost")
        wait_until(lambda: writer.dropped == 3, 5)


OTHERS = """
import ctypes, logging, os, sys, warnings
from weftline.engine.serving.config import Logs
from weftline.engine.serving.logs import start_logs

handler = start_logs(Logs("json"), take_stderr=True)
libc = ctypes.CDLL(None)
os.write(2, b"a C library: one\\r\\nand \\x1b[31mtwo\\nhalf of ")
libc.perror(b"a line")
warnings.warn("of Python")
print("printed", file=sys.stderr)
logging.getLogger("weftline.x").warning("ours")
logging.getLogger("another").warning("not ours")
os.system("echo of a child >&2")
handler.close()
print("{}", file=sys.stderr)
"""


def test_lines_of_c_libraries_and_others_do_not_break_the_json_log() -> None:
    env = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run([sys.executable, "-c", OTHERS], env=env, capture_output=True, text=True, timeout=60)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    found = {line.get("message", "") for line in lines}
    assert {"a C library: one", "printed", "ours", "not ours", "of a child"} <= found, done.stderr
    assert any(text.startswith("half of a line: ") for text in found)
    assert any("UserWarning: of Python" in text for text in found)
    assert lines[-1] == {}, "after the end, standard error is as it was"
    assert done.returncode == 0 and done.stdout == ""
