"""Entry point of a worker process: hardens the process, then runs the main loop.

The runtime starts it by exec with one inherited socket, and one output pipe per step where it has several steps:
`python -m weftline.engine.worker FD [PIPE...] PARENT_PID`. Before hardening, the process does not notice the end of its
parent. Nothing slow is imported until then. The main loop is in `main.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from weftline.engine.worker.hardening import harden


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve on the inherited socket FD until it closes."""
    descriptor, *pipes, parent_pid = map(int, arguments or sys.argv[1:])
    harden(parent_pid)

    from weftline.engine.runtime import descendants
    from weftline.engine.worker.main import run_worker
    from weftline.engine.worker.stdio import StepPipes, log_to_stderr

    descendants.name_children(os.environ.get(descendants.VARIABLE, ""))
    log_to_stderr()
    run_worker(descriptor, StepPipes(pipes))
    return 0


if __name__ == "__main__":
    # Leave at once: interpreter shutdown of large frameworks takes long and has nothing left to do.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
