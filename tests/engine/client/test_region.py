"""A client's shared memory: new, private, lent in ranges, and never left behind."""

import stat
from pathlib import Path

import pytest

from weftline.engine.client.region import FOLDER, SharedRegion
from weftline.errors import LimitReached


def test_a_region_is_a_new_file_of_this_user_alone() -> None:
    region = SharedRegion.create(100)
    held = Path(f"{FOLDER}{region.key}").stat()
    assert stat.S_IMODE(held.st_mode) == 0o600 and held.st_size == region.size_bytes == 4096
    region.close()
    assert not Path(f"{FOLDER}{region.key}").exists()
    region.close()


def test_ranges_are_lent_and_given_back() -> None:
    region = SharedRegion.create(8192)
    first = region.try_place(b"a" * 4096)
    second = region.try_place(b"b" * 4096)
    assert {first, second} == {0, 4096} and region.try_place(b"c") is None
    held = Path(f"{FOLDER}{region.key}").read_bytes()
    assert held in (b"a" * 4096 + b"b" * 4096, b"b" * 4096 + b"a" * 4096)
    assert first is not None
    region.give_back(first)
    assert region.try_place(b"c") == first
    with pytest.raises(KeyError):
        region.give_back(4095)
    region.close()


def test_nothing_is_left_of_a_region_that_nobody_closed() -> None:
    region = SharedRegion.create(1)
    path = Path(f"{FOLDER}{region.key}")
    assert path.exists()
    del region
    assert not path.exists()


def test_a_region_larger_than_the_machine_is_refused_and_leaves_nothing() -> None:
    before = set(Path(FOLDER).glob("weftline-client*"))
    with pytest.raises(LimitReached, match="cannot reserve"):
        SharedRegion.create(1 << 50)
    assert set(Path(FOLDER).glob("weftline-client*")) == before
