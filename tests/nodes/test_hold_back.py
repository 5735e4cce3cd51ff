"""What leaves a text that still grows: never a part of what the rules find, and all the rest."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weftline.nodes.guardrail_rules import BUILT_IN, Rule, RuleScan, find, user_rules
from weftline.nodes.guardrail_verdict import CONTEXT_CHARS, HoldBack, Policy, judge

OWN = user_rules("own", ["bad", "very bad words", "böse"], ["x[0-9]{2,30}y", r"\bfoo$", "q{1,40}b?"])
RULES = [*(rule for rules in BUILT_IN.values() for rule in rules), *OWN]
CATEGORIES = frozenset({"secrets", "personal", "own"})
MESSAGE = "<no>"

BITS = [
    "my password is hunter2!", "4111 1111 1111 1111", "5500-0000-0000-0004", "jane.doe@mail.example.org",
    "jane\u200b@a.org", "+44 20 7946 0958", "123-45-6789", "DE89 3704 0044 0532 0130 00", "ghp_" + "a1B2" * 9,
    "sk-proj-abc123def456ghi789", "eyJhbGciOiJIUzI1." + "eyJzdWIiOiIx" * 12 + ".SflKxwRJSMeKKF2Q",
    "postgres://joe:s3cret@db/x", "bad", "very bad words", "x1234y", "x12", "foo", "qqqqqb", "b\u00f6se",
    "\uff42\uff41\uff44", "1 2 3 4 5 6 7 8 9 1 2 3 4 5 6 7 8", "4111111111111111111111", "AKIAIOSFODNN7EXAMPLE",
    " ", "\n", ", ", "the", "\u6c34\u6c34", "-", "@", "0", "1", "7", ".",
]  # fmt: skip
texts = st.lists(st.one_of(st.sampled_from(BITS), st.text(max_size=6)), max_size=24).map("".join)
cuts = st.lists(st.integers(1, 40), max_size=80)


def pieces_of(text: str, sizes: list[int]) -> list[str]:
    """Cut a text by these sizes, again and again."""
    found, at, turn = [], 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)] if sizes else len(text)
        found.append(text[at : at + size])
        at, turn = at + size, turn + 1
    return found


def poured(text: str, sizes: list[int], policy: Policy, window: int = 20) -> tuple[list[str], HoldBack]:
    """Let a text through piece by piece; return what left each time, and how it ended."""
    held, left = HoldBack(policy, RULES, window, 0), []
    for piece in pieces_of(text, sizes):
        held.add(piece)
        left.append(held.take_released())
        if held.ended:
            return left, held
    held.complete()
    left.append(held.take_released())
    return left, held


@settings(max_examples=300, deadline=None)
@given(texts, cuts)
@example("4111 1111 1111 1111 and on " * 3, [1])
@example("call 1" + " 1" * 40, [1])
def test_no_part_of_what_is_found_leaves_and_the_pieces_are_the_answer(text: str, sizes: list[int]) -> None:
    left, held = poured(text, sizes, Policy(CATEGORIES, message=MESSAGE))
    first = min((hit.start for hit in find(RULES, text)), default=None)
    ended = held.ended
    assert ended is not None
    assert "".join(left) == ended.text == (text if first is None else text[:first] + MESSAGE)
    assert ended.action == ("allow" if first is None else "replace")
    assert held.released_chars == (len(text) if first is None else first)


@settings(max_examples=300, deadline=None)
@given(texts, cuts)
def test_redacted_text_is_that_of_the_whole_judgement_wherever_it_is_cut(text: str, sizes: list[int]) -> None:
    policy = Policy(frozenset(), CATEGORIES)
    left, held = poured(text, sizes, policy)
    whole = judge(text, policy, RULES, {})
    assert held.ended is not None
    assert "".join(left) == held.ended.text == whole.text
    assert held.ended.action == whole.action
    assert {(one.start, one.end) for one in held.ended.reasons} == {(one.start, one.end) for one in whole.reasons}


@settings(max_examples=150, deadline=None)
@given(texts, cuts)
def test_a_scan_finds_what_find_does_in_any_pieces(text: str, sizes: list[int]) -> None:
    scan = RuleScan(RULES)
    found = [hit for piece in pieces_of(text, sizes) for _, hit in scan.add(piece)]
    found += [hit for _, hit in scan.add("", whole=True)]
    key = lambda hit: (hit.start, hit.end, hit.rule)  # noqa: E731
    assert sorted(found, key=key) == sorted(find(RULES, text), key=key)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name[:20])
def test_a_rule_without_reach_finds_only_what_stands_in_one_run(rule: Rule) -> None:
    for bit in BITS:
        for hit in find([rule], f"so {bit} it is") if not rule.reach else ():
            found = f"so {bit} it is"[hit.start : hit.end].replace("\u200b", "")
            assert found.isascii() and not any(letter.isspace() for letter in found)


def test_blocked_text_ends_where_it_was_and_nothing_follows() -> None:
    left, held = poured(
        "It is fine. " * 5 + "The card is 4111 1111 1111 1111, you see. " * 3,
        [7],
        Policy(CATEGORIES, on_violation="block"),
    )
    assert held.ended is not None and held.ended.action == "block"
    assert "".join(left) == held.ended.text == "It is fine. " * 5 + "The card is "


def test_allow_says_what_it_found_and_lets_all_of_it_through() -> None:
    text = "mail jane@example.org twice: jane@example.org"
    left, held = poured(text, [3], Policy(CATEGORIES, on_violation="allow"))
    assert held.ended is not None and "".join(left) == held.ended.text == text
    assert (held.ended.action, len(held.ended.reasons)) == ("allow", 2)


def test_the_window_is_held_back_until_the_end() -> None:
    held = HoldBack(Policy(CATEGORIES), RULES, 200, 0)
    held.add("word " * 100)
    out = held.take_released()
    assert len(out) == 300
    held.add("word " * 2)
    assert held.take_released() == "word " * 2
    held.complete()
    assert len(held.take_released()) == 200 and held.ended is not None


def test_a_run_without_spaces_waits_for_its_end_and_costs_no_more_for_that() -> None:
    held = HoldBack(Policy(CATEGORIES), RULES, 20, 0)
    for _ in range(5_000):
        held.add("abcdefgh")
        assert held.take_released() == ""
    held.add(" and more words follow here")
    held.complete()
    assert len(held.take_released()) == 40_027


class Judges:
    """A classifier that finds a word: what it was asked, in turn."""

    def __init__(self, **options: Any) -> None:
        policy = Policy(frozenset({"abuse"}), message=MESSAGE, **options)
        self.held = HoldBack(policy, RULES, 20, 40)
        self.asked: list[str] = []

    def pour(self, text: str, size: int = 5) -> str:
        left = []
        for piece in [*pieces_of(text, [size]), None]:
            self.held.complete() if piece is None else self.held.add(piece)
            asked = self.held.text_to_classify()
            if asked is not None:
                self.asked.append(asked)
                self.held.record_scores({"abuse": 0.9 if "idiot" in asked else 0.1, "safe": 0.5})
            left.append(self.held.take_released())
            if self.held.ended:
                break
        return "".join(left)


def test_a_classifier_stops_a_text_before_what_it_did_not_like_has_left() -> None:
    one = Judges()
    out = one.pour("a calm text goes on for some while, and then you idiot come and it goes on")
    assert one.held.ended is not None and one.held.ended.text == out
    assert out.endswith(MESSAGE) and "idiot" not in out and out.startswith("a calm text")
    assert [reason.category for reason in one.held.ended.reasons] == ["abuse"]


def test_a_classifier_is_asked_now_and_then_with_what_came_before() -> None:
    one = Judges()
    text = "word " * 400
    assert one.pour(text) == text
    assert len(one.asked) == len(text) // 40 and max(map(len, one.asked)) <= CONTEXT_CHARS + 60 + 40
    assert one.asked[-1].endswith("word ") and one.held.ended is not None and one.held.ended.scores["abuse"] == 0.1


def test_no_text_is_released_before_it_was_classified_with_a_window() -> None:
    held = HoldBack(Policy(frozenset({"abuse"})), RULES, 20, 40)
    held.add("word " * 30)
    assert held.take_released() == ""
    assert held.text_to_classify() is not None
    held.record_scores({"abuse": 0.0})
    held.add("idiot " * 10)
    assert held.take_released() == ("word " * 30)[:130]


def test_a_redact_category_of_the_classifier_replaces_the_whole_text() -> None:
    held = HoldBack(Policy(frozenset(), frozenset({"abuse"}), "block", MESSAGE), RULES, 20, 40)
    held.add("x " * 30)
    held.complete()
    held.text_to_classify()
    held.record_scores({"abuse": 0.9})
    assert held.take_released() == MESSAGE and held.ended is not None and held.ended.action == "replace"
