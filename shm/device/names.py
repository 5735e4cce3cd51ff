"""Device names: `cpu`, `cuda:0`, and the fake GPUs `fake:0`.

A fake GPU has memory, streams and events of its own that are shared between processes as a real one's are, and lies in
host memory: frameworks compute on the CPU there. More kinds refuse calls that a real driver may refuse, one for each
share mode: 'fake-legacy:0' shares no memory by descriptor, 'fake-alone:0' shares none, and 'fake-closed:0' creates
shareable memory that no other process can attach.
"""

from __future__ import annotations

FAKES = ("fake", "fake-legacy", "fake-alone", "fake-closed")
"""Kinds of made-up GPUs."""


def is_gpu(device: str) -> bool:
    """Return True for devices with memory of their own: all but 'cpu' and ''.

    That includes 'auto', which is not placed yet.
    """
    return device not in ("", "cpu")


def is_fake(device: str) -> bool:
    return kind_of(device) in FAKES


def kind_of(device: str) -> str:
    """Return 'cuda' of 'cuda:1'."""
    return device.partition(":")[0]


def index_of(device: str) -> int:
    """Return 1 of 'cuda:1'; a device without a number is the first."""
    return int(device.partition(":")[2] or 0)


def torch_device(device: str) -> str:
    """Return what torch and its friends call a device: a fake GPU's memory is the CPU's."""
    return "cpu" if is_fake(device) else device
