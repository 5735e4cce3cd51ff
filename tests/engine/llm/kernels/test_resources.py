"""Every kernel compiles for the GPUs it is made for, and fits into their registers: no GPU is needed to see that."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
import triton

from weftline.engine.llm.kernels.forms import ARCHS, KernelForm, forms
from weftline.engine.llm.kernels.paged_attention import attention_launches
from weftline.engine.llm.kernels.report import Resources, page, recorded, resources

ROOT = Path(__file__).resolve().parents[4]
VERSION, RECORDED = recorded((ROOT / "docs/kernels.md").read_text("utf-8"))
BRIEF = [form for arch in ARCHS for form in forms(arch) if form.brief]
SHARED_BYTES_MAX = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Most shared memory of one program (CUDA C++ programming guide, table of compute capabilities)."""


@pytest.mark.slow(but_first=2)
@pytest.mark.timeout(300)  # a second each on an idle core, once: Triton keeps what it has compiled
@pytest.mark.parametrize("form", BRIEF, ids=lambda form: f"sm_{form.arch} {form.name}")
def test_the_kernel_compiles_and_spills_no_more_than_is_recorded(form: KernelForm) -> None:
    taken = resources(form.launch, form.arch)
    assert taken.shared_bytes <= SHARED_BYTES_MAX[form.arch]
    if triton.__version__ == VERSION:
        assert taken.spill_bytes <= RECORDED[form.name, form.arch].spill_bytes


def test_a_round_of_one_split_compiles() -> None:
    pages, ints = torch.empty(3, 128, 64, device="meta"), torch.empty(3, dtype=torch.int32, device="meta")
    query, tables = torch.empty(2, 15, 64, device="meta"), torch.empty(2, 4, dtype=torch.int32, device="meta")
    _, launches = attention_launches(query, pages, pages, tables, ints, ints[:2], 32, 0.125, splits=1, arch=90)
    assert len(launches) == 1
    assert resources(launches[0], 90).spill_bytes == 0


def test_the_page_has_every_form_and_nothing_spills() -> None:
    assert set(RECORDED) == {(form.name, arch) for arch in ARCHS for form in forms(arch)}
    assert {taken.spill_bytes for taken in RECORDED.values()} == {0}
    assert all(taken.shared_bytes <= SHARED_BYTES_MAX[arch] for (_, arch), taken in RECORDED.items())


def test_what_is_written_is_what_is_read() -> None:
    found = [(form, Resources(at, 4, 1000 + at)) for at, form in enumerate(BRIEF)]
    version, rows = recorded(page(found))
    assert version == triton.__version__
    assert rows == {(form.name, form.arch): taken for form, taken in found}


def test_names_of_forms_are_unique() -> None:
    names = [form.name for form in forms(90)]
    assert len(names) == len(set(names))
