"""Keep freed memory of large messages in the process, where the C library is glibc.

glibc takes a block of megabytes from the kernel and returns it when it is freed, so that every page of every large
message is cleared and mapped anew. That costs more than copying the message. `keep_freed_memory` raises three
thresholds and limits what they can keep.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

MIB = 1 << 20

MMAP_THRESHOLD_BYTES = 32 * MIB
"""Larger blocks come from the kernel and return to it. The most that glibc accepts; it holds an 8 MB tensor with the
copies of a message that grows while it is received."""

TRIM_THRESHOLD_BYTES = 128 * MIB
"""Freed memory at the end of a pool beyond which it is returned: eight 8 MB requests with their responses."""

TOP_PAD_BYTES = 32 * MIB
"""Memory that is taken from the kernel at a time: one block of the largest size that a pool serves."""

POOLS_MAX = 2
"""Pools of memory that threads share; glibc's default is 8 for each core. One for the interpreter's thread and one for
gRPC's. When no message is in flight the process keeps at most POOLS_MAX * TRIM_THRESHOLD_BYTES, 256 MiB, of freed
memory at the ends of its pools; gaps below a block in use are bounded by the server's limit on bytes in flight."""

PARAMETERS = (
    # M_ constant of malloc.h, variable, tunable, value
    (-3, "MALLOC_MMAP_THRESHOLD_", "glibc.malloc.mmap_threshold", MMAP_THRESHOLD_BYTES),
    (-1, "MALLOC_TRIM_THRESHOLD_", "glibc.malloc.trim_threshold", TRIM_THRESHOLD_BYTES),
    (-2, "MALLOC_TOP_PAD_", "glibc.malloc.top_pad", TOP_PAD_BYTES),
    (-8, "MALLOC_ARENA_MAX", "glibc.malloc.arena_max", POOLS_MAX),
)


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Set the thresholds that the operator has not set in `environ`; return the names of the variables for them.

    Call it before threads start. No-op without glibc.
    """
    try:
        if not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
            return []
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, ValueError):  # another C library
        return []
    tunables = environ.get("GLIBC_TUNABLES", "")
    wanted = [one for one in PARAMETERS if one[1] not in environ and f"{one[2]}=" not in tunables]
    return [variable for constant, variable, _, value in wanted if mallopt(constant, value)]
