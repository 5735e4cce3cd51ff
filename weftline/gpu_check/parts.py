"""List of the parts in order, those that can lose the device last.

1. the device as such, kernels and graphs; 2. a model of 8 billion weights: its rounds, a closed loop, its sleep; 3. the
engine itself; 4. leases, hops, faults, kills, and programs of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weftline.gpu_check.context import CheckContext
from weftline.gpu_check.failures import check_fault, check_kills
from weftline.gpu_check.hops import check_hops
from weftline.gpu_check.leases import check_leases
from weftline.gpu_check.memory import (
    check_contexts,
    check_copies,
    check_costs,
    check_exporter_killed,
    check_read_only,
    check_share,
)
from weftline.gpu_check.outcomes import CheckOutcome
from weftline.gpu_check.programs import (
    LLM_PARTS,
    check_engine_hops,
    check_llm_step,
    check_memory_accesses,
    check_mps,
    check_pipeline,
    llm_part,
)
from weftline.gpu_check.report import surroundings


@dataclass(frozen=True, slots=True)
class CheckPart:
    """One part. row: its number in the validation list, if it has one; limit_s: most seconds it may take.

    It begins only when so much time is left.
    needs_device: it needs this check's driver of the device.  asked: it runs only when its own option is given.
    """

    name: str
    row: str
    about: str
    limit_s: float
    run: Callable[[CheckContext], CheckOutcome | dict[str, Any]]
    needs_device: bool = True
    asked: str = ""


def _llm(name: str, limit_s: float) -> CheckPart:
    return CheckPart(f"llm: {name}", "", LLM_PARTS[name], limit_s, llm_part(name), False)


PARTS = (
    CheckPart(
        "surroundings", "V11", "what it runs in: container, rights, limits", 10, lambda context: surroundings(), False
    ),
    CheckPart("share", "V1", "made in one process, read in another", 40, check_share),
    CheckPart("read-only", "V6", "guests cannot write, or the driver refuses", 40, check_read_only),
    CheckPart(
        "exporter killed", "V3", "memory outlives its maker in the runtime's descriptor", 40, check_exporter_killed
    ),
    CheckPart("contexts", "V8", "what a process takes of the device", 60, check_contexts),
    _llm("kernels", 150),
    _llm("graphs", 90),
    _llm("fused", 90),
    _llm("decode 8b", 90),
    _llm("together 8b", 90),
    _llm("profile 8b", 60),
    _llm("open as served", 90),
    _llm("sleep", 90),
    _llm("refused prompt", 60),
    _llm("KV resize", 60),
    _llm("mixed rounds", 60),
    _llm("long prompt", 90),
    _llm("features", 60),
    _llm("transformers 8b", 90),
    CheckPart("leases", "V4", "leases to and fro under delay, compared; both orderings", 80, check_leases),
    CheckPart("hops", "V9", "a hop against its size, and its peers", 150, check_hops),
    CheckPart("fault", "G3", "an illegal address in one worker: others serve", 60, check_fault),
    CheckPart("kills", "V5", "200 kills at random moments", 180, check_kills),
    _llm("families", 90),
    _llm("together 70b fp8", 240),
    CheckPart("costs", "V2", "opening, making, attaching, events: p50 and p99", 90, check_costs),
    CheckPart("copy-in", "V7", "bytes/s into an arena beside a plain copy", 60, check_copies),
    CheckPart("llm step", "", "two models in hardened workers under a budget", 150, check_llm_step),
    CheckPart("engine hops", "", "a hop with the scheduler", 150, check_engine_hops),
    CheckPart("pipeline", "", "the flagship on the device", 180, check_pipeline),
    CheckPart("mps", "V10", "the same under the multi-process service", 120, check_mps, asked="--mps"),
    CheckPart("memcheck", "V12", "compute-sanitizer's memcheck", 180, check_memory_accesses),
)


def chosen(names: list[str]) -> tuple[CheckPart, ...]:
    """Return the parts of these names or rows, in the order they run; ValueError for one that is not there."""
    known = {key for part in PARTS for key in (part.name, part.row) if key}
    for name in names:
        if name not in known:
            raise ValueError(f"no part is called {name!r}; there are {', '.join(part.name for part in PARTS)}")
    return tuple(part for part in PARTS if part.name in names or part.row in names)
