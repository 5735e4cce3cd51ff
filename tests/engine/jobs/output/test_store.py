from __future__ import annotations

import json
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.engine.jobs.output import jobs
from tests.engine.jobs.output.faults import FaultyDisk, Killed, MemoryDisk
from weftline.engine.jobs.output.manifest import ErrorRow, Manifest
from weftline.engine.jobs.output.store import Store
from weftline.errors import JobChanged, OutputFailed


def opened(out: Path, **options: Any) -> Store:
    return Store.open(str(out), jobs.MANIFEST, suffix=".jsonl", **options)


def visible(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_job_leaves_its_parts_its_errors_and_its_pictures(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with opened(out) as store:
        assert (store.next_part, store.rows, store.after, store.finished) == (0, 0, None, False)
        jobs.commit_rest(store)
        assert (store.next_part, store.rows, store.errors, store.after) == (3, 9, 3, {"row": 9})
        assert not store.finished
        found = store.finish()
        assert store.finished
    assert visible(out) == [
        "_errors.jsonl", "_media/part-00001/crop.png", "_media/part-00001/side.png",
        "_media/part-00002/crop.png", "_media/part-00002/side.png",
        "_weftline/done.json", "_weftline/errors-00000.jsonl", "_weftline/errors-00002.jsonl", "_weftline/lock",
        "_weftline/manifest.json", "_weftline/part-00000.json", "_weftline/part-00001.json",
        "_weftline/part-00002.json", "part-00000.jsonl", "part-00001.jsonl", "part-00002.jsonl",
    ]  # fmt: skip
    assert found == {
        "results": str(out), "manifest": f"{out}/_weftline/manifest.json", "errors": f"{out}/_errors.jsonl",
        "media": f"{out}/_media",
    }  # fmt: skip
    rows = [json.loads(line) for line in (out / "_errors.jsonl").read_text().splitlines()]
    assert [row["place"] for row in rows] == [1, 6, 8]
    assert rows[0] == {
        "place": 1, "id": "id-1", "step": "read", "error": "StepError", "reason": "no text", "part": 0
    }  # fmt: skip


def test_a_single_file_lies_beside_its_job(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    with opened(out, single_file=True) as store:
        jobs.commit_rest(store)
        found = store.finish(jobs.join)
    assert out.read_bytes() == b"".join(map(jobs.data, range(3)))
    assert found["errors"] == f"{out}.job/_errors.jsonl" and Path(found["errors"]).exists()
    out.unlink()
    with opened(out, single_file=True) as store:
        assert not store.finished and store.next_part == 3
        store.finish(jobs.join)
    assert out.exists()


def test_opened_again_it_knows_what_is_committed(tmp_path: Path) -> None:
    with opened(tmp_path / "out") as store:
        store.commit(0, 0, 4, jobs.write(b"one"), jobs.errors(0, [2]), after={"file": "\udcff.jsonl"}, tally={"a": 1})
        records = store.records
    with opened(tmp_path / "out") as store:
        assert store.records == records
        assert store.after == {"file": "\udcff.jsonl"}
        assert store.error_rows() == jobs.errors(0, [2])
        assert store.open_part(0).read() == b"one"


def test_a_job_without_error_rows_has_no_errors_file(tmp_path: Path) -> None:
    with opened(tmp_path / "out") as store:
        store.commit(0, 0, 2, jobs.write(b"x"))
        assert set(store.finish()) == {"results", "manifest"}
    assert not (tmp_path / "out" / "_errors.jsonl").exists()


def test_amending_replaces_rows_and_errors_and_adds_pictures(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with opened(out) as store:
        jobs.commit_rest(store)
        store.finish()
        jobs.amend_rest(store)
        assert not store.finished and not (out / "_weftline/done.json").exists()
        store.finish()
        assert store.errors == 1
        assert [one.revision for one in store.records] == [1, 0, 1]
        assert store.records[0].seconds == 2.0 and store.records[0].tally == {"again": 1}
        assert [one.folder for one in store.records[2].media] == ["part-00002/", "part-00002.r1/"]
    assert (out / "part-00000.jsonl").read_bytes() == jobs.data(0, 1)
    assert (out / "part-00001.jsonl").read_bytes() == jobs.data(1)
    assert (out / "_media/part-00002.r1/late.png").read_bytes() == b"late 2"
    assert [json.loads(line)["place"] for line in (out / "_errors.jsonl").read_text().splitlines()] == [8]
    assert [name for name in visible(out) if "errors-" in name] == ["_weftline/errors-00002.r1.jsonl"]


def test_a_done_of_earlier_revisions_counts_for_nothing(tmp_path: Path) -> None:
    done = tmp_path / "out/_weftline/done.json"
    with opened(tmp_path / "out") as store:
        store.commit(0, 0, 2, jobs.write(b"x"))
        store.finish()
        old = done.read_bytes()
        store.amend(0, jobs.write(b"y"))
        for stale in (old, b"torn"):
            done.write_bytes(stale)
            assert not store.finished


def test_the_errors_file_goes_when_no_error_is_left(tmp_path: Path) -> None:
    with opened(tmp_path / "out") as store:
        store.commit(0, 0, 2, jobs.write(b"x"), jobs.errors(0, [1]))
        store.finish()
        store.amend(0, jobs.write(b"y"))
        store.finish()
    assert not (tmp_path / "out" / "_errors.jsonl").exists()


def test_pictures_are_written_as_they_come(tmp_path: Path) -> None:
    with opened(tmp_path / "out") as store:
        draft = store.begin()
        assert draft.add("a.png", b"picture") == "_media/part-00000/a.png" == draft.folder + "a.png"
        assert (tmp_path / "out/_media/part-00000/a.png").read_bytes() == b"picture"
        record = store.commit(0, 0, 1, jobs.write(b"x"), media=draft)
        assert (record.media[0].files, record.media[0].size_bytes) == (1, 7)
        with pytest.raises(ValueError, match="the draft is of part 0"):
            store.commit(1, 1, 1, jobs.write(b"x"), media=draft)


def test_pictures_come_from_many_threads(tmp_path: Path) -> None:
    with opened(tmp_path / "out") as store, ThreadPoolExecutor(4) as pool:
        draft = store.begin()
        list(pool.map(lambda number: draft.add(f"{number}.png", b"x" * number), range(40)))
        record = store.commit(0, 0, 1, jobs.write(b"x"), media=draft)
    assert (record.media[0].files, record.media[0].size_bytes) == (40, sum(range(40)))


def test_a_part_whose_picture_was_not_written_is_not_committed() -> None:
    disk = FaultyDisk(MemoryDisk())
    with Store.open_at(jobs.place_on(disk), jobs.MANIFEST) as store:
        draft = store.begin()
        disk.at, disk.error = disk.calls + 3, 28
        with pytest.raises(OutputFailed, match="part 0 could not be written: no space left on device"):
            draft.add("a.png", b"picture")
        with pytest.raises(ValueError, match="could not be written"):
            store.commit(0, 0, 1, jobs.write(b"x"), media=draft)


def test_a_second_draft_begins_with_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "out") as store:
        store.begin().add("a.png", b"picture")
        store.commit(0, 0, 1, jobs.write(b"x"), media={"b.png": b"picture"})
    assert [path.name for path in (tmp_path / "out/_media/part-00000").iterdir()] == ["b.png"]


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden"])
def test_a_picture_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    with opened(tmp_path / "out") as store, pytest.raises(ValueError, match="no name"):
        store.begin().add(name, b"")


@pytest.mark.parametrize(
    ("part", "place", "errors", "said"),
    [
        (1, 0, (), "the next one is 0"),
        (0, 5, (), "from row 0"),
        (0, 0, (7,), "error rows"),
        (0, 0, (1, 1), "error rows"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, part: int, place: int, errors: tuple[int, ...], said: str
) -> None:
    with opened(tmp_path / "out") as store, pytest.raises(ValueError, match=said):
        store.commit(part, place, 4, jobs.write(b"x"), jobs.errors(part, errors))


def test_after_a_failure_nothing_more_is_written(tmp_path: Path) -> None:
    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise RuntimeError("the rows are no table")

    with opened(tmp_path / "out") as store:
        with pytest.raises(RuntimeError, match="no table"):
            store.commit(0, 0, 1, fail)
        with pytest.raises(OutputFailed, match="an earlier write failed"):
            store.commit(0, 0, 1, jobs.write(b"x"))
    assert visible(tmp_path / "out") == ["_weftline/lock", "_weftline/manifest.json"]
    with pytest.raises(ValueError, match="closed"):
        store.finish()


def test_a_library_that_makes_another_error_of_a_full_disk_is_seen_through() -> None:
    def wrap(file: BinaryIO) -> None:
        try:
            file.write(b"x" * 100)
        except OSError:
            raise RuntimeError("cannot serialise") from None

    def swallow(file: BinaryIO) -> None:
        try:
            file.write(b"x" * 100)
        except OSError:
            pass

    for write in (wrap, swallow):
        disk = FaultyDisk(MemoryDisk())
        with Store.open_at(jobs.place_on(disk), jobs.MANIFEST) as store:
            disk.error = 28
            disk.at = next_write(disk)
            with pytest.raises(OutputFailed, match="part 0 could not be written: no space left on device; 0 rows"):
                store.commit(0, 0, 1, write)


def next_write(disk: FaultyDisk) -> int:
    """Return the call by which a part's data is written, after its file was created."""
    return disk.calls + 1


def test_a_full_disk_is_reported_through_pyarrow(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    table = pa.table({"id": [str(row) for row in range(1000)]})
    with Store.open(str(tmp_path / "out"), jobs.MANIFEST) as store:
        store.commit(0, 0, 1000, lambda file: pq.write_table(table, file))
        assert pq.read_table(store.open_part(0)).equals(table)
    assert pq.read_table(tmp_path / "out" / "part-00000.parquet").equals(table)
    disk = FaultyDisk(MemoryDisk())
    with Store.open_at(jobs.place_on(disk, suffix=".parquet"), jobs.MANIFEST) as store:
        disk.at, disk.error = next_write(disk) + 1, 28
        with pytest.raises(OutputFailed, match="no space left on device"):
            store.commit(0, 0, 1000, lambda file: pq.write_table(table, file))


def test_extras_are_named_when_the_job_is_opened(tmp_path: Path) -> None:
    with opened(tmp_path / "out", extras=("state.json",)) as store:
        with pytest.raises(ValueError, match=r"other\.json: not named"):
            store.finish(extras={"other.json": b"{}"})
        store.finish(extras={"state.json": b"{}"})
        assert store.finished
        (tmp_path / "out" / "state.json").unlink()
        assert not store.finished


def test_a_torn_line_of_error_rows_is_named(tmp_path: Path) -> None:
    with opened(tmp_path / "out") as store:
        store.commit(0, 0, 2, jobs.write(b"x"), jobs.errors(0, [1]))
        (tmp_path / "out/_weftline/errors-00000.jsonl").write_text('{"place": 1, "id"')
        with pytest.raises(JobChanged, match=r"errors-00000\.jsonl: line 1: it is not whole"):
            store.error_rows()


def test_results_do_not_depend_on_how_often_a_job_was_stopped(tmp_path: Path) -> None:
    for name, stops in (("once", 1), ("often", 3)):
        for _ in range(stops):
            with opened(tmp_path / name) as store:
                jobs.commit_rest(store) if stops == 1 else _commit_one(store)
        with opened(tmp_path / name) as store:
            store.finish()
    once, often = ({name: (tmp_path / of / name).read_bytes() for name in visible(tmp_path / of) if "lock" not in name}
                   for of in ("once", "often"))  # fmt: skip
    assert once == often


def _commit_one(store: Store) -> None:
    class Enough(Exception):
        pass

    commit = store.commit

    def once(*given: Any, **named: Any) -> None:
        commit(*given, **named)
        raise Enough

    store.commit = once  # type: ignore[assignment, method-assign]
    with pytest.raises(Enough):
        jobs.commit_rest(store)


class Life(RuleBasedStateMachine):
    """A store that is killed, loses power, goes on, is amended and thrown away, beside a list of what must be there."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = MemoryDisk()
        self.manifest: Manifest = jobs.MANIFEST
        self.parts: list[tuple[bytes, tuple[int, ...]]] = []
        self.begun = False
        self.number = 0

    def content(self) -> bytes:
        self.number += 1
        return b"content %d\n" % self.number

    def attempt(self, at: int | None, cut: int | None, expected: list[Any], do: Any, restart: bool = False) -> None:
        """Do something that may be killed at a call; then it was done, or it was not."""
        before = list(self.parts)
        faulty = FaultyDisk(self.disk, at)
        try:
            with Store.open_at(jobs.place_on(faulty), self.manifest, restart) as store:
                do(store)
            self.parts, done = expected, True
        except Killed:
            done = False
        if not done or cut is not None:
            self.disk.die() if cut is None else self.disk.cut(random.Random(cut))
        with Store.open_at(jobs.place_on(self.disk), self.manifest) as store:
            found = [(store.open_part(one.part).read(), one.error_places) for one in store.records]
            if not done and found == expected:
                self.parts = expected
            elif not done:
                self.parts = before if not restart or found == before else []
            assert found == self.parts
            assert [row.row_number for row in store.error_rows()] == [one for _, places in self.parts for one in places]

    at = st.none() | st.integers(0, 60)
    cut = st.none() | st.integers(0, 1000)

    @rule(at=at, cut=cut, bad=st.sets(st.integers(0, 2)), pictures=st.integers(0, 2))
    def commit(self, at: int | None, cut: int | None, bad: set[int], pictures: int) -> None:
        part, content = len(self.parts), self.content()
        media: Mapping[str, bytes] = {f"{number}.png": content for number in range(pictures)}
        places = tuple(sorted(3 * part + one for one in bad))

        def do(store: Store) -> None:
            store.commit(part, 3 * part, 3, jobs.write(content), rows(part, places), media)

        self.attempt(at, cut, [*self.parts, (content, places)], do)

    @precondition(lambda self: self.parts)
    @rule(at=at, cut=cut, choice=st.integers(0, 100), keep=st.booleans())
    def amend(self, at: int | None, cut: int | None, choice: int, keep: bool) -> None:
        part, content = choice % len(self.parts), self.content()
        places = self.parts[part][1] if keep else ()
        expected = [*self.parts[:part], (content, places), *self.parts[part + 1 :]]

        def do(store: Store) -> None:
            store.amend(part, jobs.write(content), rows(part, places), {"late.png": content})

        self.attempt(at, cut, expected, do)

    @rule(at=at, cut=cut)
    def finish(self, at: int | None, cut: int | None) -> None:
        self.attempt(at, cut, list(self.parts), lambda store: store.finish())

    @rule(at=at, cut=cut)
    def restart(self, at: int | None, cut: int | None) -> None:
        self.attempt(at, cut, [], lambda store: None, restart=True)

    @invariant()
    def nothing_else_is_there(self) -> None:
        names = {path.removeprefix("/data/out/") for path in self.disk.all_files()}
        data = {name for name in names if "/" not in name and name.startswith((".", "part-"))}
        assert data == {f"part-{part:05d}.jsonl" for part in range(len(self.parts))}
        assert not [name for name in names if name.endswith((".tmp", ".new", "restart"))]


def rows(part: int, places: tuple[int, ...]) -> list[ErrorRow]:
    return [ErrorRow(row_number=one, id=str(one), step="", error="E", reason="r", part=part) for one in places]


Life.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None, derandomize=True)
TestLife = Life.TestCase
