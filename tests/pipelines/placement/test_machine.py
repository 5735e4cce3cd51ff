"""Hypothetical machines."""

from __future__ import annotations

import pytest

from weftline.errors import InputError
from weftline.pipelines.placement.machine import MADE_UP_BYTES, Device, bytes_of, made_up_gpus

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "count", "size", "model"),
    [
        ("0", 0, 0, ""), ("1", 1, MADE_UP_BYTES, ""), ("2:141GiB", 2, 141 * GIB, ""), ("8:80GB", 8, 80 * GIB, ""),
        ("1:1.5T", 1, 1536 * GIB, ""), ("1:4096MiB", 1, 4 * GIB, ""), ("2:141GiB:H200", 2, 141 * GIB, "H200"),
        ("1:24G:RTX PRO 4000", 1, 24 * GIB, "RTX PRO 4000"), ("1:25769803776", 1, 24 * GIB, ""),
        ("2:80gib", 2, 80 * GIB, ""), ("2:80g:h200", 2, 80 * GIB, "h200"), ("2: 80 GiB", 2, 80 * GIB, ""),
    ],
)  # fmt: skip
def test_gpus_are_written_as_their_number_and_memory(text: str, count: int, size: int, model: str) -> None:
    assert made_up_gpus(text) == tuple(Device(f"cuda:{index}", size, model) for index in range(count))


@pytest.mark.parametrize(
    "text",
    [
        "", "two", "2x141", "65", "-1", "2:", "2:141PiB", "1:9999999999999T", "1:80", "1:0", "1:0GiB", "2:80GiB:",
        "2:80GiB\n:H200", "2:80GiB:a;b",
    ],
)  # fmt: skip
def test_what_is_no_gpu_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match=r"(?s)^--gpus .*such as 2.*:141GiB") as refused:
        made_up_gpus(text)
    assert ("write its unit" in str(refused.value)) == (text in ("1:80", "1:0"))


@pytest.mark.parametrize(
    ("text", "bytes"),
    [("512", 512), ("2GiB", 2 * GIB), (" 1.5 gb ", 1536 << 20), ("4k", 4096), ("GiB", 0), ("1,5G", 0), ("", 0)],
)
def test_sizes_are_read_as_people_write_them(text: str, bytes: int) -> None:
    assert bytes_of(text) == bytes
