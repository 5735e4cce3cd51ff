"""Check process: executes commands on one device, received over a socket.

    python -m weftline.gpu_check.peer DESCRIPTOR DEVICE

It ends when the other side does. A device that is lost ends it with 70, as it ends a worker.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from weftline.engine.worker.hardening import harden
from weftline.errors import MissingPackage
from weftline.gpu_check import hopping, writing
from weftline.gpu_check.hands import Hands
from weftline.gpu_check.processes import LOST_CODE
from weftline.gpu_check.running import Skipped
from weftline.gpu_check.wire import CheckSocket, PeerGone
from weftline.shm.device.driver import DeviceLost, DriverError

INJECTED = {"LD_PRELOAD", "CUDA_INJECTION64_PATH"}
"""With one of these set, a tool such as compute-sanitizer is loaded into the process, and has to look into it."""

VERBS: dict[str, Any] = {
    **{name.removeprefix("do_"): verb for name, verb in vars(Hands).items() if name.startswith("do_")},
    **writing.VERBS,
    **hopping.VERBS,
}


def serve(hands: Hands) -> None:
    """Answer until the other side is gone."""
    while True:
        message, fds = hands.wire.receive()
        about = {key: value for key, value in message.items() if key != "do"}
        if fds:
            about["fds"] = fds
        try:
            answer, sent = VERBS[message["do"]](hands, **about)
            hands.wire.send(answer, sent)
        except PeerGone:
            raise
        except DeviceLost as error:
            hands.wire.send({"failed": f"the device is lost: {error}", "lost": error.code})
            os._exit(LOST_CODE)
        except DriverError as error:
            hands.wire.send({"failed": str(error), "refused": error.code})
        except MissingPackage as error:
            hands.wire.send({"failed": str(error), "refused": "MISSING_PACKAGE"})
        except Skipped as error:
            hands.wire.send({"failed": str(error), "skipped": True})
        except Exception as error:  # every error goes back to the sender
            hands.wire.send({"failed": f"{type(error).__name__}: {error}"})


def main(arguments: list[str]) -> int:
    """Serve on the descriptor given, hardened as a worker is; returns what the process ends with."""
    if not INJECTED & os.environ.keys():
        harden(os.getppid())  # what a driver refuses such a process the check has to find
    fd, device = arguments
    try:
        serve(Hands(device, CheckSocket(socket.socket(fileno=int(fd)))))
    except PeerGone:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
