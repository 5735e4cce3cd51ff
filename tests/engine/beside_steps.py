"""Steps that share a process on one device: each says when its calls began and ended, and on which thread."""

import os
import sys
import threading
import time
from typing import Any

import numpy as np

import weftline
from tests.engine.device_steps import OnDevice
from weftline.node import Batch, BatchNode, Outputs, Ports, StepContext, port


class Json(BatchNode):
    """From a JSON value to another."""

    heavy = True

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        return Ports((port("x", "json"),), (port("y", "json"),))

    def run(self, batch: Batch) -> Outputs:
        return {"y": [self.one(x) for x in batch["x"]]}

    def one(self, x: Any) -> Any:
        raise NotImplementedError


class Wait(Json):
    """Sleeps for x seconds: [began, ended, thread that opened it, thread that ran it]."""

    def open(self, context: Any) -> None:
        self.opened = threading.get_ident()

    def one(self, x: Any) -> Any:
        began = time.monotonic()
        time.sleep(x)
        return [began, time.monotonic(), self.opened, threading.get_ident()]


class Meet(Json):
    """Waits until the other instance of it in this process is in its call too; False when none comes."""

    _here = threading.Barrier(2)

    def one(self, x: Any) -> Any:
        try:
            self._here.wait(x)
        except threading.BrokenBarrierError:
            self._here.reset()
            return False
        return True


class Trouble(Json):
    """Raises for 'raise', ends the process for 'die', stays for 'stay', waits to be cancelled for 'wait'; else x."""

    def one(self, x: Any) -> Any:
        if x == "raise":
            raise ValueError("planned failure")
        if x == "die":
            time.sleep(0.2)
            os._exit(3)
        if x == "stay":
            time.sleep(60)
        if x == "wait":
            until = time.monotonic() + 20
            while time.monotonic() < until:
                if weftline.current().cancelled:
                    return "cancelled"
                time.sleep(0.005)
        return x


class Speak(Json):
    """Prints its lines with pauses, so that another step's come between."""

    def one(self, x: Any) -> Any:
        for line in x:
            print(line, flush=True)
            print(line, file=sys.stderr)
            time.sleep(0.02)
        return len(x)


class Slow(OnDevice):
    """Adds 1 and takes 2 ms over it, without the interpreter."""

    def run(self, batch: Batch) -> Outputs:
        rows = [np.array(x.torch().numpy()) for x in batch["x"]]
        time.sleep(0.002)
        return {"y": [row + 1 for row in rows]}
