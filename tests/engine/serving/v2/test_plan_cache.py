"""Plans of heads: found for the same bytes and equal metadata only, and never more than a few."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.model_info import ModelInfo, PortInfo
from weftline.engine.serving.v2.messages import InferRequest, Region, Tensor, WantedOutput
from weftline.engine.serving.v2.plan_cache import HEAD_BYTES_MAX, HEADS_MAX, PlanCache
from weftline.engine.serving.v2.request import RequestPlan, plan_request
from weftline.errors import AccessDenied, UnknownModel

INFO = ModelInfo("m", 1, (PortInfo("x", "uint8[N]"),), (PortInfo("y", "uint8[N]"),))
ITEM = Tensor("x", "UINT8", (2,), b"")


def request(tensor: Tensor = ITEM, *outputs: WantedOutput) -> InferRequest:
    return InferRequest("m", (tensor,), outputs)


class Regions:
    """Memory in which every region exists."""

    def check(self, name: str, offset: int, size_bytes: int) -> None:
        pass


def plan(one: InferRequest, info: ModelInfo = INFO) -> RequestPlan:
    return plan_request(one, info, ServeLimits(), Regions())  # type: ignore[arg-type]


def find(cache: PlanCache, head: bytes, raws: int = 1, info: ModelInfo = INFO) -> RequestPlan | None:
    return cache.find(head, raws, "m", lambda model: None, lambda model, version: info)


def test_a_plan_is_found_for_its_head_and_number_of_raw_contents_alone() -> None:
    cache, one = PlanCache(), plan(request())
    cache.add(request(), b"head", 1, one)
    assert find(cache, b"head") is one
    assert find(cache, b"Head") is None and find(cache, b"head", 0) is None
    assert cache.find(b"head", 1, "n", lambda model: None, lambda model, version: INFO) is None


def test_equal_metadata_keeps_the_plans_and_any_other_drops_them() -> None:
    cache, one = PlanCache(), plan(request())
    cache.add(request(), b"head", 1, one)
    assert find(cache, b"head", info=msgspec.structs.replace(INFO)) is one
    assert find(cache, b"head", info=msgspec.structs.replace(INFO, version=2)) is None
    assert find(cache, b"head") is None


def test_a_long_head_is_not_looked_up() -> None:
    cache = PlanCache()
    cache.add(request(), b"head", 1, plan(request()))
    block = memoryview(np.zeros(HEAD_BYTES_MAX + 1, np.uint8)).toreadonly()  # of a large message; it has no hash
    assert find(cache, block) is None  # type: ignore[arg-type]


def test_a_model_that_ended_drops_its_plans() -> None:
    cache = PlanCache()
    cache.add(request(), b"head", 1, plan(request()))

    def gone(model: str, version: str) -> ModelInfo:
        raise UnknownModel("it is gone")

    with pytest.raises(UnknownModel):
        cache.find(b"head", 1, "m", lambda model: None, gone)
    assert find(cache, b"head") is None


def test_the_caller_is_checked_before_the_model_is_looked_up() -> None:
    cache = PlanCache()
    cache.add(request(), b"head", 1, plan(request()))
    asked: list[str] = []

    def refuse(model: str) -> None:
        raise AccessDenied("not this model")

    def info(model: str, version: str) -> ModelInfo:
        asked.append(model)
        return INFO

    with pytest.raises(AccessDenied):
        cache.find(b"head", 1, "m", refuse, info)
    assert not asked


@pytest.mark.parametrize(
    "one",
    [
        request(Tensor("x", "UINT8", (1, 2), b"")),
        request(Tensor("x", "UINT8", (2,), None, (1, 2))),
        request(Tensor("x", "UINT8", (2,), None, None, Region("r", 0, 2))),
        request(ITEM, WantedOutput("y", Region("r", 0, 2))),
    ],
)
def test_plans_of_batches_typed_contents_and_regions_are_not_kept(one: InferRequest) -> None:
    cache = PlanCache()
    cache.add(one, b"head", 1, plan(one))
    assert find(cache, b"head") is None


def test_a_plan_of_typed_contents_that_became_raw_is_not_kept() -> None:
    cache, one = PlanCache(), request(Tensor("x", "UINT8", (2,), b"ab"))
    cache.add(one, b"head", 0, plan(one))
    assert find(cache, b"head", 0) is None


def test_long_heads_are_not_kept_and_the_oldest_gives_way() -> None:
    cache, one = PlanCache(), plan(request())
    cache.add(request(), bytes(HEAD_BYTES_MAX + 1), 1, one)
    assert find(cache, bytes(HEAD_BYTES_MAX + 1)) is None
    for at in range(HEADS_MAX + 1):
        cache.add(request(), bytes([at]), 1, one)
    kept: Any = cache._models["m"].plans
    assert len(kept) == HEADS_MAX and find(cache, b"\0") is None and find(cache, b"\1") is one
