"""Media folder reader: one row for each picture, recording or text file.

Columns are `path` and `name`, and one for each kind of file there is (image, audio, text, bytes) with the path again,
null for files of another kind: whoever binds it to an input reads the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa

from weftline.engine.jobs.sources import fingerprint
from weftline.engine.jobs.sources.finding import SourceFile, origins
from weftline.engine.jobs.sources.formats import media_kind
from weftline.engine.jobs.sources.piece import MEANS, Batch, Mark, Origin, RowRange
from weftline.engine.jobs.sources.shown import shown_url

PIECE_ROWS = 1_000

KINDS = ("image", "audio", "text", "bytes")


class MediaReader:
    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self._names = [one.name for one in origins(files)]
        self.origins: Sequence[Origin] = (Origin("files", "files"),)
        self._kinds = [media_kind(one.shown) for one in files]
        there = [kind for kind in KINDS if kind in set(self._kinds)]
        lazy = [pa.field(kind, pa.string(), metadata={MEANS: b"path"}) for kind in there]
        self.schema: pa.Schema = pa.schema([pa.field("path", pa.string()), pa.field("name", pa.string()), *lazy])

    @property
    def rows(self) -> int | None:
        return len(self._files)

    def pieces(self, fine: bool) -> Sequence[RowRange]:
        total = len(self._files)
        return [RowRange(0, 0, row, min(PIECE_ROWS, total - row)) for row in range(0, total, PIECE_ROWS)]

    def read(self, piece: RowRange, at: Mark | None = None) -> Iterator[Batch]:
        """Yield the one batch of a piece."""
        here = slice(piece.row, piece.row + (piece.rows or 0))
        paths, names, kinds = [one.url for one in self._files[here]], self._names[here], self._kinds[here]
        columns: list[list[str | None]] = [[shown_url(path) for path in paths], list(names)]
        columns += [
            [path if kind == field.name else None for path, kind in zip(paths, kinds, strict=True)]
            for field in list(self.schema)[2:]
        ]
        arrays = [pa.array(column, pa.string()) for column in columns]
        yield Batch(0, piece.row, pa.table(arrays, schema=self.schema), names)

    def fingerprint(self) -> Mapping[str, str]:
        return fingerprint.of_media(self._files, [Origin(name, name) for name in self._names])

    def close(self) -> None:
        """Nothing is open."""
