"""Block pipeline of a job: read-ahead thread, concurrent execution, in-order delivery.

Memory is bounded by how many blocks are under way, however many there are: `ahead` with the answerer, as many read and
waiting for it, and none beyond; of large ones fewer, BYTES_MAX in each place, and at least one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from typing import Generic, TypeVar

BYTES_MAX = 512 << 20
"""Most bytes of blocks that are asked at a time, and that are read and wait; one block may be larger."""

LOOK_S = 0.2
"""How often `idle` is called while nothing happens."""

Block = TypeVar("Block")
Answer = TypeVar("Answer")


class _Ahead(Generic[Block]):
    """Reads blocks in a thread, a bounded number ahead of whoever takes them."""

    def __init__(self, blocks: Iterable[Block], most: int, size: Callable[[Block], int], wake: threading.Event) -> None:
        self._blocks, self._most, self._size, self._wake = blocks, most, size, wake
        self._read: deque[Block] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._over = self._left = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="weftline-read-ahead", daemon=True)
        self._thread.start()

    def take(self) -> Block | None:
        """Return the next block; None when none is there now."""
        with self._changed:
            if not self._read:
                return None
            block = self._read.popleft()
            self._bytes -= self._size(block)
            self._changed.notify()
            return block

    def over(self) -> bool:
        """Whether all blocks were taken; what reading failed with is raised then."""
        with self._changed:
            over = self._over and not self._read
        if over and self._error is not None:
            raise self._error
        return over

    def leave(self) -> None:
        """Read no more. The thread ends when the source gives the next rows, or has none."""
        with self._changed:
            self._left = True
            self._changed.notify()

    def _run(self) -> None:
        try:
            for block in self._blocks:
                with self._changed:
                    while not self._left and (len(self._read) >= self._most or self._bytes >= BYTES_MAX):
                        self._changed.wait()
                    if self._left:
                        return
                    self._read.append(block)
                    self._bytes += self._size(block)
                self._wake.set()
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._over = True
            self._wake.set()


def answered(
    blocks: Iterable[Block],
    ask: Callable[[Block], Future[Answer]],
    ahead: int,
    *,
    size: Callable[[Block], int] = lambda block: 0,
    stop: Callable[[], bool] = lambda: False,
    idle: Callable[[], None] = lambda: None,
) -> Generator[tuple[Block, Answer], None, None]:
    """Yield each block with its answer, in order. What reading or answering failed with is raised where it belongs.
    Close it when it is left early.

    ahead: how many blocks are asked for at a time.
    size:  of a block in bytes, about; asked for more than once.
    stop:  looked at often; when it says so, nothing more is yielded.
    idle:  called now and then while nothing else happens.
    """
    wake = threading.Event()
    read = _Ahead(blocks, ahead, size, wake)
    asked_bytes = 0
    asked: deque[tuple[Block, Future[Answer]]] = deque()
    try:
        while not stop():
            while len(asked) < ahead and asked_bytes < BYTES_MAX and (block := read.take()) is not None:
                asked_bytes += size(block)
                future = ask(block)
                asked.append((block, future))
                future.add_done_callback(lambda _: wake.set())
            if asked and asked[0][1].done():
                block, future = asked.popleft()
                asked_bytes -= size(block)
                yield block, future.result()
            elif not asked and read.over():
                return
            else:
                if not wake.wait(LOOK_S):
                    idle()
                wake.clear()
    finally:
        read.leave()
        for _, future in asked:
            future.cancel()
