"""R17, R18 at the store: whatever fails or dies, at any call, the next run ends as an uninterrupted one does."""

from __future__ import annotations

import errno
import os
import posixpath
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.jobs.output import jobs
from tests.engine.jobs.output.faults import FaultyDisk, Killed, MemoryDisk, When
from weftline.engine.jobs.output import layout as naming
from weftline.engine.jobs.output.manifest import PartRecord, decode
from weftline.engine.jobs.output.store import Store
from weftline.errors import OutputFailed

KINDS = pytest.mark.parametrize("single", [False, True])


def uninterrupted(single: bool, amend: bool = True) -> tuple[dict[str, bytes], int]:
    """Return the files that a run leaves when nothing happens, and how many calls it makes."""
    disk = MemoryDisk()
    counted = FaultyDisk(disk)
    jobs.run(jobs.place_on(counted, single), amend)
    return disk.all_files(), counted.calls


def check_visible(disk: MemoryDisk) -> None:
    """What a reader sees at any moment is whole: data of one revision, all errors, the whole joined file."""
    whole = {jobs.data(part, revision) for part in range(3) for revision in (0, 1)}
    for path, content in disk.all_files().items():
        base = posixpath.basename(path)
        if base.startswith("."):
            continue
        if naming.is_data(base, ".jsonl"):
            assert content in whole, path
        elif base in ("_errors.jsonl", "x.jsonl"):
            assert content.endswith(b"\n"), path
        elif naming.part_of_record(base) is not None:
            decode(content, PartRecord)
    seen = [posixpath.basename(path) for path in disk.all_files()]
    visible = [base for base in seen if naming.is_data(base, ".jsonl")]
    assert len(visible) == len(set(visible))


@pytest.mark.slow(but_first=1)
@KINDS
@pytest.mark.parametrize("when", ["before", "after", "torn"])
def test_killed_at_any_call_the_next_run_ends_the_same(single: bool, when: When) -> None:
    expected, calls = uninterrupted(single)
    assert calls > 60
    for at in range(calls):
        disk = MemoryDisk()
        faulty = FaultyDisk(disk, at, when)
        with pytest.raises(Killed):
            jobs.run(jobs.place_on(faulty, single), amend=True)
        disk.die()
        check_visible(disk)
        jobs.run(jobs.place_on(disk, single), amend=True)
        assert disk.all_files() == expected, faulty.log[at]


@pytest.mark.slow(but_first=1)
@KINDS
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_power_cut_at_any_call_the_next_run_ends_the_same(single: bool, seed: int | None) -> None:
    expected, calls = uninterrupted(single)
    for at in range(calls + 1):
        disk = MemoryDisk()
        faulty = FaultyDisk(disk, at, "before")
        ended = True
        try:
            jobs.run(jobs.place_on(faulty, single), amend=True)
        except Killed:
            ended = False
        disk.cut(None if seed is None else random.Random(seed * 1000 + at))
        check_visible(disk)
        if ended:
            assert disk.all_files() == expected  # finished means on disk
        jobs.run(jobs.place_on(disk, single), amend=True)
        assert disk.all_files() == expected, at


@pytest.mark.slow(but_first=1)
@KINDS
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("when", ["before", "after", "torn"])
def test_an_error_at_any_call_stops_clearly_and_the_next_run_ends_the_same(
    single: bool, error: int, when: When
) -> None:
    expected, calls = uninterrupted(single)
    for at in range(calls):
        disk = MemoryDisk()
        faulty = FaultyDisk(disk, at, when, error)
        with pytest.raises(OutputFailed) as failure:
            jobs.run(jobs.place_on(faulty, single), amend=True)
        said = "no space left on device" if error == errno.ENOSPC else "input/output error"
        assert said in str(failure.value) and "run the same command again" in str(failure.value)
        left = [path for path in disk.all_files() if naming.is_being_written(posixpath.basename(path))]
        assert not left
        check_visible(disk)
        jobs.run(jobs.place_on(disk, single), amend=True)
        assert disk.all_files() == expected, faulty.log[at]


@pytest.mark.slow(but_first=1)
@KINDS
def test_killed_again_while_it_recovers_it_still_ends_the_same(single: bool) -> None:
    expected, calls = uninterrupted(single)
    for first in range(1, calls, 7):
        for again in range(0, 24, 3):
            disk = MemoryDisk()
            for at in (first, again):
                with pytest.raises(Killed):
                    jobs.run(jobs.place_on(FaultyDisk(disk, at, "torn"), single), amend=True)
                    raise Killed  # nothing was left to do
                disk.cut(random.Random(first * 100 + again))
            jobs.run(jobs.place_on(disk, single), amend=True)
            assert disk.all_files() == expected, (first, again)


@KINDS
def test_at_no_moment_does_a_reader_see_half_of_anything(single: bool) -> None:
    disk = MemoryDisk()
    faulty = FaultyDisk(disk)
    faulty.seen = lambda: check_visible(disk)
    jobs.run(jobs.place_on(faulty, single), amend=True)
    jobs.run(jobs.place_on(faulty, single), restart=True)


def test_what_has_returned_is_on_disk() -> None:
    disk = MemoryDisk()
    with Store.open_at(jobs.place_on(disk), jobs.MANIFEST) as store:
        jobs.commit_rest(store)
        jobs.amend_rest(store)
        written = {path: content for path, content in disk.all_files().items() if "/part-" in path}
        disk.cut()
    assert {path: content for path, content in disk.all_files().items() if "/part-" in path} == written


def test_what_was_thrown_away_does_not_come_back() -> None:
    disk = MemoryDisk()
    jobs.run(jobs.place_on(disk, single_file=True), amend=True)
    Store.open_at(jobs.place_on(disk, single_file=True), jobs.MANIFEST, restart=True).close()
    disk.cut()
    assert list(disk.all_files()) == ["/data/x.jsonl.job/_weftline/manifest.json"]


def test_error_rows_that_are_no_more_do_not_come_back() -> None:
    disk = MemoryDisk()
    with Store.open_at(jobs.place_on(disk), jobs.MANIFEST) as store:
        store.commit(0, 0, 2, jobs.write(b"x"), jobs.errors(0, [1]))
        store.finish()
        store.amend(0, jobs.write(b"y"))
        store.finish()
    disk.cut()
    assert "/data/out/_errors.jsonl" not in disk.all_files()


def test_what_the_next_run_finds_is_on_disk() -> None:
    _, calls = uninterrupted(False)
    for at in range(calls):
        disk = MemoryDisk()
        with pytest.raises(Killed):
            jobs.run(jobs.place_on(FaultyDisk(disk, at, "after")), amend=True)
        disk.die()
        found = []
        for _ in range(2):
            with Store.open_at(jobs.place_on(disk), jobs.MANIFEST, extras=("state.json",)) as store:
                found.append(store.records)
            disk.cut()
        assert found[0] == found[1]


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("seed", [None, 5])
def test_killed_while_it_begins_anew_it_begins_anew_all_the_same(single: bool, seed: int | None) -> None:
    expected, _ = uninterrupted(single, False)
    counted = FaultyDisk(MemoryDisk())
    jobs.run(jobs.place_on(counted, single), amend=True)
    finished = counted.calls
    jobs.run(jobs.place_on(counted, single), restart=True)
    for at in range(finished, counted.calls):
        disk = MemoryDisk()
        faulty = FaultyDisk(disk, at)
        jobs.run(jobs.place_on(faulty, single), amend=True)
        with pytest.raises(Killed):
            jobs.run(jobs.place_on(faulty, single), restart=True)
        disk.cut(None if seed is None else random.Random(seed * 1000 + at))
        Store.open_at(jobs.place_on(disk, single), jobs.MANIFEST).close()  # whole: not half of the old job
        jobs.run(jobs.place_on(disk, single), restart=True)
        assert disk.all_files() == expected, faulty.log[at]


@pytest.fixture
def quick_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: what is tested is the process's death, not the disk's."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="weftline-store-", dir=shm))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
def test_kill_9_of_a_process_at_any_call_the_next_run_ends_the_same(quick_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.jobs.output.kill_9", str(quick_folder)],
        capture_output=True, text=True, timeout=100, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


def test_a_real_file_size_limit_is_reported_and_leaves_no_partial_file(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            import resource
            import signal

            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
            with Store.open(str(tmp_path / "out"), jobs.MANIFEST, suffix=".jsonl") as store:
                store.commit(0, 0, 5, jobs.write(b"a" * 50_000))
                try:
                    store.commit(1, 5, 5, jobs.write(b"b" * 3_000_000))
                except OutputFailed as failure:
                    said = str(failure)
                    code = 0 if "part 1 could not be written: file too large; 5 rows are committed" in said else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["_weftline", "part-00000.jsonl"]
    with Store.open(str(tmp_path / "out"), jobs.MANIFEST, suffix=".jsonl") as store:
        assert (store.next_part, store.rows) == (1, 5)
        store.commit(1, 5, 5, jobs.write(b"b" * 3_000_000))
