"""`weftline batch` from end to end in this process: data sets of all kinds, every option, every way it can end."""

import io
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image

from tests.engine.serving.grpc.served import served_in_thread
from tests.weftline.batch_files import SHOUT, flipper, lines, results, shouter, visible
from weftline.cli.batch import ASKED, Interrupts, as_json, has_resume_notes, resume_hint, runner_factory, write_report
from weftline.cli.batch_options import BatchOptions, Via
from weftline.cli.main import main
from weftline.cli.remote import Cluster
from weftline.engine.jobs.progress import ErrorKind, JobResult, Tally
from weftline.engine.jobs.ray import runner as factory
from weftline.engine.jobs.spec import DataSpec, JobSpec, OutSpec
from weftline.errors import InputError

WORDS = ["the", "quick", "brown", "fox", "jumps", "over"]


@pytest.fixture
def shout(tmp_path: Path) -> str:
    return shouter(tmp_path)


def test_a_job_writes_its_results_and_prints_their_path(weft, shout: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = weft("batch", shout, "--data", lines(tmp_path, WORDS), "--out", str(out))
    assert (ended.code, ended.out) == (0, f"{out}\n")
    assert results(out) == [
        {"id": f"rows.jsonl#{n}", "text": word, "n": n, "loud": word.upper(), "length": len(word)}
        for n, word in enumerate(WORDS)
    ]
    assert "shouter: finished" in ended.err
    assert (out / "_report.html").read_text().startswith("<!DOCTYPE html>")
    again = weft("batch", shout, "--data", str(tmp_path / "rows.jsonl"), "--out", str(out))
    assert (again.code, again.out) == (0, f"{out}\n")


@pytest.mark.slow
def test_rows_are_chosen_columns_mapped_and_results_put_into_one_file(weft, shout: str, tmp_path: Path) -> None:
    table = pa.table({"word": [f"w{n}" for n in range(40)], "n": list(range(40)), "key": [f"k{n}" for n in range(40)]})
    pq.write_table(table, tmp_path / "rows.parquet")
    out = tmp_path / "out.jsonl"
    ended = weft(
        *("batch", shout, "--data", str(tmp_path / "rows.parquet"), "--format", "parquet", "--out", str(out)),
        *("--out-format", "jsonl", "--map", "text=word", "--id", "key", "--where", "n >= 10", "--where", "n < 30"),
        *("--shuffle", "7", "--shard", "2/2", "--limit", "4", "--output", "loud", "--keep", "n", "--part-rows", "3"),
        *("--block-rows", "2", "--seed", "5", "--errors-max", "0", "--no-report", "--quiet"),
    )
    assert (ended.code, ended.err) == (0, "")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 4
    assert all(set(row) == {"id", "n", "loud"} for row in rows)
    assert all(row["id"] == f"k{row['n']}" and row["loud"] == f"W{row['n']}" for row in rows)
    assert all(10 <= row["n"] < 30 for row in rows)
    assert [row["n"] for row in rows] != sorted(row["n"] for row in rows)
    assert not list(tmp_path.rglob("_report.html"))


@pytest.mark.slow
def test_the_figures_can_be_json(weft, shout: str, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text,n\n" + "".join(f"{word},{n}\n" for n, word in enumerate(WORDS)))
    out, report = tmp_path / "out", tmp_path / "mine.html"
    ended = weft(
        *("batch", shout, "--data", str(tmp_path / "rows.csv"), "--out", str(out), "--json", "--keep", "none"),
        *("--report", str(report)),
    )
    shown = json.loads(ended.out)
    assert (shown["rows"], shown["errors"], shown["resumed"], shown["finished"]) == (6, 0, 0, True)
    assert shown["steps"]["shout"]["rows"] == 6
    assert shown["steps"]["shout"]["batches"] == 2  # of four and of two
    assert shown["repeatable"] == {"loud": "exact", "length": "exact"}
    assert report.exists() and not (out / "_report.html").exists()
    assert set(results(out)[0]) == {"id", "loud", "length"}


@pytest.mark.slow
def test_rows_come_through_standard_input(weft, shout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = io.BytesIO(b'{"text": "one"}\n{"text": "two"}\n')
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(sent))
    ended = weft("batch", shout, "--data", "-", "--out", str(tmp_path / "out"), "--no-report")
    assert ended.code == 0
    assert [row["loud"] for row in results(tmp_path / "out")] == ["ONE", "TWO"]


@pytest.mark.slow
def test_a_folder_of_pictures_gives_pictures(weft, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for name, colour in (("a.png", "red"), ("b.png", "blue")):
        picture = Image.new("RGB", (4, 6), colour)
        picture.putpixel((0, 0), (0, 255, 0))
        picture.save(tmp_path / "photos" / name)
    out = tmp_path / "out"
    given = ("batch", flipper(tmp_path), "--data", str(tmp_path / "photos"), "--no-report")
    assert weft(*given, "--format", "files", "--out", str(out), "--media", "files", "--keep", "none").code == 0
    rows = results(out)
    assert [row["id"] for row in rows] == ["a.png", "b.png"]
    assert set(rows[0]) == {"id", "flipped"}
    assert Image.open(out / rows[1]["flipped"]).getpixel((0, 5)) == (0, 255, 0)
    inline = tmp_path / "inline"
    assert weft(*given, "--out", str(inline), "--media", "inline").code == 0
    shown = Image.open(io.BytesIO(results(inline)[0]["flipped"]["bytes"]))
    assert (shown.size, shown.getpixel((1, 1))) == ((4, 6), (255, 0, 0))


@pytest.mark.slow
def test_error_rows_are_kept_aside_and_can_be_run_again(weft, shout: str, tmp_path: Path) -> None:
    strict, out = tmp_path / "strict", tmp_path / "out"
    strict.touch()
    texts = ["a", "bad", "c", "bad", "e"]
    command = ("batch", shout, "--data", lines(tmp_path, texts), "--out", str(out), "--no-report", "--part-rows", "2")
    first = weft(*command)
    assert first.code == 5
    assert [row["loud"] for row in results(out)] == ["A", "C", "E"]
    shown = [json.loads(line) for line in (out / "_errors.jsonl").read_text().splitlines()]
    assert [one["id"] for one in shown] == ["rows.jsonl#1", "rows.jsonl#3"]
    assert all(one["step"] == "shout" and "it is bad" in one["reason"] for one in shown)
    assert "finished, 2 rows with errors" in first.err and "--retry-errors" in first.err

    strict.unlink()
    assert weft(*command).code == 5  # nothing is run again unless it is asked for
    assert weft(*command, "--retry-errors").code == 0
    mended = visible(out)
    assert [row["loud"] for row in results(out)] == ["A", "BAD", "C", "BAD", "E"]
    fresh = tmp_path / "fresh"
    assert weft(*command[:5], str(fresh), *command[6:]).code == 0
    assert {name: data for name, data in mended.items() if name.startswith("part")} == {
        name: data for name, data in visible(fresh).items() if name.startswith("part")
    }


@pytest.mark.slow
def test_too_many_errors_stop_it_with_what_there_is(weft, shout: str, tmp_path: Path) -> None:
    (tmp_path / "strict").touch()
    command = ("batch", shout, "--data", lines(tmp_path, ["bad"] * 30), "--out", str(tmp_path / "out"))
    ended = weft(*command, "--errors-max", "3", "--block-rows", "2", "--part-rows", "4")
    assert (ended.code, ended.out) == (11, "")
    assert "shouter: stopped" in ended.err and "error: " in ended.err
    assert (tmp_path / "out" / "_report.html").exists()


@pytest.mark.slow
def test_another_pipeline_or_other_data_is_refused_until_it_begins_anew(weft, shout: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ("batch", shout, "--data", lines(tmp_path, WORDS), "--out", str(out), "--no-report")
    assert weft(*command).code == 0
    before = visible(out)
    lines(tmp_path, [*WORDS, "more"])
    changed = weft(*command)
    assert (changed.code, changed.out) == (10, "")
    assert "rows.jsonl" in changed.err and "--restart" in changed.err
    Path(shout).write_text(SHOUT.replace("items_max: 4", "items_max: 5"))
    assert "pipeline" in weft(*command).err
    assert visible(out) == before
    assert weft(*command, "--restart").code == 0
    assert len(results(out)) == 7


class Full(MemoryFileSystem):
    """A file system whose disk is full once a part is to be written."""

    protocol = "full"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def _open(self, path: str, mode: str = "rb", **options: object) -> object:
        if mode != "rb" and "part-" in path:
            raise OSError(28, "No space left on device")
        return super()._open(path, mode, **options)


@pytest.fixture
def full_disk() -> Iterator[str]:
    fsspec.register_implementation("full", Full, clobber=True)
    yield "full://results"
    Full.store.clear()


@pytest.mark.slow
def test_a_full_disk_is_an_error_with_its_remedy(weft, shout: str, tmp_path: Path, full_disk: str) -> None:
    ended = weft("batch", shout, "--data", lines(tmp_path, WORDS), "--out", full_disk)
    assert (ended.code, ended.out) == (12, "")
    assert "no space left on device" in ended.err and "run the same command again" in ended.err


@pytest.mark.slow
def test_a_dry_run_shows_everything_and_writes_nothing(weft, shout: str, tmp_path: Path) -> None:
    data = lines(tmp_path, WORDS)
    before = sorted(tmp_path.iterdir())
    ended = weft("batch", shout, "--data", data, "--out", str(tmp_path / "out"), "--where", "n > 0", "--dry-run")
    assert ended.code == 0
    for shown in ("shouter", "loud", "n > 0", "quick", "QUICK", "brown", "BROWN", "fox", "FOX", "the same bytes"):
        assert shown in ended.out
    assert "JUMPS" not in ended.out
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != "__pycache__"] == before


def test_mistakes_of_the_command_line_come_at_once_before_anything_is_read(weft) -> None:
    ended = weft(
        "batch", "p.yaml", "more.parquet", "--shard", "9/8", "--map", "x", "--errors-max", "lots", "--model", "m"
    )
    assert (ended.code, ended.out) == (2, "")
    for said in (
        "--data: ",
        "--out: ",
        "more.parquet: ",
        "--shard 9/8: ",
        "--map x: ",
        "--errors-max lots: ",
        "--model ",
    ):
        assert said in ended.err
    assert weft("batch", "p.yaml", "--limit", "0", "--data", "x", "--out", "y").code == 2
    assert weft("batch", "p.yaml", "--no-such-option").code == 2


def test_what_is_not_there_is_named(weft, shout: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    gone = weft("batch", shout, "--data", str(tmp_path / "gone.jsonl"), "--out", out)
    assert (gone.code, "gone.jsonl" in gone.err) == (3, True)
    nowhere = weft("batch", "nowhere.yaml", "--data", lines(tmp_path, WORDS), "--out", out)
    assert (nowhere.code, "nowhere.yaml" in nowhere.err) == (2, True)
    odd = weft("batch", shout, "--data", lines(tmp_path, WORDS), "--out", out, "--output", "lout")
    assert odd.code in (2, 3) and "lout" in odd.err and "loud" in odd.err
    unmapped = weft("batch", shout, "--data", lines(tmp_path, WORDS), "--out", out, "--map", "text=txet")
    assert unmapped.code in (2, 3) and "txet" in unmapped.err and "did you mean" in unmapped.err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_server_can_answer(shout: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, data = tmp_path / "out", lines(tmp_path, WORDS)
    served = Path(shout).read_text().replace("functions.py", str(tmp_path / "functions.py"))
    token = tmp_path / "token"
    token.write_text("wl_rows\n")
    token.chmod(0o600)
    with served_in_thread({"words": served}) as server:
        command = ["batch", shout, "--data", data, "--no-report", "--via", server.address, "--token-file", str(token)]
        assert main([*command, "--model", "words", "--insecure", "--out", str(out)]) == 0
        assert [row["loud"] for row in results(out)] == [word.upper() for word in WORDS]
        capfd.readouterr()
        assert main([*command, "--out", str(tmp_path / "other")]) == 3  # it is not called shouter there
        assert "shouter" in capfd.readouterr().err


def test_help_shows_examples(weft) -> None:
    shown = weft("batch", "--help").out
    assert shown.count("weftline batch ") >= 4 and "Usage: weftline batch [OPTIONS]" in shown


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
def test_a_report_that_cannot_be_written_is_only_a_warning(place: str) -> None:
    notes: list[str] = []
    assert write_report(END, place, {}, notes.append) == END
    assert len(notes) == 1 and notes[0].startswith(f"no report at {place}: ")


def test_figures_are_json_values() -> None:
    tally = Tally()
    tally.of("shout").add(2.0, 1.0, 4, items=4)
    kind = ErrorKind("shout", "ValueError", "it is bad", 1, ["a#1"])
    figures = json.loads(json.dumps(as_json(replace(END, tally=tally, kinds=(kind,)))))
    assert (figures["rows"], figures["errors"], figures["rows_per_s"]) == (10, 1, 3.0)
    assert (figures["steps"]["shout"]["rows"], figures["steps"]["shout"]["batches"]) == (4, 1.0)
    assert figures["error_kinds"] == [
        {"step": "shout", "error": "ValueError", "reason": "it is bad", "count": 1, "ids": ["a#1"]}
    ]


def test_the_way_on_is_the_same_command_as_far_as_that_is_true() -> None:
    spec = JobSpec(Path("p.yaml"), DataSpec(("rows.jsonl",)), OutSpec("out"))
    assert (resume_hint(spec), has_resume_notes(spec)) == ("run the same command to resume", False)
    anew = replace(spec, restart=True)
    assert (resume_hint(anew), has_resume_notes(anew)) == ("run the same command without --restart to resume", True)
    piped = replace(spec, data=DataSpec(("-",)))
    assert "standard input must start again" in resume_hint(piped) and has_resume_notes(piped)


def test_the_first_signal_asks_and_the_second_ends() -> None:
    said: list[str] = []
    with Interrupts(said.append) as interrupts:
        interrupts.under_way()
        assert not interrupts.asked()
        os.kill(os.getpid(), signal.SIGINT)
        assert said == []  # a handler may print nothing: who asks does
        assert interrupts.asked() and interrupts.asked()
        assert said == [ASKED]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_is_as_good_as_ctrl_c() -> None:
    with Interrupts(lambda text: None) as interrupts:
        interrupts.under_way()
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.asked()


def test_while_nothing_is_under_way_the_first_one_ends_it() -> None:
    with Interrupts(lambda text: None), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


def test_afterwards_signals_are_what_they_were() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Interrupts(lambda text: None) as interrupts:
        interrupts.under_way()
        os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts(lambda text: None) as interrupts:
            interrupts.under_way()
            os.kill(os.getpid(), signal.SIGINT)
            assert not interrupts.asked()
    finally:
        signal.signal(signal.SIGINT, before)


def test_signals_are_not_handled_outside_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def inside() -> None:
        with Interrupts(lambda text: None) as interrupts:
            seen.extend([signal.getsignal(signal.SIGINT), interrupts.asked()])

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [before, False]


@pytest.fixture
def options_here(tmp_path: Path) -> BatchOptions:
    spec = JobSpec(Path(shouter(tmp_path)), DataSpec(("rows.jsonl",)), OutSpec("out", outputs=("loud",)), seed=3)
    return BatchOptions(job=replace(spec, block_rows=2))


def test_copies_on_a_cluster_are_asked_for_the_same_job(
    options_here: BatchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(factory, "ray_runner_factory", lambda pipeline, **options: asked.update(options, file=pipeline))
    runner_factory(replace(options_here, cluster=Cluster("ray", 2, 0.5, "auto")))
    spec = options_here.job
    assert (asked["file"], asked["outputs"], asked["seed"]) == (spec.pipeline, ("loud",), 3)
    assert (asked["block_rows"], asked["replicas"], asked["address"], asked["need"].gpus) == (2, 2, "auto", 0.5)


def test_a_server_is_reached_as_other_commands_reach_it(options_here: BatchOptions, tmp_path: Path) -> None:
    server = runner_factory(replace(options_here, server=Via("localhost:1")))
    assert (server.repeatable, server.block_rows) == ({"loud": "rounding"}, 2)
    with pytest.raises(InputError, match="cannot read"):
        runner_factory(replace(options_here, server=Via("localhost:1", tmp_path / "no-token")))


def test_an_unknown_output_is_an_error_before_anything_starts(options_here: BatchOptions) -> None:
    out = OutSpec("out", outputs=("lout",))
    with pytest.raises(InputError, match=r"--output lout: the pipeline has no such output; did you mean loud\?"):
        runner_factory(replace(options_here, job=replace(options_here.job, out=out)))
