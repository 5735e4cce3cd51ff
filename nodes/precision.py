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

    A worker on a GPU calls this once, before its nodes compute; code of users may set it again.
    """
    for owner, name in _tf32_settings(torch)[1:]:
        setattr(owner, name, "ieee" if name == "fp32_precision" else False)


def _tf32_settings(torch: Any) -> list[tuple[Any, str]]:
    """Return torch's settings of TF32, that of matrix products first; torch before 2.9 has the older names."""
    products, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if hasattr(products, "fp32_precision"):
        return [(owner, "fp32_precision") for owner in (products, cudnn.conv, cudnn.rnn)]
    return [(products, "allow_tf32"), (cudnn, "allow_tf32")]


class _Tf32:
    """The process's settings of TF32: allowed while any thread is inside, then as they were before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: list[Any] = []

    @contextmanager
    def allowed(self) -> Iterator[None]:
        import torch

        settings = _tf32_settings(torch)
        with self._lock:
            if not self._inside:
                self._before = [getattr(owner, name) for owner, name in settings]
                for owner, name in settings:
                    setattr(owner, name, "tf32" if name == "fp32_precision" else True)
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    for (owner, name), value in zip(settings, self._before, strict=True):
                        setattr(owner, name, value)


_TF32 = _Tf32()
