from __future__ import annotations

from weftline.engine.jobs.output.manifest import PartRecord, digest, gaps


def record(part: int = 0, row_number: int = 0, rows: int = 3, revision: int = 0) -> PartRecord:
    return PartRecord(
        part=part, row_number=row_number, rows=rows, file="f", size_bytes=1, sha256="aa", after={}, tally={},
        seconds=1.0, revision=revision,
    )  # fmt: skip


def test_records_must_follow_each_other() -> None:
    assert gaps({0: record(), 1: record(1, 3)}) == []
    assert gaps({}) == []
    assert gaps({1: record(1, 3)}) == ["the record of part 0 is missing, and later ones are there"]
    assert gaps({0: record(1, 0)}) == ["the record of part 0 is that of part 1"]
    assert "begins at row 4" in gaps({0: record(), 1: record(1, 4)})[0]
    assert "begins at row 4" in gaps({0: record(0, 4)})[0]


def test_the_digest_changes_with_any_revision() -> None:
    assert len({digest([]), digest([record()]), digest([record(revision=1)]), digest([record(), record(1, 3)])}) == 4
