"""Fake of a CUDA graph for tests on a CPU: repeats the operations that ran, with the numbers that Python gave them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")


class FakeCapture:
    """CUDA graph on a CPU: operations are recorded with their arguments and repeated verbatim.

    A number that Python gave an operation stays what it was, so code that lets one vary from round to round gives wrong
    results here as it would there. Reading a value off a tensor raises, as it does there. Operations that do not go
    through torch's dispatcher (numpy, numba) would be missed: keep them out of what is recorded.

    recorded:  how many recordings were made.   forgotten: how often all of them were dropped.
    fail:      raise at the next recording, for tests of what follows.
    """

    def __init__(self) -> None:
        self.recorded = self.forgotten = 0
        self.fail = False

    def record(self, compute: Callable[[], T]) -> tuple[Callable[[], None], T]:
        if self.fail:
            raise RuntimeError("this fake was set to fail")
        compute()
        tape = _Tape()
        with tape:
            result = compute()
        self.recorded += 1
        return tape.play, result

    def forget(self) -> None:
        self.forgotten += 1


_aten = torch.ops.aten
_READS = {
    _aten._local_scalar_dense.default, _aten.item.default, _aten.is_nonzero.default, _aten.equal.default,
    _aten.nonzero.default, _aten.masked_select.default,
}  # fmt: skip
"""Operations whose result, or its shape, the host has to know."""


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record every dispatched operation while active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[tuple[Any, Any, dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            raise RuntimeError("a value is read off the device while a graph is recorded")
        out = func(*args, **(kwargs or {}))
        infos = [returned.alias_info for returned in func._schema.returns]
        written = any(info is not None and info.is_write for info in infos)
        # what is said to be a view of an argument may be a copy: whether memory is shared is looked at
        shared = {tensor.untyped_storage().data_ptr() for tensor in _tensors([*args, *(kwargs or {}).values()])}
        made = _tensors(out)
        is_view = bool(made) and all(tensor.untyped_storage().data_ptr() in shared for tensor in made)
        if written:
            self._steps.append((func, args, kwargs or {}, []))  # it writes where it wrote
        elif not is_view:
            self._steps.append((func, args, kwargs or {}, made))
        return out

    def play(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, fresh in self._steps:
                out = func(*args, **kwargs)
                for place, found in zip(fresh, _tensors(out), strict=False):
                    place.copy_(found)


def _tensors(out: Any) -> list[Tensor]:
    return [found for found in (out if isinstance(out, tuple | list) else (out,)) if isinstance(found, Tensor)]
