"""The parts of the check in the order they run: quick proofs first, what takes long or loses the device last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weftline.engine.gpu_check.copies import check_contexts, check_copies
from weftline.engine.gpu_check.faults import check_fault
from weftline.engine.gpu_check.hops import check_hops
from weftline.engine.gpu_check.kills import check_kills
from weftline.engine.gpu_check.leases import check_leases
from weftline.engine.gpu_check.mps import check_mps
from weftline.engine.gpu_check.programs import LLM_PARTS, check_memory_accesses, check_pipeline, llm_part
from weftline.engine.gpu_check.running import Outcome
from weftline.engine.gpu_check.sharing import check_costs, check_exporter_killed, check_read_only, check_share
from weftline.engine.gpu_check.surroundings import surroundings
from weftline.engine.gpu_check.trial import Trial


@dataclass(frozen=True, slots=True)
class Part:
    """One part. row: its number in the validation list, if it has one; limit_s: most seconds it may take.

    needs_device: it needs this check's driver of the device.  asked: it runs only when its own option is given.
    """

    name: str
    row: str
    about: str
    limit_s: float
    run: Callable[[Trial], Outcome | dict[str, Any]]
    needs_device: bool = True
    asked: str = ""


PARTS = (
    Part("surroundings", "V11", "what it runs in: container, rights, limits", 10, lambda trial: surroundings(), False),
    Part("share", "V1", "made in one process, read in another", 60, check_share),
    Part("costs", "V2", "opening, making, attaching, events: p50 and p99", 90, check_costs),
    Part("exporter killed", "V3", "memory outlives its maker in the runtime's descriptor", 60, check_exporter_killed),
    Part("read-only", "V6", "guests cannot write, or the driver says so", 60, check_read_only),
    Part("leases", "V4", "leases to and fro under delay, compared; both orderings", 120, check_leases),
    Part("copy-in", "V7", "bytes/s into an arena beside a plain copy", 60, check_copies),
    Part("contexts", "V8", "what a process takes of the device", 90, check_contexts),
    Part("hops", "V9", "a hop against its size, and its peers", 150, check_hops),
    Part("fault", "G3", "an illegal address in one worker: others serve", 60, check_fault),
    Part("kills", "V5", "200 kills at random moments", 180, check_kills),
    Part("mps", "V10", "the same under the multi-process service", 120, check_mps, asked="--mps"),
    Part("memcheck", "V12", "compute-sanitizer's memcheck", 180, check_memory_accesses),
    Part("pipeline", "", "the flagship on the device", 180, check_pipeline),
    *(Part(f"llm: {name}", "", about, 300, llm_part(name), False) for name, about in LLM_PARTS.items()),
)


def chosen(names: list[str]) -> tuple[Part, ...]:
    """Return the parts of these names or rows, in the order they run; ValueError for one that is not there."""
    known = {key for part in PARTS for key in (part.name, part.row) if key}
    for name in names:
        if name not in known:
            raise ValueError(f"no part is called {name!r}; there are {', '.join(part.name for part in PARTS)}")
    return tuple(part for part in PARTS if part.name in names or part.row in names)
