"""Ray data set of block numbers, produced as blocks become available.

Ray Data pulls what it reads, and a job pushes blocks: the feed waits between the two. The numbers are the same whoever
reads them and however often, which Ray relies on when it reads again what a lost machine held.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import ray
from ray.data import Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

NUMBER = "block"
"""The column that has the numbers."""


class BlockNumbers(Datasource):  # type: ignore[misc]
    """`desk`: the actor to ask."""

    def __init__(self, desk: Any) -> None:
        super().__init__()
        self._desk = desk

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """Return one task, however many are asked for: there is one order."""
        unknown = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(partial(numbers, self._desk), unknown)]


def numbers(desk: Any) -> Iterator[pa.Table]:
    """Yield the number of each block, a table each, until the desk is closed."""
    number = 0
    while ray.get(desk.wait_offered.remote(number)):
        yield pa.table({NUMBER: [number]})
        number += 1
