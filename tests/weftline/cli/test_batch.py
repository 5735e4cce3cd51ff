"""`weftline batch` from end to end in this process: data sets of all kinds, every option, every way it can end."""

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image

from tests.engine.serving.grpc.served import served_in_thread
from tests.weftline.batch_files import SHOUT, flipper, lines, results, shouter, visible
from weftline.cli.main import main

WORDS = ["the", "quick", "brown", "fox", "jumps", "over"]


@pytest.fixture
def shout(tmp_path: Path) -> str:
    return shouter(tmp_path)


def test_a_job_writes_its_results_and_says_where(weft, shout: str, tmp_path: Path) -> None:
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
    out, report = tmp_path / "out", tmp_path / "told.html"
    ended = weft(
        *("batch", shout, "--data", str(tmp_path / "rows.csv"), "--out", str(out), "--json", "--keep", "none"),
        *("--report", str(report)),
    )
    told = json.loads(ended.out)
    assert (told["rows"], told["errors"], told["resumed"], told["finished"]) == (6, 0, 0, True)
    assert told["steps"]["shout"]["rows"] == 6
    assert told["steps"]["shout"]["batches"] == 2  # of four and of two
    assert told["repeatable"] == {"loud": "exact", "length": "exact"}
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
    told = [json.loads(line) for line in (out / "_errors.jsonl").read_text().splitlines()]
    assert [one["id"] for one in told] == ["rows.jsonl#1", "rows.jsonl#3"]
    assert all(one["step"] == "shout" and "it is bad" in one["reason"] for one in told)
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
def test_a_full_disk_is_told_with_what_to_do(weft, shout: str, tmp_path: Path, full_disk: str) -> None:
    ended = weft("batch", shout, "--data", lines(tmp_path, WORDS), "--out", full_disk)
    assert (ended.code, ended.out) == (12, "")
    assert "no space left on device" in ended.err and "run the same command again" in ended.err


@pytest.mark.slow
def test_a_dry_run_shows_everything_and_writes_nothing(weft, shout: str, tmp_path: Path) -> None:
    data = lines(tmp_path, WORDS)
    before = sorted(tmp_path.iterdir())
    ended = weft("batch", shout, "--data", data, "--out", str(tmp_path / "out"), "--where", "n > 0", "--dry-run")
    assert ended.code == 0
    for told in ("shouter", "loud", "n > 0", "quick", "QUICK", "brown", "BROWN", "fox", "FOX", "the same bytes"):
        assert told in ended.out
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
    told = weft("batch", "--help").out
    assert told.count("weftline batch ") >= 4 and "Usage: weftline batch [OPTIONS]" in told
