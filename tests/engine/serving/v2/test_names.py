"""S6: what may name a model, and that nothing else gets to be looked up."""

from __future__ import annotations

import pytest

from weftline.engine.serving.v2.names import check_name, check_version
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
