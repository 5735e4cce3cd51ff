"""Problems get their line, and are told in terms of what was written."""

from weftline.pipelines.graph import Pipeline
from weftline.pipelines.report import Report

LINES = {"steps.answer": 3, "steps.answer.prompt": 5}


def test_problems_are_placed_once_and_under_what_was_written() -> None:
    report = Report(
        Pipeline("p", (), (), {}, file="p.yaml", lines=LINES), {"steps.answer_prompt": "steps.answer.prompt"}
    )
    report.add("steps.answer_prompt.inputs.see__x", "odd")
    report.add("steps.answer_prompt.inputs.see__x", "odd")
    report.add("steps.answer.model", "missing")
    report.add("steps.answer_prompted", "another step")
    report.add("steps.answer.prompt", "later", line=9)
    assert [(one.path, one.line, one.file) for one in report.problems] == [
        ("steps.answer.prompt", 5, "p.yaml"),
        ("steps.answer.model", 3, "p.yaml"),
        ("steps.answer_prompted", 0, "p.yaml"),
        ("steps.answer.prompt", 9, "p.yaml"),
    ]
    assert report.holds("steps.answer_prompt.template")
    assert not report.holds("steps.answer")
