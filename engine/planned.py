"""A pipeline that was checked and planned: what a session opens, at first and when it is reloaded.

A pipeline comes as a YAML file, or as one built in Python. Its plan is made as if nothing else were open; `again` makes
another one, for what others have left of the GPUs. Nothing runs here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from weftline.engine.machine import this_machine
from weftline.engine.shared_gpus import Again
from weftline.pipelines.builder import Builder
from weftline.pipelines.graph import Pipeline
from weftline.pipelines.load import load_file
from weftline.pipelines.place import Machine
from weftline.pipelines.plan import Plan
from weftline.pipelines.planning import make_plan
from weftline.pipelines.profile_file import profile_beside

Source = str | Path | Pipeline | Builder
"""What a pipeline is loaded from: a YAML file, or one built in Python."""


class PlannedPipeline:
    """A plan, the machine it was made for, and the pipeline as it was written.

    machine: None: this machine.
    graph:   None: only the plan is known.
    """

    def __init__(self, plan: Plan, machine: Machine | None = None, graph: Pipeline | None = None) -> None:
        self.plan = plan
        self.machine = machine
        self._graph = graph

    @classmethod
    def of(cls, pipeline: Source, machine: Machine | None = None) -> Self:
        """Check and plan a pipeline for a machine, this one when left out; PipelineError lists every problem."""
        graph = graph_of(pipeline)
        return cls(_plan(graph, machine), machine, graph)

    @property
    def again(self) -> Again | None:
        """Makes the plan for another machine; None when the pipeline is not known, only its plan."""
        graph = self._graph
        return None if graph is None else lambda machine: _plan(graph, machine)


def plan_of(pipeline: Source, machine: Machine | None = None) -> Plan:
    """Return the plan of a pipeline for a machine; PipelineError lists every problem."""
    return _plan(graph_of(pipeline), machine)


def graph_of(pipeline: Source) -> Pipeline:
    """Return a pipeline as it was written; PipelineError when it cannot be read."""
    if isinstance(pipeline, str | Path):
        return load_file(pipeline)
    return pipeline.build() if isinstance(pipeline, Builder) else pipeline


def _plan(graph: Pipeline, machine: Machine | None) -> Plan:
    return make_plan(graph, machine or this_machine(), profile=profile_beside(graph))
