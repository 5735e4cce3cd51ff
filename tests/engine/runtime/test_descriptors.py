"""The descriptors kept back for starting workers."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from weftline.engine.runtime.descriptors import Reserve, shortage


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1  # one is the listing's own


@pytest.fixture
def few() -> Iterator[int]:
    """Let this process have 20 descriptors more than it has now."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir()) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    yield most
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_reserved_descriptors_are_released_and_reacquired() -> None:
    before = open_descriptors()
    reserve = Reserve(5)
    assert open_descriptors() == before + 5
    reserve.lend()
    assert open_descriptors() == before and reserve.fill(), "nothing is missing while they are lent"
    reserve.take_back()
    assert open_descriptors() == before + 5 and reserve.whole
    reserve.close()
    reserve.close()
    assert open_descriptors() == before


def test_a_reserve_that_cannot_be_filled_is_logged_and_filled_later(few: int) -> None:
    reserve = Reserve(5)
    reserve.lend()
    taken: list[int] = []
    with pytest.raises(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    reserve.take_back()
    assert not reserve.whole and not reserve.fill()
    assert str(few) in shortage() and "ulimit -n" in shortage()
    for descriptor in taken:
        os.close(descriptor)
    assert reserve.fill() and reserve.whole
    reserve.close()
