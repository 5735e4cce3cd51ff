"""Weight sharding for tensor parallelism (Megatron-LM, Shoeybi et al. 2019).

The sharding of each module comes from the `tp_plan` of the transformers model.

    colwise                 rows of the matrix: each rank computes its heads, or its part of the MLP's width
    rowwise                 columns of the matrix: each rank has part of the sum, and the sums are added up
    colwise_gather_output   rows, and all ranks' outputs put together again
    rowwise_split_input     columns, of an input that every rank has whole
    packed_colwise          experts: rows of two matrices in one, the gate's and the other's
    moe_tp_experts          experts: their outputs are added up

Embeddings and norms are whole on every rank. Key heads that are fewer than the ranks stand on several of them. Other
entries, and matrices that are no plain linear layers, are refused: to leave one out would give wrong answers.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from weftline.engine.llm.parallel.peers import Peers
from weftline.errors import ModelError

_WHOLE = {"replicated_with_grad_allreduce", "embedding_rowwise", "embedding_colwise"}
"""Modules that are replicated on every rank: norms and embeddings."""
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def shard(model: Any, peers: Peers) -> None:
    """Shard `model` in place to the part of rank `peers.rank`; ModelError if it cannot be sharded."""
    name, plan = type(model).__name__, dict(getattr(model, "tp_plan", None) or {})
    if not plan:
        raise ModelError(f"{name} does not say how it is split over devices\n    fix: give one device")
    config = model.config.get_text_config(decoder=True)
    if config.num_attention_heads % peers.size:
        raise ModelError(f"{name} has {config.num_attention_heads} heads; they cannot be split over {peers.size} ranks")
    for path, module in list(model.named_modules()):
        style = plan.get(_NUMBER.sub(".*", path))
        if style is not None and style not in _WHOLE:
            _replace(model, path, module, style, config, peers)
        for parameter in [key for key, _ in module.named_parameters(recurse=False)]:
            style = plan.get(_NUMBER.sub(".*", f"{path}.{parameter}"))
            if style is not None and style not in _WHOLE:
                _cut(module, parameter, f"{path}.{parameter}", style, peers)


def _replace(model: Any, path: str, module: nn.Module, style: str, config: Any, peers: Peers) -> None:
    if style == "moe_tp_experts":
        module.register_forward_hook(lambda module, args, out: peers.add(out))
        return
    if type(module) is not nn.Linear:
        raise ModelError(f"{path} is a {type(module).__name__}; only plain linear layers can be split over devices")
    made: nn.Module
    if style == "colwise":
        made = _rows_of(module, _rows(path, module, config, peers))
    elif style in ("rowwise", "rowwise_split_input"):
        columns = _even(path, module.in_features, peers)
        made = _Columns(module, columns, peers, split_input=style == "rowwise_split_input")
    elif style == "colwise_gather_output":
        made = _Joined(module, peers)
    else:
        raise ModelError(f"{path} is split as {style}, which is not supported\n    fix: give one device")
    parent, _, last = path.rpartition(".")
    setattr(model.get_submodule(parent), last, made)


def _cut(module: nn.Module, parameter: str, path: str, style: str, peers: Peers) -> None:
    whole: Tensor = getattr(module, parameter)
    if style == "packed_colwise" and whole.ndim == 3:
        gate, other = whole.data.chunk(2, 1)
        kept = torch.cat([_part(half, 1, path, peers) for half in (gate, other)], 1)
    elif style == "rowwise" and whole.ndim == 3:
        kept = _part(whole.data, 2, path, peers).clone()
    else:
        raise ModelError(f"{path} is split as {style}, which is not supported\n    fix: give one device")
    setattr(module, parameter, nn.Parameter(kept, requires_grad=False))


def _part(whole: Tensor, dim: int, path: str, peers: Peers) -> Tensor:
    if whole.shape[dim] % peers.size:
        raise ModelError(f"{path} has {whole.shape[dim]} parts; they cannot be split over {peers.size} ranks")
    return whole.chunk(peers.size, dim)[peers.rank]


def _rows(path: str, linear: nn.Linear, config: Any, peers: Peers) -> slice:
    """Return the outputs of a layer for this rank: whole heads, replicated where key heads are too few."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if path.endswith((".k_proj", ".v_proj")) and heads % peers.size:
        if peers.size % heads:
            raise ModelError(
                f"{path} has {heads} key heads; they can be neither split over {peers.size} ranks nor shared"
            )
        width = linear.out_features // heads
        first = peers.rank * heads // peers.size * width
        return slice(first, first + width)
    return _even(path, linear.out_features, peers)


def _even(path: str, size: int, peers: Peers) -> slice:
    if size % peers.size:
        raise ModelError(f"{path} is {size} wide; it cannot be split over {peers.size} ranks")
    width = size // peers.size
    return slice(peers.rank * width, (peers.rank + 1) * width)


def _kept(part: Tensor) -> nn.Parameter:
    """Return a copy, so that the whole matrix can be freed."""
    return nn.Parameter(part.detach().clone(), requires_grad=False)


def _rows_of(linear: nn.Linear, rows: slice) -> nn.Linear:
    """Build a linear layer with some outputs of another one."""
    made = nn.Linear(linear.in_features, rows.stop - rows.start, linear.bias is not None, device="meta")
    made.weight = _kept(linear.weight[rows])
    if linear.bias is not None:
        made.bias = _kept(linear.bias[rows])
    return made


class _Columns(nn.Module):
    """Row-parallel linear layer: partial products of some inputs, all-reduced over the ranks."""

    def __init__(self, linear: nn.Linear, columns: slice, peers: Peers, split_input: bool) -> None:
        super().__init__()
        self.weight = _kept(linear.weight[:, columns])
        self.bias = None if linear.bias is None else _kept(linear.bias)
        self._columns = columns if split_input else None
        self._peers = peers

    def forward(self, inputs: Tensor) -> Tensor:
        if self._columns is not None:
            inputs = inputs[..., self._columns]
        out = self._peers.add(functional.linear(inputs, self.weight))
        return out if self.bias is None else out + self.bias


class _Joined(nn.Module):
    """Column-parallel linear layer with gathered outputs; the last rank may have fewer."""

    def __init__(self, linear: nn.Linear, peers: Peers) -> None:
        super().__init__()
        self._outputs = linear.out_features
        width = -(-self._outputs // peers.size)
        rows = slice(peers.rank * width, (peers.rank + 1) * width)
        missing = width - len(linear.weight[rows])
        self.weight = _kept(functional.pad(linear.weight[rows], (0, 0, 0, missing)))
        self.bias = None if linear.bias is None else _kept(functional.pad(linear.bias[rows], (0, missing)))
        self._peers = peers

    def forward(self, inputs: Tensor) -> Tensor:
        return self._peers.join(functional.linear(inputs, self.weight, self.bias))[..., : self._outputs]
