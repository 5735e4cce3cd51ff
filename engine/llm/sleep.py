"""Release of a model's device memory for sleep, and its restoration.

A weight is known under many names: a parameter, the same one tied to the output layer, slices of a merged layer, what a
fused norm's forward holds. Were tensors exchanged for others, each of these would have to be found. So every tensor
stays the object that it is, and what is taken from under it is its memory:

    Rest.of   copies the memory to the host, all of it, and only then empties it on the device
    rise      gives the tensors memory again, with the same bytes in it

A tensor that rests has its shape and nothing under it: whoever computed with it would crash. An engine takes no request
meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, UntypedStorage

_log = logging.getLogger(__name__)

HOST_BUFFER_BYTES = 64 << 20
"""Host memory is taken in pieces of this size: torch rounds what it page-locks up to a power of two, and a model's
tensors would take up to twice their size. A tensor may lie across pieces."""


def is_elsewhere(device: torch.device) -> bool:
    """Whether host memory is another memory than the device's; on a CPU, weights are where they would be brought."""
    return device.type != "cpu"


@dataclass(slots=True)
class Rest:
    """What lies where while tensors rest; `rise` ends it.

    kept:    memory whose bytes wait in `pieces`, with its size.
    passing: memory whose content nobody wants again, with its size; it comes back as zeros.
    """

    kept: list[tuple[UntypedStorage, int]] = field(default_factory=list)
    passing: list[tuple[UntypedStorage, int]] = field(default_factory=list)
    pieces: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, device: torch.device, kept: Iterable[Tensor], passing: Iterable[Tensor] = ()) -> Rest:
        """Lay down what these tensors have on `device`; RuntimeError when the host has no memory: nothing changed then.

        Waits for the device: what was to be computed with the tensors is done.
        """
        rest = cls(_memories(kept, device), _memories(passing, device))
        left = rest.host_bytes
        while left > 0:
            rest.pieces.append(_host_piece(min(left, HOST_BUFFER_BYTES), locked=device.type == "cuda"))
            left -= HOST_BUFFER_BYTES
        for there, here in rest._parts():
            here.copy_(there, non_blocking=True)
        _settle(device)
        for memory, _ in (*rest.kept, *rest.passing):
            memory.resize_(0)
        return rest

    @property
    def host_bytes(self) -> int:
        """What waits in the host's memory."""
        return sum(size for _, size in self.kept)

    def rise(self) -> None:
        """Give every tensor its memory and its content; RuntimeError when the device has not as much."""
        for memory, size in (*self.kept, *self.passing):
            memory.resize_(size)
        for there, here in self._parts():
            there.copy_(here, non_blocking=True)
        for memory, size in self.passing:
            _bytes_of(memory, size).zero_()
        for device in {memory.device for memory, _ in self.kept}:
            _settle(device)
        locked = any(piece.is_pinned() for piece in self.pieces)
        self.kept, self.passing, self.pieces = [], [], []
        forget = getattr(torch.accelerator, "empty_host_cache", None)  # not in every torch that is good enough else
        if locked and forget is not None:
            forget()

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what is copied at a time, as bytes: a part of a memory, and where it lies on the host."""
        at = 0
        for memory, size in self.kept:
            whole, done = _bytes_of(memory, size), 0
            while done < size:
                piece, start = divmod(at, HOST_BUFFER_BYTES)
                count = min(size - done, HOST_BUFFER_BYTES - start)
                yield whole[done : done + count], self.pieces[piece][start : start + count]
                done += count
                at += count


def _memories(tensors: Iterable[Tensor], device: torch.device) -> list[tuple[UntypedStorage, int]]:
    """Return the memories under tensors on `device`, each once, with their sizes."""
    found: dict[int, tuple[UntypedStorage, int]] = {}
    for tensor in tensors:
        for plain in _plain(tensor):
            memory = plain.untyped_storage()
            if plain.device.type == device.type and memory.nbytes() and memory.resizable():
                found[memory.data_ptr()] = (memory, memory.nbytes())
    return list(found.values())


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that a tensor is made of: a quantised one has numbers, scales and zero points."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    else:
        yield tensor


def _bytes_of(memory: UntypedStorage, size: int) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory, 0, (size,), (1,))


def _host_piece(size: int, locked: bool) -> Tensor:
    """Return host memory, page-locked where that is wanted and can be had: the device then copies by itself."""
    if locked:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            _log.info("no more host memory can be page-locked, weights rest in other memory: %s", error)
    return torch.empty(size, dtype=torch.uint8)


def _settle(device: torch.device) -> None:
    """Wait until what was put on the current stream is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
