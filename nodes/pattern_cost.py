"""Cost analysis of regular expressions (ReDoS check).

Python's `re` backtracks, so a pattern such as (a+)+b takes time exponential in the text's length. `cost` bounds the
ways a pattern can match from one starting point; times the text's length, that bounds the work. Patterns whose cost has
no small bound are refused: write .{0,40} instead of .*, and no repeat around something that itself varies.
"""

from __future__ import annotations

import re
import re._parser as parser  # type: ignore[import-not-found]
from typing import Any

COST_MAX = 1_000
"""Most ways to match from one place: with 100 000 characters, about a second in the worst case."""

PATTERN_CHARS_MAX = 1_000


def compile_bounded(pattern: str) -> re.Pattern[str]:
    """Return `pattern` compiled, ignoring case; ValueError when it is no regular expression or may take too long."""
    if len(pattern) > PATTERN_CHARS_MAX:
        raise ValueError(f"a pattern of {len(pattern)} characters; the most is {PATTERN_CHARS_MAX}")
    try:
        found = cost(parser.parse(pattern, re.IGNORECASE))
        if found > COST_MAX:
            raise ValueError("it may take too long: bound its repeats, such as .{0,40} for .*, and nest none")
        return re.compile(pattern, re.IGNORECASE)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"no regular expression: {error}") from None


def cost(tree: Any) -> int:
    """Return a bound on the ways to match a parsed pattern from one place, or COST_MAX + 1 when it is larger."""
    product = 1
    for operator, argument in tree:
        product = min(product * _cost_of(str(operator), argument), COST_MAX + 1)
    return product


def _cost_of(operator: str, argument: Any) -> int:
    if operator in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        low, high, body = argument
        if high > COST_MAX:
            return COST_MAX + 1
        inner = cost(body)
        return int(high - low + 1) if inner == 1 else min(inner ** min(high, 64) * (high - low + 1), COST_MAX + 1)
    if operator == "BRANCH":
        return sum(cost(branch) for branch in argument[1])
    if operator == "SUBPATTERN":
        return cost(argument[-1])
    if operator in ("ASSERT", "ASSERT_NOT"):
        return cost(argument[1])
    if operator == "ATOMIC_GROUP":
        return cost(argument)
    return COST_MAX + 1 if operator.startswith("GROUPREF") else 1
