"""Arrow stream reader for standard input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa

from weftline.engine.jobs.sources.arrow_reader import slices
from weftline.engine.jobs.sources.finding import unreadable
from weftline.engine.jobs.sources.piece import Batch, Mark, Origin, RowRange
from weftline.engine.jobs.sources.schemas import check_names, fitted, plain
from weftline.engine.jobs.sources.standard_input import StandardInput


class StreamReader:
    """Reads the schema when it is made. A mark is a record batch, a row in it, and that row's number in the stream."""

    def __init__(self, stdin: StandardInput) -> None:
        self.origins: Sequence[Origin] = (stdin.origin,)
        self._stream = stdin.open()
        try:
            self._reader = pa.ipc.open_stream(self._stream)
        except (pa.ArrowException, OSError) as error:
            raise unreadable(stdin.origin.shown, error) from None
        check_names(self._reader.schema, stdin.origin.shown)
        self.schema: pa.Schema = plain(self._reader.schema)
        self._stdin, self._read = stdin, False

    @property
    def rows(self) -> int | None:
        return None

    def pieces(self, fine: bool) -> Sequence[RowRange]:
        return [RowRange(0)]

    def read(self, piece: RowRange, at: Mark | None = None) -> Iterator[Batch]:
        """Yield batches, once."""
        if self._read:
            self._stdin.open()  # refuses
        self._read = True
        shown, row = self.origins[0].shown, 0
        first, start, _ = at or (0, 0, 0)
        try:
            for number, batch in enumerate(self._reader):
                table = pa.Table.from_batches([batch])
                for offset, part in slices(table):
                    if (number, offset) >= (first, start):
                        yield Batch([number, offset, row], row, fitted(part, self.schema, shown))
                    row += part.num_rows
        except (pa.ArrowException, OSError) as error:
            raise unreadable(shown, error) from None

    def fingerprint(self) -> Mapping[str, str]:
        return {"stdin": "cannot be checked"}

    def close(self) -> None:
        self._stream.close()
