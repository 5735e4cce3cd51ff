"""Guardrail rules: secrets, personal data, user-defined words and patterns, and their matching over streamed text.

Built-in patterns are linear: a run of characters is only entered at its start (a look-behind for the same characters),
matched whole (possessive repeats), or bounded. Conditions that a pattern cannot express, such as a card number's check
digit, are functions of the characters found.

User patterns are bounded (ReDoS check). Python's `re` backtracks, so a pattern such as (a+)+b takes time exponential
in the text's length. `cost` bounds the ways a pattern can match from one starting point; times the text's length, that
bounds the work. Patterns without a small bound are refused: write .{0,40} instead of .*, and do not nest repeats.

The `reach` of a pattern bounds the characters from the start of a match that can affect it. A position of a streamed
text is *settled* when no further text can change the matches from there on: enough text for every rule's reach follows
it, or its run of characters without spaces has ended. Hits before it equal those of `find` on the whole text, however
the text was split.
"""

from __future__ import annotations

import re
import re._parser as parser  # type: ignore[import-not-found]
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COST_MAX = 1_000
"""Most ways to match from one position: with 100 000 characters, about a second in the worst case."""

PATTERN_CHARS_MAX = 1_000


def compile_bounded(pattern: str) -> re.Pattern[str]:
    """Compile `pattern`, ignoring case. ValueError: invalid, or its cost has no small bound."""
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
    """Return a bound on the ways to match a parsed pattern from one position, at most COST_MAX + 1."""
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


def reach(pattern: re.Pattern[str]) -> int | None:
    """Return a bound on the characters from a match's start that affect it; None if unbounded."""
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
    return None if operator.startswith("GROUPREF") else 1  # a character, or an assertion about the next one


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    holds: checks the matched characters, such as a check digit.
    reach: characters from the start of a match that can affect it; 0: the match lies within one run of ASCII characters
           without spaces, and is settled when that run ends.
    """

    category: str
    name: str
    pattern: re.Pattern[str]
    holds: Callable[[str], bool] = lambda found: True
    reach: int = 0


@dataclass(frozen=True, slots=True)
class Hit:
    """A match of a rule: characters `start` to before `end` of the text."""

    category: str
    rule: str
    start: int
    end: int


def find(rules: Iterable[Rule], text: str) -> list[Hit]:
    """Return the matches of the rules in `text`, by position. Look-alike letters (such as full width) are folded."""
    folded, places = fold(text)
    hits = []
    for rule in rules:
        for match in rule.pattern.finditer(folded):
            if match.end() > match.start() and rule.holds(match.group()):
                start, end = match.span()
                hits.append(Hit(rule.category, rule.name, places[start], places[end - 1] + 1))
    return sorted(hits, key=lambda hit: (hit.start, hit.end))


def fold(text: str) -> tuple[str, range | list[int]]:
    """Return `text` normalised (NFKC) without invisible characters, and the original position of each character."""
    if text.isascii():
        return text, range(len(text))
    letters: list[str] = []
    places: list[int] = []
    for place, letter in enumerate(text):
        if unicodedata.category(letter) == "Cf":  # zero-width spaces and joiners, inserted to hide a word
            continue
        for plain in unicodedata.normalize("NFKC", letter):
            letters.append(plain)
            places.append(place)
    return "".join(letters), places


def luhn(digits: str) -> bool:
    """Return True when the last digit is the check digit of the others (ISO/IEC 7812-1)."""
    values = [int(digit) for digit in digits if digit.isdigit()]
    doubled = [sum(divmod(2 * value, 10)) for value in values[-2::-2]]
    return (sum(values[-1::-2]) + sum(doubled)) % 10 == 0 and len(set(values)) > 1


def iban(text: str) -> bool:
    """Return True when the check digits are valid (ISO 13616: the rearranged number mod 97 is 1)."""
    plain = text.replace(" ", "").upper()
    return 15 <= len(plain) <= 34 and int("".join(str(int(c, 36)) for c in plain[4:] + plain[:4])) % 97 == 1


def phone(text: str) -> bool:
    """Return True for digits grouped as a telephone number: 9 to 15, no single ones but a country code, no date."""
    groups = re.findall(r"\d+", text)
    sizes = [len(group) for group in groups]
    if not text[-1].isdigit() or not 9 <= sum(sizes) <= 15 or 1 in sizes[1:]:
        return False
    if sizes in ([3, 2, 4], [4, 2, 2], [2, 2, 4]) or (sizes[0] == 1 and len(sizes) < 3 and text[0] != "+"):
        return False
    return len(sizes) > 1 or text[0] in "+(0"


REACH_MAX = 200
"""Built-in rules with a longer reach match within one run of characters without spaces."""

PHONE_REACH = 48
"""A sign, a parenthesis, 15 digits with up to two characters between each two, and the character after."""


def _rule(
    category: str, name: str, pattern: str, holds: Callable[[str], bool] = lambda found: True, most: int = REACH_MAX
) -> Rule:
    """Return a built-in rule. most: the reach where the pattern is unbounded, but its check is bounded."""
    compiled = re.compile(pattern, re.ASCII)
    found = reach(compiled) or most
    return Rule(category, name, compiled, holds, found if found < REACH_MAX else 0)


_SECRET_NAMES = "password|passwd|pwd|passphrase|passcode|pin|secret|api[_ -]?key|access[_ -]?key|auth[_ -]?token|token"

BUILT_IN: Mapping[str, tuple[Rule, ...]] = {
    "secrets": (
        _rule("secrets", "private key", r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY-----"),
        _rule("secrets", "AWS access key", r"(?<![A-Z0-9])(?:AKIA|ASIA)[0-9A-Z]{16}(?![A-Z0-9])"),
        _rule("secrets", "GitHub token", r"(?<![A-Za-z0-9_])(?:gh[pousr]_|github_pat_)[A-Za-z0-9_]{22,}+"),
        _rule("secrets", "API key", r"(?<![A-Za-z0-9_-])(?:sk|rk|pk)[-_](?=[A-Za-z_-]{0,200}[0-9])[A-Za-z0-9_-]{16,}+"),
        _rule("secrets", "Slack token", r"(?<![A-Za-z0-9-])xox[abeprs]-[A-Za-z0-9-]{10,}+"),
        _rule("secrets", "Google key", r"(?<![A-Za-z0-9_-])AIza[0-9A-Za-z_-]{35}(?![0-9A-Za-z_-])"),
        _rule(
            "secrets",
            "JSON web token",
            r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}+\.[A-Za-z0-9_-]{8,}+\.[A-Za-z0-9_-]{8,}+",
        ),
        _rule(
            "secrets", "password in an address", r"(?<![a-z+.-])[a-z][a-z+.-]{1,20}://[^\s:/@]{1,64}:[^\s:/@]{1,64}@"
        ),
        _rule(
            "secrets",
            "value of a password or key",
            rf"(?i)(?<![a-z])(?:{_SECRET_NAMES})(?: is|[\"']?\s{{0,3}}[:=])\s{{0,3}}[\"']?"
            r"(?=[^\s\"']{0,32}[0-9!@#$%^&*])[^\s\"']{4,128}",
        ),
    ),
    "personal": (
        _rule(
            "personal",
            "e-mail address",
            r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9._%+-]{1,64}+@[A-Za-z0-9-]{1,63}+(?:\.[A-Za-z0-9-]{1,63}+){1,8}",
        ),
        _rule("personal", "card number", r"(?<![\d-])\d(?:[ -]?\d){12,18}(?!\d)", luhn),
        _rule(
            "personal", "social security number", r"(?<![\d-])(?!000|666|9\d\d)\d{3}-(?!00)\d\d-(?!0000)\d{4}(?![\d-])"
        ),
        _rule("personal", "IBAN", r"(?<![A-Z0-9])[A-Z]{2}\d\d(?: ?[A-Z0-9]{2,4}){3,8}(?![A-Z0-9])", iban),
        _rule("personal", "telephone number", r"(?<![\w.+-])\+?\(?\d(?:[ ().-]{0,2}\d){8,}+\w?", phone, PHONE_REACH),
    ),
}
"""Rule sets by category."""


def user_rules(category: str, words: Iterable[str], patterns: Iterable[str]) -> list[Rule]:
    """Return the rules of a user's word list and patterns; ValueError names a pattern that is refused.

    Words match whole, in any case; patterns are regular expressions of bounded cost.
    """
    found = []
    listed = sorted({fold(word.strip())[0] for word in words if word.strip()}, key=len, reverse=True)
    if listed:
        alternatives = "|".join(map(re.escape, listed))
        words_pattern = re.compile(rf"(?<!\w)(?:{alternatives})(?!\w)", re.IGNORECASE)
        found.append(Rule(category, "word list", words_pattern, reach=max(map(len, listed)) + 1))
    for pattern in patterns:
        try:
            compiled = compile_bounded(pattern)
            found.append(Rule(category, pattern, compiled, reach=reach(compiled) or 1))
        except ValueError as error:
            raise ValueError(f"{pattern!r:.80}: {error}") from None
    return found


class RuleScan:
    """Hits of `rules` in a growing text, and the settled position. Positions are those of the folded text."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = tuple(rules)
        self._from = [0] * len(self._rules)  # by rule: all matches that start before it were reported
        self._folded = ""
        self._places: list[int] = []
        self._run = 0  # start of the last run of ASCII characters without spaces
        self._length = 0
        self.settled = 0

    @property
    def length(self) -> int:
        """Length of the folded text in characters."""
        return len(self._folded)

    def place(self, at: int) -> int:
        """Return the position in the text of a character of the folded text; the text's length for the end."""
        return self._places[at] if at < len(self._places) else self._length

    def index(self, place: int) -> int:
        """Return the first character of the folded text at or after a position of the text."""
        return bisect_left(self._places, place)

    def add(self, text: str, whole: bool = False) -> list[tuple[int, Hit]]:
        """Append new text; return new, settled hits with their start in the folded text.

        whole: the text is complete, so everything is settled.
        """
        self._append(text)
        end = len(self._folded)
        found: list[tuple[int, Hit]] = []
        settled = end
        for index, rule in enumerate(self._rules):
            upto = end if whole else self._run if not rule.reach else max(0, end - rule.reach + 1)
            settled = min(settled, upto)
            at = self._from[index]
            if at >= upto:
                continue
            at = max(at, upto)
            for match in rule.pattern.finditer(self._folded, self._from[index]):
                start, stop = match.span()
                if start >= upto:
                    break
                at = max(at, stop)
                if stop > start and rule.holds(match.group()):
                    hit = Hit(rule.category, rule.name, self.place(start), self._places[stop - 1] + 1)
                    found.append((start, hit))
            self._from[index] = at
        self.settled = max(self.settled, settled)
        return sorted(found, key=lambda one: (one[0], -one[1].end))

    def _append(self, text: str) -> None:
        folded, places = fold(text)
        before = len(self._folded)
        self._folded += folded
        self._places += [self._length + place for place in places]
        self._length += len(text)
        for at in range(len(folded) - 1, -1, -1):
            if not folded[at].isascii() or folded[at].isspace():
                self._run = before + at + 1
                break
