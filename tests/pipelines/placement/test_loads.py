"""Which tensors could stay on a GPU if their steps were on one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import pytest

from weftline.pipelines.placement.loads import links_of, loads_of
from weftline.pipelines.spec.graph import Step
from weftline.pipelines.spec.policy import GpuPolicy


def linked(
    written: Mapping[str, Sequence[str]], edges: Collection[tuple[str, str]], light: str = "", shared: str = ""
) -> dict[str, dict[str, int]]:
    """Links by the names of steps; `light` and `shared` are letters: steps that are light, or share a worker."""
    steps = [Step(name, worker="w" if name in shared else None) for name in written]
    loads = loads_of(steps, written, {name: name not in light for name in written}, {}, GpuPolicy())
    said = ["".join(sorted(load.names)) for load in loads]
    return {said[one]: {said[other]: count for other, count in own.items()}
            for one, own in links_of(loads, written, edges).items()}  # fmt: skip


AUTO, ON_0, ON_1 = ("auto",), ("cuda:0",), ("cuda:1",)


def test_steps_that_exchange_tensors_are_linked_both_ways() -> None:
    found = linked({"a": AUTO, "b": ON_0, "c": AUTO}, {("a", "b"), ("b", "c"), ("b", "a")})
    assert found == {"a": {"b": 2}, "b": {"a": 2, "c": 1}, "c": {"b": 1}}


def test_light_steps_that_follow_hand_a_link_on() -> None:
    edges = {("a", "x"), ("x", "y"), ("y", "b"), ("x", "c"), ("y", "x")}
    steps = dict.fromkeys("abcxy", AUTO)
    assert linked(steps, edges, light="xy") == {"a": {"b": 1, "c": 1}, "b": {"a": 1}, "c": {"a": 1}}
    assert linked({**steps, "x": ("cpu",)}, edges, light="xy") == {}, "what it reads is in host memory"
    assert linked({**steps, "x": ON_1}, edges, light="xy")["a"] == {"x": 1}, "it does not follow"


@pytest.mark.parametrize("devices", [("auto", "auto"), ("cuda:0", "cuda:1"), ("cuda:0", "cpu"), ("auto", "cuda:0")])
def test_steps_on_several_devices_are_linked_to_nothing(devices: tuple[str, ...]) -> None:
    assert linked({"a": AUTO, "b": devices}, {("a", "b")}) == {}


def test_a_step_whose_instances_are_all_on_one_gpu_is_linked() -> None:
    assert linked({"a": AUTO, "b": ("cuda:1", "cuda:1")}, {("a", "b")}) == {"a": {"b": 1}, "b": {"a": 1}}


def test_steps_that_share_a_worker_are_one_end_of_a_link() -> None:
    found = linked(dict.fromkeys("abc", AUTO), {("a", "b"), ("b", "c"), ("a", "c")}, shared="ab")
    assert found == {"ab": {"c": 2}, "c": {"ab": 2}}
