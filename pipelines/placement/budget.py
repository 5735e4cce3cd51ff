"""Memory budget of each GPU: claims of steps, the remainder for KV caches, and the initial KV cache of each llm step.

Claims are a safety reserve; for each process its context and its arena; for each instance its weights and working
memory; and KV memory where the pipeline states it. The remainder goes to llm steps that state none, once all other
claims are known; until then it is divided when they are open. Reservations of other pipelines of this process are
claims as well, a row for each (`Device.taken`).

`limits.kv_bytes` is a device's total for all its llm steps. A step's own `kv_bytes` is then its minimum: it starts with
that and keeps it. Steps that state none divide half of the remainder; the other half is assigned on demand while the
pipeline runs (`weftline.engine.scheduler.kv_budget`). Without such a limit, llm steps divide the remainder of a GPU
whose other claims are all known. Where the only unknown claim is that of one llm step, it measures the remainder when
it opens (`weftline.engine.llm.kv_sizing`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weftline.errors import Problem
from weftline.pipelines.check.problems import listed
from weftline.pipelines.placement.machine import Machine, Taken
from weftline.pipelines.placement.needs import Need, Needs, gpus_of, has_kv_memory
from weftline.pipelines.placement.place import size_text
from weftline.pipelines.placement.plan import Claim, DeviceBudget, Plan, PlannedStep
from weftline.pipelines.spec.policy import GpuPolicy, Limits
from weftline.shm.device.names import is_fake

LEAST_BYTES = 64 << 10
"""Minimum: less holds a token or two of the smallest model."""

START_SHARE = 0.5
"""Share of a device's remainder that llm steps start with; the other half is assigned on demand."""


def shares(step: PlannedStep) -> bool:
    """Return True when a node's KV cache can share a budget: all of it is on one device."""
    return has_kv_memory(step.streams, step.options) and step.options.get("ranks") in (None, 1)


def takes_rest(step: PlannedStep, budget: DeviceBudget) -> bool:
    """Return True when a step uses the remainder of a GPU when it opens."""
    return budget.rest_bytes > 0 and shares(step) and not own_kv_bytes(step) and budget.device in step.devices


def kv_most(plan: Plan, step: PlannedStep, device: str) -> int:
    """Return the upper limit of an instance's KV memory at run time; 0: no more than at start.

    That is the total that its device's llm steps share, without the start sizes of the others. Where the remainder of a
    GPU is not known yet, it is the unclaimed memory.
    """
    if not shares(step):
        return 0
    total = kv_limits(plan.limits).get(device)
    if total is not None:
        return max(0, total - _given(plan.steps, device) + own_kv_bytes(step))
    budget = next((one for one in plan.budgets if one.device == device), None)
    if budget is None or budget.rest_bytes or own_kv_bytes(step):
        return 0
    return max(0, budget.total_bytes - budget.claimed_bytes)


def least_left(takers: int) -> int:
    """Return the minimal remainder of a GPU for this many instances without stated KV memory."""
    return LEAST_BYTES if takers == 1 else int(takers * LEAST_BYTES / START_SHARE)


def with_kv_memory(plan: Plan) -> tuple[Plan, list[Problem]]:
    """Return the plan with initial KV sizes, and a problem without line for each device with too small a limit.

    Where the remainder of a GPU is known, its llm steps share it like a stated limit; `over_commits` checks that it is
    large enough (`least_left`).
    """
    limits = kv_limits(plan.limits)
    left = {
        budget.device: budget.kv_bytes + _given(plan.steps, budget.device)
        for budget in plan.budgets
        if budget.kv_bytes and budget.device not in limits
    }
    shared = limits | left
    steps = [step for step in plan.steps if shares(step)] if shared else []
    starts: dict[str, int] = {}
    problems: list[Problem] = []
    for device, total in shared.items():
        given = _given(steps, device)
        free = {
            step.name: step.devices.count(device) for step in steps if device in step.devices and not own_kv_bytes(step)
        }
        part = 1.0 if device in left and sum(free.values()) == 1 else START_SHARE
        share = int((total - given) * part / max(1, sum(free.values())))
        if device in limits and (given > total or (free and share < LEAST_BYTES)):
            problems.append(_too_few(device, total, given, sum(free.values())))
        starts |= {name: min(share, starts.get(name, share)) for name in free}
    changed = (
        dataclasses.replace(step, options=_with(step.options, starts[step.name])) if step.name in starts else step
        for step in plan.steps
    )
    limited = dataclasses.replace(plan.limits, kv_bytes=shared)
    used = {device for step in plan.steps if shares(step) for device in step.devices}
    idle = tuple(f"limits.kv_bytes.{one} changes nothing: no llm step is on {one}" for one in limits if one not in used)
    return dataclasses.replace(plan, steps=tuple(changed), limits=limited, notes=(*plan.notes, *idle)), problems


def kv_limits(limits: Limits) -> dict[str, int]:
    """Return `kv_bytes` by full device name."""
    return {"cuda:0" if device == "cuda" else device: total for device, total in limits.kv_bytes.items()}


def own_kv_bytes(step: PlannedStep) -> int:
    """Return the KV memory that a step states; 0 for none."""
    return int(step.options["kv_bytes"] or 0)


def _given(steps: Sequence[PlannedStep], device: str) -> int:
    return sum(own_kv_bytes(step) * step.devices.count(device) for step in steps if shares(step))


def _with(options: Mapping[str, Any], kv_bytes: int) -> dict[str, Any]:
    return {**options, "kv_bytes": kv_bytes}


def _too_few(device: str, total: int, given: int, free: int) -> Problem:
    path = f"limits.kv_bytes.{device}"
    if given > total:
        found = f"{size_text(total)}, and the llm steps there state {size_text(given)} as kv_bytes"
        return Problem(path, found, f"at least {given}", "raise the device's limit, or lower the steps' kv_bytes")
    found = f"{size_text(total)}, too little for the llm steps that share it"
    return Problem(path, found, f"at least {given + int(free * LEAST_BYTES / START_SHARE)}", "raise the limit")


RESERVE, CONTEXT, ARENA, WORK, KV = "reserve", "context", "arena", "weights and work", "KV memory"
"""Purposes of claims."""

OTHER, FILLER = "another pipeline", "another pipeline, with all that was left"
SERVING, SERVING_FILLER = "the version that serves", "the version that serves, with all that was left"
OTHER_RESERVE = "reserve of other pipelines"
OF_OTHERS = frozenset({OTHER, FILLER, SERVING, SERVING_FILLER, OTHER_RESERVE})
"""Purposes of claims of other pipelines than the planned one."""

LLM_STEPS = "llm steps"
"""Owner of the claim for KV memory that a device's llm steps share by `limits.kv_bytes`."""


def budgets(plan: Plan, needs: Needs, gpu: GpuPolicy, machine: Machine) -> tuple[DeviceBudget, ...]:
    """Return the budget of every GPU that a step of a placed plan is on."""
    found = list[DeviceBudget]()
    for device in machine.devices:
        claims = [*_processes(plan, device.name, needs, gpu), *_instances(plan, device.name, needs.steps)]
        if not claims:
            continue
        claims.append(Claim("", RESERVE, gpu.reserve_bytes, _source(gpu.reserve_bytes, GpuPolicy().reserve_bytes)))
        claims += _kv(plan, device.name)
        claims += claims_of_others(device.taken, device.reserve_bytes - gpu.reserve_bytes)
        found.append(DeviceBudget(device.name, device.memory_bytes, tuple(claims)))
    shared = {device.name for device in machine.devices if device.shared}
    divided = _fillable(dataclasses.replace(plan, budgets=tuple(found))) - shared
    return tuple(
        dataclasses.replace(one, kv_bytes=max(0, one.total_bytes - one.claimed_bytes))
        if one.device in divided
        else dataclasses.replace(one, rest_bytes=0 if one.device in shared else _remainder(plan, one))
        for one in found
    )


def over_commits(plan: Plan) -> list[Problem]:
    """Return a problem, without file or line, for each over-committed GPU."""
    problems = []
    for budget in plan.budgets:
        left = budget.total_bytes - budget.claimed_bytes
        takers = [] if budget.device in kv_limits(plan.limits) or not _known(budget) else open_kv(plan, budget.device)
        least = least_left(len(takers)) if takers else 0
        if left < least:
            found = over_commit_text(budget.device, budget.total_bytes, budget.claims, takers if left >= 0 else ())
            path, fix = _remedy(budget, least - left)
            problems.append(Problem(path, found, fix="; ".join([fix, *remedies_of_others(budget.claims)])))
    return problems


def claims_of_others(taken: Iterable[Taken], more_reserve_bytes: int = 0) -> list[Claim]:
    """Return the claims of other pipelines on a GPU, a row for each, and their reserve beyond one's own.

    A pipeline that is being opened and was not measured has a second row of unknown size.
    """
    claims = []
    for one in taken:
        filled = one.fills and one.known  # else its share is not assigned yet
        what = (SERVING, SERVING_FILLER)[filled] if one.serves else (OTHER, FILLER)[filled]
        claims += [Claim(one.owner, what, one.bytes, "claimed")] if one.bytes else []
        claims += [] if one.known else [Claim(one.owner, what, 0, "unknown")]
    return claims + ([Claim("", OTHER_RESERVE, more_reserve_bytes, "claimed")] if more_reserve_bytes > 0 else [])


def remedies_of_others(claims: Iterable[Claim]) -> list[str]:
    """Return remedies for memory held by other pipelines, as phrases; empty where none holds any."""
    by_what: dict[str, dict[str, None]] = {}
    for claim in claims:
        by_what.setdefault(claim.what, {})[claim.owner] = None
    fillers, others = [*by_what.get(FILLER, ())], [*(by_what.get(FILLER, {}) | by_what.get(OTHER, {}))]
    ways = [f"or bound the KV memory of {listed(fillers)} (limits.kv_bytes there)"] if fillers else []
    ways += [f"or unload {listed(others)}"] if others else []
    if SERVING_FILLER in by_what:
        ways.append("or bound its KV memory (limits.kv_bytes), in the version that serves too")
    if by_what.keys() & {SERVING, SERVING_FILLER}:
        ways.append("or unload the version that serves and load the new one (until then the old one goes on serving)")
    return ways


def open_kv(plan: Plan, device: str) -> list[str]:
    """Return the step of each instance on a device that uses its remainder."""
    return [
        step.name
        for step in plan.steps
        for own in step.devices
        if own == device and shares(step) and not own_kv_bytes(step)
    ]


def _fillable(plan: Plan) -> set[str]:
    """Return the GPUs whose remainder goes to llm steps: all claims are known there and no limit is set.

    A step has one size for all its instances, so it has none while the remainder of any of their devices is unknown.
    Other llm steps on these devices then wait for it too.
    """
    limited = {*kv_limits(plan.limits)}
    unknown = {budget.device for budget in plan.budgets if not _known(budget)}
    divided = {
        budget.device
        for budget in plan.budgets
        if budget.device not in limited | unknown and open_kv(plan, budget.device)
    }
    takers = [{*step.devices} - limited for step in plan.steps if shares(step) and not own_kv_bytes(step)]
    while waiting := {device for on in takers if not on <= divided for device in on & divided}:
        divided -= waiting
    return divided


def reserve_of(budget: DeviceBudget) -> int:
    """Return the memory of a GPU that stays free, for all pipelines on it."""
    return sum(claim.bytes for claim in budget.claims if claim.what in (RESERVE, OTHER_RESERVE))


def _remainder(plan: Plan, budget: DeviceBudget) -> int:
    """Return the remainder that a GPU's only unmeasured llm step uses when it opens; 0 if other claims are unknown."""
    if budget.device in kv_limits(plan.limits) or is_fake(budget.device):  # a fake GPU has no memory to fill
        return 0
    takers = open_kv(plan, budget.device)
    unknown = {claim.owner for claim in budget.claims if claim.source == "unknown"}
    if len(takers) != 1 or unknown != {*takers} or not plan.step(takers[0]).fills_memory:
        return 0
    return max(0, budget.total_bytes - budget.claimed_bytes)


def over_commit_text(device: str, total_bytes: int, claims: Iterable[Claim], starved: Sequence[str] = ()) -> str:
    """Return a phrase and a table of a device's claims, largest first, indented as part of a problem.

    starved: names of llm steps without a remainder, if that is the problem.
    """
    claims = [*claims]
    wanted = sum(claim.bytes for claim in claims)
    more = f"{size_text(wanted - total_bytes)} too much"
    if starved:
        more = f"nothing is left for the KV memory of {', '.join(dict.fromkeys(starved))}"
    head = f"{device} has {size_text(total_bytes)}, and {size_text(wanted)} of it are claimed: {more}"
    return "\n".join([head, *(f"      {line}" for line in claim_lines(claims, wanted, device, total_bytes))])


def budget_lines(budget: DeviceBudget) -> list[str]:
    """Return a GPU's claims as aligned lines, largest first, and the remainder."""
    lines = claim_lines(budget.claims, budget.claimed_bytes, budget.device, budget.total_bytes)
    unknown = dict.fromkeys(claim.owner for claim in budget.claims if claim.source == "unknown")
    left = size_text(budget.total_bytes - budget.claimed_bytes)
    if budget.kv_bytes:
        lines.append(f"{left} are left, all of it KV memory (limits.kv_bytes bounds it where pipelines share a GPU)")
    elif budget.rest_bytes:
        owner = ", ".join(unknown)
        lines.append(
            f"{left} are left for {owner}, which was not measured: the remainder after its weights and work "
            "becomes its KV memory when it opens (kv_bytes or limits.kv_bytes bounds it)"
        )
    elif unknown:
        lines.append(f"at most {left} are left; not measured: {', '.join(unknown)} (`weftline profile`)")
    else:
        lines.append(f"{left} are left")
    return lines


def claim_lines(claims: Iterable[Claim], wanted: int, device: str, total_bytes: int) -> list[str]:
    """Return a table of claims as aligned lines, largest first, with their sum and the device's total."""
    rows = [(size_text(bytes) if source != "unknown" else "?", owner, what, source)
            for owner, what, source, bytes in _added_up(claims)]  # fmt: skip
    rows += [(size_text(wanted), "together", "", ""), (size_text(total_bytes), f"{device} has", "", "")]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        f"{size:>{widths[0]}}  {owner:<{widths[1]}}  {what:<{widths[2]}}  {source}".rstrip()
        for size, owner, what, source in rows
    ]


def _added_up(claims: Iterable[Claim]) -> list[tuple[str, str, str, int]]:
    """Return owner, purpose, source and bytes, largest first; claims of one step's instances are one row."""
    found: dict[tuple[str, str, str], int] = {}
    count: Counter[tuple[str, str, str]] = Counter()
    for claim in claims:
        key = claim.owner, claim.what, claim.source
        found[key] = found.get(key, 0) + claim.bytes
        count[key] += 1
    rows = [
        (
            f"{owner} ({count[owner, what, source]} instances)" if count[owner, what, source] > 1 else owner,
            what,
            source,
            bytes,
        )
        for (owner, what, source), bytes in found.items()
    ]
    return sorted(rows, key=lambda row: -row[3])


def _processes(plan: Plan, device: str, needs: Needs, gpu: GpuPolicy) -> list[Claim]:
    measured = needs.context_bytes.get(device)
    source = "measured" if measured is not None else _source(gpu.context_bytes, GpuPolicy().context_bytes)
    context = gpu.context_bytes if measured is None else measured
    claims = []
    for worker in plan.workers:
        if worker.device == device:
            claims.append(Claim(worker.name, CONTEXT, context, source, worker.name))
            if worker.device_arena_bytes:
                arena = _source(worker.device_arena_bytes, GpuPolicy().arena_bytes)
                claims.append(Claim(worker.name, ARENA, worker.device_arena_bytes, arena, worker.name))
    ranks = (
        (step, plan.workers[worker].name)
        for step in plan.steps
        for worker, own in zip(step.workers, step.devices)
        if device in _gpus(step, own, needs.steps)[1:]
    )
    return claims + [Claim(f"{step.name} (rank)", CONTEXT, context, source, worker) for step, worker in ranks]


def _instances(plan: Plan, device: str, needs: Mapping[str, Need]) -> list[Claim]:
    claims = []
    for step in plan.steps:
        need = needs.get(step.name, Need())
        source = "unknown" if device not in need.bytes else "stated" if need.stated else "measured"
        for at, own in zip(step.workers, step.devices):
            if device in _gpus(step, own, needs):
                worker = plan.workers[at].name
                claims.append(Claim(step.name, WORK, need.bytes.get(device, 0), source, worker))
                if need.ranks > 1 and need.kv_bytes:
                    claims.append(Claim(step.name, KV, need.kv_bytes, "stated", worker))
    return claims


def _kv(plan: Plan, device: str) -> list[Claim]:
    """Return the stated KV memory: of the device as a whole, or of each step."""
    steps = [step for step in plan.steps if shares(step) and device in step.devices]
    if steps and device in kv_limits(plan.limits):
        return [Claim(LLM_STEPS, KV, kv_limits(plan.limits)[device], "stated")]
    return [
        Claim(step.name, KV, bytes, "stated", plan.workers[worker].name)
        for step in steps
        for worker, one in zip(step.workers, step.devices)
        if one == device and (bytes := own_kv_bytes(step))
    ]


def _gpus(step: PlannedStep, device: str, needs: Mapping[str, Need]) -> tuple[str, ...]:
    """Return the GPUs that an instance uses, from its own on."""
    return gpus_of(device, needs.get(step.name, Need()).ranks)


def _known(budget: DeviceBudget) -> bool:
    return all(claim.source != "unknown" for claim in budget.claims)


def _source(bytes: int, usual: int) -> str:
    return "assumed" if bytes == usual else "stated"


def _remedy(budget: DeviceBudget, too_much: int) -> tuple[str, str]:
    """Return the location of the largest adjustable claim and a remedy."""
    sums: Counter[tuple[str, str, str]] = Counter()
    for claim in budget.claims:
        sums[claim.owner, claim.what, claim.source] += 0 if claim.what in OF_OTHERS | {CONTEXT} else claim.bytes
    (owner, what, source), largest = sums.most_common(1)[0]
    less = f" by {size_text(too_much)}" if too_much <= largest else ""
    if not largest:
        return "gpu", "let steps share a process, or use another GPU (`device:`)"
    if what in (RESERVE, ARENA):
        path = "gpu.reserve_bytes" if what == RESERVE else "gpu.arena_bytes"
        return path, f"lower {path}{less if what == RESERVE else ''}, or use another GPU (`device:`)"
    if what == KV:
        path = f"limits.kv_bytes.{budget.device}" if owner == LLM_STEPS else f"steps.{owner}.kv_bytes"
        return path, f"lower {path}{less}, or put steps on another GPU (`device:`)"
    if source == "stated":
        path = f"steps.{owner}.device_bytes"
        return path, f"put {owner} or others on another GPU (`device:`), or lower {path} if that is more than it needs"
    return f"steps.{owner}", f"put {owner} or others on another GPU (`device:`), or lower batch.items_max"
