"""Data sets on disk, one in every format, all with the same rows."""

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest

ROWS = 137

Maker = Callable[[Path], str]


def rows(count: int = ROWS) -> list[dict[str, Any]]:
    return [{"text": f"row {row}", "n": row} for row in range(count)]


def table(count: int = ROWS) -> pa.Table:
    return pa.Table.from_pylist(rows(count), schema=pa.schema([("text", pa.string()), ("n", pa.int64())]))


def jsonl(count: int = ROWS) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows(count)).encode()


def tar(path: Path, members: list[tuple[str, bytes]], mode: str = "w") -> None:
    with tarfile.open(path, mode) as archive:
        for name, data in members:
            about = tarfile.TarInfo(name)
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))


def _parquet(folder: Path) -> str:
    whole = table()
    pq.write_table(whole.slice(0, 80), folder / "a.parquet", row_group_size=17)
    pq.write_table(whole.slice(80), folder / "b.parquet", row_group_size=100)
    return str(folder)


def _jsonl(folder: Path) -> str:
    lines = jsonl().splitlines(keepends=True)
    (folder / "a.jsonl").write_bytes(b"".join(lines[:50]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[50:])))
    return str(folder)


def _csv(folder: Path) -> str:
    pcsv.write_csv(table(), folder / "a.csv")
    return str(folder / "a.csv")


def _arrow(folder: Path) -> str:
    whole = table()
    with pa.ipc.new_file(str(folder / "a.arrow"), whole.schema) as file:
        file.write_table(whole.slice(0, 90), max_chunksize=13)
    with pa.ipc.new_stream(str(folder / "b.arrow"), whole.schema) as stream:
        stream.write_table(whole.slice(90), max_chunksize=20)
    return str(folder / "*.arrow")


def _tar(folder: Path) -> str:
    for name, part in (("a.tar", rows()[:70]), ("b.tar", rows()[70:])):
        members = [
            (f"{row['n']:05d}.{end}", str(text).encode())
            for row in part
            for end, text in (("txt", row["text"]), ("cls", row["n"]))
        ]
        tar(folder / name, members)
    return str(folder)


def _hf(folder: Path) -> str:
    import datasets

    datasets.Dataset(table()).save_to_disk(str(folder / "saved"))
    return str(folder / "saved")


def _files(folder: Path) -> str:
    for row in rows():
        (folder / f"{row['n']:05d}.txt").write_text(row["text"])
    return str(folder)


MAKERS: dict[str, Maker] = {
    "parquet": _parquet, "jsonl": _jsonl, "csv": _csv, "arrow": _arrow, "webdataset": _tar, "hf": _hf, "files": _files,
}  # fmt: skip


@pytest.fixture(scope="session")
def data_sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One data set of ROWS rows in each format, by format."""
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in MAKERS.items()}
