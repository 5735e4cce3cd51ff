"""Kills a real process with signal 9 at each call in turn, lets the next run end the job, and compares what is there.

    python -m tests.engine.jobs.output.kill_9 FOLDER

A process of its own, so that the ones it forks are small.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.engine.jobs.output import jobs
from tests.engine.jobs.output.faults import FaultyDisk
from weftline.engine.jobs.output.local_files import SystemDisk


def main(folder: Path) -> int:
    """Return at how many calls a process was killed; AssertionError when a job ended otherwise than uninterrupted."""
    counted = FaultyDisk(SystemDisk())
    jobs.run(jobs.place_on(counted, root=made(folder / "whole")), amend=True)
    expected = contents(folder / "whole")
    for at in range(counted.calls):
        root = made(folder / str(at))
        child = os.fork()
        if child == 0:
            try:
                disk = FaultyDisk(SystemDisk(), at, ("before", "after", "torn")[at % 3], real=True)
                jobs.run(jobs.place_on(disk, root=root), amend=True)
            finally:
                os._exit(1)
        if not os.WIFSIGNALED(os.waitpid(child, 0)[1]):
            raise AssertionError(f"call {at} was not made: {counted.log[at]}")
        jobs.run(jobs.place_on(SystemDisk(), root=root), amend=True)
        if contents(Path(root)) != expected:
            raise AssertionError(f"killed at call {at}, {counted.log[at]}, the job ended otherwise")
    return counted.calls


def made(folder: Path) -> str:
    folder.mkdir()
    return str(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))
