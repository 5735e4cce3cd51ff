"""The GPU's form, run on a CPU with torch's operations, says what the CPU's form says."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.llm import tiny
from weftline.engine.llm import attention
from weftline.engine.llm.attention import LayerPages, Span
from weftline.engine.llm.cpu.attention import CpuAttention
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.fusion.rows import rotate
from weftline.engine.llm.gpu import attention as gpu_attention
from weftline.engine.llm.gpu.attention import GpuAttention, PlainOps, ops_for
from weftline.engine.llm.gpu.buffers import BufferLimits, RoundBuffers
from weftline.engine.llm.kv_cache import PageTable
from weftline.engine.llm.kv_memory import torch_allocator
from weftline.engine.llm.model_loader import RunnerOptions
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.schedule import RoundLimits

PAGE, PAGES, HEADS, KV, WIDTH = 4, 24, 4, 2, 16
CPU = torch.device("cpu")


def layers(form: Any) -> LayerPages:
    layer = LayerPages(form, kv_heads=KV, widths=(WIDTH, WIDTH))
    layer.bind(PAGES * PAGE, torch_allocator(torch.empty(0)))
    return layer


def rounds(seed: int) -> list[list[Span]]:
    """Return rounds of three sequences: prompts, a mixed round, decoding; their pages in random order."""
    rng = random.Random(seed)
    pages = rng.sample(range(PAGES), PAGES)
    # scattered pages: none of them is taken for a neighbour
    tables = [PageTable(pages[8 * at : 8 * at + 8], run=8) for at in range(3)]
    known, made = [0, 0, 0], []
    for counts in ([9, 1, 14], [1, 12, 1], [1, 1, 1], [1, 1, 1]):
        row, spans = 0, []
        for at, count in enumerate(counts):
            spans.append(Span(row, known[at], count, tables[at]))
            row, known[at] = row + count, known[at] + count
        made.append(spans)
    return made


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (6, None), (None, 5.0), (5, 5.0)])
@torch.inference_mode()
def test_both_forms_say_the_same(window: int | None, softcap: float | None, turned: bool) -> None:
    torch.manual_seed(1)
    gpu, cpu = GpuAttention.make(PAGE, 32, 64, CPU, PlainOps()), CpuAttention(PAGE)
    ours, theirs = layers(gpu), layers(cpu)
    for memory in (ours.keys, ours.values):
        if memory is not None:
            memory.fill_(torch.nan)  # unwritten slots must not matter
    for spans in rounds(3):
        rows = sum(span.count for span in spans)
        query, key, value = (torch.randn(rows, heads, WIDTH) for heads in (HEADS, KV, KV))
        cos, sin = torch.randn(2, rows, WIDTH // 2)
        gpu.fill(spans)
        cpu.fill(spans)
        if turned:
            found = gpu.attend_rotary(ours, query, key, value, cos, sin, 0.25, window, softcap)
            query, key = rotate(query.clone(), cos, sin), rotate(key.clone(), cos, sin)
        else:
            packed = (tensor.transpose(0, 1) for tensor in (query, key, value))
            found = gpu.attend(ours, *packed, 0.25, window, softcap)
        packed = (tensor.transpose(0, 1).contiguous() for tensor in (query, key, value))
        expected = cpu.attend(theirs, *packed, 0.25, window, softcap)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_padding_rows_are_written_nowhere() -> None:
    gpu = GpuAttention.make(PAGE, 32, 64, CPU, PlainOps())
    layer = layers(gpu)
    gpu.view = gpu.buffers.fill([Span(0, 2, 1, PageTable([5]))], 4, 4, [1])
    query, key, value = (torch.randn(4, heads, WIDTH) for heads in (HEADS, KV, KV))
    out = gpu.attend_rotary(layer, query, key, value, torch.ones(4, 4), torch.zeros(4, 4), 0.25, None, None)
    assert layer.keys is not None
    written = layer.keys.abs().sum((0, 2)).nonzero().flatten().tolist()
    assert written == [5 * PAGE + 2]
    assert torch.equal(layer.keys[:, written[0]], key[0])
    assert torch.isfinite(out).all()


@torch.inference_mode()
def test_a_round_of_padding_only_writes_nothing() -> None:
    layer = layers(None)
    assert layer.keys is not None and layer.values is not None
    PlainOps().write(
        torch.ones(2, KV, WIDTH), torch.ones(2, KV, WIDTH), layer.keys, layer.values, torch.tensor([-1, -1])
    )
    assert not layer.keys.any() and not layer.values.any()


def test_a_layer_without_pages_says_so() -> None:
    gpu = GpuAttention.make(PAGE, 32, 64, CPU, PlainOps())
    with pytest.raises(RuntimeError, match="before it has pages"):
        gpu.attend(LayerPages(gpu), *torch.zeros(3, 2, 1, 4), 1.0, None, None)


def test_without_a_gpu_plain_operations_are_used_and_a_reason_is_given() -> None:
    ops, reason = ops_for(CPU)
    assert isinstance(ops, PlainOps)
    assert reason is not None and "cpu" in reason


def test_a_gpu_without_the_kernels_logs_one_line_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gpu_attention, "ops_for", lambda device: (PlainOps(), "no compiler; fix: install gcc"))
    monkeypatch.setattr(gpu_attention, "RoundBuffers", lambda limits, page_tokens, device: gpu_buffers)
    gpu_buffers = RoundBuffers(BufferLimits(4, 4, 4), PAGE, CPU)
    with caplog.at_level(logging.WARNING):
        GpuAttention.make(PAGE, 32, 64, torch.device("cuda"))
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == ["no compiler; fix: install gcc"]


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_the_engine_gives_the_same_answers_with_the_gpus_form(family: str, fused: bool) -> None:
    prompts, params = tiny.prompts(7, seed=31), SamplingParams(tokens_max=10, ignore_eos=True)
    attention.register()
    ours = AutoModelForCausalLM.from_config(tiny.config(family), attn_implementation=attention.NAME)
    ours.load_state_dict(tiny.reference(family).state_dict())
    runner = Runner(ours, RunnerOptions(page_tokens=8, kv_bytes=64 * 8 * 512, fuse=fused))
    form = GpuAttention.make(8, 512, 64, CPU, PlainOps())
    for layer in runner._layers:
        layer.form = form
    runner._backend = form
    limits = RoundLimits(tokens_max=48, sequences_max=6)  # prompts come in chunks, beside those that decode
    expected = Engine(tiny.runner(family), None, limits).generate(prompts, params)
    assert Engine(runner, None, limits).generate(prompts, params) == expected
