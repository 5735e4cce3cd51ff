"""Parameters that name registered memory."""

from __future__ import annotations

import pytest

from weftline.engine.serving.v2.nouns import Region
from weftline.engine.serving.v2.region_parameters import OFFSET, REGION, SIZE, parameters_of, region_of
from weftline.errors import InputError


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
