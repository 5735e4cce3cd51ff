"""Merged linear layers: several projections of one input as one matrix product.

`merge` adds a `MergedLinear` and replaces each layer by a `MergedSlice`, so that the model's own code goes on calling
`q_proj`, `k_proj` and `v_proj` and finds one product computed for all three. Every merged linear says in
`parts` which of its outputs belong to whom, for adapters and checkpoints that know the old names. `split` puts plain
linear layers back; their weights are then views of the merged one.

The old weights are freed as they merge: what is there twice, for a moment, is one group's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class MergedLinear(nn.Linear):
    """One linear layer that computes what several did.

    parts: (name, start, stop) of each: its outputs are start:stop of this one's, and `name` is what the module that
           holds this one called it. They follow each other without gaps.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, parts: tuple[tuple[str, int, int], ...]) -> None:
        """Take `weight` [outputs, inputs] and `bias` [outputs] as they are; nothing is copied."""
        super().__init__(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)
        self.parts = parts


class _Product:
    """The newest product of a merged linear: kept until each part has taken its piece, or the next input comes."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        self._owner = owner
        self._name = name
        self._input: Tensor | None = None
        self._pieces: list[Tensor | None] = []

    @property
    def linear(self) -> Any:
        """The merged linear, or its replacement."""
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
    """Stands where a merged linear layer stood; has no weights of its own.

    Its siblings must be called with the same tensor object, unchanged, for the product to be shared; another object
    is computed anew, so that the result is right in any case.
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


def unlike(owner: nn.Module, names: Sequence[str]) -> str | None:
    """Return why the children `names` of `owner` cannot be merged, or None when they can."""
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
    """Merge the linear children `names` of `owner` into a new child `merged`; `unlike` must have said None."""
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
    """Undo `merge`: plain linear layers again, whose weights share the merged one's memory."""
    linear: Any = owner._modules[merged]
    for name, start, stop in linear.parts:
        plain = nn.Linear(linear.in_features, stop - start, bias=linear.bias is not None, device="meta")
        plain.weight = nn.Parameter(linear.weight.data[start:stop], requires_grad=False)
        if linear.bias is not None:
            plain.bias = nn.Parameter(linear.bias.data[start:stop], requires_grad=False)
        setattr(owner, name, plain.eval())
    delattr(owner, merged)


def merged_linears(model: nn.Module) -> Iterator[tuple[str, MergedLinear]]:
    """Yield the merged linear layers of a model with the path of the module that each sits in."""
    for path, module in model.named_modules():
        if isinstance(module, MergedLinear):
            yield path.rpartition(".")[0], module
