"""Flow control of one stream to an ingress process.

Pieces are copied out of the engine's extent as they are read. The engine is told what was read a quarter of a window at
a time; a reader that stops reading thus stops the engine's stream. The block of the request's own inputs is free with
the first piece: who answers has read the question.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from weftline.engine.protocol.messages import CHUNK_OVERHEAD_BYTES
from weftline.engine.result import StreamedOutput, owned
from weftline.engine.serving.frontend import messages as msg
from weftline.engine.serving.frontend.extent import NO_BLOCK, SharedBuffer
from weftline.engine.serving.frontend.parcel import parcel_of
from weftline.shm.arena import HostArena

ACKNOWLEDGE_BYTES = msg.WINDOW_BYTES // 4
"""How much of a stream is read before the engine is told."""


class ResponseStream:
    """The stream of one question. For one event loop.

    block: where the question's inputs lie on the shelf.
    say:   sends a message to the engine.
    """

    def __init__(
        self, number: int, block: int, shelf: SharedBuffer, answers: HostArena, say: Callable[[msg.FromIngress], None]
    ) -> None:
        self._number = number
        self._block = block
        self._shelf = shelf
        self._answers = answers
        self._say = say
        self._come: deque[msg.ResponseChunk | msg.Finished | Exception] = deque()
        self._news = asyncio.Event()
        self._read_bytes = 0
        self._left = False
        self._ended = False

    # the reader

    async def get(self) -> StreamedOutput | None:
        """Wait for the next piece; None at the end, or the error that ended the stream."""
        while not self._come:
            self._news.clear()
            await self._news.wait()
        come = self._come.popleft()
        if isinstance(come, msg.Finished):
            return None
        if isinstance(come, Exception):
            raise come
        try:
            value = owned(parcel_of(come.value, self._answers))
        finally:
            self._take(come)
        if not come.last:
            self._count(come.value.size_bytes + CHUNK_OVERHEAD_BYTES)
        return StreamedOutput(come.output, value, come.last)

    def leave(self) -> None:
        """Read no more; what the engine has not ended yet it withdraws."""
        self._left = True
        for come in self._come:
            if isinstance(come, msg.ResponseChunk):
                self._take(come)
        self._come.clear()
        if not self._ended:
            self._say(msg.Cancel(self._number))

    # the engine

    def hear(self, piece: msg.ResponseChunk) -> None:
        self._free()
        if self._left:
            self._take(piece)
            return
        self._come.append(piece)
        self._news.set()

    def end(self, end: msg.Finished | Exception) -> None:
        """The engine has ended the stream, or is gone."""
        self._free()
        self._ended = True
        self._come.append(end)
        self._news.set()

    # inside

    def _count(self, size_bytes: int) -> None:
        self._read_bytes += size_bytes
        if self._read_bytes >= ACKNOWLEDGE_BYTES and not self._ended:
            self._say(msg.More(self._number, self._read_bytes))
            self._read_bytes = 0

    def _take(self, piece: msg.ResponseChunk) -> None:
        if piece.block != NO_BLOCK:
            self._say(msg.BlockReleased(piece.block))

    def _free(self) -> None:
        block, self._block = self._block, NO_BLOCK
        self._shelf.free(block)
