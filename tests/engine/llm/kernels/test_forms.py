"""Serving compiles nothing: whatever the sizes of rounds, a model's kernels have few compiled forms."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from weftline.engine.llm.gpu.buffers import BufferLimits, RoundBuffers
from weftline.engine.llm.gpu.graphs import SIZES
from weftline.engine.llm.kernels.draw import draw_launch
from weftline.engine.llm.kernels.launch import Launch
from weftline.engine.llm.kernels.paged_attention import attention_launches
from weftline.engine.llm.kernels.rotate import rotate_launch
from weftline.engine.llm.kernels.rows import add_norm_launch, gate_launch, norm_launch

ROWS = (1, 2, 3, 7, 16, 64, 100, 512, 2048, 8192)
BACKEND = make_backend(GPUTarget("cuda", 90, 32))


def form(launch: Launch) -> tuple[object, ...]:
    """Return what Triton looks a compiled kernel up by."""
    kernel = launch.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, BACKEND)
    return kernel, str(bind(**launch.arguments)[1]), launch.warps, launch.stages


def forms(launches: Iterable[Launch]) -> set[tuple[object, ...]]:
    return {form(launch) for launch in launches}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def attention(rows: int, sequences: int, slots: int, pages_max: int, window: int | None = None) -> list[Launch]:
    pages = empty(8, slots, 128)
    tables, row_starts = empty(512, pages_max, dtype=torch.int32), empty(513, dtype=torch.int32)
    return attention_launches(
        *(empty(rows, 32, 128), pages, pages, tables[:sequences], row_starts[: sequences + 1]),
        *(empty(512, dtype=torch.int32)[:sequences], 16, 128**-0.5, window),
    )[1]


def test_attention_has_one_form_for_decoding_and_one_for_prompts() -> None:
    decoding = [(size, size) for size in SIZES if size <= 512]
    mixed = [(rows, sequences) for rows, sequences in itertools.product(ROWS, (1, 3, 17, 64, 512)) if rows >= sequences]
    for pages_max in (64, 2048):
        launches = [
            launch
            for (rows, sequences), slots in itertools.product(decoding + mixed, (1 << 12, 3 << 15))
            for launch in attention(rows, sequences, slots, pages_max)
        ]
        assert len(forms(launches)) == 4  # two kernels each
        decode = [launch for size, _ in decoding for launch in attention(size, size, 1 << 12, pages_max)]
        assert len(forms(decode)) == 2


def test_sampling_has_a_form_for_rounds_that_narrow_and_one_for_others() -> None:
    buffers = RoundBuffers(BufferLimits(512, 512, 4), 16, torch.device("cpu"))
    for vocabulary in (32000, 50257):
        launches = []
        for rows in (1, 2, 3, 8, 64, 255):
            logits = empty(rows, vocabulary, dtype=torch.float32)
            settings = buffers.fixed(rows).draws
            packed = torch.zeros(3, rows, dtype=torch.int64), torch.zeros(4, rows)
            (seed, position, top_k), (temperature, top_p, min_p, _) = packed
            launches += [
                draw_launch(logits, **settings)[1],
                draw_launch(logits, temperature, seed, position)[1],
                draw_launch(logits, temperature, seed, position, top_k, top_p)[1],
                draw_launch(logits, temperature, seed, position, min_p=min_p)[1],
            ]
        assert len(forms(launches)) == 2


def test_the_small_steps_have_one_form_each() -> None:
    for make in (
        lambda rows: norm_launch(empty(rows, 4096), empty(4096), 1e-6)[1],
        lambda rows: norm_launch(empty(rows, 48, 128)[:, :32], empty(128), 1e-6)[1],
        lambda rows: add_norm_launch(empty(rows, 4096), empty(rows, 4096), empty(4096), 1e-6)[2],
        lambda rows: gate_launch(empty(rows, 2 * 14336))[1],
        lambda rows: rotate_launch(
            *empty(rows, 48, 128).split((32, 8, 8), 1), *(empty(rows, 128) for _ in range(2)),
            *(empty(8, 1 << 12, 128) for _ in range(2)), empty(rows, dtype=torch.int64),
        )[1],
    ):  # fmt: skip
        assert len(forms(make(rows) for rows in ROWS)) == 1
