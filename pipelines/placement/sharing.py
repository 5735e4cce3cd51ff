"""Sharing: pipelines planned together over what is loaded once for all of them.

    shared = plan_shared({"assistant": one, "search": other}, machine)
    shared.plan                        the deployments: nodes to open, with processes, devices and memory
    shared.programs["assistant"]       the pipeline's own plan, and the deployment of each of its steps
    over(shared, changed, machine)     a changed pipeline over what stands; None when something has to be loaded

Steps share a deployment when their load keys are equal (load_key.py). A pipeline for which no room is left is refused,
and the others are planned without it.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from weftline.errors import PipelineError, Problem
from weftline.nodes.catalog import CATALOG
from weftline.pipelines.placement.bare_plan import BarePlan, bare_plan, light_bytes
from weftline.pipelines.placement.joint_policies import ONE_ENGINE, engine_of, was_stated
from weftline.pipelines.placement.load_key import LoadKey, load_keys
from weftline.pipelines.placement.machine import Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import (
    Deployment,
    Member,
    Placed,
    User,
    over_deployments,
    place_alone,
    place_together,
)
from weftline.pipelines.placement.profile_file import Profile
from weftline.pipelines.placement.transfers import with_transfers
from weftline.pipelines.spec.graph import Pipeline
from weftline.pipelines.spec.policy import NAME_CHARS_MAX, GpuPolicy, Limits, Slo


@dataclass(frozen=True, slots=True)
class PlannedProgram:
    """A pipeline over deployments.

    plan:        its own: its graph, limits and outputs; processes and devices of its steps are those of their
                 deployments, and its workers are all of the joint plan, so that indexes fit.
    deployments: by step, the index into `SharedPlan.plan.steps`; -1 for steps that the scheduler evaluates, which the
                 joint plan does not have.
    """

    plan: Plan
    deployments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """Plan of what is loaded, and the plans of the pipelines over it.

    plan:     its steps are the deployments, with unique names; wires and conditions in them are those of their first
              users. Of one pipeline whose steps share nothing it is the pipeline's own plan.
    keys:     by deployment.
    programs: by given name.
    refused:  pipelines that have problems, or for which no room is left.
    stated:   GPU policy and limits of each program.
    threads:  by deployment, the `threads:` that its users state.
    """

    plan: Plan
    keys: tuple[LoadKey, ...]
    programs: Mapping[str, PlannedProgram]
    refused: Mapping[str, PipelineError]
    stated: tuple[tuple[GpuPolicy, Limits], ...] = field(default=(), repr=False)
    threads: tuple[frozenset[int | None], ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, plan: Plan) -> SharedPlan:
        """Return a plan as the only program over its own steps."""
        program = PlannedProgram(plan, tuple(range(len(plan.steps))))
        return cls(plan, (LoadKey((), shares=False),) * len(plan.steps), {plan.name: program}, {})

    def with_plan(self, plan: Plan) -> SharedPlan:
        """Return this with other budgets, those of `plan`."""
        programs = {
            name: dataclasses.replace(one, plan=dataclasses.replace(one.plan, budgets=plan.budgets))
            for name, one in self.programs.items()
        }
        return dataclasses.replace(self, plan=plan, programs=programs)


def groups_of(pipelines: Mapping[str, Pipeline]) -> tuple[tuple[str, ...], ...]:
    """Return the names of pipelines that one engine can run, by what they state of GPU processes, in given order."""
    found: dict[tuple[object, ...], list[str]] = {}
    for name, one in pipelines.items():
        found.setdefault(engine_of(one.gpu), []).append(name)
    return tuple(tuple(names) for names in found.values())


def plan_shared(
    pipelines: Mapping[str, Pipeline],
    machine: Machine,
    catalog: Mapping[str, str] = CATALOG,
    profiles: Mapping[str, Profile | None] = MappingProxyType({}),
) -> SharedPlan:
    """Plan pipelines together, by name; steps with equal load keys share a deployment.

    PipelineError: one that is alone has problems; of several, such a one is refused.

    profiles: measured costs, by name.
    """
    members = [Member(name, bare_plan(one, machine, catalog), profiles.get(name)) for name, one in pipelines.items()]
    if len(members) == 1 and members[0].bare.plan is None:
        place_alone(members[0], machine)  # raises, with the problems of placement too
    refused = {one.name: PipelineError(one.bare.checked.problems) for one in members if one.bare.plan is None}
    members = [one for one in members if one.bare.plan is not None]
    for one in members:
        if engine_of(one.bare.pipeline.gpu) != engine_of(members[0].bare.pipeline.gpu):
            refused[one.name] = _other_gpu_policy(one.bare.pipeline, members[0])
    keys = {one.name: load_keys(one.bare, os.environ) for one in members}
    fits = [one for one in members if one.name not in refused]
    placed = _as_many_as_fit(fits, keys, machine, refused, alone=len(pipelines) == 1)
    kept = [one for one in fits if one.name not in refused]
    programs = {
        one.name: PlannedProgram(plan, indexes)
        for one, plan, indexes in zip(kept, placed.programs, placed.deployments, strict=True)
    }
    stated = tuple((one.bare.pipeline.gpu, one.bare.pipeline.limits) for one in kept)
    return SharedPlan(placed.plan, _keys_of(placed, kept, keys), programs, refused, stated, _threads_of(placed, kept))


def over(
    shared: SharedPlan, pipeline: Pipeline, machine: Machine, catalog: Mapping[str, str] = CATALOG
) -> PlannedProgram | None:
    """Plan a pipeline over what stands; None when a step needs something that is not loaded, or not loaded so.

    Nothing is placed. PipelineError: the pipeline has problems.
    """
    bare = bare_plan(pipeline, machine, catalog)
    if bare.plan is None:
        raise PipelineError(bare.checked.problems)
    keys = load_keys(bare, os.environ)
    indexes = _matches(shared, [keys.get(step.name) for step in bare.plan.steps])
    used = [(bare.checked.steps[step.name].step, at) for step, at in zip(bare.plan.steps, indexes) if not step.control]
    if any(at < 0 or step.threads not in shared.threads[at] for step, at in used):
        return None
    if not was_stated(pipeline.gpu, pipeline.limits, shared.stated):
        return None
    plan = over_deployments(bare, bare.plan, shared.plan, indexes)
    return PlannedProgram(plan, indexes) if _can_run(bare, plan, shared, indexes) else None


def _matches(shared: SharedPlan, keys: Sequence[LoadKey | None]) -> tuple[int, ...]:
    """Return the deployment of each key; -1 for none. Steps that are to be apart have one each, as far as they last."""
    found: list[int] = []
    for key in keys:
        fitting = [at for at, one in enumerate(shared.keys) if key is not None and key.fits(one)]
        free = [at for at in fitting if at not in found] if key is not None and key.apart else []
        found.append((free or fitting or [-1])[0])
    return tuple(found)


def _can_run(bare: BarePlan, plan: Plan, shared: SharedPlan, indexes: Sequence[int]) -> bool:
    """Return whether deployments write their outputs to where a program reads them, and have room for them."""
    ports = {name: one.device_ports for name, one in bare.checked.steps.items()}
    wanted = with_transfers(plan, ports, 0)
    for step, at in zip(wanted.steps, indexes, strict=True):
        given = shared.plan.steps[at].device_outputs if at >= 0 else {}
        if any(where == "device" and step.device_outputs.get(port) != where for port, where in given.items()):
            return False
        arenas = [shared.plan.workers[worker].arena_bytes for worker in step.workers]
        needs = min(light_bytes(bare.checked, step) or 0, plan.limits.arena_bytes)
        if needs > min(arenas, default=0):
            return False
    return True


def _other_gpu_policy(pipeline: Pipeline, first: Member) -> PipelineError:
    usual = first.bare.pipeline.gpu
    problems = [
        Problem(
            f"gpu.{name}",
            f"{getattr(pipeline.gpu, name)}, and {first.name}, which is planned before it, has {getattr(usual, name)}",
            fix="state the same in both, or serve them by processes of their own",
            line=pipeline.line(f"gpu.{name}"),
            file=pipeline.file,
        )
        for name in ONE_ENGINE
        if getattr(pipeline.gpu, name) != getattr(usual, name)
    ]
    return PipelineError(problems)


_Keys = Mapping[str, Mapping[str, LoadKey]]
"""Keys by pipeline and step."""


def _as_many_as_fit(
    members: Sequence[Member],
    keys: _Keys,
    machine: Machine,
    refused: dict[str, PipelineError],
    alone: bool,
) -> Placed:
    """Place pipelines in given order, without those for which no room is left; these are added to `refused`."""

    def tried(some: Sequence[Member]) -> Placed:
        return place_together(some, _deployments(some, keys), machine)

    try:
        return tried(members) if members else _nothing(machine)
    except PipelineError:
        if alone:
            raise
    kept: list[Member] = []
    found = _nothing(machine)
    for one in members:
        try:
            found = tried([*kept, one])
            kept.append(one)
        except PipelineError as error:
            refused[one.name] = error
    return found


def _nothing(machine: Machine) -> Placed:
    none = Plan("", (), {}, {}, (), (), (), Limits(), Slo(), machine.cores, Path())
    return Placed(none, (), ())


def _deployments(members: Sequence[Member], keys: _Keys) -> list[Deployment]:
    """Return the deployments of pipelines, in running order of their first users."""
    users: dict[object, list[User]] = {}
    for at, member in enumerate(members):
        before = Counter[LoadKey]()
        for name in member.bare.runs():
            user, key = User(at, name), keys[member.name][name]
            shared = (key, before[key] if key.apart else 0)
            before[key] += 1
            users.setdefault(shared if key.shares else user, []).append(user)
    groups = [(own, _group(members, own[0])) for own in users.values()]
    names = _unique([(own[0].step, members[own[0].pipeline].name) for own in users.values()])
    stated = [group for group in dict.fromkeys(group for _, group in groups) if group is not None]
    workers = dict(zip(stated, _unique([(worker, members[at].name) for at, worker in stated]), strict=True))
    return [
        Deployment(name, workers[group] if group is not None else None, tuple(own))
        for name, (own, group) in zip(names, groups, strict=True)
    ]


def _group(members: Sequence[Member], user: User) -> tuple[int, str] | None:
    """Return the pipeline and the name of the `worker:` that a step states."""
    worker = members[user.pipeline].bare.checked.steps[user.step].step.worker
    return (user.pipeline, worker) if worker is not None else None


def _unique(names: Sequence[tuple[str, str]]) -> list[str]:
    """Return a unique name for each pair of a name and its pipeline: the name, or 'pipeline.name' where it recurs."""
    count = Counter(name for name, _ in names)
    taken = {name for name in count if count[name] == 1}
    found = []
    for name, pipeline in names:
        if count[name] > 1:
            name = _free(f"{pipeline}.{name}", taken)
            taken.add(name)
        found.append(name)
    return found


def _free(name: str, taken: Collection[str]) -> str:
    """Return the name, shortened and numbered where it has to be."""
    number, free = 1, name[:NAME_CHARS_MAX]
    while free in taken:
        number += 1
        free = f"{name[: NAME_CHARS_MAX - len(str(number)) - 1]}-{number}"
    return free


def _keys_of(placed: Placed, members: Sequence[Member], keys: _Keys) -> tuple[LoadKey, ...]:
    """Return the key of each step of the joint plan; that of a step that the scheduler evaluates fits none."""
    found = dict[int, LoadKey]()
    for member, plan, indexes in zip(members, placed.programs, placed.deployments, strict=True):
        for step, at in zip(plan.steps, indexes, strict=True):
            if at >= 0 and not step.control:
                found.setdefault(at, keys[member.name][step.name])
    return tuple(found.get(at, LoadKey((), shares=False)) for at in range(len(placed.plan.steps)))


def _threads_of(placed: Placed, members: Sequence[Member]) -> tuple[frozenset[int | None], ...]:
    """Return the `threads:` that the users of each step of the joint plan state."""
    found: list[set[int | None]] = [set() for _ in placed.plan.steps]
    for member, plan, indexes in zip(members, placed.programs, placed.deployments, strict=True):
        for step, at in zip(plan.steps, indexes, strict=True):
            if at >= 0:
                found[at].add(member.bare.checked.steps[step.name].step.threads)
    return tuple(map(frozenset, found))
