"""Merged linear layers give what they gave apart, in any order of calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weftline.engine.llm.fusion.linear import MergedLinear, MergedSlice, merge, split, unmergeable

NAMES = ("q", "k", "v")


class Owner(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.q, self.k, self.v = (nn.Linear(8, width, bias=bias) for width in (6, 4, 2))


class Counted(nn.Module):
    """Stands in the merged layer's place and counts its calls."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.parts, self.calls = inner, inner.parts, 0

    def forward(self, given: Tensor) -> Tensor:
        self.calls += 1
        product: Tensor = self.inner(given)
        return product


def merged(bias: bool = True) -> tuple[Any, Any, Any]:
    """Return an owner as it was, one that was merged, and the counter in it."""
    plain, owner = Owner(bias), Owner(bias)
    merge(owner, NAMES, "qkv")
    owner.qkv = counter = Counted(owner.qkv)
    return plain, owner, counter


@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_three_calls_with_one_input_are_one_product(bias: bool) -> None:
    plain, owner, counter = merged(bias)
    for _ in range(3):
        given = torch.randn(1, 5, 8)
        for name in NAMES:
            assert torch.allclose(getattr(owner, name)(given), getattr(plain, name)(given), atol=1e-6)
    assert counter.calls == 3


@torch.inference_mode()
def test_another_input_is_computed_anew_and_the_order_does_not_matter() -> None:
    plain, owner, counter = merged()
    one, two = torch.randn(2, 5, 8)
    for name, given in (("v", one), ("q", two), ("k", two), ("q", one), ("q", one), ("v", two)):
        assert torch.allclose(getattr(owner, name)(given), getattr(plain, name)(given), atol=1e-6)
    assert counter.calls == 5  # only k had what q left behind


@torch.inference_mode()
def test_a_tensor_written_to_after_all_parts_were_taken_is_computed_anew() -> None:
    plain, owner, _ = merged()
    given = torch.randn(5, 8)
    for _ in range(2):
        for name in NAMES:
            assert torch.allclose(getattr(owner, name)(given), getattr(plain, name)(given), atol=1e-6)
        given.mul_(2)  # as the buffers of a CUDA graph are


def test_parts_name_the_outputs_and_show_the_old_weights() -> None:
    plain, owner = Owner(), Owner()
    merge(owner, NAMES, "qkv")
    assert owner.qkv.parts == (("q", 0, 6), ("k", 6, 10), ("v", 10, 12))  # type: ignore[union-attr]
    assert isinstance(owner.k, MergedSlice)
    assert torch.equal(owner.k.weight, plain.k.weight)
    assert owner.k.bias is not None and torch.equal(owner.k.bias, plain.k.bias)
    assert [name for name, _ in owner.named_parameters()] == ["qkv.weight", "qkv.bias"]


def test_split_gives_plain_layers_in_the_same_memory() -> None:
    plain, owner = Owner(), Owner()
    merge(owner, NAMES, "qkv")
    linear: Any = owner.qkv
    assert isinstance(linear, MergedLinear)
    split(owner, "qkv")
    assert set(owner._modules) == set(NAMES)
    for name in NAMES:
        found = getattr(owner, name)
        assert type(found) is nn.Linear
        assert torch.equal(found.weight, getattr(plain, name).weight)
        assert found.weight.untyped_storage().data_ptr() == linear.weight.untyped_storage().data_ptr()


def _swap(owner: Owner, name: str, module: nn.Module) -> Owner:
    setattr(owner, name, module)
    return owner


class Other(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("owner", "said"),
    [
        (_swap(Owner(), "k", Other(8, 4)), "k is a Other, not a plain Linear"),
        (_swap(Owner(), "k", nn.Linear(9, 4)), "k takes 9 inputs"),
        (_swap(Owner(), "v", nn.Linear(8, 2, dtype=torch.bfloat16)), "v has another dtype"),
        (_swap(Owner(), "v", nn.Linear(8, 2, bias=False)), "only one of q and v has a bias"),
        (Owner(), None),
    ],
)
def test_layers_that_cannot_be_merged_say_why(owner: Owner, said: str | None) -> None:
    found = unmergeable(owner, NAMES)
    assert found is None if said is None else said in (found or "")


def test_a_layer_with_a_hook_is_not_merged() -> None:
    owner = Owner()
    owner.q.register_forward_hook(lambda *_: None)
    assert unmergeable(owner, NAMES) == "q has hooks"
