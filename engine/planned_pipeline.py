"""A checked and planned pipeline: the input of `Session.open` and `Session.reload`.

A pipeline is a YAML file, or built in Python. Its plan assumes that no other session is open; `again` plans it anew for
the GPU memory that other sessions leave. Nothing runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Self

from weftline.engine.gpus import Reservation
from weftline.engine.machine import this_machine
from weftline.errors import InputError, WeftlineError
from weftline.pipelines.placement.place import Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.placement.profile_file import Profile, profile_beside
from weftline.pipelines.placement.sharing import SharedPlan, plan_shared
from weftline.pipelines.spec.builder import Builder
from weftline.pipelines.spec.graph import Pipeline
from weftline.pipelines.spec.loader import load_file
from weftline.pipelines.spec.single_step import graph_to_debug, plan_to_debug

Source = str | Path | Pipeline | Builder
"""Source of a pipeline: the path of a YAML file, or a pipeline built in Python."""

Replan = Callable[[Machine], SharedPlan]
"""Function that plans pipelines anew for a machine with other reservations. PipelineError: they do not fit."""


class PlannedPipeline:
    """A plan, its machine, and the graph it was made from.

    plan:    the pipeline's own.
    shared:  the plan and what it loads: steps with equal load keys share.
    machine: None: this machine.
    graph:   None: only the plan is known.
    again:   plans the pipeline for another machine; None: that is not possible.
    """

    def __init__(
        self,
        plan: Plan | SharedPlan,
        machine: Machine | None = None,
        graph: Pipeline | None = None,
        again: Replan | None = None,
    ) -> None:
        self.shared = SharedPlan.of(plan) if isinstance(plan, Plan) else plan
        ((self.name, program),) = self.shared.programs.items()
        self.plan = program.plan
        self.machine = machine
        self.graph = graph
        self.again = again

    @classmethod
    def of(cls, pipeline: Source, machine: Machine | None = None) -> Self:
        """Check and plan a pipeline for a machine, by default this one; PipelineError lists every problem."""
        graph = graph_of(pipeline)
        return cls(_shared(graph, machine), machine, graph, lambda there: _shared(graph, there))

    def to_debug(self, step: str) -> Self:
        """Return the pipeline planned with this step in this process; InputError if that is not possible."""
        if self.graph is None:
            raise InputError("debug: this pipeline was made from a plan alone; load it with weftline.load")
        graph = graph_to_debug(self.graph, step)

        def plan(there: Machine | None) -> SharedPlan:
            return SharedPlan.of(plan_to_debug(_plan(graph, there), step))

        return type(self)(plan(self.machine), self.machine, graph, plan)


def plan_of(pipeline: Source, machine: Machine | None = None) -> Plan:
    """Return the plan of a pipeline for a machine; PipelineError lists every problem."""
    return _plan(graph_of(pipeline), machine)


def graph_of(pipeline: Source) -> Pipeline:
    """Return the graph of a pipeline; PipelineError if it cannot be read, InputError if it is none."""
    if isinstance(pipeline, str | Path):
        return load_file(pipeline)
    if not isinstance(pipeline, Builder | Pipeline):
        raise InputError(f"pipeline: found {type(pipeline).__name__}, expected a file's path or a weftline.Pipeline")
    return pipeline.build() if isinstance(pipeline, Builder) else pipeline


def _plan(graph: Pipeline, machine: Machine | None) -> Plan:
    return make_plan(graph, machine or this_machine(), profile=profile_beside(graph))


def _shared(graph: Pipeline, machine: Machine | None) -> SharedPlan:
    return plan_shared({graph.name: graph}, machine or this_machine(), profiles={graph.name: profile_beside(graph)})


def plan_group(
    pipelines: Mapping[str, Pipeline], machine: Machine, hold: Reservation
) -> tuple[SharedPlan, dict[str, WeftlineError]]:
    """Plan pipelines of one engine together, for the GPU memory that is left, and reserve it.

    Also return the error of each that cannot be planned. PipelineError: none can.
    """
    refused = dict[str, WeftlineError]()
    profiles = dict[str, Profile | None]()
    for name, one in pipelines.items():
        try:
            profiles[name] = profile_beside(one)
        except WeftlineError as error:
            refused[name] = error
    wanted = {name: pipelines[name] for name in profiles}
    if not wanted:
        raise next(iter(refused.values()))

    def plan(there: Machine) -> SharedPlan:
        return plan_shared(wanted, there, profiles=profiles)

    shared = reserved(plan(machine), hold, plan, machine)
    return shared, {**refused, **shared.refused}


def reserved(shared: SharedPlan, hold: Reservation, again: Replan | None, machine: Machine | None) -> SharedPlan:
    """Reserve the GPU memory of a plan; return it, or one that was made for what other sessions leave.

    again: plans anew for another machine; None: it opens as planned, or not at all. PipelineError: it does not fit.
    """
    made = [shared]

    def replan(there: Machine, again: Replan) -> Plan:
        made.append(again(there))
        return made[-1].plan

    plan = hold.reserve(shared.plan, None if again is None else partial(replan, again=again), machine)
    found = next((one for one in made if one.plan is plan), None)
    return found if found is not None else made[-1].with_plan(plan)
