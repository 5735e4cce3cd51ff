"""How far a pattern looks, and that no text beyond it changes a match."""

from __future__ import annotations

import re

import pytest

from weftline.nodes.guardrail_rules import reach


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("abc", 3), ("a{2,5}b?", 6), ("(?:ab|c){3}", 6), ("a(?=bcd)", 4), ("(?<=abc)d", 1), (r"\bword\b", 6),
        ("a*", None), ("x(?:a{1,3})+", None), ("(?!abc)[a-z]", 4), ("", 0), ("(?>ab)c", 3), ("a{3,}+", None),
        ("(?=a+)b", None),
    ],
)  # fmt: skip
def test_the_reach_of_a_pattern(pattern: str, found: int | None) -> None:
    assert reach(re.compile(pattern)) == found
