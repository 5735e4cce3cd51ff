"""Fused element-wise operations between matrix products: torch, numba or Triton.

    rms_norm      root mean square norm (Zhang and Sennrich 2019)
    add_rms_norm  the residual added first
    rotate        rotary embedding in the rotate-half form (Su et al. 2021), of queries and keys at once
    gated         activation(gate) * up of a merged product

Each equals transformers' own code, in its rounding order. On a CPU in float32 they are compiled by numba, on a GPU they
are Triton kernels; otherwise torch's operations are used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

ROWS_MAX = 256
"""Most rows for the numba kernels, which run on one core; torch's operations use all cores."""


@dataclass(frozen=True, slots=True)
class NormForm:
    """Variant of an RMS norm.

    weight:     [width], the factor of the normalised values; includes the 1 of `one_plus`.
    own:        [width], the model's weight parameter.
    eps:        added to the mean square.
    cast_first: round to the input's dtype before the multiplication (Llama) instead of after (Gemma).
    one_plus:   the factor is 1 + `own`.
    """

    weight: Tensor
    own: Tensor
    eps: float
    cast_first: bool = True
    one_plus: bool = False


@cache
def _compiled() -> Any:
    try:
        from weftline.engine.llm.cpu import kernels
    except ImportError:  # without numba: slower, same results
        return None
    return kernels


@cache
def _kernels(device: torch.device) -> Any:
    """Return the Triton kernels for `device`, or None if unavailable."""
    from weftline.engine.llm.kernels.availability import available

    if available(device) is not None:
        return None
    from weftline.engine.llm.kernels import rows

    return SimpleNamespace(norm=rows.rms_norm, add_norm=rows.add_rms_norm, gate=rows.silu_mul)


def _norm_kernels(values: Tensor, form: NormForm) -> Any:
    """Return the Triton kernels if they support this form and these dtypes, else None."""
    usual = form.cast_first != form.one_plus and form.own.dtype is values.dtype
    return _kernels(values.device) if usual and values.is_cuda else None


def _plain(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.device.type == "cpu"


def packed_rows(values: Tensor) -> Tensor:
    """View `values` [..., width] as the norm kernel takes it: [rows, width] or [rows, heads, width].

    A round is one batch element: [1, rows, width], and [1, rows, heads, width] for norms of query and key heads.
    """
    return values[0] if values.dim() in (3, 4) and values.shape[0] == 1 else values.reshape(-1, values.shape[-1])


def rms_norm(values: Tensor, form: NormForm) -> Tensor:
    """Return the RMS norm of `values` [..., width] over the last dimension."""
    weight, shape = form.weight, values.shape[-1:]
    kernels = _norm_kernels(values, form) if values.is_cuda else None
    if kernels is not None:
        normed: Tensor = kernels.norm(packed_rows(values), form.own, form.eps, form.one_plus).view(values.shape)
        return normed
    if values.dtype is torch.float32 and weight.dtype is torch.float32:
        compiled = _compiled() if values.is_contiguous() and _plain(values) else None
        if compiled is None or values.numel() > ROWS_MAX * shape[0]:
            return functional.rms_norm(values, shape, weight, form.eps)
        out = torch.empty_like(values)
        compiled.norm(values.view(-1, shape[0]).numpy(), weight.numpy(), form.eps, out.view(-1, shape[0]).numpy())
        return out
    if form.cast_first:
        return weight * functional.rms_norm(values.float(), shape, None, form.eps).to(values.dtype)
    return (functional.rms_norm(values.float(), shape, None, form.eps) * weight.float()).to(values.dtype)


def add_rms_norm(values: Tensor, delta: Tensor, form: NormForm) -> tuple[Tensor, Tensor]:
    """Return (values + delta, its RMS norm); may overwrite `delta`."""
    if _plain(values) and _plain(delta) and delta.is_contiguous() and values.is_contiguous():
        width, compiled = values.shape[-1], _compiled()
        if compiled is not None and values.numel() <= ROWS_MAX * width and _plain(form.weight):
            out = torch.empty_like(values)
            flat = (t.view(-1, width).numpy() for t in (values, delta, out))
            compiled.add_norm(*flat, form.weight.numpy(), form.eps)
            return delta, out
    kernels = _norm_kernels(values, form) if values.is_cuda else None
    if kernels is not None:
        packed = (t.view(-1, values.shape[-1]) for t in (values, delta))
        normed, total = kernels.add_norm(*packed, form.own, form.eps, form.one_plus)
        return total.view(values.shape), normed.view(values.shape)
    delta += values
    return delta, rms_norm(delta, form)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding `cos`, `sin` [rows, rotary width] to `heads` [rows, heads, width].

    Rotates the first `rotary width` elements of each head; may overwrite `heads`.
    """
    width = cos.shape[-1]
    if len(heads) <= ROWS_MAX and _plain(heads) and _plain(cos):
        compiled = _compiled()
        if compiled is not None:
            compiled.rotate(heads.numpy(), cos.numpy(), sin.numpy())
            return heads
    first = heads if width == heads.shape[-1] else heads[..., :width]
    low, high = first.chunk(2, dim=-1)
    turned = (first * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]).to(heads.dtype)
    return turned if first is heads else torch.cat((turned, heads[..., width:]), dim=-1)


def gated(product: Tensor, activate: Callable[[Tensor], Tensor], name: str = "") -> Tensor:
    """Return activate(gate) * up, where `product` [..., 2 * width] is [gate, up].

    name: 'silu' or 'gelu_tanh' if `activate` is that function, for which kernels exist; else empty.
    """
    if name and product.is_cuda and (kernels := _kernels(product.device)) is not None:
        made: Tensor = kernels.gate(product.view(-1, product.shape[-1]), name == "gelu_tanh")
        return made.view(*product.shape[:-1], made.shape[-1])
    gate, up = product.chunk(2, dim=-1)
    return activate(gate) * up
