from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.engine.jobs.output import jobs
from weftline.engine.jobs.output.store import Store
from weftline.errors import InputError, JobChanged, OutputFailed


def opened(out: Path, restart: bool = False, single_file: bool = False, **changes: Any) -> Store:
    manifest = msgspec.structs.replace(jobs.MANIFEST, **changes)
    return Store.open(str(out), manifest, suffix=".jsonl", restart=restart, single_file=single_file)


def finished(out: Path, **options: Any) -> None:
    with opened(out, **options) as store:
        jobs.commit_rest(store)
        store.finish(jobs.join)


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / "part-00000.jsonl").write_text("foreign")
    for restart in (False, True):
        with pytest.raises(InputError, match=r"holds part-00000\.jsonl, thesis\.txt, and no manifest of a job"):
            opened(tmp_path, restart)
    assert sorted(os.listdir(tmp_path)) == ["part-00000.jsonl", "thesis.txt"]  # noqa: PTH208


def test_a_folder_with_hidden_files_only_is_empty(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*")
    opened(tmp_path).close()


def test_a_file_that_no_job_wrote_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("mine")
    for restart in (False, True):
        with pytest.raises(InputError, match="is there already"):
            opened(tmp_path / "x.jsonl", restart, single_file=True)
    assert (tmp_path / "x.jsonl").read_text() == "mine"
    assert os.listdir(tmp_path) == ["x.jsonl"]  # noqa: PTH208


def test_records_without_a_manifest_are_refused(tmp_path: Path) -> None:
    finished(tmp_path / "out")
    (tmp_path / "out/_weftline/manifest.json").unlink()
    with pytest.raises(InputError, match="no manifest"):
        opened(tmp_path / "out")


def test_what_changed_is_listed_and_nothing_touched(tmp_path: Path) -> None:
    finished(tmp_path / "out")
    with pytest.raises(JobChanged) as refused:
        opened(tmp_path / "out", input={"rows.jsonl": "3"}, settings={"limit": 5})
    assert "input rows.jsonl has changed" in str(refused.value)
    assert "limit is 5, and was not set when the job began" in str(refused.value)
    assert "--restart begins anew" in str(refused.value)
    with opened(tmp_path / "out") as store:
        assert store.finished


def test_other_versions_are_a_warning(tmp_path: Path) -> None:
    opened(tmp_path / "out", versions={"torch": "2.6"}).close()
    with opened(tmp_path / "out", versions={"torch": "2.7"}) as store:
        assert store.warnings == ("torch: 2.7 now, 2.6 when the job began",)
        assert store.manifest.versions == {"torch": "2.6"}


def test_restart_removes_what_the_job_wrote_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    finished(out)
    (out / "notes.txt").write_text("mine")
    (out / "_media" / "mine.png").write_bytes(b"mine")
    with opened(out, restart=True, settings={"limit": 5}) as store:
        assert (store.next_part, store.manifest.settings) == (0, {"limit": 5})
    left = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    assert left == ["_media/mine.png", "_weftline/lock", "_weftline/manifest.json", "notes.txt"]


def test_restart_of_a_single_file_removes_it(tmp_path: Path) -> None:
    finished(tmp_path / "x.jsonl", single_file=True)
    opened(tmp_path / "x.jsonl", restart=True, single_file=True).close()
    assert not (tmp_path / "x.jsonl").exists()


def test_a_manifest_that_cannot_be_read_is_named_and_restart_goes_on(tmp_path: Path) -> None:
    finished(tmp_path / "out")
    for torn in (b"", b'{"version": 1, "pipe', b'{"version": 9, "pipeline": {}, "input": {}}', b"[]"):
        (tmp_path / "out/_weftline/manifest.json").write_bytes(torn)
        with pytest.raises(JobChanged, match="its manifest cannot be used: "):
            opened(tmp_path / "out")
    with opened(tmp_path / "out", restart=True) as store:
        assert store.next_part == 0


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("part-00001.jsonl", None, "part-00001.jsonl is missing"),
        ("part-00001.jsonl", b"short", "part-00001.jsonl has 5 bytes, and 54 were written"),
        ("part-00001.jsonl", b"x" * 54, "part-00001.jsonl does not hold what was written"),
        ("_weftline/errors-00002.jsonl", None, "errors-00002.jsonl is missing"),
        ("_weftline/errors-00002.jsonl", b"{}\n", "errors-00002.jsonl does not hold what was written"),
        ("_weftline/part-00001.json", b'{"part": 1', "the record of part 1 cannot be read: it is not whole"),
        ("_weftline/part-00001.json", b"", "the record of part 1 cannot be read: it is empty"),
        ("_weftline/part-00001.json", b"{}", "the record of part 1 cannot be read: Object missing required field"),
        ("_weftline/part-00001.json", None, "the record of part 1 is missing, and later ones are there"),
    ],
)
def test_damage_from_outside_is_named_and_nothing_removed(
    tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    out = tmp_path / "out"
    finished(out)
    path = out / name
    path.unlink() if content is None else path.write_bytes(content)
    before = sorted(out.rglob("*"))
    with pytest.raises(JobChanged) as refused:
        opened(out)
    assert said in str(refused.value)
    assert sorted(out.rglob("*")) == before


def test_all_damages_are_listed_at_once(tmp_path: Path) -> None:
    finished(tmp_path / "out")
    for part in (0, 2):
        (tmp_path / f"out/part-0000{part}.jsonl").unlink()
    with pytest.raises(JobChanged, match=r"(?s)part-00000\.jsonl is missing.*part-00002\.jsonl is missing"):
        opened(tmp_path / "out")


def test_a_second_run_is_kept_out(tmp_path: Path) -> None:
    with opened(tmp_path / "out"):
        for restart in (False, True):
            with pytest.raises(OutputFailed, match=rf"another run .* \(process {os.getpid()}\)"):
                opened(tmp_path / "out", restart)
    opened(tmp_path / "out").close()


def test_the_lock_dies_with_its_process(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            opened(tmp_path / "out")
            os.write(writes, b"!")
            signal.pause()
        finally:
            os._exit(1)
    assert os.read(reads, 1) == b"!"
    with pytest.raises(OutputFailed, match=f"process {child}"):
        opened(tmp_path / "out")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    opened(tmp_path / "out").close()
    os.close(reads)
    os.close(writes)


def test_a_refused_job_leaves_no_lock_held(tmp_path: Path) -> None:
    with opened(tmp_path / "out") as store:
        store.commit(0, 0, 1, jobs.write(b"x"))
    with pytest.raises(JobChanged):
        opened(tmp_path / "out", schema="other")
    opened(tmp_path / "out").close()


def test_leftovers_of_a_part_that_was_not_committed_go(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with opened(out) as store:
        store.commit(0, 0, 1, jobs.write(b"x"))
        store.begin().add("a.png", b"orphan")
    for name in ("part-00001.jsonl", ".part-00001.jsonl.tmp", ".part-00000.jsonl.new", "_weftline/errors-00001.jsonl"):
        (out / name).write_bytes(b"orphan")
    (out / "readme.txt").write_text("mine")
    opened(out).close()
    left = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    assert left == ["_weftline/lock", "_weftline/manifest.json", "_weftline/part-00000.json", "part-00000.jsonl",
                    "readme.txt"]  # fmt: skip


def test_an_old_part_is_only_weighed_when_all_are_too_much_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    finished(out)
    monkeypatch.setattr("weftline.engine.jobs.output.folder.READ_AGAIN_BYTES_MAX", 100)
    (out / "part-00001.jsonl").write_bytes(b"x" * 54)
    opened(out).close()
    (out / "part-00002.jsonl").write_bytes(b"x" * 81)
    with pytest.raises(JobChanged, match="part-00002"):
        opened(out)


def test_a_job_that_committed_nothing_has_no_claim_on_its_folder(tmp_path: Path) -> None:
    opened(tmp_path / "out", settings={"limit": 5}).close()
    with opened(tmp_path / "out") as store:
        jobs.commit_rest(store)
        assert store.manifest.settings == jobs.MANIFEST.settings
    with pytest.raises(JobChanged):
        opened(tmp_path / "out", settings={"limit": 5})


def test_a_job_that_committed_nothing_leaves_a_file_that_it_did_not_write(tmp_path: Path) -> None:
    opened(tmp_path / "x.jsonl", single_file=True).close()
    (tmp_path / "x.jsonl").write_text("mine")
    with pytest.raises(InputError, match="is there already"):
        opened(tmp_path / "x.jsonl", single_file=True, schema="other")
    assert (tmp_path / "x.jsonl").read_text() == "mine"
