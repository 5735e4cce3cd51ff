"""Which steps a request needs for the outputs it asks for, and who reads what.

Values are numbered once for a plan: pipeline inputs first, then every step's outputs in plan order. A Route is worked
out once for each choice of outputs and kept; steps that nobody asked for are pruned from it.
"""

from __future__ import annotations

from weftline.engine.request import Route
from weftline.errors import InputError
from weftline.pipelines.graph import Wire
from weftline.pipelines.plan import Plan

ROUTES_MAX = 256
"""Most choices of outputs remembered; a plan has a handful, a hostile client could ask for thousands."""


class Routes:
    """Numbers a plan's values and finds the route for a choice of outputs."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        wires = [Wire(None, given.name) for given in plan.inputs]
        wires += [Wire(step.name, port.name) for step in plan.steps for port in step.outputs]
        self._slots = {wire: slot for slot, wire in enumerate(wires)}
        self._producer = [-1] * len(plan.inputs) + [i for i, step in enumerate(plan.steps) for _ in step.outputs]
        self.input_slots = [tuple(self._slots[given.wire] for given in step.inputs) for step in plan.steps]
        self.output_slots = [
            tuple(self._slots[Wire(step.name, port.name)] for port in step.outputs) for step in plan.steps
        ]
        self._outputs = {output.name: self._slots[output.wire] for output in plan.outputs}
        self._kept: dict[tuple[str, ...] | None, Route] = {}

    def slot_of_input(self, name: str) -> int:
        return self._slots[Wire(None, name)]

    def route(self, wanted: tuple[str, ...] | None) -> Route:
        """Return the route for these outputs (None: all); InputError names an output the pipeline does not have."""
        route = self._kept.get(wanted)
        if route is None:
            route = self._work_out(wanted)
            if len(self._kept) < ROUTES_MAX:
                self._kept[wanted] = route
        return route

    def _work_out(self, wanted: tuple[str, ...] | None) -> Route:
        outputs = tuple(dict.fromkeys(self._outputs if wanted is None else wanted))
        unknown = [name for name in outputs if name not in self._outputs]
        if unknown or not outputs:
            raise InputError(
                f"no output is called {', '.join(unknown) or 'nothing'}; outputs: {', '.join(self._outputs)}"
            )
        needed: set[int] = set()
        ahead = [self._producer[self._outputs[name]] for name in outputs]
        while ahead:
            step = ahead.pop()
            if step >= 0 and step not in needed:
                needed.add(step)
                ahead += [self._producer[slot] for slot in self.input_slots[step]]
        readers: list[list[int]] = [[] for _ in self._slots]
        for step in sorted(needed):
            for slot in self.input_slots[step]:
                readers[slot].append(step)
        names: list[list[str]] = [[] for _ in self._slots]
        for name in outputs:
            names[self._outputs[name]].append(name)
        return Route(
            steps=tuple(sorted(needed)),
            readers=tuple(map(tuple, readers)),
            outputs_at=tuple(map(tuple, names)),
            missing={step: len(self.input_slots[step]) for step in needed},
            outputs=outputs,
        )
