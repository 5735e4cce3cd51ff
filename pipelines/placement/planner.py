"""Planner: from pipelines to what is loaded for them, with all defaults applied.

A *deployment* is a node that is opened once for all of its users: steps of one pipeline or of several. `place_together`
places the deployments of some pipelines, and plans each pipeline over them. `make_plan` plans one pipeline whose steps
are its deployments. Which steps share is decided in sharing.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weftline.errors import PipelineError, Problem
from weftline.nodes.catalog import CATALOG
from weftline.nodes.contract import StepContext
from weftline.pipelines.check.checked import Checked, CheckedStep
from weftline.pipelines.check.checker import types_of
from weftline.pipelines.check.options import request_options
from weftline.pipelines.check.problems import Report
from weftline.pipelines.placement.bare_plan import BarePlan, bare_plan, light_bytes
from weftline.pipelines.placement.budget import budgets, over_commits, with_kv_memory
from weftline.pipelines.placement.chains import chains
from weftline.pipelines.placement.joint_policies import joint_gpu, joint_limits, kv_conflicts
from weftline.pipelines.placement.machine import Machine
from weftline.pipelines.placement.model_memory import oversized
from weftline.pipelines.placement.needs import Needs, merged, needs_of
from weftline.pipelines.placement.place import Placement, place
from weftline.pipelines.placement.plan import Plan, PlannedStep
from weftline.pipelines.placement.profile_file import Profile
from weftline.pipelines.placement.transfers import device_edges, with_device_arenas, with_transfers
from weftline.pipelines.spec.graph import Pipeline, Step
from weftline.pipelines.spec.policy import Limits, Slo
from weftline.shm.device.names import is_gpu


@dataclass(frozen=True, slots=True)
class User:
    """A step that uses a deployment. pipeline: index among those that are planned together."""

    pipeline: int
    step: str


@dataclass(frozen=True, slots=True)
class Deployment:
    """Steps with one load key, which one node serves.

    name:   unique among deployments; workers and logs are named by it.
    worker: name of the process that it shares with others by `worker:`; None: as placed.
    users:  the first decides what is no part of the key.
    """

    name: str
    worker: str | None
    users: tuple[User, ...]


@dataclass(frozen=True, slots=True)
class Member:
    """A pipeline to plan with others. name: unique among them."""

    name: str
    bare: BarePlan
    profile: Profile | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """Plan of what is loaded, and the plans of the pipelines over it.

    plan:        its steps are the deployments. Of one pipeline whose steps share nothing it is the pipeline's own plan,
                 which has the steps that the scheduler evaluates as well.
    programs:    plan of each pipeline.
    deployments: for each pipeline and step, the index of its deployment in `plan.steps`; -1 for a step that the
                 scheduler evaluates, unless it is one of `plan.steps`.
    """

    plan: Plan
    programs: tuple[Plan, ...]
    deployments: tuple[tuple[int, ...], ...]


def make_plan(
    pipeline: Pipeline, machine: Machine, catalog: Mapping[str, str] = CATALOG, profile: Profile | None = None
) -> Plan:
    """Return the plan of the pipeline on `machine`, each step with a node of its own.

    profile: measured costs of its steps; None: not measured.

    PipelineError lists every problem of both.
    """
    return place_alone(Member(pipeline.name, bare_plan(pipeline, machine, catalog), profile), machine).plan


def place_alone(member: Member, machine: Machine) -> Placed:
    """Place a pipeline, each step with a node of its own. PipelineError lists all problems, also those of `check`."""
    workers = {step.name: step.worker for step in member.bare.checked.pipeline.steps}
    own = [Deployment(name, workers[name], (User(0, name),)) for name in member.bare.runs()]
    return place_together([member], own, machine)


def place_together(members: Sequence[Member], deployments: Sequence[Deployment], machine: Machine) -> Placed:
    """Place deployments, and plan each pipeline over them.

    PipelineError lists all problems as those of the last pipeline, by its own names of steps.
    """
    joint = _Joint(members, deployments, machine)
    last = members[-1].bare
    report = Report(last.pipeline, last.checked.origins, list(last.checked.problems))
    limits = joint_limits([one.bare.pipeline.limits for one in members])
    report.take(kv_conflicts([one.bare.pipeline.limits for one in members]))
    placement, problems = joint.place(limits)
    report.take(map(joint.named_by_last, problems))
    if report.problems or last.plan is None:
        raise PipelineError(report.problems)
    placed = joint.planned(placement, limits)
    report.take(
        one for member, plan in zip(members, placed.programs) for one in oversized(member.bare.checked, plan, machine)
    )
    report.take(map(joint.named_by_last, over_commits(placed.plan)))
    plan, problems = with_kv_memory(placed.plan)
    report.take(map(joint.named_by_last, problems))
    if report.problems:
        raise PipelineError(report.problems)
    return joint.finished(dataclasses.replace(placed, plan=plan))


class _Joint:
    """Deployments of some pipelines, and the names of both sides."""

    def __init__(self, members: Sequence[Member], deployments: Sequence[Deployment], machine: Machine) -> None:
        self._members, self._deployments, self._machine = members, deployments, machine
        self._of = {user: index for index, one in enumerate(deployments) for user in one.users}
        self._gpu = joint_gpu([one.bare.pipeline.gpu for one in members])
        self._profiled = [needs_of(one.bare.checked, machine, one.profile) for one in members]
        self._needs = self._joint_needs()
        self._ports = [{name: one.device_ports for name, one in each.bare.checked.steps.items()} for each in members]
        self._is_plan = len(members) == 1 and all(len(one.users) == 1 for one in deployments)

    def place(self, limits: Limits) -> tuple[Placement, list[Problem]]:
        """Return the placement of the deployments, and its problems, without file or line."""
        return place(
            self._steps(),
            {one.name: self._is_heavy(one.users[0]) for one in self._deployments},
            limits,
            self._machine,
            self._gpu,
            self._needs,
            self._edges(),
            self._light_bytes(),
            [one.bare.pipeline.limits.arena_bytes for one in self._members],
        )

    def planned(self, placement: Placement, limits: Limits) -> Placed:
        """Return the plans with processes, devices, transfers and memory budgets."""
        programs = [self._program(index, placement) for index in range(len(self._members))]
        indexes = tuple(tuple(self._index(at, step.name) for step in plan.steps) for at, plan in enumerate(programs))
        plan = programs[0] if self._is_plan else self._joint_plan(programs, placement, limits)
        plan = with_device_arenas(plan, self._gpu.arena_bytes)
        sized = (dataclasses.replace(step, device_bytes=_device_bytes(step, self._needs)) for step in plan.steps)
        plan = dataclasses.replace(plan, steps=tuple(sized))
        plan = dataclasses.replace(
            plan,
            budgets=budgets(plan, self._needs, self._gpu, self._machine),
            notes=(*placement.process_notes, *self._notes(programs)),
            work=placement.work,
        )
        return Placed(plan, tuple(programs), indexes)

    def finished(self, placed: Placed) -> Placed:
        """Return the plans of the pipelines with what was decided about their deployments."""
        if self._is_plan:
            return dataclasses.replace(placed, programs=(placed.plan,))
        programs = []
        for member, plan, indexes in zip(self._members, placed.programs, placed.deployments, strict=True):
            plan = over_deployments(member.bare, plan, placed.plan, indexes)
            if len(self._members) == 1:
                plan = dataclasses.replace(
                    plan, budgets=placed.plan.budgets, notes=placed.plan.notes, work=placed.plan.work
                )
            programs.append(plan)
        return dataclasses.replace(placed, programs=tuple(programs))

    def named_by_last(self, problem: Problem) -> Problem:
        """Return a problem of a deployment as one of the last pipeline's step that uses it, if there is one."""
        for one in sorted(self._deployments, key=lambda one: -len(one.name)):  # 'steps.a.b' is of a.b before a
            path = f"steps.{one.name}"
            own = next((user.step for user in one.users if user.pipeline == len(self._members) - 1), one.name)
            if problem.path == path or problem.path.startswith(f"{path}."):
                return dataclasses.replace(problem, path=f"steps.{own}{problem.path.removeprefix(path)}")
        return problem

    def _index(self, pipeline: int, step: str) -> int:
        if self._is_plan:
            return next(index for index, one in enumerate(self._bare(0).steps) if one.name == step)
        return self._of.get(User(pipeline, step), -1)

    def _bare(self, pipeline: int) -> Plan:
        plan = self._members[pipeline].bare.plan
        if plan is None:
            raise ValueError(f"pipeline {self._members[pipeline].name} has problems, and so no plan")
        return plan

    def _name(self, pipeline: int, step: str) -> str:
        return self._deployments[self._of[User(pipeline, step)]].name

    def _steps(self) -> list[Step]:
        """Return a step for each deployment, in the order of the files: that of its first user."""
        found: dict[int, Step] = {}
        for at, member in enumerate(self._members):
            for step in member.bare.checked.pipeline.steps:
                index = self._of.get(User(at, step.name))
                if index is None:
                    continue
                one = self._deployments[index]
                first = found.get(index) or dataclasses.replace(step, name=one.name, worker=one.worker)
                found[index] = dataclasses.replace(first, threads=_largest(first.threads, step.threads))
        return list(found.values())

    def _is_heavy(self, user: User) -> bool:
        steps = self._members[user.pipeline].bare.checked.steps
        return user.step in steps and steps[user.step].node.heavy

    def _joint_needs(self) -> Needs:
        steps, contexts = {}, dict[str, int]()
        for one in self._deployments:
            known = [self._profiled[user.pipeline].steps.get(user.step) for user in one.users]
            if needs := [need for need in known if need is not None]:
                steps[one.name] = merged(needs)
        for profiled in self._profiled:
            contexts |= {at: max(bytes, contexts.get(at, 0)) for at, bytes in profiled.context_bytes.items()}
        return Needs(steps, contexts)

    def _edges(self) -> frozenset[tuple[str, str]]:
        edges = set()
        for at, member in enumerate(self._members):
            for giver, reader in device_edges(member.bare.plan.steps, self._ports[at]) if member.bare.plan else ():
                edges.add((self._name(at, giver), self._name(at, reader)))
        return frozenset((giver, reader) for giver, reader in edges if giver != reader)

    def _light_bytes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for at, member in enumerate(self._members):
            for step in member.bare.plan.steps if member.bare.plan else ():
                if (size := light_bytes(member.bare.checked, step)) is not None:
                    name = self._name(at, step.name)
                    found[name] = max(size, found.get(name, 0))
        return found

    def _program(self, pipeline: int, placement: Placement) -> Plan:
        """Return the plan of a pipeline with processes, devices and transfers."""
        bare, steps = self._bare(pipeline), []
        for step in bare.steps:
            name = "" if User(pipeline, step.name) not in self._of else self._name(pipeline, step.name)
            devices = placement.devices.get(name, ())
            indexes = placement.worker_indexes.get(name, ())
            first = devices[0] if devices else ""
            steps.append(dataclasses.replace(step, device=first, devices=devices, workers=indexes))
        plan = dataclasses.replace(
            bare, steps=tuple(steps), workers=placement.workers, chains=chains(steps, bare.inputs)
        )
        return with_transfers(plan, self._ports[pipeline], self._gpu.arena_bytes)

    def _joint_plan(self, programs: Sequence[Plan], placement: Placement, limits: Limits) -> Plan:
        """Return the plan whose steps are the deployments, without a graph."""
        first = programs[0]
        steps = []
        for one in self._deployments:
            users = [programs[user.pipeline].step(user.step) for user in one.users]
            own_dir = users[0].base_dir or programs[one.users[0].pipeline].base_dir
            steps.append(
                dataclasses.replace(
                    users[0],
                    name=one.name,
                    base_dir=None if own_dir == first.base_dir else own_dir,
                    device_outputs=_device_outputs(users),
                    run_max_ms=max(step.run_max_ms for step in users),
                )
            )
        joint = (tuple(self._of[User(at, plan.steps[step].name)] for step in chain)
                 for at, plan in enumerate(programs) for chain in plan.chains)  # fmt: skip
        return Plan(
            name=", ".join(dict.fromkeys(plan.name for plan in programs)),
            inputs=(),
            input_types={},
            input_readers={},
            steps=tuple(steps),
            outputs=(),
            workers=placement.workers,
            limits=limits,
            slo=Slo(),
            cores=self._machine.cores,
            base_dir=first.base_dir,
            file=first.file,
            chains=_disjoint(joint),
            ordering=self._gpu.ordering,
            mps=self._gpu.mps,
            nvtx=self._gpu.nvtx,
            secrets={secret: text for plan in programs for secret, text in plan.secrets.items()},
        )

    def _notes(self, programs: Sequence[Plan]) -> list[str]:
        """Return lines about what is shared, and about single pipelines, named where there are several."""
        found = self._sharing_notes()
        for member, needs, plan in zip(self._members, self._profiled, programs, strict=True):
            checked = member.bare.checked
            own = [*needs.notes, *_without_host_sleep(checked, plan), *_of_nodes(checked, plan)]
            found += own if len(self._members) == 1 else [f"{member.name}: {line}" for line in own]
        return found

    def _sharing_notes(self) -> list[str]:
        several, found = len(self._members) > 1, []
        for one in self._deployments:
            users = [f"{self._members[user.pipeline].name}.{user.step}" if several else user.step for user in one.users]
            if len(users) > 1:
                *most, last = users
                node = self._members[one.users[0].pipeline].bare.checked.steps[one.users[0].step]
                what = "model" if node.node.heavy else "node"
                found.append(f"{', '.join(most)} and {last} share one {what}: {node.step.node} {one.name}")
        return found


def over_deployments(bare: BarePlan, plan: Plan, loaded: Plan, indexes: Sequence[int]) -> Plan:
    """Return the plan of a pipeline whose steps have the processes, devices and load options of their deployments.

    indexes: by step, as in Placed.
    """
    checked = bare.checked.steps
    steps = [
        step if at < 0 else _over(step, loaded.steps[at], checked[step.name])
        for step, at in zip(plan.steps, indexes, strict=True)
    ]
    # a chain runs a deployment once
    found = (chain for chain in chains(steps, plan.inputs) if len({indexes[at] for at in chain}) == len(chain))
    return dataclasses.replace(plan, steps=tuple(steps), workers=loaded.workers, chains=tuple(found))


def _over(step: PlannedStep, deployment: PlannedStep, one: CheckedStep) -> PlannedStep:
    return dataclasses.replace(
        step,
        options={**deployment.options, **request_options(one.node, one.config)},
        device=deployment.device,
        devices=deployment.devices,
        workers=deployment.workers,
        device_inputs=deployment.device_inputs,
        device_outputs=deployment.device_outputs,
        device_bytes=deployment.device_bytes,
    )


def _disjoint(found: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return the chains without those that share a deployment with an earlier one, or have one twice."""
    kept, taken = [], set[int]()
    for chain in found:
        if taken.isdisjoint(chain) and len({*chain}) == len(chain):
            kept.append(chain)
            taken |= {*chain}
    return tuple(kept)


def _device_outputs(users: Sequence[PlannedStep]) -> dict[str, str]:
    """Return the union of what the readers of all users need: on the device alone only where that holds for each."""
    found = {}
    for port in users[0].outputs:
        kept = {step.device_outputs.get(port.name, "") for step in users}
        if kept != {""}:
            found[port.name] = "device" if kept == {"device"} else "both"
    return found


def _largest(one: int | None, other: int | None) -> int | None:
    return max((value for value in (one, other) if value is not None), default=None)


def _without_host_sleep(checked: Checked, plan: Plan) -> list[str]:
    """Return a line for each step that is configured to keep weights in host memory while asleep, but cannot."""
    found = []
    for step in plan.steps:
        if step.idle is None or step.idle.keep != "host":
            continue
        one = checked.steps[step.name]
        if not one.node.can_rest(one.config, StepContext(one.step.base_dir or checked.pipeline.base_dir)):
            what = f"node {one.step.node} is opened again"
            found.append(f"{step.name} keeps only its process while it sleeps: {what}")
        elif not any(map(is_gpu, step.devices or (step.device,))):
            why = "the CPU's memory is the host's"
            found.append(f"{step.name} keeps its weights where they are while it sleeps: {why}")
    return found


def _of_nodes(checked: Checked, plan: Plan) -> list[str]:
    """Return notes of the plan's nodes for display."""
    found = []
    for name, devices in ((step.name, step.devices) for step in plan.steps if not step.control):
        one = checked.steps[name]
        base_dir, types = one.step.base_dir or checked.pipeline.base_dir, types_of(one.step, checked)
        context = StepContext(base_dir, tuple(one.step.inputs), types, devices)
        found += [f"{name}: {line}" for line in one.node.plan_notes(one.config, context)]
    return found


def _device_bytes(step: PlannedStep, needs: Needs) -> int:
    """Return the known memory of an instance on its first GPU."""
    known = needs.steps[step.name].bytes if step.name in needs.steps else {}
    return next((known[device] for device in step.devices if device in known), step.device_bytes)
