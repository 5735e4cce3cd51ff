"""A checked and planned pipeline: the input of `Session.open` and `Session.reload`.

A pipeline is a YAML file, or built in Python. Its plan assumes that no other session is open; `again` plans it anew for
the GPU memory that other sessions leave. Nothing runs here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from weftline.engine.machine import this_machine
from weftline.errors import InputError
from weftline.pipelines.placement.place import Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.placement.profile_file import profile_beside
from weftline.pipelines.placement.reservations import Replan
from weftline.pipelines.spec.builder import Builder
from weftline.pipelines.spec.graph import Pipeline
from weftline.pipelines.spec.loader import load_file
from weftline.pipelines.spec.single_step import graph_to_debug, plan_to_debug

Source = str | Path | Pipeline | Builder
"""Source of a pipeline: the path of a YAML file, or a pipeline built in Python."""


class PlannedPipeline:
    """A plan, its machine, and the graph it was made from.

    machine: None: this machine.
    graph:   None: only the plan is known.
    debug:   the step to debug; '' for none.
    """

    def __init__(
        self, plan: Plan, machine: Machine | None = None, graph: Pipeline | None = None, debug: str = ""
    ) -> None:
        self.plan = plan
        self.machine = machine
        self._graph = graph
        self._debug = debug

    @classmethod
    def of(cls, pipeline: Source, machine: Machine | None = None) -> Self:
        """Check and plan a pipeline for a machine, by default this one; PipelineError lists every problem."""
        graph = graph_of(pipeline)
        return cls(_plan(graph, machine), machine, graph)

    @property
    def again(self) -> Replan | None:
        """Function that plans the pipeline for another machine; None if only its plan is known."""
        graph, debug = self._graph, self._debug
        return None if graph is None else lambda machine: _plan(graph, machine, debug)

    def to_debug(self, step: str) -> Self:
        """Return the pipeline planned with this step in this process; InputError if that is not possible."""
        if self._graph is None:
            raise InputError("debug: this pipeline was made from a plan alone; load it with weftline.load")
        graph = graph_to_debug(self._graph, step)
        return type(self)(_plan(graph, self.machine, step), self.machine, graph, step)


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


def _plan(graph: Pipeline, machine: Machine | None, debug: str = "") -> Plan:
    plan = make_plan(graph, machine or this_machine(), profile=profile_beside(graph))
    return plan_to_debug(plan, debug) if debug else plan
