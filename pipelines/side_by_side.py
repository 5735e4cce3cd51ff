"""Plans of several pipelines that are to be open at the same time, each for what those before it leave of the GPUs.

In the order in which they will be loaded, so that who is refused when they are is refused here, before anything starts.
"""

from __future__ import annotations

import itertools

from weftline.pipelines.graph import Pipeline
from weftline.pipelines.holdings import Holder, Holdings
from weftline.pipelines.machine import Machine
from weftline.pipelines.plan import Plan
from weftline.pipelines.planning import make_plan
from weftline.pipelines.profile_file import profile_beside


class SideBySide:
    """Plans pipelines for a machine on which those that were planned before are open."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._holdings = Holdings()
        self._numbers = itertools.count(1)

    def add(self, pipeline: Pipeline, name: str) -> Plan:
        """Return the plan of one more. PipelineError: it has problems, or too little is left; it then claims nothing.

        name: what it is called where others are told what it has.
        """
        holder = Holder(name, next(self._numbers))
        machine = self._holdings.beside(self._machine, holder)
        plan = make_plan(pipeline, machine, profile=profile_beside(pipeline))
        self._holdings.try_take(holder, plan)
        return plan
