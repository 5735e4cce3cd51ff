"""Legacy sharing of an allocation between processes: a handle of 64 bytes instead of a file descriptor.

A CUDA handle is resolved by the driver in the kernel. The handle of a fake names a process and its descriptor, and the
opener duplicates that descriptor with pidfd_getfd(2) (Linux 5.6). The kernel permits this to processes that may trace
the maker. Workers are hardened (PR_SET_DUMPABLE 0), so that the call fails between two of them with DriverError unless
they have CAP_SYS_PTRACE; tensors then go through host memory.
"""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple

from weftline.shm.device.driver import SHARE_HANDLE_BYTES, DriverError

_MAGIC = b"fakshare"
_PIDFD_GETFD = 438
"""Number of the system call pidfd_getfd on x86-64, arm64 and riscv64."""


class ShareHandle(NamedTuple):
    """Memory identity, and the maker's process and file descriptor."""

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
        """Duplicate the maker's descriptor into this process. DriverError: the kernel refuses."""
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
