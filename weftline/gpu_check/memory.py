"""V1, V2, V3, V6, V7 and V8: shared device memory across processes, its cost, access rights and bandwidth.

The process that runs a check stands for the runtime: it holds descriptors, and never opens a driver.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

from weftline.gpu_check.context import MIB, CheckContext, same, share
from weftline.gpu_check.outcomes import RIGHT, CheckOutcome, Skipped, Wrong, judged, spread
from weftline.gpu_check.processes import DriverRefused

SHARE_MODES = ("descriptor", "handle")


def check_share(context: CheckContext) -> dict[str, Any]:
    """V1: what one process writes, another reads, in every share mode that the driver supports."""
    size = (4 if context.quick else 256) * MIB
    figures: dict[str, Any] = {}
    with context.group() as group:
        maker, guest = group.start("the maker"), group.start("the guest")
        guest.ask("open")
        for share_mode in SHARE_MODES:
            try:
                true_size = share(maker, guest, share_mode, size, share_mode)
            except DriverRefused as error:
                if share_mode == "descriptor":
                    raise
                figures[f"share mode {share_mode}"] = f"not offered: {error}"
                continue
            for at, seed in ((0, 1), (true_size - MIB, 2), (true_size // 2, 3), (0, 4)):
                written = maker.ask("fill", arena=share_mode, offset=at, size_bytes=MIB, seed=seed)["checksum"]
                found = guest.ask("checksum", arena=share_mode, offset=at, size_bytes=MIB)["checksum"]
                same(f"share mode {share_mode}, 1 MiB at {at}", written, found)
            figures[f"share mode {share_mode}"] = f"{true_size // MIB} MiB read as written"
    return figures


def check_costs(context: CheckContext) -> dict[str, Any]:
    """V2: what it takes to open a driver, to make, attach to and close an arena, and to make and open events."""
    times, size = (5 if context.quick else 50), (4 if context.quick else 64) * MIB
    figures: dict[str, Any] = {}
    opened = []
    for _ in range(1 if context.quick else 5):
        with context.group() as group:
            opened.append(group.start("a process").ask("open")["open_ms"])
    figures["driver opened in a new process"] = spread(opened, "ms")
    with context.group() as group:
        maker, guest = group.start("the maker"), group.start("the guest")
        guest.ask("open")
        for name, taken in _lists(maker.ask("time_arenas", size_bytes=size, times=times)).items():
            figures[f"arena of {size // MIB} MiB: {name.removesuffix('_ms')}"] = spread(taken, "ms")
        share(maker, guest, "a", size)
        for name, taken in _lists(maker.ask("time_events", times=times)).items():
            figures[f"event: {name.removesuffix('_ms')}"] = spread(taken, "ms")
        handles = maker.ask("make_events", count=min(times, 50))["handles"]
        taken = guest.ask("time_open_events", handles=handles)["open_ms"]
        figures["event: open another process's"] = spread(taken, "ms")
    return figures


def check_exporter_killed(context: CheckContext) -> dict[str, Any]:
    """V3: memory whose maker was killed lives on in the descriptor that the runtime holds."""
    size = (4 if context.quick else 256) * MIB
    with context.group() as group:
        maker = group.start("the maker")
        made = maker.ask("make", arena="a", size_bytes=size)
        if not made["fds"]:
            raise Skipped("the driver shares no memory by descriptor")
        (fd,) = made["fds"]
        try:
            written = [maker.ask("fill", arena="a", offset=at, size_bytes=MIB, seed=at) for at in (0, size - MIB)]
            seconds = maker.kill()
            for name in ("the first heir", "the second heir"):
                heir = group.start(name)
                heir.ask("attach", [fd], arena="a", size_bytes=made["size_bytes"])
                for at, one in zip((0, size - MIB), written, strict=True):
                    found = heir.ask("checksum", arena="a", offset=at, size_bytes=MIB)["checksum"]
                    same(f"{name}, 1 MiB at {at}", one["checksum"], found)
                group.dismiss(heir)
        finally:
            os.close(fd)
    return {"killed and reaped_s": seconds, "read afterwards": f"{size // MIB} MiB by two processes, one by one"}


def check_read_only(context: CheckContext) -> dict[str, Any]:
    """V6: a guest's mapping is read-only, or the driver refuses to make it so; it is never written in silence."""
    with context.group() as group:
        maker, guest = group.start("the maker"), group.start("the guest")
        made = maker.ask("make", arena="a", size_bytes=4 * MIB)
        attached = guest.ask("attach", made["fds"], arena="a", size_bytes=made["size_bytes"])
        for fd in made["fds"]:
            os.close(fd)
        before = maker.ask("fill", arena="a", offset=0, size_bytes=MIB, seed=5)["checksum"]
        if attached["writable_by_necessity"]:
            return {"read-only mapping": "refused by the driver; guests map for writing, and nothing but care protects"}
        try:
            refused = guest.ask("write_into", arena="a")["refused"]
            how = f"honoured: a write fails with {refused}" if refused else ""
        except Wrong as error:
            how = f"honoured: {error}"
        found = maker.ask("checksum", arena="a", offset=0, size_bytes=MIB)["checksum"]
        same("after a guest's write", before, found)
        if not how:
            raise Wrong("a guest's write into a read-only mapping was accepted, and did nothing")
    return {"read-only mapping": how}


def _lists(answer: dict[str, Any]) -> dict[str, list[float]]:
    return {name: found for name, found in answer.items() if name.endswith("_ms")}


SIZES = (64 << 10, 512 << 10, 4 * MIB, 32 * MIB, 256 * MIB, 1024 * MIB)
FAKE_SIZES = (64 << 10, MIB, 16 * MIB)
ROUND_BYTES, FAKE_ROUND_BYTES = 4096 * MIB, 32 * MIB
"""About how much is copied in one round, so that launching is not what is measured of the larger sizes."""

COPIES_MAX = 200
SHARE_WANTED = 0.85
"""Bar: share of a plain copy from device to device."""

ROUNDS, QUICK_ROUNDS = 9, 3


def check_copies(context: CheckContext) -> CheckOutcome:
    """V7: a new tensor copied into an arena, beside a copy between two allocations, taking turns."""
    sizes = FAKE_SIZES if context.fake else SIZES
    round_bytes = FAKE_ROUND_BYTES if context.fake else ROUND_BYTES
    rounds = QUICK_ROUNDS if context.quick else ROUNDS
    figures: dict[str, Any] = {}
    shares = []
    with context.group() as group:
        maker = group.start("the maker")
        for fd in maker.ask("make", arena="a", size_bytes=sizes[-1])["fds"]:
            os.close(fd)
        for size in sizes[: 2 if context.quick else None]:
            times = max(min(round_bytes // size, COPIES_MAX), 2)
            found = maker.ask("time_copies", arena="a", size_bytes=size, times=times, rounds=rounds)
            plain, arena = (statistics.median(found[kind]) for kind in ("plain", "arena"))
            low, high = min(found["arena"]), max(found["arena"])
            shares.append(arena / plain)
            figures[f"{size_text(size)}: into an arena_gb_per_s"] = round(arena / 1e9, 2)
            figures[f"{size_text(size)}: rounds between_gb_per_s"] = f"{low / 1e9:.2f} and {high / 1e9:.2f}"
            figures[f"{size_text(size)}: of a plain copy"] = round(arena / plain, 3)
    bar = judged("copy into an arena, of a plain one", min(shares), SHARE_WANTED, "of it", at_least=True,
                 judge=context.judges)  # fmt: skip
    return CheckOutcome(context.part, RIGHT, figures=figures, bars=[bar])


def check_contexts(context: CheckContext) -> dict[str, Any]:
    """V8: device and host memory of a process that only opened its driver, with an arena, and with torch at work."""
    figures: dict[str, Any] = {}
    with context.group() as group:
        watcher = group.start("the watcher")
        watcher.ask("open")

        def free() -> int:
            return int(watcher.ask("memory")["free"])

        before = free()
        process = group.start("a process")
        process.ask("open")
        figures["driver only: device_mib"] = (before - free()) // MIB
        figures["driver only: host_mib"] = _resident(process.pid) // MIB
        guest = group.start("the guest")
        guest.ask("open")
        before_arena = free()
        share(process, guest, "a", 64 * MIB)
        figures["arena of 64 MiB, made and attached to: device_mib"] = (before_arena - free()) // MIB
        group.dismiss(guest)
        if context.quick and context.fake:
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
