"""Whole jobs: what they write, how they go on, what they refuse, and what becomes of bad rows."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow")

import pyarrow.parquet as pq  # noqa: E402

from tests.engine.jobs.made import answer_plainly, plain, spec_of, visible, write_pipeline, write_rows  # noqa: E402
from tests.engine.jobs.output.faults import FaultyDisk, Killed, MemoryDisk  # noqa: E402
from weftline.engine.jobs import job as jobs  # noqa: E402
from weftline.engine.jobs.job import run_job  # noqa: E402
from weftline.engine.jobs.output import folder as places  # noqa: E402
from weftline.engine.jobs.output.layout import EXTRAS  # noqa: E402
from weftline.engine.jobs.output.local_files import Disk, LocalFiles  # noqa: E402
from weftline.engine.jobs.output.store import Store  # noqa: E402
from weftline.engine.jobs.progress import Progress  # noqa: E402
from weftline.engine.jobs.runners.factory import local_runner_factory  # noqa: E402
from weftline.engine.jobs.spec import ErrorsMax  # noqa: E402
from weftline.errors import InputError, JobChanged, OutputFailed, PipelineError, SessionClosed, TooManyErrors  # noqa: E402

TEXTS = [f"row {n}" for n in range(47)]
BAD = [f"{'fail' if n % 7 == 3 else 'row'} {n}" for n in range(47)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_pipeline(tmp_path)
    write_rows(tmp_path / "rows.jsonl", BAD)
    return tmp_path


def rows_of(folder: Path, out: str = "out") -> list[dict[str, Any]]:
    return [row for file in sorted((folder / out).glob("*.parquet")) for row in pq.read_table(file).to_pylist()]


def errors_of(folder: Path, out: str = "out") -> list[dict[str, Any]]:
    file = folder / out / "_errors.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


# what is written


@pytest.mark.parametrize("format", ["parquet", "jsonl", "arrow", "hf"])
def test_every_row_is_there_once_in_order_with_what_was_kept(folder: Path, format: str) -> None:
    end = run_job(spec_of(folder, folder / "rows.jsonl", format=None), plain())
    assert (end.finished, end.rows, end.errors, end.resumed) == (True, 47, 7, 0)
    rows, errors = rows_of(folder), errors_of(folder)
    assert [row["n"] for row in rows] == [n for n in range(47) if n % 7 != 3]
    assert rows[0]["id"] == "rows.jsonl#0"
    assert all(row["answer"].startswith(row["text"].upper()) for row in rows)
    assert [row["place"] for row in errors] == [n for n in range(47) if n % 7 == 3]
    assert errors[0] == {
        "place": 3, "id": "rows.jsonl#3", "step": "work", "error": "StepError", "reason": "the text says so", "part": 0,
    }  # fmt: skip
    assert len(list((folder / "out").glob("part-*"))) == 5
    assert end.tally.steps["work"].rows == 47


def test_results_are_what_a_loop_over_the_rows_gives(folder: Path) -> None:
    from weftline.engine.jobs.rows import row_seed

    run_job(spec_of(folder, folder / "rows.jsonl", seed=0), plain())
    expected = [answer_plainly(text, row_seed(0, n)) for n, text in enumerate(BAD) if "fail" not in text]
    assert [row["answer"] for row in rows_of(folder)] == expected


@pytest.mark.parametrize("out", ["all.parquet", "all.jsonl", "all.arrow"])
def test_a_single_file_is_put_together_at_the_end(folder: Path, out: str) -> None:
    end = run_job(spec_of(folder, folder / "rows.jsonl", out), plain())
    assert end.files["results"] == str(folder / out)
    if out.endswith("jsonl"):
        numbers = [json.loads(line)["n"] for line in (folder / out).read_text().splitlines()]
    elif out.endswith("parquet"):
        numbers = pq.read_table(folder / out)["n"].to_pylist()
    else:
        numbers = pa.ipc.open_file(folder / out).read_all()["n"].to_pylist()
    assert numbers == [n for n in range(47) if n % 7 != 3]
    assert run_job(spec_of(folder, folder / "rows.jsonl", out), plain()).resumed == 47


def test_a_data_set_of_the_datasets_library(folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    spec = spec_of(folder, folder / "rows.jsonl")
    run_job(replace(spec, out=replace(spec.out, format="hf")), plain())
    assert datasets.load_from_disk(str(folder / "out"))["n"] == [n for n in range(47) if n % 7 != 3]


def test_chosen_outputs_and_columns(folder: Path) -> None:
    run_job(spec_of(folder, folder / "rows.jsonl", keep=("n",), outputs=("answer",), id="n"), plain())
    assert list(rows_of(folder)[5]) == ["id", "n", "answer"]
    assert rows_of(folder)[5]["id"] == "6"
    with pytest.raises(InputError, match=r"no column is called m; columns: text, n"):
        run_job(spec_of(folder, folder / "rows.jsonl", "other", keep=("m",)), plain())
    with pytest.raises(InputError, match=r"no output is called answr(?s:.)*did you mean answer"):
        run_job(spec_of(folder, folder / "rows.jsonl", "other", outputs=("answr",)), plain())
    assert not (folder / "other").exists()


def test_a_selection_without_rows_has_results_without_rows(folder: Path) -> None:
    end = run_job(spec_of(folder, folder / "rows.jsonl", "none.parquet", where=("n > 1000",)), plain())
    assert (end.finished, end.rows) == (True, 0)
    assert pq.read_table(folder / "none.parquet").column_names == ["id", "text", "n", "answer"]


# going on


def stopped_after(folder: Path, rows: int, data: Path | None = None, **more: Any) -> None:
    """Run a job that is asked to end when so many rows are answered."""
    seen = [0]

    def answer(text: str, seed: int) -> str:
        seen[0] += 1
        return answer_plainly(text, seed)

    spec = spec_of(folder, data or folder / "rows.jsonl", **more)
    end = run_job(spec, plain(answer), stop=lambda: seen[0] >= rows)
    assert end.finished is (end.why == "")


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("rows", [1, 9, 14, 25, 40, 46])
def test_a_job_that_was_stopped_goes_on_to_the_same_end(folder: Path, rows: int) -> None:
    run_job(spec_of(folder, folder / "rows.jsonl", "whole", shuffle=3), plain())
    stopped_after(folder, rows, shuffle=3)
    end = run_job(spec_of(folder, folder / "rows.jsonl", shuffle=3), plain())
    assert end.finished and end.rows == 47 and end.errors == 7
    assert visible(folder) == visible(folder, "whole")
    assert end.tally.steps["work"].rows == 47


def test_a_finished_job_is_not_run_again(folder: Path) -> None:
    run_job(spec_of(folder, folder / "rows.jsonl"), plain())
    before, opened = visible(folder), []
    factory = replace(plain(), open=lambda progress: opened.append(1))  # type: ignore[arg-type,return-value]
    end = run_job(spec_of(folder, folder / "rows.jsonl"), factory)
    assert (end.finished, end.rows, end.resumed, end.errors, opened) == (True, 47, 47, 7, [])
    assert visible(folder) == before


def test_a_job_without_a_row_left_is_finished_without_its_models(folder: Path) -> None:
    run_job(spec_of(folder, folder / "rows.jsonl"), plain())
    before, opened = visible(folder), []
    (done,) = folder.rglob("done.json")
    done.unlink()  # killed after its last part
    factory = replace(plain(), open=lambda progress: opened.append(1))  # type: ignore[arg-type,return-value]
    end = run_job(spec_of(folder, folder / "rows.jsonl"), factory)
    assert (end.finished, end.rows, opened) == (True, 47, [])
    assert visible(folder) == before and done.exists()


class OnDisk:
    """Lets a job write through a disk in memory that fails or dies."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.disk: Disk = MemoryDisk()
        patch.setattr(jobs, "_open_store", self._open)

    def _open(self, job: Any) -> Store:
        place = places.find("out", False, job.suffix, {})
        place = replace(place, files=LocalFiles("/data/out", self.disk))
        return Store.open_at(place, job.manifest, extras=EXTRAS[job.format])

    def run(self, folder: Path, disk: Disk, again: bool = False) -> None:
        """Run the job on a disk; `again`: its error rows, which go well now."""
        self.disk = disk
        mended = plain(lambda text, seed: answer_plainly(text.replace("fail", "row"), seed), 5)
        spec = spec_of(folder, folder / "rows.jsonl", part_rows=5, retry_errors=again)
        run_job(spec, mended if again else plain(block_rows=5))


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> OnDisk:
    write_pipeline(tmp_path)
    write_rows(tmp_path / "rows.jsonl", BAD[:12])
    return OnDisk(monkeypatch)


def seen_on(disk: MemoryDisk) -> dict[str, bytes]:
    """Return what a reader sees of the results: no records, whose times differ, and nothing that is being written."""
    return {
        path: data
        for path, data in disk.all_files().items()
        if "/_weftline/" not in path and not Path(path).name.startswith(".")
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", [errno.ENOSPC, errno.EIO])
def test_r17_a_disk_that_fails_at_any_call(tmp_path: Path, on_disk: OnDisk, kind: int) -> None:
    whole = FaultyDisk(MemoryDisk())
    on_disk.run(tmp_path, whole)
    assert whole.calls > 60
    expected, messages = seen_on(whole.disk), set()  # type: ignore[arg-type]
    for at in range(whole.calls):
        disk = MemoryDisk()
        try:
            on_disk.run(tmp_path, FaultyDisk(disk, at, error=kind))
        except OutputFailed as error:
            messages.add(str(error).splitlines()[0])
        assert seen_on(disk).items() <= expected.items(), at
        on_disk.run(tmp_path, disk)
        assert seen_on(disk) == expected, at
    words = "space" if kind == errno.ENOSPC else "/output error"
    assert messages and all(words in one for one in messages), messages


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after", "torn"])
def test_r18_killed_at_any_call_each_row_is_there_once(tmp_path: Path, on_disk: OnDisk, when: Any) -> None:
    whole = FaultyDisk(MemoryDisk())
    on_disk.run(tmp_path, whole)
    expected = seen_on(whole.disk)  # type: ignore[arg-type]
    for at in range(whole.calls):
        disk = MemoryDisk()
        with suppress(Killed):
            on_disk.run(tmp_path, FaultyDisk(disk, at, when))
        on_disk.run(tmp_path, disk)
        assert seen_on(disk) == expected, at


@pytest.mark.slow
def test_running_error_rows_again_survives_a_kill_at_any_call(tmp_path: Path, on_disk: OnDisk) -> None:
    whole = FaultyDisk(MemoryDisk())
    on_disk.run(tmp_path, whole)
    counted = FaultyDisk(whole.disk)
    on_disk.run(tmp_path, counted, again=True)
    expected = seen_on(whole.disk)  # type: ignore[arg-type]
    assert "/data/out/_errors.jsonl" not in expected
    for at in range(counted.calls):
        disk = MemoryDisk()
        on_disk.run(tmp_path, disk)
        with suppress(Killed):
            on_disk.run(tmp_path, FaultyDisk(disk, at), again=True)
        on_disk.run(tmp_path, disk, again=True)
        assert seen_on(disk) == expected, at


# what is refused


@pytest.mark.slow
def test_a_changed_pipeline_data_set_or_setting_is_refused_by_name(folder: Path) -> None:
    data = folder / "rows.jsonl"
    stopped_after(folder, 25)
    kept = visible(folder)
    with pytest.raises(JobChanged, match=r'where is \["n < 5"\], and was \[\] when the job began'):
        run_job(spec_of(folder, data, where=("n < 5",)), plain())
    (folder / "steps.py").write_text("def work(text: str) -> str:\n    return text\n")
    with pytest.raises(JobChanged, match=r"steps.py has changed(?s:.)*--restart begins anew"):
        run_job(spec_of(folder, data), plain())
    write_pipeline(folder)
    write_rows(data, [*BAD, "one more"])
    with pytest.raises(JobChanged, match=r"rows\.jsonl has changed"):
        run_job(spec_of(folder, data), plain())
    assert visible(folder) == kept
    end = run_job(spec_of(folder, data, restart=True), plain())
    assert (end.finished, end.rows, end.resumed) == (True, 48, 0)


def test_nothing_is_loaded_before_what_can_be_known_is_known(folder: Path) -> None:
    def open_it(progress: object) -> Any:
        raise AssertionError("loaded")

    factory = replace(plain(), open=open_it)
    with pytest.raises(InputError, match=r"input text \(text\): there is no column text"):
        (folder / "other.jsonl").write_text('{"txt": "a"}\n')
        run_job(spec_of(folder, folder / "other.jsonl"), factory)
    with pytest.raises(InputError, match=r"missing\.jsonl"):
        run_job(spec_of(folder, folder / "missing.jsonl"), factory)
    with pytest.raises(InputError, match=r"\.csv"):
        run_job(spec_of(folder, folder / "rows.jsonl", "out.csv"), factory)


# bad rows


def test_too_many_errors_stop_the_job_and_it_can_go_on(folder: Path) -> None:
    with pytest.raises(TooManyErrors, match=r"4 of \d+ rows failed; the limit is 3 error rows") as caught:
        run_job(spec_of(folder, folder / "rows.jsonl", errors_max=ErrorsMax(rows=3)), plain())
    assert "the text says so (4 rows)" in str(caught.value)
    assert caught.value.end is not None and caught.value.end.errors == 4 and not caught.value.end.finished
    end = run_job(spec_of(folder, folder / "rows.jsonl", errors_max=ErrorsMax(share=0.5)), plain())
    assert (end.finished, end.errors, end.resumed) == (True, 7, 20)
    with pytest.raises(TooManyErrors, match=r"the text says so \(1 row\)"):
        run_job(spec_of(folder, folder / "rows.jsonl", "none", errors_max=ErrorsMax(rows=0)), plain())


def test_a_share_of_errors_is_looked_at_when_there_are_enough_rows(folder: Path) -> None:
    write_rows(folder / "many.jsonl", ["fail"] * 20 + ["row"] * 200)
    end = run_job(spec_of(folder, folder / "many.jsonl", errors_max=ErrorsMax(share=0.25)), plain())
    assert (end.finished, end.errors) == (True, 20)
    with pytest.raises(TooManyErrors, match=r"the limit is 5 % of error rows"):
        run_job(spec_of(folder, folder / "many.jsonl", "strict", errors_max=ErrorsMax(share=0.05)), plain())


@pytest.mark.slow
def test_error_rows_are_run_again_and_nothing_else(folder: Path) -> None:
    write_rows(folder / "fine.jsonl", TEXTS)
    texts = dict(enumerate(TEXTS))

    def mended(text: str, seed: int) -> str:
        if text == "fail 10":
            raise ValueError("still")
        return answer_plainly(text.replace("fail", "row"), seed)

    run_job(spec_of(folder, folder / "rows.jsonl"), plain())
    factory = plain(mended)
    made: list[Any] = []
    factory = replace(factory, open=lambda progress: made.append(plain(mended).open(None)) or made[-1])
    end = run_job(spec_of(folder, folder / "rows.jsonl", retry_errors=True), factory)
    assert (end.finished, end.rows, end.errors) == (True, 47, 1)
    asked = [place for places in made[0].asked for place in places]
    assert asked == [n for n in range(47) if n % 7 == 3]
    assert [row["place"] for row in errors_of(folder)] == [10]
    rows = rows_of(folder)
    assert [row["n"] for row in rows] == [n for n in range(47) if n != 10]
    run_job(spec_of(folder, folder / "fine.jsonl", "fine"), plain())
    fine = {row["n"]: row["answer"] for row in rows_of(folder, "fine")}
    assert all(row["answer"] == fine[row["n"]] for row in rows)  # seeds are the rows' own
    assert texts


def test_error_rows_of_a_stopped_job_run_again_before_the_rest(folder: Path) -> None:
    records = folder / "out" / "_weftline"
    some = run_job(spec_of(folder, folder / "rows.jsonl"), plain(), stop=lambda: (records / "part-00001.json").exists())
    assert not some.finished
    end = run_job(spec_of(folder, folder / "rows.jsonl", retry_errors=True), plain())
    assert (end.finished, end.rows, end.errors) == (True, 47, 7)
    assert [row["n"] for row in rows_of(folder)] == [n for n in range(47) if n % 7 != 3]


def test_a_lost_engine_ends_the_job(folder: Path) -> None:
    def answer(text: str, seed: int) -> str:
        if text.endswith("30"):
            raise SessionClosed("the engine is gone")
        return answer_plainly(text, seed)

    with pytest.raises(SessionClosed, match="the engine is gone"):
        run_job(spec_of(folder, folder / "rows.jsonl"), plain(answer))
    end = run_job(spec_of(folder, folder / "rows.jsonl"), plain())
    assert end.finished and end.resumed in (10, 20, 30)


# with real workers


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("mode", ["rows", "blocks"])
def test_r19_poison_rows_are_error_rows_and_the_job_finishes(folder: Path, mode: str) -> None:
    texts: list[Any] = [f"row {n}" for n in range(30)]
    texts[4], texts[11], texts[17] = "fail", "die", None
    write_rows(folder / "rows.jsonl", texts)
    seen: list[Progress] = []
    spec = spec_of(folder, folder / "rows.jsonl")
    end = run_job(spec, local_runner_factory(spec.pipeline, mode=mode, block_rows=5), watch=seen.append)
    assert (end.finished, end.rows, end.errors) == (True, 30, 3)
    errors = {row["place"]: (row["step"], row["error"]) for row in errors_of(folder)}
    assert errors[4] == ("work", "StepError")
    assert errors[11] == ("work", "WorkerDied")
    assert errors[17] == ("", "InputError")
    assert [row["n"] for row in rows_of(folder)] == [n for n in range(30) if n not in errors]
    assert seen[-1].rows == 30 and seen[-1].errors == 3


@pytest.mark.slow
def test_both_ways_of_answering_give_the_same_rows_and_so_does_going_on(folder: Path) -> None:
    spec = spec_of(folder, folder / "rows.jsonl", "rows")
    run_job(spec, local_runner_factory(spec.pipeline, mode="rows", block_rows=5))
    spec = spec_of(folder, folder / "rows.jsonl", "blocks")
    run_job(spec, local_runner_factory(spec.pipeline, mode="blocks", block_rows=5))
    assert visible(folder, "rows") == visible(folder, "blocks")
    assert len(rows_of(folder, "rows")) == 40
    seen: list[int] = []
    spec = spec_of(folder, folder / "rows.jsonl", "again")
    factory = local_runner_factory(spec.pipeline, mode="rows", block_rows=5)
    end = run_job(
        spec, factory, watch=lambda progress: seen.append(progress.committed), stop=lambda: bool(seen and seen[-1])
    )
    run_job(spec, factory)
    assert visible(folder, "again") == visible(folder, "rows")
    assert end.why in ("", "interrupted")


@pytest.fixture(autouse=True)
def no_threads_stay() -> Iterator[None]:
    import threading

    before = set(threading.enumerate())
    yield
    started = [one for one in threading.enumerate() if one.name.startswith("weftline-") and one not in before]
    for one in started:
        one.join(10)
    assert not [one for one in started if one.is_alive()]


def test_a_step_that_remembers_is_refused_before_anything_is_loaded(folder: Path) -> None:
    (folder / "words.yaml").write_text(
        "weftline: 1\nname: words\ninputs: {text: text}\n"
        "steps:\n  keep: {node: remember, inputs: {value: text}}\n  say: {node: echo, inputs: {value: text}}\n"
        "outputs: {kept: keep.value, answer: say.value}\n"
    )
    with pytest.raises(PipelineError, match=r"steps\.keep: keeps state between the requests of a sequence"):
        run_job(spec_of(folder, folder / "rows.jsonl"), plain())
    assert not (folder / "out").exists()
    assert run_job(spec_of(folder, folder / "rows.jsonl", outputs=("answer",)), plain()).finished


def test_a_folder_of_results_is_a_data_set(folder: Path) -> None:
    run_job(spec_of(folder, folder / "rows.jsonl"), plain())
    assert (folder / "out" / "_errors.jsonl").exists()
    assert pq.read_table(folder / "out")["n"].to_pylist() == [n for n in range(47) if n % 7 != 3]


def tables(folder: Path, kind: str) -> tuple[str, dict[str, Any]]:
    """Write the rows of BAD as a table of a kind; return its argument and the options that it needs."""
    rows = [{"text": text, "n": n} for n, text in enumerate(BAD)]
    halves = pa.Table.from_pylist(rows[:24]), pa.Table.from_pylist(rows[24:])
    if kind == "delta":
        deltalake = pytest.importorskip("deltalake")
        for half in halves:
            deltalake.write_deltalake(
                str(folder / "t"), half.append_column("half", pa.array([1] * len(half))), mode="append"
            )
        deltalake.DeltaTable(str(folder / "t")).delete("n = 5")
        return str(folder / "t"), {}
    if kind == "hive":
        for number, half in enumerate(halves):
            (folder / "t" / f"half={number}").mkdir(parents=True)
            pq.write_table(half, folder / "t" / f"half={number}" / "x.parquet", row_group_size=9)
        return str(folder / "t"), {}
    if kind == "braces":
        for number, half in enumerate(halves):
            write_rows(folder / f"x-0{number}.jsonl", half.column("text").to_pylist())
        return str(folder / "x-{00..01}.jsonl"), {}
    if kind == "separator":
        (folder / "x.csv").write_text("text;n\n" + "".join(f"{row['text']};{row['n']}\n" for row in rows))
        return str(folder / "x.csv"), {"separator": ";"}
    (folder / "x.json").write_text(json.dumps(rows, indent=2))
    return str(folder / "x.json"), {}


@pytest.mark.parametrize("kind", ["delta", "hive", "braces", "separator", "json list"])
def test_jobs_over_tables_resume_to_equal_bytes(folder: Path, kind: str) -> None:
    data, more = tables(folder, kind)
    run_job(spec_of(folder, Path(data), "whole", **more), plain())
    rows = rows_of(folder, "whole")
    assert len(rows) + len(errors_of(folder, "whole")) == (46 if kind == "delta" else 47)
    assert ("half" in rows[0]) is (kind in ("delta", "hive"))
    stopped_after(folder, 25, Path(data), **more)
    assert run_job(spec_of(folder, Path(data), **more), plain()).resumed in (10, 20, 30)
    assert visible(folder) == visible(folder, "whole")
    if kind == "separator":
        with pytest.raises(InputError, match="--separator ';'"):
            run_job(spec_of(folder, Path(data)), plain())


VARIED = [{"a": 1}, {"b": ["x", 1]}, "text", 3, None, [1, "q"], True]

MIXED = """
weftline: 1
name: mixed
inputs: {text: text, n: json}
steps:
  work: {node: function, function: "steps.py:work", inputs: {text: text, n: n}}
outputs: {answer: work.answer, found: work.found}
"""

MIXED_STEPS = """
def work(text: str, n: "json") -> {"answer": "text", "found": "json"}:
    if "fail" in text:
        raise ValueError("the text says so")
    values = [{"a": 1}, {"b": ["x", 1]}, "text", 3, None, [1, "q"], True]
    return {"answer": text.upper(), "found": values[n % 7]}
"""


@pytest.mark.parametrize("format", ["parquet", "jsonl", "arrow"])
def test_load_dataset_reads_a_folder_of_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    write_pipeline(tmp_path, MIXED, MIXED_STEPS)
    rows = [
        {"text": text, "n": n, "late": None if n < 20 else "x", "digits": str(n), "own": {"ab"[n % 2]: [n, "x"]},
         "parts": [str(n)], "mixed": [n, {"a": n}][n % 2]}
        for n, text in enumerate(BAD)
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = spec_of(tmp_path, tmp_path / "rows.jsonl")
    spec = replace(spec, out=replace(spec.out, format=format))
    end = run_job(spec, local_runner_factory(spec.pipeline))
    (tmp_path / "out" / "_report.html").write_text("<html></html>")
    assert end.errors == 7 and (tmp_path / "out" / "_errors.jsonl").exists()
    read = datasets.load_dataset(str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache"))
    good = [n for n in range(47) if n % 7 != 3]
    assert read["n"][:] == good
    assert read["late"][:] == [None if n < 20 else "x" for n in good]
    assert read["answer"][:] == [BAD[n].upper() for n in good]
    assert read["digits"][:] == [str(n) for n in good]
    assert read["parts"][:] == [[str(n)] for n in good]
    found = {
        name: [one if format == "jsonl" or one is None else json.loads(one) for one in read[name]]
        for name in ("found", "own", "mixed")
    }
    assert found["found"] == [VARIED[n % 7] for n in good]
    assert found["own"] == [rows[n]["own"] for n in good]
    assert found["mixed"] == [rows[n]["mixed"] for n in good]
