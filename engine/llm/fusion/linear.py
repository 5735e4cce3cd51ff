"""Merged linear layers: several projections of one input as one matrix product.

`merge` adds a `MergedLinear` and replaces each layer by a `MergedSlice`. The model's own code still calls `q_proj`,
`k_proj` and `v_proj`, and one matrix product serves all three. `MergedLinear.parts` maps output ranges to the original
names, for adapters and checkpoints. `split` restores plain linear layers whose weights are views of the merged weight.

The original weights are freed after each merge, so at most one group exists twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class MergedLinear(nn.Linear):
    """Linear layer that replaces several layers of one input.

    parts: (name, start, stop) of each original layer: outputs start:stop, `name` in the owning module; without gaps.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, parts: tuple[tuple[str, int, int], ...]) -> None:
        """Store `weight` [outputs, inputs] and `bias` [outputs] without copying."""
        super().__init__(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)
        self.parts = parts


class _Product:
    """Latest output of a merged linear, cached until every slice has read its part or the input changes."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        self._owner = owner
        self._name = name
        self._input: Tensor | None = None
        self._pieces: list[Tensor | None] = []

    @property
    def linear(self) -> Any:
        """Return the merged linear, or the layer that replaced it."""
        return self._owner._modules[self._name]

    def take(self, at: int, given: Tensor) -> Tensor:
        piece = self._pieces[at] if given is self._input else None
        if piece is None:
            linear = self.linear
            widths = [stop - start for _, start, stop in linear.parts]
            self._input, self._pieces = given, list(linear(given).split(widths, dim=-1))
            piece = self._pieces[at]
        self._pieces[at] = None
        if all(left is None for left in self._pieces):
            self._input = None
        if piece is None:
            raise RuntimeError(f"part {at} of {self._name} has no piece")
        return piece


class MergedSlice(nn.Module):
    """Placeholder for a linear layer that was merged; has no weights of its own.

    The product is shared while the slices are called with the same tensor object. Any other object is computed anew, so
    the result is correct in any case.
    """

    def __init__(self, product: _Product, at: int, start: int, stop: int) -> None:
        super().__init__()
        self._product = product
        self._at = at
        self._range = slice(start, stop)

    def forward(self, given: Tensor) -> Tensor:
        return self._product.take(self._at, given)

    @property
    def weight(self) -> Tensor:
        """[outputs, inputs], a view of the merged weight."""
        found: Tensor = self._product.linear.weight
        return found[self._range]

    @property
    def bias(self) -> Tensor | None:
        found: Tensor | None = self._product.linear.bias
        return None if found is None else found[self._range]


def unmergeable(owner: nn.Module, names: Sequence[str]) -> str | None:
    """Return the reason why the children `names` of `owner` cannot be merged; None if they can."""
    found = [owner._modules.get(name) for name in names]
    first = found[0]
    for name, child in zip(names, found, strict=True):
        if type(child) is not nn.Linear:
            return f"{name} is a {type(child).__name__}, not a plain Linear"
        if type(child.weight) is not nn.Parameter or type(child.weight.data) is not Tensor:
            return f"the weight of {name} is a {type(child.weight.data).__name__}, not a plain tensor"
        if child._forward_hooks or child._forward_pre_hooks or "forward" in child.__dict__:
            return f"{name} has hooks"
        if not isinstance(first, nn.Linear) or child.in_features != first.in_features:
            return f"{name} takes {child.in_features} inputs, {names[0]} another number"
        if child.weight.dtype != first.weight.dtype or child.weight.device != first.weight.device:
            return f"the weight of {name} has another dtype or device than that of {names[0]}"
        if (child.bias is None) != (first.bias is None):
            return f"only one of {names[0]} and {name} has a bias"
    return None


def merge(owner: nn.Module, names: Sequence[str], merged: str) -> None:
    """Merge the linear children `names` of `owner` into a new child `merged`; `unmergeable` must be None."""
    children: list[Any] = [owner._modules[name] for name in names]
    parts, start = [], 0
    for name, child in zip(names, children, strict=True):
        parts.append((name, start, start + child.out_features))
        start += child.out_features
    weight = torch.cat([child.weight.data for child in children])
    bias = None if children[0].bias is None else torch.cat([child.bias.data for child in children])
    setattr(owner, merged, MergedLinear(weight, bias, tuple(parts)))
    product = _Product(owner, merged)
    for at, (name, begin, stop) in enumerate(parts):
        setattr(owner, name, MergedSlice(product, at, begin, stop))


def split(owner: nn.Module, merged: str) -> None:
    """Undo `merge`: restore plain linear layers whose weights are views of the merged weight."""
    linear: Any = owner._modules[merged]
    for name, start, stop in linear.parts:
        plain = nn.Linear(linear.in_features, stop - start, bias=linear.bias is not None, device="meta")
        plain.weight = nn.Parameter(linear.weight.data[start:stop], requires_grad=False)
        if linear.bias is not None:
            plain.bias = nn.Parameter(linear.bias.data[start:stop], requires_grad=False)
        setattr(owner, name, plain.eval())
    delattr(owner, merged)
