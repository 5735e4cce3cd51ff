"""Guardrail rules: secrets, personal data, and user-defined words and patterns.

Every built-in pattern is linear: a run of characters is only entered at its start (a look-behind for the same
characters), taken whole (possessive repeats), or bounded. What a pattern cannot say, such as a card number's check
digit, a function decides on the characters found.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from weftline.nodes.pattern_cost import compile_bounded
from weftline.nodes.pattern_reach import reach


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing to look for.

    holds: whether found characters really are one.
    reach: how many characters from where it starts can decide about a match; 0: it lies within one run of ASCII
           characters without spaces, and is decided when that run ends.
    """

    category: str
    name: str
    pattern: re.Pattern[str]
    holds: Callable[[str], bool] = lambda found: True
    reach: int = 0


@dataclass(frozen=True, slots=True)
class Hit:
    """A match of a rule: from `start` to before `end`, in characters of the text."""

    category: str
    rule: str
    start: int
    end: int


def find(rules: Iterable[Rule], text: str) -> list[Hit]:
    """Return what the rules find in `text`, in order of place. Look-alike letters (full width and such) are folded."""
    folded, places = fold(text)
    hits = []
    for rule in rules:
        for match in rule.pattern.finditer(folded):
            if match.end() > match.start() and rule.holds(match.group()):
                start, end = match.span()
                hits.append(Hit(rule.category, rule.name, places[start], places[end - 1] + 1))
    return sorted(hits, key=lambda hit: (hit.start, hit.end))


def fold(text: str) -> tuple[str, range | list[int]]:
    """Return `text` with compatibility letters made plain and invisible ones left out, and where each letter was."""
    if text.isascii():
        return text, range(len(text))
    letters: list[str] = []
    places: list[int] = []
    for place, letter in enumerate(text):
        if unicodedata.category(letter) == "Cf":  # zero-width spaces and joiners, put between letters to hide a word
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
    """Return True for digits grouped as a telephone number: 9 to 15, no lone ones but a country's, no date."""
    groups = re.findall(r"\d+", text)
    sizes = [len(group) for group in groups]
    if not text[-1].isdigit() or not 9 <= sum(sizes) <= 15 or 1 in sizes[1:]:
        return False
    if sizes in ([3, 2, 4], [4, 2, 2], [2, 2, 4]) or (sizes[0] == 1 and len(sizes) < 3 and text[0] != "+"):
        return False
    return len(sizes) > 1 or text[0] in "+(0"


REACH_MAX = 200
"""Built-in rules that look further are those for what stands in one run of characters without spaces."""

PHONE_REACH = 48
"""A sign, a parenthesis, 15 digits with up to two characters between each two, and what may follow."""


def _rule(
    category: str, name: str, pattern: str, holds: Callable[[str], bool] = lambda found: True, most: int = REACH_MAX
) -> Rule:
    """Return a built-in rule. most: its reach where the pattern has no bound, but what holds has one."""
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

    Words match whole, in any case; patterns are regular expressions within `pattern_cost`'s bounds.
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
