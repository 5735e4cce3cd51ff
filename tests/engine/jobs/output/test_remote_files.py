from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.jobs.output import jobs
from weftline.engine.jobs.output.files import Files, LockHeld, read
from weftline.engine.jobs.output.folder import ResultFolder
from weftline.engine.jobs.output.layout import ResultLayout
from weftline.engine.jobs.output.local_files import LocalFiles
from weftline.engine.jobs.output.remote_files import RemoteFiles
from weftline.engine.jobs.output.store import Store
from weftline.errors import JobChanged, OutputFailed

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def url() -> Iterator[str]:
    folder = f"memory://{uuid.uuid4().hex}"
    yield folder
    system, root = fsspec.core.url_to_fs(folder)
    if system.exists(root):
        system.rm(root, recursive=True)


def test_a_job_in_an_object_store_is_gone_on_with_and_ends_as_a_local_one(url: str, tmp_path: Path) -> None:
    for out in (url, str(tmp_path / "out")):
        with Store.open(out, jobs.MANIFEST, suffix=".jsonl") as store:
            record = jobs.errors(0, [1])
            store.commit(0, 0, 4, jobs.write(jobs.data(0)), record, after={"row": 4}, tally={"steps": {}}, seconds=1.5)
        with Store.open(out, jobs.MANIFEST, suffix=".jsonl") as store:
            assert store.next_part == 1
            jobs.commit_rest(store)
            store.finish()
            jobs.amend_rest(store)
            store.finish()
            assert store.finished
    system, root = fsspec.core.url_to_fs(url)
    remote = {path.removeprefix(root + "/"): system.cat_file(path) for path in system.find(root)}
    local = {
        str(path.relative_to(tmp_path / "out")): path.read_bytes()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file() and path.name != "lock"
    }
    assert remote == local


def test_a_single_file_and_a_restart_in_an_object_store(url: str) -> None:
    out = f"{url}/x.jsonl"
    with Store.open(out, jobs.MANIFEST, suffix=".jsonl", single_file=True) as store:
        jobs.commit_rest(store)
        assert store.finish(jobs.join)["errors"] == f"{out}.job/_errors.jsonl"
    system, root = fsspec.core.url_to_fs(url)
    assert system.cat_file(f"{root}/x.jsonl") == b"".join(map(jobs.data, range(3)))
    with Store.open(out, jobs.MANIFEST, suffix=".jsonl", single_file=True, restart=True) as store:
        assert store.next_part == 0
    assert system.find(root) == [f"{root}/x.jsonl.job/_weftline/manifest.json"]


def test_a_part_that_was_changed_there_is_named(url: str) -> None:
    with Store.open(url, jobs.MANIFEST, suffix=".jsonl") as store:
        jobs.commit_rest(store)
    system, root = fsspec.core.url_to_fs(url)
    system.pipe_file(f"{root}/part-00000.jsonl", b"short")
    with pytest.raises(JobChanged, match=r"part-00000\.jsonl has 5 bytes"):
        Store.open(url, jobs.MANIFEST, suffix=".jsonl")


class Renaming(RemoteFiles):
    """A file system whose files are seen while they arrive, such as one behind SFTP."""

    def __init__(self, root: Path) -> None:
        super().__init__(fsspec.filesystem("file"), str(root))


def test_where_files_are_seen_while_they_arrive_they_are_renamed(tmp_path: Path) -> None:
    class Torn(fsspec.implementations.local.LocalFileSystem):  # type: ignore[name-defined, misc]
        cachable = False

        def put_file(self, local: str, path: str, *given: Any, **named: Any) -> None:
            super().put_file(local, path, *given, **named)
            raise ConnectionResetError(104, "connection reset by peer")

    jobs.run(ResultFolder("out", "out", Renaming(tmp_path / "a"), ResultLayout("", "", ".jsonl")), amend=True)
    jobs.run(ResultFolder("out", "out", LocalFiles(tmp_path / "b"), ResultLayout("", "", ".jsonl")), amend=True)
    ours, theirs = ({str(path.relative_to(tmp_path / one)) for path in (tmp_path / one).rglob("*") if path.is_file()}
                    for one in "ab")  # fmt: skip
    assert ours == theirs - {"_weftline/lock"}
    files = RemoteFiles(Torn(), str(tmp_path / "c"))
    with pytest.raises(ConnectionResetError):
        files.write("x", jobs.write(b"content"))
    assert os.listdir(tmp_path / "c") == []  # noqa: PTH208


def test_an_error_of_an_object_store_client_is_reported(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class HttpError(Exception):
        pass

    def fail(*given: Any, **named: Any) -> None:
        raise HttpError("quota exceeded")

    with Store.open(url, jobs.MANIFEST, suffix=".jsonl") as store:
        monkeypatch.setattr(type(fsspec.filesystem("memory")), "put_file", fail)
        with pytest.raises(OutputFailed, match="part 0 could not be written: httpError: quota exceeded; 0 rows"):
            store.commit(0, 0, 1, jobs.write(b"x"))


def test_who_writes_is_known_and_a_dead_one_is_not_waited_for(url: str) -> None:
    system, root = fsspec.core.url_to_fs(url)
    owner = f"{root}/_weftline/owner.json"
    with Store.open(url, jobs.MANIFEST):
        with pytest.raises(OutputFailed, match=rf"process {os.getpid()} on .*; if that run has ended, remove {owner}"):
            Store.open(url, jobs.MANIFEST)
        said = json.loads(system.cat_file(owner))
    assert not system.exists(owner)
    system.pipe_file(owner, json.dumps({**said, "started": said["started"] - 1}).encode())  # of an earlier process
    Store.open(url, jobs.MANIFEST).close()
    for other in (json.dumps({**said, "host": "elsewhere"}).encode(), b"torn"):
        system.pipe_file(owner, other)
        with pytest.raises(OutputFailed, match="another run of this job is writing here"):
            Store.open(url, jobs.MANIFEST)


def test_a_run_that_was_pushed_aside_commits_no_more(url: str) -> None:
    system, root = fsspec.core.url_to_fs(url)
    with Store.open(url, jobs.MANIFEST) as store:
        system.pipe_file(f"{root}/_weftline/owner.json", b'{"host": "elsewhere", "pid": 7}')
        with pytest.raises(OutputFailed, match="taken over by process 7 on elsewhere"):
            store.commit(0, 0, 1, jobs.write(b"x"))
    assert system.exists(f"{root}/_weftline/owner.json")
    assert not system.exists(f"{root}/_weftline/part-00000.json")


@pytest.mark.parametrize("kind", ["local", "memory", "renaming"])
def test_all_kinds_of_files_do_the_same(kind: str, url: str, tmp_path: Path) -> None:
    made: dict[str, Files] = {
        "local": LocalFiles(tmp_path / "a"), "memory": RemoteFiles(*fsspec.core.url_to_fs(url)),
        "renaming": Renaming(tmp_path / "b"),
    }  # fmt: skip
    files = made[kind]
    assert files.entries("") == [] and files.size("x") is None
    files.write("deep/er/x", jobs.write(b"one"))
    files.write("deep/er/x", jobs.write(b"three"))
    files.write("deep/y", jobs.write(b""))
    files.sync_names("deep/")
    assert files.entries("deep/") == ["er/", "y"]
    assert (files.size("deep/er/x"), files.size("deep/y"), files.size("deep/er")) == (5, 0, None)
    files.move("deep/er/x", "deep/er/z")
    assert read(files, "deep/er/z") == b"three"
    files.remove("deep/er/absent")
    files.remove_folder("deep/er/")
    files.remove_folder("absent/")
    assert [one for one in files.entries("deep") if one != "er/"] == ["y"]
    with pytest.raises(FileNotFoundError):
        files.open("deep/er/z")
    with pytest.raises(RuntimeError):
        files.write("z", _raise)
    assert files.size("z") is None
    lock = files.lock("state/")
    with pytest.raises(LockHeld):
        files.lock("state/")
    lock.check()
    lock.release()
    lock.release()
    files.lock("state/").release()


def _raise(file: object) -> None:
    raise RuntimeError
