"""WebDataset reader: files with a common stem form one row.

The suffixes are those of the first LEARN_ROWS rows of the first archive; others that come up later are left out. Texts
are text, `cls` and `index` whole numbers, `json` written JSON, everything else bytes; `__key__` is the name in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from tarfile import TarError
from typing import Any

import pyarrow as pa

from weftline.engine.jobs.sources import fingerprint
from weftline.engine.jobs.sources.finding import SourceFile, origins, unreadable
from weftline.engine.jobs.sources.formats import compression_of
from weftline.engine.jobs.sources.lines import unpacked
from weftline.engine.jobs.sources.piece import BATCH_BYTES, MEANS, UNUSABLE, Batch, Mark, Origin, RowRange
from weftline.errors import InputError

LEARN_ROWS = 100
TAR_ROWS_MAX = 1_000
TEXTS = ("txt", "text", "caption", "transcript", "md")
RESERVED = ("__key__", "__url__", "__bad__")
"""What webdataset itself writes into a row; a file of such a suffix would take its place."""

NUMBERS = ("cls", "cls2", "index", "inx", "id")

Sample = Mapping[str, Any]


class TarReader:
    """A piece is an archive; a mark is the number of a row in it."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self.origins: Sequence[Origin] = origins(files)
        with self._samples(0) as samples:
            suffixes = list(dict.fromkeys(name for one in islice(samples, LEARN_ROWS) for name in one))
        self._suffixes = [name for name in suffixes if not name.startswith("__")]
        if not self._suffixes:
            raise InputError(f"{files[0].shown}: holds no rows (files called KEY.SUFFIX)")
        self.schema: pa.Schema = pa.schema([pa.field("__key__", pa.string()), *map(_field, self._suffixes)])

    @property
    def rows(self) -> int | None:
        return None

    def pieces(self, fine: bool) -> Sequence[RowRange]:
        return [RowRange(origin) for origin in range(len(self._files))]

    def read(self, piece: RowRange, at: Mark | None = None) -> Iterator[Batch]:
        name = self.origins[piece.origin].name
        with self._samples(piece.origin) as samples:
            row, held, size_bytes = 0, list[Sample](), 0
            for sample in samples:
                row += 1
                if row <= (at or 0):
                    continue
                held.append(sample)
                size_bytes += sum(len(value) for value in sample.values() if isinstance(value, bytes))
                if len(held) >= TAR_ROWS_MAX or size_bytes >= BATCH_BYTES:
                    yield self._batch(held, row - len(held), name)
                    held, size_bytes = [], 0
            if held:
                yield self._batch(held, row - len(held), name)

    def fingerprint(self) -> Mapping[str, str]:
        return fingerprint.of_tables(self._files, self.origins)

    def close(self) -> None:
        """Nothing stays open between reads."""

    def _batch(self, samples: Sequence[Sample], row: int, name: str) -> Batch:
        reasons: list[str | None] = [None] * len(samples)
        columns: list[list[Any]] = [[one["__key__"] for one in samples]]
        for suffix in self._suffixes:
            values: list[Any] = []
            for place, one in enumerate(samples):
                value, why = _value(suffix, one.get(suffix))
                values.append(value)
                reasons[place] = reasons[place] or why
            columns.append(values)
        fields = [*self.schema, pa.field(UNUSABLE, pa.string())]
        arrays = [pa.array(values, field.type) for values, field in zip([*columns, reasons], fields, strict=True)]
        table = pa.table(arrays, schema=pa.schema(fields))
        return Batch(row, row, table, [f"{name}#{one['__key__']}" for one in samples])

    @contextmanager
    def _samples(self, origin: int) -> Iterator[Iterator[Sample]]:
        from webdataset.tariterators import group_by_keys  # brings torch, where that is installed

        file = self._files[origin]
        try:
            with file.open() as packed, unpacked(packed, compression_of(file.shown)) as stream:
                yield group_by_keys(_members(stream, file.shown))
        except (TarError, OSError, EOFError, pa.ArrowException) as error:
            raise unreadable(file.shown, error) from None


def _members(stream: Any, shown: str) -> Iterator[Sample]:
    """Yield the files of an archive as webdataset has them; InputError for those that it cannot make rows of."""
    from webdataset.tariterators import base_plus_ext, tar_file_iterator

    keys, current, suffixes = set[str](), None, set[str]()
    for member in tar_file_iterator(stream):
        name = member["fname"]
        key, suffix = base_plus_ext(name)
        if key is not None:
            if key != current:
                if key in keys:
                    raise InputError(
                        f"{shown}: {name}: row {key} was there already, with another row's files after it\n"
                        "    fix: give every row its own name, and write its files one after the other"
                    )
                keys.add(key)
                current, suffixes = key, set()
            if suffix.lower() in (*RESERVED, *suffixes):
                why = f"a row cannot have a file called {suffix}" if suffix.lower() in RESERVED else "is there twice"
                raise InputError(f"{shown}: {name}: {why}\n    fix: leave it out, or give it another name")
            suffixes.add(suffix.lower())
        yield {**member, "__url__": shown}


def _field(suffix: str) -> pa.Field:
    if suffix in NUMBERS:
        return pa.field(suffix, pa.int64())
    if suffix == "json":
        return pa.field(suffix, pa.string(), metadata={MEANS: b"json"})
    return pa.field(suffix, pa.string() if suffix in TEXTS else pa.binary())


def _value(suffix: str, data: bytes | None) -> tuple[Any, str | None]:
    """Return a member as its column has it, and why it cannot be used, if it cannot."""
    if data is None or (suffix not in NUMBERS and suffix not in TEXTS and suffix != "json"):
        return data, None
    try:
        text = data.decode()
        return (int(text) if suffix in NUMBERS else text), None
    except UnicodeDecodeError:
        return None, f"{suffix}: text that is not UTF-8"
    except ValueError:
        return None, f"{suffix}: no whole number"
