"""Option `precision`: autocast and TF32 for torch networks with float32 weights.

    float32    every product and convolution in float32; the default
    tf32       those on a GPU with the 10-bit mantissa of TensorFloat-32; no effect on the CPU
    bfloat16   torch's autocast: matrix products and attention in bfloat16, sums such as softmax and norms in float32
    float16    the same in float16, whose range is smaller: values beyond 65 504 become infinite

Outputs are float32 in every case. TF32 is a setting of the whole process, and is set only while a call of a step that
asks for it is made; products that other steps of the process start at that moment may be computed in TF32 too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from weftline.nodes.contract import ConfigError

PRECISIONS = ("float32", "tf32", "bfloat16", "float16")
_HALF = ("bfloat16", "float16")


def check_precision(precision: str, allowed: tuple[str, ...] = PRECISIONS) -> None:
    """Raise ConfigError about option `precision` unless it is one of those allowed."""
    if precision not in allowed:
        raise ConfigError("precision", f"{precision!r:.40}", f"one of {', '.join(allowed)}")


@contextmanager
def computing_in(precision: str, device: str) -> Iterator[None]:
    """Have torch compute in a precision inside, on `device` as torch calls it."""
    import torch

    if precision in _HALF:
        with torch.autocast(device.partition(":")[0], getattr(torch, precision)):
            yield
    elif precision == "tf32" and device.startswith("cuda"):
        with _TF32.allowed():
            yield
    else:
        yield


def round_weights(network: Any, precision: str) -> None:
    """Store the weights of linear layers as autocast would round them in every call: the same numbers, half the memory.

    Layers that share their weight with another kind of layer, such as an embedding table, are left as they are.
    """
    import torch

    if precision not in _HALF:
        return
    linear = [module for module in network.modules() if type(module) is torch.nn.Linear]
    ours = {id(module) for module in linear}
    others = {id(one) for module in network.modules() if id(module) not in ours for one in module.parameters(False)}
    for module in linear:
        if id(module.weight) not in others:
            module.to(getattr(torch, precision))


def compute_in_float32(torch: Any) -> None:
    """Turn off TF32 in cuDNN's convolutions and recurrent layers, where torch allows it by default.

    Matrix products are in float32 by torch's default. A worker on a GPU calls this once, before its nodes compute; code
    of users may set it again.
    """
    torch.backends.cudnn.allow_tf32 = False


class _Tf32Settings:
    """Torch's settings of TF32. They are written by their older names.

    Since 2.9 torch has newer ones (`fp32_precision`), and refuses to read the older ones after a newer one was written
    to another value. `torch.backends.cudnn.flags` and torch.compile read the older ones. The newer ones can always be
    read, and distinguish "none" from "ieee".
    """

    def __init__(self, torch: Any) -> None:
        self._products, self._cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        newer = [self._products, self._cudnn.conv, self._cudnn.rnn] if hasattr(self._products, "fp32_precision") else []
        self._before = [(one, one.fp32_precision) for one in newer]
        if newer:
            self._allowed = [one.fp32_precision == "tf32" for one in newer[:2]]
        else:
            self._allowed = [self._products.allow_tf32, self._cudnn.allow_tf32]

    def allow(self) -> None:
        self._products.allow_tf32 = self._cudnn.allow_tf32 = True

    def restore(self) -> None:
        """Return to the settings at the time of `__init__`."""
        self._products.allow_tf32, self._cudnn.allow_tf32 = self._allowed
        for owner, value in self._before:
            if owner.fp32_precision != value:
                owner.fp32_precision = value


class _Tf32:
    """The process's settings of TF32: allowed while any thread is inside, then as they were before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: _Tf32Settings | None = None

    @contextmanager
    def allowed(self) -> Iterator[None]:
        import torch

        with self._lock:
            if not self._inside:
                self._before = _Tf32Settings(torch)
                self._before.allow()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside and self._before is not None:
                    self._before.restore()


_TF32 = _Tf32()
