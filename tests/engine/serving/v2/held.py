"""Registered memory as a dictionary, and model metadata from a short notation."""

from __future__ import annotations

from weftline.engine.serving.model_info import ModelInfo, PortInfo
from weftline.errors import InputError


class HeldRegions:
    """Regions by name in this process; `reads` logs the reads."""

    def __init__(self, **held: bytes) -> None:
        self.held = {name: bytearray(data) for name, data in held.items()}
        self.reads: list[tuple[str, int, int]] = []

    def check(self, name: str, offset: int, size_bytes: int) -> None:
        if name not in self.held or offset + size_bytes > len(self.held[name]):
            raise InputError(f"no region {name!r:.40} with that range")

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        self.check(name, offset, len(buffer))
        self.reads.append((name, offset, len(buffer)))
        buffer[:] = self.held[name][offset : offset + len(buffer)]

    def write(self, name: str, offset: int, data: bytes | memoryview) -> None:
        self.check(name, offset, len(data))
        self.held[name][offset : offset + len(data)] = data


def info(inputs: dict[str, str], outputs: dict[str, str] | None = None, **more: object) -> ModelInfo:
    """Return the info of a model `m`; a '?' after a port's name makes it optional, a '+' lets it stream."""

    def ports(written: dict[str, str]) -> tuple[PortInfo, ...]:
        return tuple(PortInfo(name.rstrip("?+"), type, "?" in name, "+" in name) for name, type in written.items())

    return ModelInfo("m", 3, ports(inputs), ports(outputs or {"y": "text"}), **more)  # type: ignore[arg-type]
