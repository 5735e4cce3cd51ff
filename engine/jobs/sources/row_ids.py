"""Row ids from a column or from file and row, checked for uniqueness."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

from weftline.engine.jobs.rows import Position, Rows
from weftline.errors import InputError
from weftline.pipelines.check.problems import did_you_mean, listed

CHECKED_ROWS = 2_000_000
"""So many ids of one run are compared with each other; those beyond are not, since that takes room: 120 bytes each."""

_ID_BYTES = 16


class IdCheck:
    """Remembers 16 bytes of each id, of rows numbered from the first one that a job means.

    again: reads the rows after a position, or all, once more: those before a job that goes on are looked at too.
    """

    def __init__(self, again: Callable[[Position | None], Iterator[Rows]]) -> None:
        self._again = again
        self._seen: set[bytes] = set()
        self._looked = 0
        self._after: Position | None = None

    def look_before(self, place: int) -> None:
        """Look at the rows before a place, so far as that was not done; InputError as from `look`."""
        if self._looked >= place or len(self._seen) >= CHECKED_ROWS:
            return
        for rows in self._again(self._after):
            self.look(rows)
            if self._looked >= place or len(self._seen) >= CHECKED_ROWS:
                return

    def look(self, rows: Rows) -> None:
        """Refuse an id that came before, in this reading or an earlier one; InputError names it."""
        new = rows.ids[max(0, self._looked - rows.place) :]
        if new:
            self._looked, self._after = rows.place + len(rows), rows.after
        for id in new[: max(0, CHECKED_ROWS - len(self._seen))]:
            digest = hashlib.blake2b(id.encode("utf-8", "surrogatepass"), digest_size=_ID_BYTES).digest()
            if digest in self._seen:
                raise InputError(
                    f"row id {id!r:.200} comes twice\n    fix: choose a column whose values differ, or leave --id out"
                )
            self._seen.add(digest)


def check_id(name: str, schema: pa.Schema) -> None:
    """Refuse a column that cannot have ids."""
    if name not in schema.names:
        hint = did_you_mean(name, schema.names)
        raise InputError(
            f"--id {name:.80}: there is no such column{f'; {hint}' if hint else ''}\n"
            f"    columns: {listed(schema.names)}"
        )
    type = schema.field(name).type
    fits = (pa.types.is_string, pa.types.is_large_string, pa.types.is_integer, pa.types.is_date, pa.types.is_timestamp)
    if not any(one(type) for one in fits):
        raise InputError(f"--id {name:.80}: a column of {type}; expected text or whole numbers")


def ids_of(table: pa.Table, name: str, instead: Sequence[str], broken: Sequence[bool] | None) -> list[str]:
    """Return the ids of a column as text; rows that could not be read are called after file and row.

    instead: ids made from file and row.
    broken:  which rows could not be read.
    """
    found: list[str | None] = table.column(name).cast(pa.string()).to_pylist()
    for row, id in enumerate(found):
        if id is None:
            if broken is None or not broken[row]:
                raise InputError(f"row {instead[row]}: column {name} is empty, and --id {name} makes row ids from it")
            found[row] = instead[row]
    return [id for id in found if id is not None]
