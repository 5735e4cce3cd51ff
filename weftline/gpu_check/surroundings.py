"""V11: environment of the check: container, permissions, limits and driver.

Facts only, from proc(5) and the like; none of them is right or wrong, and none names the machine or its paths.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

CAPABILITIES = {"CAP_SYS_PTRACE": 19, "CAP_SYS_ADMIN": 21, "CAP_SYS_NICE": 23, "CAP_IPC_LOCK": 14}
"""Those that sharing between processes may ask for: bits of capabilities(7)."""

CONTAINER_SIGNS = (Path("/.dockerenv"), Path("/run/.containerenv"))
SECCOMP = {"0": "off", "1": "strict", "2": "a filter"}


def surroundings() -> dict[str, Any]:
    status = _pairs(Path("/proc/self/status"))
    held = int(status.get("CapEff", "0"), 16)
    capabilities = [name for name, bit in CAPABILITIES.items() if held >> bit & 1]
    nodes = sorted(path.name for path in Path("/dev").glob("nvidia*"))
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        "kernel": os.uname().release,
        "container": _container(),
        "user": "root" if os.geteuid() == 0 else "not root",
        "capabilities": ", ".join(capabilities) or "none that bear on it",
        "no new privileges": status.get("NoNewPrivs", "?"),
        "seccomp": SECCOMP.get(status.get("Seccomp", ""), "?"),
        "ptrace scope (Yama)": _first(Path("/proc/sys/kernel/yama/ptrace_scope")) or "none",
        "locked memory, at most": _limit(resource.RLIMIT_MEMLOCK),
        "open descriptors, at most": _limit(resource.RLIMIT_NOFILE),
        "/dev/shm": f"{shm.f_blocks * shm.f_frsize >> 20} MiB" if shm else "none",
        "driver": _first(Path("/proc/driver/nvidia/version")) or "none",
        "device files": ", ".join(nodes) or "none",
        "cores": len(os.sched_getaffinity(0)),
    }


def _container() -> str:
    if any(sign.exists() for sign in CONTAINER_SIGNS):
        return "yes"
    init = _first(Path("/proc/1/comm"))
    return "probably" if init not in ("systemd", "init") else "no sign of one"


def _pairs(path: Path) -> dict[str, str]:
    lines = path.read_text().splitlines() if path.is_file() else []
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _first(path: Path) -> str:
    """Return the first line of a file, '' when it cannot be read."""
    try:
        return path.read_text().partition("\n")[0].strip()
    except OSError:
        return ""


def _limit(which: int) -> str:
    most = resource.getrlimit(which)[0]
    return "no limit" if most == resource.RLIM_INFINITY else str(most)
