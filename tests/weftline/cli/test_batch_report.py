"""Where a report goes, that it fails no job and that an empty run does not replace it; a job's end in words."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from weftline.cli.batch import as_json, is_special, way_on, write_report
from weftline.engine.jobs.progress import ErrorKind, JobResult, Tally
from weftline.engine.jobs.spec import DataSpec, JobSpec, OutSpec

END = JobResult("shouter", ("rows.jsonl",), "out", {"results": "out"}, True, "", 10, 1, 4, 2.0, Tally())


def test_a_report_is_written_whole_and_stands_among_the_files(tmp_path: Path) -> None:
    place, notes = str(tmp_path / "deep" / "_report.html"), []
    end = write_report(END, place, {}, notes.append)
    assert end == replace(END, files={"results": "out", "report": place})
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["_report.html"]
    assert "</html>" in Path(place).read_text() and notes == []


def test_a_run_with_nothing_to_do_keeps_the_report_that_is_there(tmp_path: Path) -> None:
    place = tmp_path / "_report.html"
    done = replace(END, resumed=10)
    write_report(done, str(place), {}, print)
    assert "</html>" in place.read_text()  # none is there: this one is better than none
    place.write_text("of the run that answered rows")
    assert write_report(done, str(place), {}, print).files["report"] == str(place)
    assert place.read_text() == "of the run that answered rows"
    write_report(END, str(place), {}, print)
    assert "</html>" in place.read_text()


@pytest.mark.parametrize("place", ["/dev/null/_report.html", "nosuch://bucket/_report.html"])
def test_a_report_that_cannot_be_written_is_told_and_no_more(place: str) -> None:
    notes: list[str] = []
    assert write_report(END, place, {}, notes.append) == END
    assert len(notes) == 1 and notes[0].startswith(f"no report at {place}: ")


def test_figures_are_json_values() -> None:
    tally = Tally()
    tally.of("shout").add(2.0, 1.0, 4, items=4)
    kind = ErrorKind("shout", "ValueError", "it is bad", 1, ["a#1"])
    told = json.loads(json.dumps(as_json(replace(END, tally=tally, kinds=(kind,)))))
    assert (told["rows"], told["errors"], told["rows_per_s"]) == (10, 1, 3.0)
    assert (told["steps"]["shout"]["rows"], told["steps"]["shout"]["batches"]) == (4, 1.0)
    assert told["error_kinds"] == [
        {"step": "shout", "error": "ValueError", "reason": "it is bad", "count": 1, "ids": ["a#1"]}
    ]


def test_the_way_on_is_the_same_command_as_far_as_that_is_true() -> None:
    spec = JobSpec(Path("p.yaml"), DataSpec(("rows.jsonl",)), OutSpec("out"))
    assert (way_on(spec), is_special(spec)) == ("run the same command to go on", False)
    anew = replace(spec, restart=True)
    assert (way_on(anew), is_special(anew)) == ("run the same command without --restart to go on", True)
    piped = replace(spec, data=DataSpec(("-",)))
    assert "its rows have to come in again" in way_on(piped) and is_special(piped)
