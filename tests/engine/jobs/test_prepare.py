"""TODO."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.jobs.made import plain, spec_of, write_pipeline, write_rows
from weftline.engine.jobs.job import run_job
from weftline.engine.jobs.prepare import data_around
from weftline.errors import InputError

pytest.importorskip("pyarrow")


@pytest.mark.parametrize(
    ("out", "data", "around"),
    [
        ("in/found", "in", True),
        ("in", "in/", True),
        ("in/deep/x.jsonl", "./in", True),
        ("link/found", "in", True),
        ("file://HERE/in/found", "in", True),
        ("in/_found", "in", False),
        ("in/.found/x.jsonl", "in", False),
        ("found", "in", False),
        ("input", "in", False),
        ("in/rows.jsonl.out", "in/rows.jsonl", False),
        ("s3://in/found", "in", False),
        ("in/found", "s3://in", False),
        ("in/found", "-", False),
        ("~no-such-user/found", "~no-such-user", False),
    ],
)
def test_results_among_the_data_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, data: str, around: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rows.jsonl").write_text("{}")
    (tmp_path / "link").symlink_to("in")
    assert data_around(out.replace("HERE", str(tmp_path)), ("other", data)) == (data if around else None)


def test_a_job_whose_results_would_be_its_data_is_refused(tmp_path: Path) -> None:
    write_pipeline(tmp_path)
    (tmp_path / "in").mkdir()
    write_rows(tmp_path / "in" / "rows.jsonl", ["a", "b"])
    for out in ("in/found", "in/x.jsonl"):
        with pytest.raises(InputError, match=r"--out .*: is inside the data folder .*in: (?s:.)*fix: write elsewhere"):
            run_job(spec_of(tmp_path, tmp_path / "in", out), plain())
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["rows.jsonl"]
    for _ in range(2):
        assert run_job(spec_of(tmp_path, tmp_path / "in", "in/_found"), plain()).rows == 2
