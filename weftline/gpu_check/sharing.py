"""V1, V2, V3 and V6: shared memory across processes, its cost and its access rights.

The process that runs a check stands for the runtime: it holds descriptors, and never opens a driver.
"""

from __future__ import annotations

import os
from typing import Any

from weftline.gpu_check.processes import DriverRefused
from weftline.gpu_check.running import Skipped, Wrong, spread
from weftline.gpu_check.trial import MIB, Trial, same, share

RUNGS = ("descriptor", "handle")


def check_share(trial: Trial) -> dict[str, Any]:
    """V1: what one process writes, another reads, on every rung of the ladder that the driver offers."""
    size = (4 if trial.quick else 256) * MIB
    figures: dict[str, Any] = {}
    with trial.crew() as crew:
        maker, guest = crew.start("the maker"), crew.start("the guest")
        guest.ask("open")
        for rung in RUNGS:
            try:
                true_size = share(maker, guest, rung, size, rung)
            except DriverRefused as error:
                if rung == "descriptor":
                    raise
                figures[f"rung {rung}"] = f"not offered: {error}"
                continue
            for at, seed in ((0, 1), (true_size - MIB, 2), (true_size // 2, 3), (0, 4)):
                written = maker.ask("fill", arena=rung, offset=at, size_bytes=MIB, seed=seed)["checksum"]
                found = guest.ask("checksum", arena=rung, offset=at, size_bytes=MIB)["checksum"]
                same(f"rung {rung}, 1 MiB at {at}", written, found)
            figures[f"rung {rung}"] = f"{true_size // MIB} MiB read as written"
    return figures


def check_costs(trial: Trial) -> dict[str, Any]:
    """V2: what it takes to open a driver, to make, attach to and close an arena, and to make and open events."""
    times, size = (5 if trial.quick else 50), (4 if trial.quick else 64) * MIB
    figures: dict[str, Any] = {}
    opened = []
    for _ in range(1 if trial.quick else 5):
        with trial.crew() as crew:
            opened.append(crew.start("a process").ask("open")["open_ms"])
    figures["driver opened in a new process"] = spread(opened, "ms")
    with trial.crew() as crew:
        maker, guest = crew.start("the maker"), crew.start("the guest")
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


def check_exporter_killed(trial: Trial) -> dict[str, Any]:
    """V3: memory whose maker was killed lives on in the descriptor that the runtime holds."""
    size = (4 if trial.quick else 256) * MIB
    with trial.crew() as crew:
        maker = crew.start("the maker")
        made = maker.ask("make", arena="a", size_bytes=size)
        if not made["fds"]:
            raise Skipped("the driver shares no memory by descriptor")
        (fd,) = made["fds"]
        try:
            written = [maker.ask("fill", arena="a", offset=at, size_bytes=MIB, seed=at) for at in (0, size - MIB)]
            seconds = maker.kill()
            for name in ("the first heir", "the second heir"):
                heir = crew.start(name)
                heir.ask("attach", [fd], arena="a", size_bytes=made["size_bytes"])
                for at, one in zip((0, size - MIB), written, strict=True):
                    found = heir.ask("checksum", arena="a", offset=at, size_bytes=MIB)["checksum"]
                    same(f"{name}, 1 MiB at {at}", one["checksum"], found)
                crew.dismiss(heir)
        finally:
            os.close(fd)
    return {"killed and reaped_s": seconds, "read afterwards": f"{size // MIB} MiB by two processes, one by one"}


def check_read_only(trial: Trial) -> dict[str, Any]:
    """V6: a guest's mapping is read-only, or the driver refuses to make it so; it is never written in silence."""
    with trial.crew() as crew:
        maker, guest = crew.start("the maker"), crew.start("the guest")
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
