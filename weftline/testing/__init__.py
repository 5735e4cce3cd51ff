"""Test pipelines without their models and without a GPU: fake nodes, a fake GPU, a recorder and a clock.

The fake nodes are used by name, like built-in nodes. `weftline nodes` and the list of built-in nodes leave them out.

echo:     passes `value` on, after a delay if there is one.
fail:     fails chosen items: an exception, a crash, a hang, a lack of memory.
remember: returns the texts of a sequence so far; a stateful node.
trickle:  streams a fixed number of chunks.
fill:     creates a tensor.
add:      adds a number to every element of a tensor.
total:    sums the elements of a tensor.

`weftline nodes fail` prints the ports and options of one of them. A device named `fake:0` is a GPU in host memory, with
streams, events and memory that is shared between processes. 'fake-legacy:0' shares no memory by file descriptor,
'fake-alone:0' shares none, and other processes cannot attach the memory of 'fake-closed:0'.

Failures are injected by count or by value, never at random. Each name below is imported when it is first used.
docs/guides/testing.md is the guide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weftline.testing.clock import ManualClock
    from weftline.testing.fake_gpu.gpu import FakeGpu
    from weftline.testing.fake_gpu.machine import FakeMachine
    from weftline.testing.nodes import (
        EXIT_KILLED,
        Echo,
        EchoConfig,
        Fail,
        FailConfig,
        Remember,
        RememberConfig,
        Trickle,
        TrickleConfig,
    )
    from weftline.testing.recorder import Recorder, same_calls
    from weftline.testing.tensor_nodes import Add, AddConfig, Fill, FillConfig, Total, TotalConfig

__all__ = [
    "EXIT_KILLED",
    "Add",
    "AddConfig",
    "Echo",
    "EchoConfig",
    "Fail",
    "FailConfig",
    "FakeGpu",
    "FakeMachine",
    "Fill",
    "FillConfig",
    "ManualClock",
    "Recorder",
    "Remember",
    "RememberConfig",
    "Total",
    "TotalConfig",
    "Trickle",
    "TrickleConfig",
    "same_calls",
]

_MODULES = {
    "weftline.testing.clock": ("ManualClock",),
    "weftline.testing.fake_gpu.gpu": ("FakeGpu",),
    "weftline.testing.fake_gpu.machine": ("FakeMachine",),
    "weftline.testing.nodes": (
        *("EXIT_KILLED", "Echo", "EchoConfig", "Fail", "FailConfig"),
        *("Remember", "RememberConfig", "Trickle", "TrickleConfig"),
    ),
    "weftline.testing.recorder": ("Recorder", "same_calls"),
    "weftline.testing.tensor_nodes": ("Add", "AddConfig", "Fill", "FillConfig", "Total", "TotalConfig"),
}
"""Names by the module that defines them; the imports for type checkers above are the same."""

_HOMES = {name: module for module, names in _MODULES.items() for name in names}


if not TYPE_CHECKING:  # hidden from type checkers, which would accept any attribute

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'weftline.testing' has no attribute {name!r}; it has {', '.join(__all__)}")
        from importlib import import_module

        found = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return found


def __dir__() -> list[str]:
    return sorted(__all__)
