"""Offload of a model's device memory to the host while it sleeps, and its restoration.

A weight is reachable in many ways: as a parameter, tied to the output layer, as slices of a merged layer, or held by
the forward of a fused norm. Replacing tensors would mean finding each of these, so every tensor object stays and only
its memory is released:

    OffloadedTensors.offload   copies all memory to the host, and then frees it on the device
    restore                    allocates the memory again, with the same bytes

An offloaded tensor has a shape and no memory: computing with it would crash. The engine refuses requests meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, UntypedStorage

_log = logging.getLogger(__name__)

HOST_BUFFER_BYTES = 64 << 20
"""Size of host buffers: torch rounds page-locked allocations up to a power of two, so that single tensors would take up
to twice their size. A tensor may span buffers."""


def has_own_memory(device: torch.device) -> bool:
    """Return whether the device's memory is separate from the host's; on a CPU there is nothing to offload."""
    return device.type != "cpu"


@dataclass(slots=True)
class OffloadedTensors:
    """Memory of offloaded tensors until `restore`.

    kept:    storages whose bytes are in `buffers`, with their sizes.
    dropped: storages whose content is not needed, with their sizes; restored as zeros.
    """

    kept: list[tuple[UntypedStorage, int]] = field(default_factory=list)
    dropped: list[tuple[UntypedStorage, int]] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)

    @classmethod
    def offload(cls, device: torch.device, kept: Iterable[Tensor], dropped: Iterable[Tensor] = ()) -> OffloadedTensors:
        """Offload these tensors from `device`; RuntimeError, with no change, when the host has no memory.

        Waits for the device to finish computing with the tensors.
        """
        offloaded = cls(_storages(kept, device), _storages(dropped, device))
        left = offloaded.host_bytes
        while left > 0:
            offloaded.buffers.append(_host_buffer(min(left, HOST_BUFFER_BYTES), locked=device.type == "cuda"))
            left -= HOST_BUFFER_BYTES
        for there, here in offloaded._parts():
            here.copy_(there, non_blocking=True)
        _synchronize(device)
        for memory, _ in (*offloaded.kept, *offloaded.dropped):
            memory.resize_(0)
        return offloaded

    @property
    def host_bytes(self) -> int:
        """Return the bytes in host memory."""
        return sum(size for _, size in self.kept)

    def restore(self) -> None:
        """Restore memory and content of every tensor; RuntimeError when the device has too little memory."""
        for memory, size in (*self.kept, *self.dropped):
            memory.resize_(size)
        for there, here in self._parts():
            there.copy_(here, non_blocking=True)
        for memory, size in self.dropped:
            _bytes_of(memory, size).zero_()
        for device in {memory.device for memory, _ in self.kept}:
            _synchronize(device)
        locked = any(buffer.is_pinned() for buffer in self.buffers)
        self.kept, self.dropped, self.buffers = [], [], []
        forget = getattr(torch.accelerator, "empty_host_cache", None)  # missing in older supported versions of torch
        if locked and forget is not None:
            forget()

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs to copy, as bytes: a part of a storage, and its place on the host."""
        at = 0
        for memory, size in self.kept:
            whole, done = _bytes_of(memory, size), 0
            while done < size:
                buffer, start = divmod(at, HOST_BUFFER_BYTES)
                count = min(size - done, HOST_BUFFER_BYTES - start)
                yield whole[done : done + count], self.buffers[buffer][start : start + count]
                done += count
                at += count


def _storages(tensors: Iterable[Tensor], device: torch.device) -> list[tuple[UntypedStorage, int]]:
    """Return the distinct storages of tensors on `device`, with their sizes."""
    found: dict[int, tuple[UntypedStorage, int]] = {}
    for tensor in tensors:
        for plain in _plain(tensor):
            memory = plain.untyped_storage()
            if plain.device.type == device.type and memory.nbytes() and memory.resizable():
                found[memory.data_ptr()] = (memory, memory.nbytes())
    return list(found.values())


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors of a tensor: a quantised one has values, scales and zero points."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    else:
        yield tensor


def _bytes_of(memory: UntypedStorage, size: int) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory, 0, (size,), (1,))


def _host_buffer(size: int, locked: bool) -> Tensor:
    """Return host memory, page-locked if requested and possible, which makes copies asynchronous."""
    if locked:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            _log.info("no more host memory can be page-locked, offloading weights to pageable memory: %s", error)
    return torch.empty(size, dtype=torch.uint8)


def _synchronize(device: torch.device) -> None:
    """Wait for the current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
