"""S6: names of models are validated before any look-up; shared-memory parameters."""

from __future__ import annotations

import pytest

from weftline.engine.serving.v2.messages import (
    OFFSET,
    REGION,
    SIZE,
    Region,
    check_name,
    check_version,
    parameters_of,
    region_of,
)
from weftline.errors import InputError


@pytest.mark.parametrize("name", ["ocr", "assistant.see", "a-b_c.1", "x" * 128, "..", "0"])
def test_a_name_of_plain_letters_passes_through(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "../x",
        "/etc/passwd",
        "a/b",
        "a\\b",
        "a\0b",
        "a\n",
        "x" * 129,
        "x" * (1 << 20),
        "оcr",
        "ocr\u200b",
        "a b",
        "a%2fb",
    ],
)
def test_anything_else_is_refused_without_being_repeated(name: object) -> None:
    with pytest.raises(InputError) as refused:
        check_name(name)
    assert len(str(refused.value)) < 120
    assert not isinstance(name, str) or len(name) < 3 or name not in str(refused.value)


def test_a_version_may_be_left_out() -> None:
    assert check_version("") == "" and check_version("3") == "3"
    with pytest.raises(InputError, match="model version"):
        check_version("../3")


@pytest.mark.parametrize("region", [Region("r", 0, 10), Region("r", 4096, 0)])
def test_a_region_survives_the_trip(region: Region) -> None:
    assert region_of(parameters_of(region), "input x") == region


def test_no_parameters_are_no_region() -> None:
    assert region_of({}, "input x") is None
    assert region_of({"binary_data": True}, "input x") is None


@pytest.mark.parametrize(
    "parameters",
    [
        {REGION: "r"}, {SIZE: 4}, {OFFSET: 4}, {REGION: "", SIZE: 4}, {REGION: "x" * 129, SIZE: 4},
        {REGION: 7, SIZE: 4},
        {REGION: "r", SIZE: -1}, {REGION: "r", SIZE: 1 << 63}, {REGION: "r", SIZE: True}, {REGION: "r", SIZE: 4.0},
        {REGION: "r", SIZE: 4, OFFSET: -1}, {REGION: "r", SIZE: 4, OFFSET: "0"},
        {REGION: "r", SIZE: 4, OFFSET: 1 << 64},
    ],
)  # fmt: skip
def test_half_a_region_is_refused(parameters: dict[str, object]) -> None:
    with pytest.raises(InputError, match="input x"):
        region_of(parameters, "input x")  # type: ignore[arg-type]
