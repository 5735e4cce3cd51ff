"""A worker process from its first moment: it is hardened before it loads anything that takes time.

Started by exec with one inherited socket, `python -m weftline.engine.worker FD PARENT_PID`. Until it is hardened nobody
tells it that its parent has ended, so nothing but that is imported here; what it does then is in `loop.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from weftline.engine.worker.hardening import harden


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve on the inherited socket FD until it closes."""
    descriptor, parent_pid = map(int, (arguments or sys.argv[1:])[:2])
    harden(parent_pid)

    import logging

    from weftline.engine.worker.loop import work

    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    work(descriptor)
    return 0


if __name__ == "__main__":
    # Leave at once: interpreter shutdown of large frameworks takes long and has nothing left to do.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
