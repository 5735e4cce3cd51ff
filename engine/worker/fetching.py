"""Tensors that lie on a worker's device alone, copied to host memory for a reader who cannot attach its arena there.

Those are few: what was on its way when the first reader was refused. From then on the worker gives everything in host
memory (messages.GiveOnHost).
"""

from __future__ import annotations

import numpy as np

from weftline.engine.messages import Fetch, Fetched, Value
from weftline.engine.worker.memory import Memory
from weftline.engine.worker.near import NearMemory
from weftline.errors import LimitReached, StepError
from weftline.shm.view import bytes_view


def fetch(memory: Memory, message: Fetch) -> Fetched:
    """Answer a Fetch: asks for room in the worker's host arena, and waits for it and for the copies."""
    if memory.near is None:
        return Fetched(message.token, (), "its worker has no way to the device")
    try:
        return Fetched(message.token, _copied(memory, memory.near, message.values))
    except (LimitReached, StepError) as error:
        return Fetched(message.token, (), str(error))


def _copied(memory: Memory, near: NearMemory, values: tuple[Value, ...]) -> tuple[Value, ...]:
    tensors = [near.view(value) for value in values]
    blocks, _ = memory.need([tensor.nbytes for tensor in tensors], ())
    lie = []
    for value, tensor, block in zip(values, tensors, blocks, strict=True):
        place = block.place(0, tensor.nbytes)
        if value.ready is not None:
            near.wait_ready(near.out, value.ready)
        room = np.frombuffer(bytes_view(memory.own_arena, place), np.uint8)
        near.driver.copy(int(room.ctypes.data), tensor.address, tensor.nbytes, near.out)
        lie.append(Value(value.kind, value.dtype, value.shape, place=place))
    near.driver.synchronize(near.out)
    return tuple(lie)
