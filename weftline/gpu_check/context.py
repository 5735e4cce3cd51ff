"""Context of one part: device, amount of work and deadline."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from weftline.gpu_check.outcomes import CheckOutcome, PartsProcess, Skipped, Wrong
from weftline.gpu_check.processes import Process, ProcessGroup
from weftline.shm.device.names import is_fake

MIB = 1 << 20

OVERTIME_S = 10.0
"""Time for an orderly end of a part whose time is up."""


@dataclass(frozen=True, slots=True)
class CheckContext:
    """Context of one part. quick: small counts; full: the largest counts; until_s: on the monotonic clock.

    environment: additional variables of the part's processes.
    earlier: outcomes of parts that ran before, by name.
    llm: the process for parts of the LLM's check.
    """

    part: str
    device: str
    quick: bool
    full: bool
    until_s: float
    environment: Mapping[str, str] | None = None
    earlier: Mapping[str, CheckOutcome] = field(default_factory=dict)
    llm: PartsProcess = field(default_factory=lambda: PartsProcess(()))

    @property
    def judges(self) -> bool:
        """Return whether figures are compared with bars: not on a fake, and not with small counts."""
        return not self.fake and not self.quick

    @property
    def fake(self) -> bool:
        """Return True for a fake, whose figures are not a GPU's."""
        return is_fake(self.device)

    @property
    def left_s(self) -> float:
        return self.until_s - time.monotonic()

    def group(self) -> ProcessGroup:
        return ProcessGroup(self.device, self.environment, self.until_s + OVERTIME_S)

    def progress(self, text: str) -> None:
        """Print progress on standard error."""
        print(f"{self.part}: {text}", file=sys.stderr, flush=True)


def source_file(path: str) -> Path:
    """Return a file of the source tree; Skipped in an installed package, which lacks examples and benchmarks."""
    file = Path(__file__).resolve().parents[2] / path
    if not file.exists():
        raise Skipped(f"{path} is in a source tree only, and this is an installed package")
    return file


def share(maker: Process, guest: Process, arena: str, size_bytes: int, share_mode: str = "descriptor") -> int:
    """Create an arena in one process and attach another to it; returns its true size."""
    made = maker.ask("make", arena=arena, size_bytes=size_bytes, share_mode=share_mode)
    try:
        guest.ask(
            "attach",
            made["fds"],
            arena=arena,
            size_bytes=made["size_bytes"],
            share_mode=share_mode,
            handle=made["handle"],
        )
    finally:
        for fd in made["fds"]:
            os.close(fd)
    return int(made["size_bytes"])


def share_events(maker: Process, guest: Process, count: int) -> None:
    """Create shared events in one process and open them in another."""
    handles = maker.ask("make_events", count=count)["handles"]
    guest.ask("open_events", handles=handles)


def same(what: str, wanted: int, found: int) -> None:
    """Raise Wrong unless two checksums are equal."""
    if wanted != found:
        raise Wrong(f"{what}: checksum {found:08x}, {wanted:08x} was written")
