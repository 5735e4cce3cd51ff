"""Mapping of trained layer names to a model's linear layers.

As transformers made it, a layer is where its name says. Merged with others (`weftline.engine.llm.fusion.fuse`), it is
some columns of what the merged layer gives; the merged layer's `parts` say which.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weftline.engine.llm.lora.linear import OutputSlice


@dataclass(frozen=True, slots=True)
class AdapterPlace:
    """One layer: columns `parts[part]` of the output of `module`, which lies at `path` and has inputs of `width`."""

    path: str
    module: nn.Module
    parts: tuple[OutputSlice, ...]
    part: int
    width: int


def find_places(model: nn.Module) -> Iterator[tuple[str, AdapterPlace]]:
    """Yield the layers that adapters can change, under the names that they had when the model was trained.

    A merged layer comes after the ones it was made of, should these still be there. The output layer is left out: it
    sees only the rows whose logits are wanted.
    """
    whole: Any = model
    head = whole.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    merged: list[tuple[str, AdapterPlace]] = []
    for path, module in model.named_modules():
        if module is head:
            continue
        parts = getattr(module, "parts", None)
        sizes = _sizes(module)
        if sizes is None:
            continue
        if not parts:
            yield path, AdapterPlace(path, module, (OutputSlice(path, 0, sizes[1]),), 0, sizes[0])
            continue
        above = path.rpartition(".")[0]
        named = tuple(OutputSlice(_whole(above, name), start, stop) for name, start, stop in parts)
        merged += [(part.name, AdapterPlace(path, module, named, at, sizes[0])) for at, part in enumerate(named)]
    yield from merged


def _whole(above: str, name: str) -> str:
    """Return a part's full path; it may be given as one, or by the layer's own name."""
    return name if "." in name or not above else f"{above}.{name}"


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Return inputs and outputs of a linear layer, whatever class and format; None for anything else."""
    found = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if type(found[0]) is int and type(found[1]) is int:
        return found[0], found[1]
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.ndim == 2:  # GPT-2's, transposed
        return int(weight.shape[0]), int(weight.shape[1])
    return None


def like_computed(model: Any) -> Tensor:
    """Return a tensor of the dtype that the model computes in, on its device: embeddings are never quantised."""
    weight: Tensor = model.get_input_embeddings().weight
    return torch.empty(0, dtype=weight.dtype, device=weight.device)
