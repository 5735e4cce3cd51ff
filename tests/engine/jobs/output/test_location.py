from __future__ import annotations

import sys
from pathlib import Path

import pytest

from weftline.engine.jobs.output.folder import find
from weftline.errors import InputError, MissingPackage


def test_a_folder_is_the_place_itself(tmp_path: Path) -> None:
    place = find(f"{tmp_path}/out/", False, ".parquet", {})
    assert (place.layout.work, place.layout.final) == ("", "")
    assert place.shown("_errors.jsonl") == f"{tmp_path}/out/_errors.jsonl"


def test_a_file_has_its_job_beside_it(tmp_path: Path) -> None:
    place = find(f"{tmp_path}/x.parquet", True, ".parquet", {})
    assert (place.layout.work, place.layout.final) == ("x.parquet.job/", "x.parquet")
    assert place.shown(place.layout.errors) == f"{tmp_path}/x.parquet.job/_errors.jsonl"
    assert find("x.parquet", True, ".parquet", {}).shown("x.parquet") == "x.parquet"


def test_a_file_url_is_a_local_path(tmp_path: Path) -> None:
    place = find(f"file://{tmp_path}/out", False, ".parquet", {})
    place.files.write("a", lambda file: None)
    assert (tmp_path / "out" / "a").exists()


def test_a_bucket_has_a_place_for_a_single_file() -> None:
    place = find("memory://x.jsonl", True, ".jsonl", {})
    assert (place.folder, place.layout.final) == ("memory://", "x.jsonl")


def test_what_lies_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file is a file; results go to a folder"):
        find(f"{tmp_path}/file", False, ".parquet", {})
    (tmp_path / "x.parquet").mkdir()
    with pytest.raises(InputError, match=r"x\.parquet is a folder"):
        find(f"{tmp_path}/x.parquet", True, ".parquet", {})
    with pytest.raises(InputError, match="names no file"):
        find("out/", True, ".parquet", {})
    with pytest.raises(InputError, match="--out ~no-such-user/out: there is no home folder of this name"):
        find("~no-such-user/out", False, ".parquet", {})


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(InputError, match=r"--out nowhere://a/b: .*nowhere"):
        find("nowhere://a/b", False, ".parquet", {})


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(MissingPackage, match=r"(?s)package fsspec .*weftline\[batch\]"):
        find("s3://bucket/out", False, ".parquet", {})
