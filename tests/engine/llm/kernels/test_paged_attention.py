"""Launches of paged attention: what is refused, and what may not change from round to round."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from weftline.engine.llm.kernels.paged_attention import attention_launches

GIVEN = {
    "query": torch.empty(6, 4, 64),
    "keys": torch.empty(2, 80, 64),
    "values": torch.empty(2, 80, 64),
    "tables": torch.zeros(3, 4, dtype=torch.int32),
    "row_starts": torch.zeros(4, dtype=torch.int32),
    "starts": torch.zeros(3, dtype=torch.int32),
    "page_tokens": 16,
    "scale": 0.125,
}


@pytest.mark.parametrize(
    ("name", "wrong", "says"),
    [
        ("query", torch.empty(6, 5, 64), "5 heads cannot share 2 key heads"),
        ("query", torch.empty(6, 64), "wants dense heads"),
        ("query", torch.empty(6, 4, 64, dtype=torch.float64), "wants float16, bfloat16 or float32"),
        ("query", torch.empty(6, 4, 32), "keys: wants width 32"),
        ("keys", torch.empty(2, 80, 64, dtype=torch.int8), "keys are torch.int8 and values torch.float32"),
        ("values", torch.empty(2, 79, 64), "values: wants"),
        ("values", torch.empty(2, 80, 300), "wider than 256"),
        ("tables", torch.zeros(3, 4, dtype=torch.int64), "tables: wants int32"),
        ("tables", torch.zeros(2, 4, dtype=torch.int32), "tables: wants 3 lines"),
        ("row_starts", torch.zeros(3, dtype=torch.int32), "row_starts: wants 4 numbers"),
        ("starts", torch.zeros(6, dtype=torch.int32)[::2], "starts: wants dense int32"),
        ("row_starts", torch.zeros(4, dtype=torch.int64), "row_starts: wants dense int32"),
        ("page_tokens", 0, "page_tokens is 0"),
        ("window", 0, "window is 0"),
        ("softcap", -1.0, "softcap is -1.0"),
        ("key_scale", torch.ones(3), "key_scale: wants"),
        ("value_scale", torch.ones(2, dtype=torch.float16), "value_scale: wants"),
        ("out", torch.empty(6, 4, 32), "out is"),
    ],
)
def test_wrong_shapes_are_refused(name: str, wrong: object, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        attention_launches(**{**GIVEN, name: wrong})


def test_rounds_of_one_padded_size_have_one_launch() -> None:
    one = attention_launches(**GIVEN)[1]
    changed = {
        "row_starts": torch.tensor([0, 1, 2, 3], dtype=torch.int32),
        "starts": torch.tensor([700, 3, 0], dtype=torch.int32),
        "tables": torch.randint(0, 5, (3, 4), dtype=torch.int32),
    }
    other = attention_launches(**{**GIVEN, **changed})[1]
    assert len(one) == len(other) == 2
    for a, b in zip(one, other):
        assert (a.kernel, a.grid, a.warps, a.stages) == (b.kernel, b.grid, b.warps, b.stages)
        fixed = [{k: v for k, v in x.arguments.items() if not isinstance(v, torch.Tensor)} for x in (a, b)]
        assert fixed[0] == fixed[1]


def test_one_split_needs_no_second_kernel_and_no_memory_for_parts() -> None:
    out, launches = attention_launches(**GIVEN, splits=1)
    assert out.shape == (6, 4, 64)
    assert [launch.arguments["part_out"].numel() for launch in launches] == [0]


def test_memory_for_parts_grows_with_sequences_and_not_with_rows() -> None:
    many = {**GIVEN, "query": torch.empty(4096, 4, 64)}
    attend, _ = attention_launches(**many, splits=4)[1]
    assert attend.arguments["part_out"].shape == (3 * 8, 4, 4, 64)


def test_a_round_without_rows_launches_nothing() -> None:
    assert attention_launches(**{**GIVEN, "query": torch.empty(0, 4, 64)})[1] == []


def test_old_gpus_get_float8_pages_as_bytes() -> None:
    pages = torch.empty(2, 80, 64, dtype=torch.float8_e4m3fn)
    given = {**GIVEN, "query": torch.empty(6, 4, 64, dtype=torch.bfloat16), "keys": pages, "values": pages}
    for arch, dtype in ((80, torch.uint8), (89, torch.float8_e4m3fn), (90, torch.float8_e4m3fn)):
        attend = attention_launches(**given, arch=arch)[1][0]
        assert attend.arguments["keys"].dtype == dtype
        assert attend.arguments["BITS"] == (arch == 80)
