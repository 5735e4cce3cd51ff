"""Error rows by kind."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.jobs.recorder import IDS_MAX, OTHER, ErrorKinds, common
from weftline.engine.jobs.rows import RowError


def test_reasons_that_differ_in_numbers_and_quotes_are_one_kind() -> None:
    kinds = ErrorKinds()
    for number in range(20):
        kinds.add(
            f"row{number}",
            RowError("see", "StepError", f"cannot read 'a{number}.png': {number}.5 bytes at 0xf{number}"),
        )
    kinds.add("x", RowError("see", "StepError", "the model said no"))
    first, second = kinds.kinds()
    assert (first.step, first.error, first.reason, first.count) == (
        "see", "StepError", "cannot read '…': N bytes at N", 20,
    )  # fmt: skip
    assert list(first.ids) == [f"row{number}" for number in range(IDS_MAX)]
    assert (second.reason, second.count, list(second.ids)) == ("the model said no", 1, ["x"])


def test_a_reason_that_is_always_the_same_keeps_its_numbers() -> None:
    kinds = ErrorKinds()
    kinds.add("a", RowError("", "InputError", "more than 64 MiB in 'image'"))
    kinds.add("b", RowError("", "InputError", "more than 64 MiB in 'image'"))
    assert [one.reason for one in kinds.kinds()] == ["more than 64 MiB in 'image'"]


def test_steps_and_errors_keep_kinds_apart() -> None:
    kinds = ErrorKinds()
    for step, error in (("a", "StepError"), ("b", "StepError"), ("a", "WorkerDied")):
        kinds.add("1", RowError(step, error, "same"))
    assert len(kinds.kinds()) == 3


def test_apostrophes_are_no_quotes() -> None:
    assert common("can't do what isn't there 3 times") == "can't do what isn't there N times"
    assert common("the models' rows and the rows' models") == "the models' rows and the rows' models"
    assert common("""in "a b" and `c` and 'd'""") == "in '…' and '…' and '…'"


def test_the_most_frequent_kinds_are_listed_even_when_they_appear_late() -> None:
    kinds = ErrorKinds(most=3)
    words = [f"{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(100)]
    for place, word in enumerate(words):
        for _ in range(1 + (place == 20) * 50):
            kinds.add(word, RowError("s", "E", f"reason {word}"))
    listed = kinds.kinds()
    assert [one.error for one in listed] == ["E", "E", "E", OTHER]
    assert (listed[0].reason, listed[0].count) == (f"reason {words[20]}", 51)
    assert sum(one.count for one in listed) == 150
    assert listed[-1].reason == "97 rows with rarer reasons" and len(listed[-1].ids) == IDS_MAX


def test_memory_is_bounded_whatever_the_reasons_are() -> None:
    kinds = ErrorKinds(most=5)
    huge = "x" * 1_000_000
    for number in range(200):
        letters = "".join(chr(97 + int(digit)) for digit in str(number))
        kinds.add(huge, RowError(huge, huge, letters + huge))
    listed = kinds.kinds()
    assert sum(one.count for one in listed) == 200
    assert max(len(text) for one in listed for text in (one.step, one.error, one.reason, *one.ids)) <= 301
    held = [text for one in kinds._kinds.items() for text in (*one[0], one[1].reason, *one[1].ids)]
    assert len(held) <= 5 * 8 * 9 and sum(map(sys.getsizeof, held)) < 1_000_000


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["no 1", "no 2", "other", "'x'"])), max_size=60))
def test_counts_add_up_and_do_not_depend_on_the_order(rows: list[tuple[str, str]]) -> None:
    forth, back = ErrorKinds(most=2), ErrorKinds(most=2)
    for step, reason in rows:
        forth.add("id", RowError(step, "E", reason))
    for step, reason in reversed(rows):
        back.add("id", RowError(step, "E", reason))
    counts = [(one.step, one.count) for one in forth.kinds()]
    assert counts == [(one.step, one.count) for one in back.kinds()]
    assert sum(count for _, count in counts) == len(rows)
