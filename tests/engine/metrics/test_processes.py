"""What /proc says of a process, and of one that is not there."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from weftline.engine.metrics.processes import usage_of


def test_a_process_is_seen_with_its_memory_processor_time_and_descriptors() -> None:
    before = usage_of(os.getpid())
    assert before is not None and before.descriptors is not None
    kept = [Path(os.devnull).open() for _ in range(5)]  # noqa: SIM115
    filled = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # never the heap's freed pages
    for page in range(0, len(filled), mmap.PAGESIZE):
        filled[page] = 1
    until_s = time.process_time() + 0.1
    while time.process_time() < until_s:
        pass
    after = usage_of(os.getpid())
    for one in kept:
        one.close()
    assert after is not None and after.descriptors == before.descriptors + 5
    assert after.resident_bytes - before.resident_bytes > 32 << 20
    assert 0.05 <= after.cpu_s - before.cpu_s < 5
    filled.close()


def test_nothing_is_said_of_a_process_that_is_not_there() -> None:
    assert usage_of(2**22 + 1) is None
