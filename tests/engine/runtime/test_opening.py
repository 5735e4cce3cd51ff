"""Progress and outcome of opening what a program uses."""

from __future__ import annotations

from weftline.engine.protocol import messages as msg
from weftline.engine.runtime.opening import REPORTS_MAX, Opening

STEPS = {"s": ["s"], "detect": ["detect"], "read": ["read"]}


def refused(step: str, why: str) -> msg.OpenFailed:
    return msg.OpenFailed(step, msg.Failure("ModelError", why))


def test_progress_is_reported_first_and_completion_last() -> None:
    reported: list[tuple[str, bool]] = []
    opening = Opening((0, 1), STEPS, lambda step, phrase, fraction: reported.append((phrase, opening.over)))
    for place in range(REPORTS_MAX + 2):
        opening.note(msg.OpenProgress("s", str(place), 0.0))
    opening.note_ready(0, "")
    opening.report()
    assert (
        not opening.over and reported[0] == ("2", False) and len(reported) == REPORTS_MAX
    )  # of a flood, the last ones
    opening.note(msg.OpenProgress("s", "warm", 1.0))
    opening.note_ready(1, "")
    opening.report()
    assert reported[-1] == ("warm", False) and opening.over and opening.error() is None


def test_a_callback_that_fails_is_not_called_again() -> None:
    calls: list[str] = []

    def fails(step: str, phrase: str, fraction: float) -> None:
        calls.append(phrase)
        raise ValueError(phrase)

    opening = Opening((0,), STEPS, fails)
    for phrase in "ab":
        opening.note(msg.OpenProgress("s", phrase, 0.0))
    opening.report()
    assert calls == ["a"]


def test_the_first_reason_is_reported_once_the_worker_has_ended() -> None:
    opening = Opening((0,), STEPS, None)
    opening.note(refused("detect", "no such model"))
    opening.note(refused("read", "no such file"))
    assert not opening.over  # it says so itself, and then it ends
    opening.note_death("w", "exit code 1")
    assert opening.over and str(opening.error()) == "step detect: no such model"


def test_a_death_is_a_reason_only_while_it_opens() -> None:
    opening = Opening((0,), STEPS, None)
    opening.note_death("w", "killed")
    assert opening.over and str(opening.error()).startswith("worker w ended while opening: killed; ")
    opened = Opening((0,), STEPS, None)
    opened.note_ready(0, "")
    opened.report()
    opened.note_death("w", "killed")
    opened.note(refused("s", "too late to matter"))
    assert opened.error() is None


def test_too_much_measured_memory_fails_the_open_and_nothing_later() -> None:
    opening = Opening((0,), STEPS, None)
    opening.note_ready(0, "too much")
    assert str(opening.error()) == "too much"
    opened = Opening((0,), STEPS, None)
    opened.note_ready(0, "")
    opened.report()
    opened.note_ready(0, "too much")
    assert opened.error() is None


def test_a_shared_step_is_reported_by_each_name_that_a_program_has_for_it() -> None:
    reported: list[str] = []
    opening = Opening((0,), {"answer": ["rewrite", "reply"]}, lambda step, phrase, fraction: reported.append(step))
    opening.note(msg.OpenProgress("answer", "warm", 1.0))
    opening.note(msg.OpenProgress("another program's", "warm", 1.0))
    opening.report()
    assert reported == ["rewrite", "reply"]


def test_a_program_without_workers_is_open_at_once() -> None:
    assert Opening((), {}, None).over
