"""List of all kernel checks against the reference.

Run twice: in Triton's interpreter by the tests, and on a GPU by `weftline.engine.llm.kernels.gpu_check`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from weftline.engine.llm.kernels import reference
from weftline.engine.llm.kernels.attention_cases import ATTENTION, attention_error, random_attention
from weftline.engine.llm.kernels.draw_cases import draw_cases, draw_error
from weftline.engine.llm.kernels.launch import FLOAT8, FLOAT8_ARCH, FLOAT8_MAX, arch_of
from weftline.engine.llm.kernels.norms import add_rms_norm, rms_norm
from weftline.engine.llm.kernels.quantise_rows import quantise_launch
from weftline.engine.llm.kernels.rotate import rotate_launch
from weftline.engine.llm.kernels.silu_mul import silu_mul
from weftline.engine.llm.kernels.write_pages import write_launch

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest difference from the reference, relative to numbers of size 1, by dtype: a few units in the last place."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check: `error` computes how wrong a kernel is; up to `allowed` it is right."""

    name: str
    error: Callable[[], float]
    allowed: float


def all_checks(device: torch.device, random_rounds: int) -> list[Check]:
    """Return every check; `random_rounds` of attention on top of the chosen ones."""
    rounds = [*ATTENTION, *(random_attention(seed) for seed in range(random_rounds))]
    checks = [
        Check(f"attention: {case.name}", partial(attention_error, case, seed, device), TOLERANCE[case.dtype])
        for seed, case in enumerate(rounds)
    ]
    # Triton's interpreter cuts where it should round, so that conversion by instructions can be checked on a GPU only
    archs = (80, 90) if device.type == "cuda" and arch_of(device) >= FLOAT8_ARCH else (80,)
    for arch in archs:
        how = "instructions" if arch >= FLOAT8_ARCH else "bits"
        checks.append(Check(f"float8 by {how} equals torch's", partial(float8_error, arch, device), 0))
        checks.append(Check(f"quantise rows by {how}", partial(quantise_error, arch, device), 0))
        checks.append(Check(f"write: float8 by {how}", partial(write_error, torch.bfloat16, FLOAT8, arch, device), 0))
    for dtype, allowed in TOLERANCE.items():
        kind = str(dtype).removeprefix("torch.")
        checks.append(Check(f"write: {kind}", partial(write_error, dtype, dtype, None, device), 0))
        for rotary in (64, 32):
            checks.append(
                Check(f"rotate {rotary} of 64: {kind}", partial(rotate_error, dtype, rotary, device), allowed)
            )
        for shape in ((5, 96), (3, 2048), (4, 3, 64)):
            for plus_one in (False, True):
                name = f"norm {list(shape)}{' plus one' if plus_one else ''}: {kind}"
                checks.append(Check(name, partial(norm_error, dtype, shape, plus_one, device), allowed))
        for inner in (48, 1500):
            for tanh_gelu in (False, True):
                name = f"gate {inner}{' gelu' if tanh_gelu else ''}: {kind}"
                checks.append(Check(name, partial(gate_error, dtype, inner, tanh_gelu, device), allowed))
    for name, made in draw_cases().items():
        checks.append(Check(f"draw: {name}", partial(drawn_error, made, device), 0))
    return checks


def write_error(dtype: torch.dtype, page_dtype: torch.dtype, arch: int | None, device: torch.device) -> float:
    """Return how many of the written pages' numbers, and of those that should not be, are not what they should be."""
    made = torch.Generator().manual_seed(5)
    rows, kv_heads, slots, widths = 9, 2, 40, (80, 64)
    key, value = (torch.randn(rows, kv_heads, width, generator=made).mul(200).to(dtype).to(device) for width in widths)
    place = torch.randperm(slots, generator=made)[:rows]
    place[3] = place[7] = -1
    scales = torch.tensor([0.4, 1.7]).to(device) if page_dtype == FLOAT8 else None
    pages = [torch.zeros(kv_heads, slots, width).to(page_dtype).to(device) for width in widths]
    expected = [page.clone() for page in pages]
    for fresh, page in zip((key, value), expected):
        scaled = fresh.float() if scales is None else (fresh.float() / scales[:, None]).clamp(-FLOAT8_MAX, FLOAT8_MAX)
        for row, slot in enumerate(place.tolist()):
            if slot >= 0:
                page.view(page.dtype)[:, slot] = scaled[row].to(page_dtype)
    write_launch(key, value, pages[0], pages[1], place.to(device), scales, scales, arch).run()
    return float(sum((page.float() != right.float()).sum() for page, right in zip(pages, expected)))


def float8_error(arch: int, device: torch.device) -> float:
    """Return how many float32 numbers become another float8 than torch's: every float8, all ties, and a wide range."""
    exact = torch.arange(0, 0x7F, dtype=torch.uint8).view(FLOAT8).float()
    ties = (exact[1:] + exact[:-1]) / 2
    near = torch.cat([ties * (1 + 2**-20), ties * (1 - 2**-20)])
    spread = torch.randn(500, generator=torch.Generator().manual_seed(2)).mul(4).exp().clamp(max=FLOAT8_MAX)
    numbers = torch.cat([exact, ties, near, spread, torch.tensor([1e-12, 0.0])])
    numbers = torch.cat([numbers, -numbers])
    fresh = torch.nn.functional.pad(numbers, (0, -len(numbers) % 64)).reshape(-1, 1, 64).to(device)
    pages = [torch.zeros(1, len(fresh), 64).to(FLOAT8).to(device) for _ in range(2)]
    write_launch(fresh, fresh, pages[0], pages[1], torch.arange(len(fresh)).to(device), arch=arch).run()
    return float((pages[0].view(torch.uint8) != fresh.transpose(0, 1).to(FLOAT8).view(torch.uint8)).sum())


def drawn_error(made: Callable[[], list[tuple[torch.Tensor, dict[str, float]]]], device: torch.device) -> float:
    """Return how many tokens of the round that `made` returns are not the reference's."""
    return draw_error(made(), device)


def quantise_error(arch: int, device: torch.device) -> float:
    """Return how many scales and float8 numbers of rows are not what torch gives."""
    wrong = 0
    for dtype, width in ((torch.bfloat16, 96), (torch.float16, 256), (torch.float32, 9000)):
        x = torch.randn(5, width, generator=torch.Generator().manual_seed(9)).mul(30).to(dtype)
        x[1], x[2, 5:], x[3, 7] = 0, 0, 60000
        out, scales, launch = quantise_launch(x.to(device), arch)
        launch.run()
        largest = x.float().abs().amax(1, keepdim=True)
        expected = torch.where(largest == 0, 1.0, largest / FLOAT8_MAX)
        wrong += int((scales.cpu() != expected).sum())
        rounded = (x.float() / expected).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)
        wrong += int((out.cpu().float() != rounded.float()).sum())
    return float(wrong)


def rotate_error(dtype: torch.dtype, rotary: int, device: torch.device) -> float:
    """Return the largest difference of rotated queries and written keys and values, inf where padding was written."""
    made = torch.Generator().manual_seed(6)
    rows, heads, kv_heads, width = 7, 4, 2, 64
    merged = torch.randn(rows, heads + 2 * kv_heads, width, generator=made).to(dtype).to(device)
    query, key, value = torch.split(merged, [heads, kv_heads, kv_heads], 1)
    angles = torch.rand(rows, rotary // 2, generator=made).mul(6).repeat(1, 2)
    cos, sin = angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device)
    pages = [torch.zeros(kv_heads, 30, width, dtype=dtype, device=device) for _ in range(2)]
    place = torch.tensor([4, 9, -1, 29, 0, 17, 2])
    out, launch = rotate_launch(query, key, value, cos, sin, pages[0], pages[1], place.to(device))
    launch.run()
    real = place >= 0
    written = [page[:, place[real]].transpose(0, 1) for page in pages]
    for page in pages:
        page[:, place[real]] = 0
    if any(bool(page.any()) for page in pages):
        return float("inf")
    return max(
        reference.difference(out, reference.rotated(query, cos, sin)),
        reference.difference(written[0], reference.rotated(key, cos, sin)[real]),
        reference.difference(written[1], value[real].double()),
    )


def norm_error(dtype: torch.dtype, shape: tuple[int, ...], plus_one: bool, device: torch.device) -> float:
    """Return the largest difference of a norm and, for rows without heads, of the sum and its norm."""
    made = torch.Generator().manual_seed(7)
    x = torch.randn(*shape, generator=made).mul(3).to(dtype).to(device)
    weight = torch.randn(shape[-1], generator=made).to(dtype).to(device)
    error = reference.difference(rms_norm(x, weight, 1e-6, plus_one), reference.rms_normed(x, weight, 1e-6, plus_one))
    if len(shape) == 2:
        residual = torch.randn(*shape, generator=made).to(dtype).to(device)
        out, total = add_rms_norm(x, residual, weight, 1e-6, plus_one)
        error = max(error, reference.difference(total, x.double() + residual.double()))
        error = max(error, reference.difference(out, reference.rms_normed(total, weight, 1e-6, plus_one)))
    return error


def gate_error(dtype: torch.dtype, inner: int, tanh_gelu: bool, device: torch.device) -> float:
    """Return the largest difference of a gate, over ordinary and very large numbers."""
    merged = torch.randn(5, 2 * inner, generator=torch.Generator().manual_seed(8)).to(dtype)
    merged[0] *= 50
    merged = merged.to(device)
    return reference.difference(silu_mul(merged, tanh_gelu), reference.gated(merged, tanh_gelu))
