"""V7 and V8: bandwidth of copies into an arena, and device memory of a process."""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

from weftline.gpu_check.running import RIGHT, CheckOutcome, judged
from weftline.gpu_check.trial import MIB, Trial, share

SIZES = (64 << 10, 512 << 10, 4 * MIB, 32 * MIB, 256 * MIB, 1024 * MIB)
FAKE_SIZES = (64 << 10, MIB, 16 * MIB)
ROUND_BYTES, FAKE_ROUND_BYTES = 4096 * MIB, 32 * MIB
"""About how much is copied in one round, so that launching is not what is measured of the larger sizes."""

COPIES_MAX = 200
SHARE_WANTED = 0.85
"""The issue's bar: of a plain copy from device to device."""

ROUNDS, QUICK_ROUNDS = 9, 3


def check_copies(trial: Trial) -> CheckOutcome:
    """V7: a new tensor copied into an arena, beside a copy between two allocations, taking turns."""
    sizes = FAKE_SIZES if trial.fake else SIZES
    round_bytes = FAKE_ROUND_BYTES if trial.fake else ROUND_BYTES
    rounds = QUICK_ROUNDS if trial.quick else ROUNDS
    figures: dict[str, Any] = {}
    shares = []
    with trial.crew() as crew:
        maker = crew.start("the maker")
        for fd in maker.ask("make", arena="a", size_bytes=sizes[-1])["fds"]:
            os.close(fd)
        for size in sizes[: 2 if trial.quick else None]:
            times = max(min(round_bytes // size, COPIES_MAX), 2)
            found = maker.ask("time_copies", arena="a", size_bytes=size, times=times, rounds=rounds)
            plain, arena = (statistics.median(found[kind]) for kind in ("plain", "arena"))
            low, high = min(found["arena"]), max(found["arena"])
            shares.append(arena / plain)
            figures[f"{size_text(size)}: into an arena_gb_per_s"] = round(arena / 1e9, 2)
            figures[f"{size_text(size)}: rounds between_gb_per_s"] = f"{low / 1e9:.2f} and {high / 1e9:.2f}"
            figures[f"{size_text(size)}: of a plain copy"] = round(arena / plain, 3)
    bar = judged("copy into an arena, of a plain one", min(shares), SHARE_WANTED, "of it", at_least=True,
                 judge=trial.judges)  # fmt: skip
    return CheckOutcome(trial.part, RIGHT, figures=figures, bars=[bar])


def check_contexts(trial: Trial) -> dict[str, Any]:
    """V8: device and host memory of a process that only opened its driver, with an arena, and with torch at work."""
    figures: dict[str, Any] = {}
    with trial.crew() as crew:
        watcher = crew.start("the watcher")
        watcher.ask("open")

        def free() -> int:
            return int(watcher.ask("memory")["free"])

        before = free()
        process = crew.start("a process")
        process.ask("open")
        figures["driver only: device_mib"] = (before - free()) // MIB
        figures["driver only: host_mib"] = _resident(process.pid) // MIB
        guest = crew.start("the guest")
        guest.ask("open")
        before_arena = free()
        share(process, guest, "a", 64 * MIB)
        figures["arena of 64 MiB, made and attached to: device_mib"] = (before_arena - free()) // MIB
        crew.dismiss(guest)
        if trial.quick and trial.fake:
            return {**figures, "with torch": "not with --quick on a fake"}
        before_torch = free()
        figures["torch"] = process.ask("import_torch", timeout_s=120)["torch"]
        figures["with torch, one product of matrices: more device_mib"] = (before_torch - free()) // MIB
        figures["with torch: host_mib"] = _resident(process.pid) // MIB
        figures["together: device_mib"] = (before - free()) // MIB
    return figures


def _resident(pid: int) -> int:
    """Return what a process has of the host's memory (proc(5), statm: pages of its resident set)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def size_text(size_bytes: int) -> str:
    """Return '512 KiB', '4 MiB'."""
    return f"{size_bytes >> 20} MiB" if size_bytes >= MIB else f"{size_bytes >> 10} KiB"
