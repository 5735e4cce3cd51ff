"""A job that is ended in the middle, politely, at once and by kill -9: the same command goes on, to the same bytes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.weftline.batch_files import lines, results, shouter, visible
from tests.weftline.conftest import workers_of
from weftline.cli.batch import ERROR_ROWS
from weftline.cli.main import main

ROWS = 60
LONGEST_S = 60.0


class Job:
    """A job over ROWS rows in parts of four; it takes a second and more while the file `slow` is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        data = lines(folder, [f"row {n}" if n % 7 else "bad" for n in range(ROWS)])
        self.command = ["batch", shouter(folder), "--data", data, "--part-rows", "4", "--block-rows", "2"]
        self.command += ["--no-report", "--out"]
        (folder / "strict").touch()

    def slowly(self, out: str, parts: int) -> subprocess.Popen[str]:
        """Start it slowed down, and return once so many parts are committed."""
        (self.folder / "slow").touch()
        command = [sys.executable, "-m", "weftline", *self.command, str(self.folder / out)]
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        until = time.monotonic() + LONGEST_S
        while len(self.committed(out)) < parts:
            assert running.poll() is None, running.communicate()
            assert time.monotonic() < until
            time.sleep(0.005)
        return running

    def committed(self, out: str) -> list[Path]:
        return sorted((self.folder / out / "_weftline").glob("part-*.json"))

    def whole(self, out: str) -> dict[str, bytes]:
        """Run it at full speed to its end, in this process, and return what is visible of it."""
        (self.folder / "slow").unlink(missing_ok=True)
        assert main([*self.command, str(self.folder / out)]) == ERROR_ROWS
        return visible(self.folder / out)


def interrupt(running: subprocess.Popen[str], *signals: signal.Signals) -> tuple[int, str, str]:
    for number in signals:
        running.send_signal(number)
    out, said = running.communicate(timeout=LONGEST_S)
    assert workers_of(running.pid) == []
    assert "weftline/cli" not in said, said  # steps may fail: their tracebacks are shown
    return running.returncode, out, said


@pytest.mark.slow
def test_a_job_that_is_ended_again_and_again_ends_in_the_same_bytes(tmp_path: Path) -> None:
    job = Job(tmp_path)
    undisturbed, parts = job.whole("undisturbed"), 0
    for signals in ([signal.SIGINT], [signal.SIGTERM, signal.SIGINT]):
        code, out, said = interrupt(job.slowly("out", parts + 2), *signals)
        assert (code, out) == (130, ""), said
        assert "interrupted" in said and "run the same command" in said
        parts = len(job.committed("out"))
        assert 0 < parts < ROWS / 4
        assert visible_parts(job, "out") < set(undisturbed)
    running = job.slowly("out", parts + 1)
    os.kill(running.pid, signal.SIGKILL)
    running.communicate(timeout=LONGEST_S)
    assert job.whole("out") == undisturbed
    assert len(results(job.folder / "out")) == ROWS - len(range(0, ROWS, 7))


def visible_parts(job: Job, out: str) -> set[str]:
    return {name for name in visible(job.folder / out) if name.startswith("part-")}
