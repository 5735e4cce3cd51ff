"""The older way in which fake devices share an allocation: a handle of 64 bytes, and no descriptor is sent.

CUDA's handle means something to the driver in the kernel, which every process talks to. A fake has no such driver, and
uses no names: its handle says which descriptor of which process leads to the memory, and the opener asks the kernel for
that descriptor (pidfd_getfd(2), Linux 5.6). The kernel grants it to those that might trace the maker. Workers are
hardened (PR_SET_DUMPABLE 0), so between two of them it is refused, by DriverError, unless they run with CAP_SYS_PTRACE:
only the host is left to them, which is what the lowest rung of the ladder is there for.
"""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple

from weftline.shm.device.driver import SHARE_HANDLE_BYTES, DriverError

_MAGIC = b"fakshare"
_PIDFD_GETFD = 438
"""Number of the system call: the same on x86-64, arm64 and riscv64."""


class ShareHandle(NamedTuple):
    """The memory's identity, and the descriptor that leads to it in the process that made it."""

    identity: int
    pid: int
    descriptor: int

    def written(self) -> bytes:
        parts = [_MAGIC, *(number.to_bytes(8, "little") for number in self)]
        return b"".join(parts).ljust(SHARE_HANDLE_BYTES, b"\0")

    @classmethod
    def read(cls, handle: bytes) -> ShareHandle:
        if len(handle) != SHARE_HANDLE_BYTES or handle[:8] != _MAGIC:
            raise DriverError("open_shared", "INVALID_HANDLE", "this is no allocation of a fake device")
        identity, pid, descriptor = (int.from_bytes(handle[at : at + 8], "little") for at in (8, 16, 24))
        return cls(identity, pid, descriptor)

    def open(self) -> int:
        """Return a descriptor of this process that leads where the maker's does; DriverError when it is refused."""
        try:
            process = os.pidfd_open(self.pid)
        except (OSError, OverflowError):
            raise DriverError("open_shared", "INVALID_HANDLE", "the process that made the allocation is gone") from None
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            opened = int(libc.syscall(_PIDFD_GETFD, process, ctypes.c_uint32(self.descriptor & 0xFFFFFFFF), 0))
        finally:
            os.close(process)
        if opened < 0:
            why = os.strerror(ctypes.get_errno())
            raise DriverError("open_shared", "NOT_SUPPORTED", f"the kernel does not lend its maker's descriptor: {why}")
        return opened
