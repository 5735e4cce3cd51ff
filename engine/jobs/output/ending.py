"""Finalisation of results after the last part, with a completion marker.

`done.json` is written last. It holds a digest of the records it was made from: when a part is amended, a done.json that
stayed behind would no longer fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

from weftline.engine.jobs.output.documents import Unreadable, decode, encode
from weftline.engine.jobs.output.files import Lock, copy, put, put_bytes, read
from weftline.engine.jobs.output.place import ResultFolder
from weftline.engine.jobs.output.records import Done, PartRecord, digest

Opener = Callable[[], BinaryIO]
Join = Callable[[Sequence[Opener], BinaryIO], None]
"""Puts parts together, in order, into one file."""


def is_finished(place: ResultFolder, records: Sequence[PartRecord]) -> bool:
    """Whether everything is there that was put together from these records; OSError when it cannot be read."""
    if place.files.size(place.layout.done) is None:
        return False
    try:
        done = decode(read(place.files, place.layout.done), Done)
    except Unreadable:
        return False
    whole = done.records == digest(records)
    return whole and all(place.files.size(name) == size for name, size in done.files.items())


def put_together(
    place: ResultFolder, records: Sequence[PartRecord], lock: Lock, join: Join | None, extras: Mapping[str, bytes]
) -> None:
    """Write what stands beside the parts, and that all is done; OSError when it cannot be written."""
    files, layout = place.files, place.layout
    made = {}
    errors = sum(len(one.error_places) for one in records)
    if errors:
        made[layout.errors] = put(files, layout.errors, lambda out: _join_errors(place, records, out)).size_bytes
    else:
        files.remove(layout.errors)
    if layout.final:
        if join is None:
            raise ValueError("a single file needs somebody to put it together")
        openers = [_opener(place, one) for one in records]
        made[layout.final] = put(files, layout.final, lambda out: join(openers, out)).size_bytes
    for name, data in extras.items():
        made[layout.work + name] = put_bytes(files, layout.work + name, data).size_bytes
    files.settle(layout.work)
    lock.check()
    rows = sum(one.rows for one in records)
    done = Done(records=digest(records), parts=len(records), rows=rows, errors=errors, files=made)
    put_bytes(files, layout.done, encode(done))


def what_lies_where(place: ResultFolder, records: Sequence[PartRecord]) -> dict[str, str]:
    """Return the names of what a finished job leaves, as the user would write them."""
    found = {"results": place.out, "manifest": place.shown(place.layout.manifest)}
    if any(one.error_places for one in records):
        found["errors"] = place.shown(place.layout.errors)
    if any(one.media for one in records):
        found["media"] = place.shown(place.layout.media)
    return found


def _opener(place: ResultFolder, record: PartRecord) -> Opener:
    return lambda: place.files.open(place.layout.work + record.file)


def _join_errors(place: ResultFolder, records: Sequence[PartRecord], out: BinaryIO) -> None:
    for one in records:
        if one.errors_file:
            with place.files.open(place.layout.state + one.errors_file) as part:
                copy(part, out)
