"""Problems get their line, and are told in terms of what was written."""

from weftline.errors import Problem
from weftline.pipelines.check.problem_collector import Origin, Report
from weftline.pipelines.spec.graph import Pipeline

LINES = {"steps.answer": 3, "steps.answer.prompt": 5}


def test_problems_are_placed_once_and_under_what_was_written() -> None:
    report = Report(
        Pipeline("p", (), (), {}, file="p.yaml", lines=LINES), {"steps.answer_prompt": Origin("steps.answer.prompt")}
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


def test_a_problem_of_what_comes_from_another_file_is_told_there() -> None:
    inner = Pipeline("i", (), (), {}, file="i.yaml", lines={"steps.say": 7, "steps.say.model": 8})
    report = Report(
        Pipeline("p", (), (), {}, file="p.yaml", lines=LINES),
        {"steps.read/say": Origin("steps.say", inner, whole=False)},
    )
    report.add("steps.read/say.model", "missing")
    report.add("steps.say.model", "another step, of the outer file")
    assert [(one.path, one.line, one.file) for one in report.problems] == [
        ("steps.say.model", 8, "i.yaml"),
        ("steps.say.model", 0, "p.yaml"),
    ]
    assert report.holds("steps.read/say.model")


def test_a_problem_that_has_its_file_is_left_as_it_is() -> None:
    report = Report(Pipeline("p", (), (), {}, file="p.yaml", lines=LINES), {"steps.answer": Origin("steps.other")})
    found = Problem("steps.answer", "odd", file="i.yaml")
    report.take([found, found])
    assert report.problems == [found]
