"""JSON report of the check, complete after every part.

    {"weftline_gpu_check": 1, "device": "cuda:0", "fake": false, "finished": true, "seconds": 312.4,
     "options": {"quick": false, "full": false, "mps": false},
     "machine": {"gpu": "NVIDIA H200, 143771 MiB, driver 570.86", "python": "3.12.3", "torch": "2.11.0", ...},
     "parts": [{"name": "hops", "row": "V9", "state": "right", "why": "", "seconds": 41.2, "call": 2, "sources": "9f",
                "figures": {...}, "bars": [{"name": ..., "found": 0.061, "wanted": 0.15, "unit": "ms",
                                            "at_least": false, "met": true}]}]}

A part that has not run yet is not there. `call` is the number of the call in which a part ran, and `sources` a
digest of the package's files then: a later call goes on from the file of the one before (`earlier_outcomes`). `fake`
says that no figure is a GPU's, and then no bar is judged.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import resource
import subprocess
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from weftline.gpu_check.outcomes import STATES, CheckOutcome, as_json, outcome_from
from weftline.shm.device.names import index_of, is_fake

VERSION = 1
PACKAGES = ("weftline", "numpy", "torch", "triton", "transformers", "cuda-bindings", "torchao", "onnxruntime-gpu")
COUNTS = ("quick", "full")
"""Options that change how much a part does."""
CHECKED_PACKAGES = ("weftline.engine", "weftline.shm", "weftline.nodes", "weftline.testing")
ASK_MAX_S = 20.0

_NUMBER, _TEXT = {"type": "number"}, {"type": "string"}
_SPREAD = {
    "type": "object",
    "properties": {"p50": _NUMBER, "p99": _NUMBER, "count": {"type": "integer"}, "unit": _TEXT},
    "required": ["p50", "p99", "count", "unit"],
    "additionalProperties": False,
}
_BAR = {
    "type": "object",
    "properties": {
        "name": _TEXT, "found": _NUMBER, "wanted": _NUMBER, "unit": _TEXT,
        "at_least": {"type": "boolean"}, "met": {"type": ["boolean", "null"]},
    },
    "required": ["name", "found", "wanted", "unit", "at_least", "met"],
    "additionalProperties": False,
}  # fmt: skip
_PART = {
    "type": "object",
    "properties": {
        "name": _TEXT, "row": _TEXT, "state": {"enum": list(STATES)}, "why": _TEXT, "seconds": _NUMBER,
        "call": {"type": "integer"}, "sources": _TEXT,
        "figures": {"type": "object", "additionalProperties": {"anyOf": [_NUMBER, _TEXT, {"type": "null"}, _SPREAD]}},
        "bars": {"type": "array", "items": _BAR},
    },
    "required": ["name", "row", "state", "why", "seconds", "call", "sources", "figures", "bars"],
    "additionalProperties": False,
}  # fmt: skip
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "weftline_gpu_check": {"const": VERSION},
        "device": _TEXT,
        "fake": {"type": "boolean"},
        "finished": {"type": "boolean"},
        "seconds": _NUMBER,
        "options": {"type": "object"},
        "machine": {"type": "object", "additionalProperties": {"type": ["string", "null"]}},
        "parts": {"type": "array", "items": _PART},
    },
    "required": ["weftline_gpu_check", "device", "fake", "finished", "seconds", "options", "machine", "parts"],
    "additionalProperties": False,
}
"""JSON Schema of what is written."""


def report(
    device: str,
    machine: dict[str, str | None],
    options: dict[str, Any],
    outcomes: Sequence[tuple[str, CheckOutcome]],
    seconds: float,
    finished: bool,
) -> dict[str, Any]:
    """Return the report of what has run so far; outcomes come with their rows."""
    return {
        "weftline_gpu_check": VERSION,
        "device": device,
        "fake": is_fake(device),
        "finished": finished,
        "seconds": round(seconds, 1),
        "options": options,
        "machine": machine,
        "parts": [{"row": row, **as_json(outcome)} for row, outcome in outcomes],
    }


def earlier_outcomes(
    file: Path, device: str, machine: dict[str, str | None], options: dict[str, Any]
) -> list[CheckOutcome]:
    """Return the outcomes that an earlier call wrote to `file`; none when there is no file.

    ValueError when they were made on something else, or with other counts: figures of two machines are not one report.
    """
    if not file.is_file():
        return []
    try:
        made = json.loads(file.read_text(encoding="utf-8"))
        kept = {"device": made["device"], **made["machine"], **{key: made["options"].get(key) for key in COUNTS}}
        outcomes = [outcome_from(part) for part in made["parts"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError("it is not a report of this check") from None
    here = {"device": device, **machine, **{key: options.get(key) for key in COUNTS}}
    for key in here.keys() | kept.keys():
        if kept.get(key) != here.get(key):
            raise ValueError(f"it is of {key} {kept.get(key)}, this call is of {here.get(key)}")
    return outcomes


@cache
def sources_digest() -> str:
    """Return a digest of the checked code, the same for a source tree and an installed package."""
    digest = hashlib.sha256()
    for name in CHECKED_PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise RuntimeError(f"package {name} is not installed completely")
        for path in sorted(Path(spec.submodule_search_locations[0]).resolve().rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def machine_facts(device: str) -> dict[str, str | None]:
    """Return the card, its driver and the versions of what is installed; nothing is imported for it."""
    facts: dict[str, str | None] = {"gpu": None if is_fake(device) else _card(device)}
    facts["python"] = platform.python_version()
    for name in PACKAGES:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = None
    return facts


def _card(device: str) -> str | None:
    """Return 'NVIDIA H200, 143771 MiB, driver 570.86.15' by nvidia-smi; None where it does not answer."""
    asked = ["nvidia-smi", "-i", str(index_of(device)), "--query-gpu=name,memory.total,driver_version"]
    try:
        done = subprocess.run(
            [*asked, "--format=csv,noheader"], capture_output=True, text=True, timeout=ASK_MAX_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode or done.stdout.count(",") != 2:
        return None
    name, memory, driver = (one.strip() for one in done.stdout.strip().split(","))
    return f"{name}, {memory}, driver {driver}"


CAPABILITIES = {"CAP_SYS_PTRACE": 19, "CAP_SYS_ADMIN": 21, "CAP_SYS_NICE": 23, "CAP_IPC_LOCK": 14}
"""Capabilities that sharing between processes may need: bits of capabilities(7)."""

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
