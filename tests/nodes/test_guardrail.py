import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.nodes.test_text_models import write_onnx
from weftline.errors import StepError
from weftline.nodes.contract import Batch, ConfigError, OpenContext, StepContext
from weftline.nodes.guardrail import Guardrail, GuardrailConfig
from weftline.nodes.guardrail_rules import BUILT_IN, compile_bounded, find
from weftline.nodes.guardrail_verdict import Policy, judge

RULES = [rule for rules in BUILT_IN.values() for rule in rules]

FOUND = [
    ("secrets", "the key is AKIAIOSFODNN7EXAMPLE."), ("secrets", "ghp_" + "a1B2" * 9),
    ("secrets", "sk-proj-abc123def456ghi789jkl"), ("secrets", "-----BEGIN RSA PRIVATE KEY-----"),
    ("secrets", "my password is hunter2!"), ("secrets", "API_KEY = 'a9f8b7c6d5'"),
    ("secrets", "password: correct7horse"), ("secrets", "postgres://joe:s3cret@db.example/x"),
    ("secrets", "eyJhbGciOiJIUzI1.eyJzdWIiOiIx.SflKxwRJSMeKKF2Q"), ("secrets", "xoxb-123456789012-abcdef"),
    ("personal", "write to jane.doe+x@mail.example.org"), ("personal", "card 4111 1111 1111 1111"),
    ("personal", "5500-0000-0000-0004"), ("personal", "SSN 123-45-6789"), ("personal", "call +44 20 7946 0958"),
    ("personal", "(555) 010-1234 56"), ("personal", "DE89 3704 0044 0532 0130 00"),
    ("personal", "jane\uff20example.org"), ("personal", "jane\u200b@exam\u200bple.org"),
]  # fmt: skip
NOT_FOUND = [
    "There are 2 red circles.", "What colour is the star?", "The password is required.", "Please reset my password",
    "4111 1111 1111 1112", "123456789012", "on 2024-11-03 at 10:30", "1 2 3 4 5 6 7 8 9 10 11", "version 3.11.2.4",
    "ask-me-anything-you-want-today", "000-12-3456", "a@b", "0000 0000 0000 0000", "the token economy",
    "3.14159265358979",
]  # fmt: skip


@pytest.mark.parametrize(("category", "text"), FOUND)
def test_rules_find_what_they_are_for(category: str, text: str) -> None:
    assert category in {hit.category for hit in find(RULES, text)}


@pytest.mark.parametrize("text", NOT_FOUND)
def test_rules_leave_ordinary_text_alone(text: str) -> None:
    assert find(RULES, text) == []


@pytest.mark.parametrize(
    "text",
    ["a" * 100_000, "1 " * 50_000, "-eyJ" * 25_000, "a." * 50_000, "password=" * 11_000, "a@" * 50_000, "1" * 100_000,
     "sk-" * 33_000, "AA11 " * 20_000, "-----BEGIN " * 9_000, "http://a:" * 11_000, "x@a." + "a-." * 30_000],
    ids=range(12),
)  # fmt: skip
def test_rules_take_time_in_proportion_to_the_text(text: str) -> None:
    started = time.process_time()
    find(RULES, text)
    assert time.process_time() - started < 1


def opened(**options: Any) -> Guardrail:
    node = Guardrail(GuardrailConfig(**options))
    node.open(OpenContext(options.pop("base_dir", Path())))
    return node


def run(node: Guardrail, *texts: str) -> tuple[Any, Any]:
    answers = node.run(Batch({"text": list(texts)}))
    return answers["text"], answers["verdict"]


@pytest.mark.parametrize(
    ("on_violation", "text", "action"),
    [("replace", "No.", "replace"), ("block", "", "block"), ("allow", "mail me: a.b@c.org", "allow")],
)
def test_each_way_to_deal_with_a_violation(on_violation: str, text: str, action: str) -> None:
    node = opened(policy={"block": ["personal"], "on_violation": on_violation, "message": "No."})
    texts, verdicts = run(node, "mail me: a.b@c.org", "There are 3 stars.")
    assert (texts[0], verdicts[0]["action"]) == (text, action)
    assert verdicts[0]["reasons"] == [
        {"category": "personal", "by": "rule", "rule": "e-mail address", "start": 9, "end": 18}
    ]
    assert (texts[1], verdicts[1]) == ("There are 3 stars.", {"action": "allow", "reasons": [], "scores": {}})


def test_a_verdict_never_repeats_what_was_found() -> None:
    _, verdicts = run(opened(), "my password is hunter2!")
    assert "hunter2" not in str(verdicts)


def test_redacting_replaces_only_the_places() -> None:
    texts, verdicts = run(opened(policy={"redact": ["personal"]}), "mail a.b@c.org or d@e.org; password=abc123")
    assert texts == ["mail [personal] or [personal]; password=abc123"] and verdicts[0]["action"] == "replace"


def test_own_words_and_patterns_are_categories() -> None:
    rules = {"rivals": {"words": ["Acme", "foo bar"], "patterns": [r"\bproject-[a-z]{1,20}\b"]}}
    node = opened(policy={"block": ["rivals"]}, rules=rules)
    texts, _ = run(node, "buy ACME now", "see Project-Zeus", "Foo Bar!", "acmeology", "a@b.org")
    assert [text == "I cannot share that." for text in texts] == [True, True, True, False, False]


def test_a_classifier_adds_its_labels(tmp_path: Path) -> None:
    write_onnx(tmp_path / "guard")
    node = Guardrail(GuardrailConfig(classifier="guard", threshold=0.7))
    node.ports(node.config, StepContext(tmp_path))
    node.open(OpenContext(tmp_path))
    node.warm_up()
    texts, verdicts = run(node, "good day", "bad bad", "good " * 500 + "bad bad", "my password is hunter2!")
    assert [verdict["action"] for verdict in verdicts] == ["allow", "replace", "replace", "replace"]
    assert verdicts[1]["reasons"] == [
        {"category": "abuse", "by": "classifier", "score": pytest.approx(0.9972, abs=1e-3)}
    ]
    assert verdicts[1]["scores"].keys() == {"safe", "abuse", "secrets"} and texts[0] == "good day"


def test_a_text_that_is_too_long_to_judge_fails_alone() -> None:
    texts, verdicts = run(opened(chars_max=10), "short", "much too long", "fine")
    assert [texts[0], texts[2]] == ["short", "fine"]
    assert isinstance(texts[1], StepError) and isinstance(verdicts[1], StepError)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"policy": {"block": ["secret"]}}, "policy.block"), ({"policy": {"block": "secrets"}}, "policy.block"),
        ({"policy": {"on_violation": "explode"}}, "policy.on_violation"), ({"policy": {"blok": []}}, "policy.blok"),
        ({"policy": {"message": 7}}, "policy.message"), ({"threshold": 0}, "threshold"),
        ({"rules": {"a": {"words": "x"}}}, "rules.a.words"), ({"rules": {"a": {}}}, "rules.a"),
        ({"rules": {"a": {"patterns": ["(a+)+b"]}}}, "rules.a.patterns"), ({"classifier": "./absent"}, "classifier"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_named(options: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Guardrail.ports(GuardrailConfig(**options), StepContext(Path()))
    assert caught.value.option == option


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+b",
        "(a|a)*b",
        "(a{1,9}){1,9}b",
        ".*x.*y",
        r"(a)\1",
        "a{1,5000}",
        "(",
        "(a?){30}a{30}",
        "(?=a+)b",
        "x" * 2000,
    ],
)
def test_patterns_that_may_take_too_long_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError):
        compile_bounded(pattern)


@pytest.mark.parametrize(
    "pattern", [r"\bacct-\d{6,10}\b", "colou?r", "(red|blue) (star|circle)s?", ".{0,40}x", "(?:ab){3}"]
)
def test_bounded_patterns_are_taken(pattern: str) -> None:
    started = time.process_time()
    list(compile_bounded(pattern).finditer("a" * 100_000))
    assert time.process_time() - started < 1


@given(st.text(max_size=300), st.sampled_from(["replace", "block", "allow"]))
@settings(max_examples=150, deadline=None)
def test_allowed_text_has_no_reason_and_positions_are_inside(text: str, on_violation: str) -> None:
    verdict = judge(text, Policy(frozenset({"secrets", "personal"}), on_violation=on_violation), RULES, {})
    assert all(0 <= reason.start < reason.end <= len(text) for reason in verdict.reasons)
    assert (verdict.text == text) or verdict.reasons
    assert verdict.action == "allow" or verdict.reasons
