"""Documentation of options is found where authors write it."""

from dataclasses import dataclass, make_dataclass

from weftline.pipelines.render.field_docs import field_docs, summary
from weftline.pipelines.spec.policy import BatchPolicy


@dataclass(frozen=True)
class Both:
    """Options of a node.

    alpha: the first, which goes
           on a second line.
    beta:  the second.
    other: no field, so no documentation.

    Some closing words: not a field.
    """

    alpha: int = 1
    beta: int = 2
    """Said again,
    and this wins."""
    gamma: int = 3
    "Under the field."
    delta: int = 4


def test_both_habits_are_read() -> None:
    assert field_docs(Both) == {
        "alpha": "the first, which goes on a second line.",
        "beta": "Said again, and this wins.",
        "gamma": "Under the field.",
    }


def test_a_class_without_source_has_no_documentation() -> None:
    assert field_docs(make_dataclass("Made", [("x", int)])) == {}
    assert field_docs(int) == {}


def test_a_summary_is_the_first_written_line() -> None:
    assert summary(BatchPolicy) == "Batching policy of one step."
    assert summary(make_dataclass("Made", [("x", int)])) == "", "the signature that dataclass writes is no summary"
