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
from weftline.gpu_check.device_commands import DEVICE_COMMANDS
from weftline.gpu_check.device_worker import DeviceWorker
from weftline.gpu_check.outcomes import Skipped
from weftline.gpu_check.processes import LOST_CODE, CheckSocket, PeerGone
from weftline.shm.device.driver import DeviceLost, DriverError

INJECTED = {"LD_PRELOAD", "CUDA_INJECTION64_PATH"}
"""With one of these set, a tool such as compute-sanitizer is loaded into the process and must inspect it."""

COMMANDS: dict[str, Any] = {
    **{name.removeprefix("do_"): verb for name, verb in vars(DeviceWorker).items() if name.startswith("do_")},
    **DEVICE_COMMANDS,
}


def serve(worker: DeviceWorker) -> None:
    """Answer until the other side is gone."""
    while True:
        message, fds = worker.wire.receive()
        about = {key: value for key, value in message.items() if key != "do"}
        if fds:
            about["fds"] = fds
        try:
            answer, sent = COMMANDS[message["do"]](worker, **about)
            worker.wire.send(answer, sent)
        except PeerGone:
            raise
        except DeviceLost as error:
            worker.wire.send({"failed": f"the device is lost: {error}", "lost": error.code})
            os._exit(LOST_CODE)
        except DriverError as error:
            worker.wire.send({"failed": str(error), "refused": error.code})
        except MissingPackage as error:
            worker.wire.send({"failed": str(error), "refused": "MISSING_PACKAGE"})
        except Skipped as error:
            worker.wire.send({"failed": str(error), "skipped": True})
        except Exception as error:  # every error goes back to the sender
            worker.wire.send({"failed": f"{type(error).__name__}: {error}"})


def main(arguments: list[str]) -> int:
    """Serve on the descriptor given, hardened as a worker is; returns what the process ends with."""
    if not INJECTED & os.environ.keys():
        harden(os.getppid())  # what a driver refuses such a process the check has to find
    fd, device = arguments
    try:
        serve(DeviceWorker(device, CheckSocket(socket.socket(fileno=int(fd)))))
    except PeerGone:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
