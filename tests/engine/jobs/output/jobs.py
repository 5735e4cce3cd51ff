"""A small job for tests of the store: three parts with error rows and pictures, and what is run again of them later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import BinaryIO

from weftline.engine.jobs.output.folder import Opener, ResultFolder
from weftline.engine.jobs.output.layout import ResultLayout
from weftline.engine.jobs.output.local_files import Disk, LocalFiles
from weftline.engine.jobs.output.manifest import ErrorRow, Manifest
from weftline.engine.jobs.output.store import Store

ROWS = (4, 2, 3)
BAD = ((1,), (), (6, 8))
BAD_LATER = {0: (), 2: (8,)}
"""Error rows that are left when those of a part are run again."""

MANIFEST = Manifest(
    pipeline={"name": "captions", "fingerprint": "1"}, input={"rows.jsonl": "2"}, settings={"limit": None}
)


def place_on(disk: Disk, single_file: bool = False, root: str = "/data", suffix: str = ".jsonl") -> ResultFolder:
    if single_file:
        return ResultFolder(
            "data/x.jsonl", "data", LocalFiles(root, disk), ResultLayout("x.jsonl.job/", "x.jsonl", suffix)
        )
    return ResultFolder("data/out", "data/out", LocalFiles(f"{root}/out", disk), ResultLayout("", "", suffix))


def data(part: int, revision: int = 0) -> bytes:
    return b"".join(b"row %d of part %d revision %d\n" % (row, part, revision) for row in range(ROWS[part]))


def write(content: bytes) -> Callable[[BinaryIO], None]:
    def write_in_pieces(file: BinaryIO) -> None:
        for start in range(0, len(content), 40):
            file.write(content[start : start + 40])

    return write_in_pieces


def errors(part: int, places: Sequence[int]) -> list[ErrorRow]:
    return [
        ErrorRow(row_number=place, id=f"id-{place}", step="read", error="StepError", reason="no text", part=part)
        for place in places
    ]


def commit_rest(store: Store) -> None:
    for part in range(store.next_part, len(ROWS)):
        media = {"crop.png": b"picture %d" % part, "side.png": b""} if part else {}
        store.commit(
            part, sum(ROWS[:part]), ROWS[part], write(data(part)), errors(part, BAD[part]), media,
            after={"row": sum(ROWS[: part + 1])}, tally={"steps": {}}, seconds=1.5,
        )  # fmt: skip


def amend_rest(store: Store) -> None:
    for part, left in BAD_LATER.items():
        if store.records[part].revision == 0:
            media = {"late.png": b"late %d" % part}
            store.amend(part, write(data(part, 1)), errors(part, left), media, tally={"again": 1}, seconds=0.5)


def join(parts: Sequence[Opener], out: BinaryIO) -> None:
    for opener in parts:
        with opener() as part:
            out.write(part.read())


def run(place: ResultFolder, amend: bool = False, restart: bool = False, manifest: Manifest = MANIFEST) -> None:
    """Do whatever is left of the job."""
    with Store.open_at(place, manifest, restart, extras=("state.json",)) as store:
        commit_rest(store)
        if not amend or all(one.revision == 0 for one in store.records):
            store.finish(join, {"state.json": b"{}"})
        if amend:
            amend_rest(store)
            store.finish(join, {"state.json": b"{}"})
