"""`weftline bench`: a load on a real pipeline, its report, its files, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CHAIN = """
inputs: {x: text, n: json}
steps:
  a: {node: echo, inputs: {value: x}, batch: {items_max: 4, wait_max_ms: 1}}
  b: {node: echo, inputs: {value: a.value}}
  c: {node: echo, type: json, inputs: {value: n}}
outputs: {y: b.value, m: c.value}
"""
FAIL = """
inputs: {x: text}
steps:
  a: {node: fail, every: 1, inputs: {value: x}}
outputs: {y: a.value}
"""
SHORT = ("--duration-s", "0.4", "--warm-up-s", "0.1")


@pytest.mark.slow
def test_a_closed_load_prints_all_its_parts(weft, write) -> None:
    ended = weft("bench", write(CHAIN), "--closed", "3", *SHORT)
    assert ended.code == 0, ended.err
    for said in (
        "machine     ", " cores, ", "; weftline ", "pipeline    test: 3 steps, 3 workers",
        "inputs      generated, seed 0: x (12 words at random), n ({})",
        "load        closed, 3 callers; 0.", " ok, 0 failed\n", "throughput  ", "latency     p50 ",
        "steps, times in ms", "batches, share of calls by their number of items",
        "workers, share of the time they were busy", "where the time of an answered request went",
        "before the first step", "mean latency", "critical paths", " a > b\n", "\nhint: ",
    ):  # fmt: skip
        assert said in ended.out, said
    assert "goodput" not in ended.out and "sent late" not in ended.out
    assert ended.err.endswith("measuring for 0.4 s after 0.1 s of warm-up\n")


@pytest.mark.slow
def test_an_open_load_with_a_deadline_tells_goodput_and_lateness(weft, write) -> None:
    ended = weft("bench", write(CHAIN), "--rate", "100", "--bursty", "--deadline-ms", "1000", *SHORT)
    assert ended.code == 0, ended.err
    assert "load        open, 100 requests/s, in bursts, seed 0; " in ended.out
    assert "goodput     " in ended.out and " answers/s within 1000 ms: " in ended.out
    assert "sent late   p50 " in ended.out


@pytest.mark.slow
def test_figures_are_written_as_json_and_add_up(weft, write, tmp_path: Path) -> None:
    figures, trace = tmp_path / "out.json", tmp_path / "trace.json"
    words = ("--input", "x=hello", "--output", "y", "--requests", "20", "--json", str(figures), "--trace", str(trace))
    ended = weft("bench", write(CHAIN), *words, "--warm-up-s", "0")
    assert ended.code == 0, ended.err
    assert f"wrote {figures}\nwrote {trace}, 20 requests; open it at ui.perfetto.dev\n" in ended.err
    assert "stopped: after 20 requests" in ended.out
    figures_json = json.loads(figures.read_text())
    assert (figures_json["sent"], figures_json["ok"], figures_json["errors"], figures_json["stopped"]) == (
        20,
        20,
        [],
        "after 20 requests",
    )
    assert [step["step"] for step in figures_json["steps"]] == ["a", "b"]  # c is for another output
    assert all(step["count"] == 20 for step in figures_json["steps"])
    spent = figures_json["where"]
    parts = ("queue_ms", "batch_wait_ms", "node_ms", "hand_over_ms")
    steps_ms = sum(step[part] for step in spent["steps"] for part in parts)
    assert (
        steps_ms + sum(spent["outside"].values()) == pytest.approx(spent["mean_ms"]) == figures_json["latency"]["mean"]
    )
    assert all(step["node_ms"] > 0 for step in spent["steps"])
    assert [path["steps"] for path in spent["paths"]] == [["a", "b"]]
    assert figures_json["options"] == {"load": {"callers": 8}, "warm_up_s": 0.0, "seed": 0}
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(one.get("cat") == "request" for one in events) == 20
    assert {one["name"] for one in events if one.get("cat") == "batch" and one["ph"] == "X"} == {"a", "b"}


@pytest.mark.slow
def test_rows_of_a_file_are_taken_in_turn(weft, write, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("from a file")
    data = tmp_path / "rows.jsonl"
    rows = [{"x": "one", "n": {"a": 1}}, {"x": f"@{tmp_path / 'x.txt'}", "n": "text"}, {"n": [1, None]}]
    data.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    ended = weft("bench", write(CHAIN), "--data", str(data), "-i", "x=given", "--requests", "6", *SHORT)
    assert ended.code == 0, ended.err
    assert f"inputs      3 rows of {data}, in turn\n" in ended.out
    assert "generated" not in ended.out
    assert "6 sent, 6 ok" in ended.out


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "rows.jsonl:2: not valid JSON at character 2: Expecting property name"),
        ("[1]", "rows.jsonl:2: found list, expected an object: inputs by name"),
        ('{"z": 1}', "rows.jsonl:2: z: the pipeline has no such input"),
        ('{"x": "@-"}', "rows.jsonl:2: input x: a row cannot read standard input"),
        ('{"x": "@missing.txt"}', "rows.jsonl:2: input x: "),
    ],
)
def test_a_malformed_row_is_reported_with_its_line_at_first(weft, write, tmp_path: Path, row, said) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"x": "fine"}\n' + row + "\n")
    ended = weft("bench", write(CHAIN), "--data", str(data))
    assert (ended.code, ended.out) == (3, "")
    assert said in ended.err
    assert "loading" not in ended.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--closed", "2", "--rate", "5"), 2, "--closed and --rate exclude each other"),
        (("--bursty",), 2, "--bursty needs --rate"),
        (("--input", "z=1"), 3, "--input z: the pipeline has no such input"),
        (("--data", "no.jsonl"), 3, "--data no.jsonl: No such file or directory"),
        (("--trace", "no/such/folder/out.json"), 1, "cannot write no/such/folder/out.json: its folder does not exist"),
        (("--output", "z"), 3, "--output z: the pipeline has no such output; it has y, m"),
    ],
)
def test_what_is_typed_wrong_is_refused(weft, write, words, code: int, said: str) -> None:
    ended = weft("bench", write(CHAIN), *words)
    assert (ended.code, ended.out) == (code, "")
    assert said in ended.err
    assert "loading" not in ended.err


@pytest.mark.slow
def test_an_error_of_generated_inputs_names_them(weft, write) -> None:
    limited = CHAIN.replace("{x: text,", "{x: {type: text, bytes_max: 5},")
    ended = weft("bench", write(limited))
    assert (ended.code, ended.out) == (3, "")
    assert "input x: " in ended.err
    assert "    inputs were generated, seed 0: x (12 words at random), n ({})\n" in ended.err


@pytest.mark.slow
def test_the_bottleneck_is_named(weft, write) -> None:
    slow = CHAIN.replace("b: {node: echo,", "b: {node: fail, delay_ms: 10, batch: {items_max: 2},")
    ended = weft("bench", write(slow), *SHORT)
    assert ended.code == 0, ended.err
    assert "hint: b is the bottleneck: its worker is busy " in ended.out
    assert "of its batches are full, so a larger batch.items_max than 2 may help" in ended.out


@pytest.mark.slow
def test_when_every_request_fails_the_report_and_the_error_are_printed(weft, write) -> None:
    ended = weft("bench", write(FAIL), *SHORT)
    assert ended.code == 5
    assert " sent, 0 ok, " in ended.out and " StepError: " in ended.out
    assert "no request was answered" in ended.err


@pytest.mark.slow
def test_an_interrupted_load_prints_what_was_measured_so_far(write) -> None:
    command = [sys.executable, "-m", "weftline", "bench", write(CHAIN), "--duration-s", "100", "--warm-up-s", "0.1"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    while not (line := running.stderr.readline()).startswith("measuring"):
        assert line, "it ended before it measured anything"
    time.sleep(1)
    os.kill(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=30)
    assert running.returncode == 130
    assert "s measured; stopped: interrupted\n" in out
    assert "steps, times in ms" in out
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_traceback_of_the_first_failure_is_printed(weft, write, tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text("def fails(x: str) -> str:\n    raise KeyError('gone')\n")
    steps = "{a: {node: function, function: 'steps.py:fails', inputs: {x: x}}}"
    file = write(f"inputs: {{x: text}}\nsteps: {steps}\noutputs: {{y: a.output}}\n")
    ended = weft("bench", file, "--requests", "5", "--closed", "1", "--warm-up-s", "0", "--duration-s", "2")
    assert ended.code == 5
    assert ended.err.count('steps.py", line 2, in fails') == 1
