"""Kernel variants compiled in production, as launches of tensors without memory.

A *form* is a kernel with its dtypes, widths and sizes; each is compiled once. Sizes are those of common models: 32
query heads on 8 key heads, rounds of 64 sequences, and windows and soft caps as Gemma has them. Sizes of rounds make no
other forms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weftline.engine.llm.kernels.draw import draw_launch
from weftline.engine.llm.kernels.float8 import quantise_launch
from weftline.engine.llm.kernels.launch import FLOAT8, Launch
from weftline.engine.llm.kernels.paged_attention import attention_launches
from weftline.engine.llm.kernels.rotate import rotate_launch
from weftline.engine.llm.kernels.rows import add_norm_launch, gate_launch, norm_launch
from weftline.engine.llm.kernels.write_pages import write_launch

ARCHS = (80, 90, 100)
HEADS, KV_HEADS, SEQUENCES, PREFILL_ROWS, SLOTS = 32, 8, 64, 2048, 1 << 16
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_NAMES = {_BF16: "bf16", _FP16: "fp16", _FP32: "fp32", FLOAT8: "fp8"}


@dataclass(frozen=True, slots=True)
class KernelForm:
    """A compiled kernel variant for one architecture; brief: in the subset that covers every kernel."""

    name: str
    arch: int
    launch: Launch
    brief: bool = False


def forms(arch: int) -> Iterator[KernelForm]:
    """Yield the forms of an architecture; only brief ones for the newest. Names are unique."""
    return (form for form in _forms(arch) if form.brief or arch < ARCHS[-1])


def _forms(arch: int) -> Iterator[KernelForm]:
    for dtype, page_dtype in ((_BF16, _BF16), (_FP16, _FP16), (_BF16, FLOAT8), (_FP32, _FP32)):
        for width in (128,) if dtype == _FP16 else (64, 128, 256):
            for decode in (True, False):
                attend, _ = _attention(arch, dtype, page_dtype, width, decode)
                brief = width == 128 and dtype != _FP16 and (dtype != _FP32 or decode)
                yield KernelForm(_name("attend", decode, dtype, page_dtype, f"width {width}"), arch, attend, brief)
    for width in (80, 96):
        for decode in (True, False):
            attend, _ = _attention(arch, _BF16, _BF16, width, decode)
            yield KernelForm(_name("attend", decode, _BF16, _BF16, f"width {width}"), arch, attend)
    for decode in (True, False):
        attend, join = _attention(arch, _BF16, _BF16, 256, decode, window=1024, softcap=50.0)
        yield KernelForm(_name("attend", decode, _BF16, _BF16, "width 256, window, soft cap"), arch, attend, not decode)
        attend, _ = _attention(arch, _BF16, _BF16, 128, decode, window=4096)
        yield KernelForm(_name("attend", decode, _BF16, _BF16, "width 128, window"), arch, attend)
        yield KernelForm(_name("join", decode, _BF16, _BF16, "width 256, window"), arch, join)
        _, join = _attention(arch, _BF16, _BF16, 128, decode)
        yield KernelForm(_name("join", decode, _BF16, _BF16, "width 128"), arch, join, decode)
    yield from _others(arch)


def _others(arch: int) -> Iterator[KernelForm]:
    for page_dtype in (_BF16, FLOAT8):
        key, pages, scale = _empty(512, KV_HEADS, 128), _pages(page_dtype, 128), _scale(page_dtype)
        slots = _empty(512, dtype=torch.int64)
        write = write_launch(key, key, pages, pages, slots, scale, scale, arch)
        yield KernelForm(f"write, bf16 into {_NAMES[page_dtype]}, width 128", arch, write, page_dtype == FLOAT8)
        query, turns = _empty(512, HEADS, 128), _empty(512, 128)
        _, rotate = rotate_launch(query, key, key, turns, turns, pages, pages, slots, scale, scale, None, arch)
        yield KernelForm(f"rotate and write, bf16 into {_NAMES[page_dtype]}, width 128", arch, rotate, True)
    for width in (2048, 4096, 8192):
        x, weight = _empty(512, width), _empty(width)
        _, norm = norm_launch(x, weight, 1e-6)
        yield KernelForm(f"norm, bf16, width {width}", arch, norm)
        _, _, added = add_norm_launch(x, x, weight, 1e-6, plus_one=width == 2048)
        yield KernelForm(
            f"add and norm{' plus one' if width == 2048 else ''}, bf16, width {width}", arch, added, width == 4096
        )
    _, norm = norm_launch(_empty(512, HEADS, 128), _empty(128), 1e-6)
    yield KernelForm("norm of heads, bf16, width 128", arch, norm)
    for tanh_gelu in (False, True):
        _, gate = gate_launch(_empty(512, 2 * 14336), tanh_gelu)
        yield KernelForm(f"{'gelu' if tanh_gelu else 'silu'} gate, bf16", arch, gate, tanh_gelu)
    for width in (4096, 14336):
        _, _, rounded = quantise_launch(_empty(512, width), arch)
        yield KernelForm(f"quantise rows, bf16 to fp8, width {width}", arch, rounded, width == 4096)
    logits, floats, ints = _empty(64, 128256, dtype=_FP32), _empty(64, dtype=_FP32), _empty(64, dtype=torch.int64)
    _, draw = draw_launch(logits, floats, ints, ints)
    yield KernelForm("draw, vocabulary 128256", arch, draw)
    _, draw = draw_launch(logits, floats, ints, ints, ints, floats, floats, floats)
    yield KernelForm("draw with narrowing, vocabulary 128256", arch, draw, True)


def _attention(
    arch: int,
    dtype: torch.dtype,
    page_dtype: torch.dtype,
    width: int,
    decode: bool,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Launch, Launch]:
    rows = SEQUENCES if decode else PREFILL_ROWS
    query, pages, scale = _empty(rows, HEADS, width, dtype=dtype), _pages(page_dtype, width), _scale(page_dtype)
    tables, starts = _empty(SEQUENCES, 2048, dtype=torch.int32), _empty(SEQUENCES, dtype=torch.int32)
    row_starts = _empty(SEQUENCES + 1, dtype=torch.int32)
    _, launches = attention_launches(
        *(query, pages, pages, tables, row_starts, starts, 16, width**-0.5, window, softcap, scale, scale), arch=arch
    )
    return launches[0], launches[1]


def _name(kernel: str, decode: bool, dtype: torch.dtype, page_dtype: torch.dtype, rest: str) -> str:
    return f"{kernel} {'decode' if decode else 'prefill'}, {_NAMES[dtype]} over {_NAMES[page_dtype]}, {rest}"


def _empty(*shape: int, dtype: torch.dtype = _BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _pages(dtype: torch.dtype, width: int) -> Tensor:
    return _empty(KV_HEADS, SLOTS, width, dtype=dtype)


def _scale(page_dtype: torch.dtype) -> Tensor | None:
    return _empty(KV_HEADS, dtype=_FP32) if page_dtype == FLOAT8 else None
