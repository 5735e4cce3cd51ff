"""A process of the check: it uses one device, and does what it is asked over the socket it was started with.

    python -m weftline.engine.gpu_check.peer DESCRIPTOR DEVICE

It ends when the other side does. A device that is lost ends it with 70, as it ends a worker.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from weftline.engine.gpu_check import hopping, writing
from weftline.engine.gpu_check.hands import Hands
from weftline.engine.gpu_check.processes import LOST_CODE
from weftline.engine.gpu_check.running import Skipped
from weftline.engine.gpu_check.wire import PeerGone, Wire
from weftline.errors import MissingPackage
from weftline.shm.device.driver import DeviceLost, DriverError

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
        except Exception as error:  # whatever it is, whoever asked has to know
            hands.wire.send({"failed": f"{type(error).__name__}: {error}"})


def main(arguments: list[str]) -> int:
    """Serve on the descriptor given; returns what the process ends with."""
    fd, device = arguments
    try:
        serve(Hands(device, Wire(socket.socket(fileno=int(fd)))))
    except PeerGone:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
