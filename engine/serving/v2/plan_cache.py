"""Plans of recent requests, by the bytes of their heads.

Clients repeat themselves: their requests differ in the id and the raw contents. A plan is a function of the head, the
number of raw contents, the model's metadata and the server's limits, so it is kept for these, and for nothing that
belongs to a caller. It is used only while the backend returns equal metadata: a reload drops the model's plans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from weftline.engine.serving.model_info import ModelInfo
from weftline.engine.serving.v2.messages import InferRequest
from weftline.engine.serving.v2.request import RequestPlan

HEADS_MAX = 64
"""Most heads of a model; the oldest is dropped first."""

HEAD_BYTES_MAX = 4096
"""Longest head that is kept."""

Head = bytes | memoryview


@dataclass(slots=True)
class _ModelPlans:
    info: ModelInfo
    plans: dict[tuple[Head, int], RequestPlan] = field(default_factory=dict)


class PlanCache:
    """Plans by model, head and number of raw contents. Used from one event loop."""

    def __init__(self) -> None:
        self._models: dict[str, _ModelPlans] = {}

    def find(
        self,
        head: Head,
        raws: int,
        model: str,
        check: Callable[[str], None],
        info: Callable[[str, str], ModelInfo],
    ) -> RequestPlan | None:
        """Return the plan of a head, None without one.

        model: the name in the head.
        check: raises unless the caller may use the model; called before `info`.
        info:  returns the metadata of a model and version, or raises.
        """
        held = self._models.get(model) if len(head) <= HEAD_BYTES_MAX else None
        if held is None or (plan := held.plans.get((head, raws))) is None:
            return None
        check(model)
        try:
            now = info(model, plan.version)
        except BaseException:
            del self._models[model]
            raise
        if now is not held.info and now != held.info:
            del self._models[model]
            return None
        return plan

    def add(self, request: InferRequest, head: Head, raws: int, plan: RequestPlan) -> None:
        """Keep the plan of a request, if it holds for every request with the same head."""
        if len(head) > HEAD_BYTES_MAX or plan.batch is not None:
            return
        if any(one.values is not None or one.region is not None for one in request.inputs):
            return
        if not raws and any(one.raw for one in request.inputs):
            return  # from typed contents, which are in the head
        if any(one.region is not None for one in request.outputs):
            return
        held = self._models.get(plan.info.name)
        if held is None or (held.info is not plan.info and held.info != plan.info):
            held = self._models[plan.info.name] = _ModelPlans(plan.info)
        if len(held.plans) >= HEADS_MAX:
            del held.plans[next(iter(held.plans))]
        held.plans[bytes(head), raws] = plan
