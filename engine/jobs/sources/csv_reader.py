"""CSV and TSV reader in blocks of whole records, by pyarrow.

Each value is a CSV cell, the text of its file (cells.py). Column types (integer, float, boolean, text) are inferred
from the first LEARN_BYTES of the first file; dates are text. A record with the wrong number of values becomes a row of
nulls with the reason in UNUSABLE. Blank lines are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial

import pyarrow as pa
import pyarrow.csv as pcsv

from weftline.engine.jobs.rows import CSV_CELL
from weftline.engine.jobs.sources.cells import cell_field, csv_field
from weftline.engine.jobs.sources.formats import suffixes_of
from weftline.engine.jobs.sources.locations import SourceFile
from weftline.engine.jobs.sources.reader import HIDDEN_FIELD, check_columns, check_names
from weftline.engine.jobs.sources.text_reader import (
    BOM,
    Cut,
    LineBlock,
    StandardInput,
    TextReader,
    all_readable,
    is_utf8,
)
from weftline.errors import InputError, first_line

LEARN_BYTES = 4 << 20

USUAL = (b",", b";", b"\t", b"|")
"""Separators that are looked for where the expected one is missing."""

_WHERE = re.compile(r"^(CSV parse error: |In CSV column #(\d+): )?(Row #\d+: )?(CSV conversion error to )?")


class CsvReader(TextReader):
    """CSV and TSV files. The first line of each file names its columns.

    separator: character between values; None: a comma, and a tab in .tsv.
    """

    def __init__(self, files: Sequence[SourceFile] | StandardInput, separator: str | None = None) -> None:
        self._separator = separator
        super().__init__(files)

    def _learn(self) -> pa.Schema:
        schema: pa.Schema | None = None
        self._headers: list[tuple[bytes, list[str]]] = []
        for origin, one in enumerate(self.origins):
            head = self._head(origin, LEARN_BYTES)
            if not head.removeprefix(BOM).strip():
                raise InputError(f"{one.shown}: is empty; expected the names of its columns in the first line")
            names, header = self._header(origin, head)
            self._headers.append((header, names))
            found = pa.schema([(name, pa.string()) for name in names])
            check_names(found, one.shown)
            if schema is None:
                schema = self._types(head[len(header) :], names, origin)
            check_columns(schema, found, one.shown, self.origins[0].shown)
        return schema

    def _header(self, origin: int, head: bytes) -> tuple[list[str], bytes]:
        """Return a file's column names, and the bytes before its first record."""
        delimiter, lead = self._delimiter(origin), len(head) - len(head.removeprefix(BOM).lstrip(b"\r\n"))
        ends = record_ends(head[lead:], delimiter)
        size = lead + (ends[0] if ends else len(head) - lead)
        line = head[lead:size]
        _check_separator(line, delimiter, self.origins[origin].shown)
        try:
            options = pcsv.ReadOptions(use_threads=False, autogenerate_column_names=True)
            every = {f"f{place}": pa.string() for place in range(line.count(delimiter) + 1)}
            table = pcsv.read_csv(
                pa.BufferReader(line), read_options=options, parse_options=_parsing(delimiter),
                convert_options=pcsv.ConvertOptions(column_types=every),
            )  # fmt: skip
        except pa.ArrowException as error:
            raise InputError(f"{self.origins[origin].shown}:1: cannot be read as CSV: {_reason(error, [])}") from None
        if table.num_rows > 1:
            fix = "tr '\\r' '\\n' < FILE > FILE.csv"
            raise InputError(
                f"{self.origins[origin].shown}:1: its lines end with a carriage return alone; expected line feeds\n"
                f"    fix: {fix}"
            )
        return [column[0].as_py() for column in table.columns], head[:size]

    def _types(self, data: bytes, names: Sequence[str], origin: int) -> pa.Schema:
        """Return the columns with the types of their first values."""
        delimiter, cells = self._delimiter(origin), _cells(names)
        ends = record_ends(data, delimiter)
        if len(data) >= LEARN_BYTES // 2 and ends:
            data = data[: ends[-1]]
        if not is_utf8(data):
            data = data.decode(errors="replace").encode()  # pyarrow cannot pass a skipped record that is not UTF-8
        table = _table(data, names, cells, delimiter, skip=True)
        if not isinstance(table, pa.Table):
            return cells
        return pa.schema([csv_field(name, table.column(name)) for name in names])

    def _parsed(self, block: LineBlock, origin: int) -> pa.Table:
        names, delimiter, cells = self._headers[origin][1], self._delimiter(origin), _cells(self.schema.names)
        table = _table(block.data, names, cells, delimiter)
        if isinstance(table, pa.Table):
            return all_readable(table)
        ends = record_ends(block.data, delimiter)
        ends = ends if ends and ends[-1] == len(block.data) else [*ends, len(block.data)]
        found = list(_bisected(block, [0, *ends], names, cells, delimiter))
        return pa.concat_tables(found).combine_chunks() if found else _broken(0, "", cells)

    def _cut(self, origin: int) -> Cut:
        return partial(whole_records, delimiter=self._delimiter(origin))

    def _before_rows(self, origin: int) -> bytes:
        return self._headers[origin][0]

    def _delimiter(self, origin: int) -> bytes:
        if self._separator is not None:
            return self._separator.encode()
        return b"\t" if suffixes_of(self.origins[origin].shown)[0] == ".tsv" else b","


def _check_separator(line: bytes, delimiter: bytes, shown: str) -> None:
    """Refuse a file whose first line has none of the separator but another one, outside quotes."""
    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(f"{shown}: the text is UTF-16; expected UTF-8\n    fix: iconv -f UTF-16 -t UTF-8 FILE > OTHER")
    bare = re.sub(rb'"(?:[^"]|"")*"', b"", line)
    other = max(USUAL, key=bare.count)
    if delimiter in bare or other not in bare:
        return
    sign, name = (one.decode().replace("\t", "tab") for one in (delimiter, other))
    raise InputError(
        f"{shown}:1: found one column, {line.decode(errors='replace').strip()!r:.80}; the separator is {sign!r}\n"
        f"    fix: --separator {name if name == 'tab' else repr(name)}, or quotes around the name if it is one"
    )


def whole_records(data: bytes, end: bool, delimiter: bytes = b",") -> int:
    """Return the size of the whole records; a line end inside quotes ends no record."""
    last = len(data) if end else data.rfind(b"\n") + 1
    if b'"' not in data:
        return last
    for start, stop, closed in reversed(list(_quoted(data, delimiter))):
        if end:
            return last if closed else 0
        if start < last <= stop:  # an unclosed quote extends to the end
            last = data.rfind(b"\n", 0, start) + 1
        elif stop < last:
            break
    return last


def record_ends(data: bytes, delimiter: bytes) -> list[int]:
    """Return the end of each whole record."""
    spans = _quoted(data, delimiter) if b'"' in data else iter(())
    ends, (start, stop) = [], next(((one[0], one[1]) for one in spans), (len(data), len(data)))
    at = data.find(b"\n")
    while at >= 0:
        while stop <= at and start < len(data):
            start, stop = next(((one[0], one[1]) for one in spans), (len(data), len(data)))
        if start < at < stop:
            at = data.find(b"\n", stop)
            continue
        ends.append(at + 1)
        at = data.find(b"\n", at + 1)
    return ends


def _quoted(data: bytes, delimiter: bytes) -> Iterator[tuple[int, int, bool]]:
    """Yield start and end of each quoted value, and True if its closing quote is present."""
    pattern = rb"(?<![^\r\n" + re.escape(delimiter) + rb'])"(?:[^"]++|"")*+("?)'
    for match in re.finditer(pattern, data):
        yield match.start(), match.end(), bool(match[1])


def _bisected(
    block: LineBlock, ends: Sequence[int], names: Sequence[str], schema: pa.Schema, delimiter: bytes
) -> Iterator[pa.Table]:
    """Parse records by bisection, until each malformed record is a row of its own."""
    data = block.data[ends[0] : ends[-1]]
    if not data.strip(b"\r\n"):
        return
    table = _table(data, names, schema, delimiter)
    if isinstance(table, pa.Table):
        yield all_readable(table)
    elif len(ends) == 2:
        line = block.line + block.data.count(b"\n", 0, ends[0])
        yield _broken(1, f"line {line}: {table}", schema)
    else:
        middle = len(ends) // 2
        yield from _bisected(block, ends[: middle + 1], names, schema, delimiter)
        yield from _bisected(block, ends[middle:], names, schema, delimiter)


def _cells(names: Sequence[str]) -> pa.Schema:
    return pa.schema([cell_field(name, pa.string(), CSV_CELL) for name in names])


def _table(
    data: bytes, names: Sequence[str], schema: pa.Schema, delimiter: bytes, skip: bool = False
) -> pa.Table | str:
    """Parse records; return a table, or the reason why they are malformed. skip: leave malformed records out."""
    if not data.strip(b"\r\n"):
        return schema.empty_table()
    types = pcsv.ConvertOptions(
        column_types=dict(zip(schema.names, schema.types, strict=True)), include_columns=schema.names
    )
    try:
        table = pcsv.read_csv(
            pa.BufferReader(data), read_options=_reading(data, names), parse_options=_parsing(delimiter, skip),
            convert_options=types,
        )  # fmt: skip
    except pa.ArrowException as error:
        return _reason(error, names)
    return pa.table(table.columns, schema=schema)


def _reading(data: bytes, names: Sequence[str]) -> pcsv.ReadOptions:
    return pcsv.ReadOptions(use_threads=False, block_size=len(data) + 64, column_names=list(names))


def _parsing(delimiter: bytes, skip: bool = False) -> pcsv.ParseOptions:
    handler = (lambda row: "skip") if skip else None
    return pcsv.ParseOptions(delimiter=delimiter.decode(), newlines_in_values=True, invalid_row_handler=handler)


def _broken(rows: int, reason: str, schema: pa.Schema) -> pa.Table:
    columns = [pa.nulls(rows, field.type) for field in schema]
    return pa.table([*columns, pa.array([reason] * rows, pa.string())], schema=pa.schema([*schema, HIDDEN_FIELD]))


def _reason(error: Exception, names: Sequence[str]) -> str:
    text = first_line(error)
    found = _WHERE.match(text)
    if found is None:
        return text
    column = found[2] and int(found[2]) < len(names) and f"column {names[int(found[2])]}: "
    reason = text[found.end() :].replace("Expected", "expected", 1)
    return f"{column or ''}{'no ' if found[4] else ''}{reason}"[:300]
