"""Reach of a regular expression: characters from the start of a match that can affect it.

Once so much text is there, a match that starts at that place is what it will be, whatever follows. That is what lets
text that still grows be judged and passed on.
"""

from __future__ import annotations

import re
import re._parser as parser  # type: ignore[import-not-found]
from typing import Any


def reach(pattern: re.Pattern[str]) -> int | None:
    """Return a bound on the characters from a match's start that it depends on; None when there is no bound."""
    return _reach(parser.parse(pattern.pattern, pattern.flags & ~re.UNICODE))


def _reach(tree: Any) -> int | None:
    total = 0
    for operator, argument in tree:
        found = _reach_of(str(operator), argument)
        if found is None:
            return None
        total += found
    return total


def _reach_of(operator: str, argument: Any) -> int | None:
    if operator in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        _, high, body = argument
        inner = _reach(body)
        return None if inner is None or (inner and high == parser.MAXREPEAT) else inner * high if inner else 0
    if operator == "BRANCH":
        each = [_reach(branch) for branch in argument[1]]
        return None if None in each else max((one for one in each if one is not None), default=0)
    if operator == "SUBPATTERN":
        return _reach(argument[-1])
    if operator in ("ASSERT", "ASSERT_NOT"):
        direction, body = argument
        return _reach(body) if direction > 0 else 0
    if operator == "ATOMIC_GROUP":
        return _reach(argument)
    return None if operator.startswith("GROUPREF") else 1  # a character, or a place that the next one decides about
