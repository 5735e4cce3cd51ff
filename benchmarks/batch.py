"""Jobs over data sets: how quickly, in how much memory, and beside a loop written by hand.

rows    a pipeline of one trivial step over 10^3 to 10^6 rows, from Parquet to Parquet: rows a second, and the most
        memory of the job's process and of a worker. The bar: 20 000 rows/s, and memory that does not grow.
loops   a job beside a hand-written loop: it reads the same file, calls the same node class
        in a process of its own at the same batch size, and writes the same columns. They take turns, round after
        round; the bar is 95 % of the loop at its best batch size.
llm     prompts through the paged engine: tokens a second, and how many answers a round writes at a time; beside the
        same engine given all prompts at once, by hand.

python -m benchmarks.batch [rows] [loops] [llm] [--rounds 3] [--quick] [--plot docs/images/batch-memory.svg]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import batch_jobs as jobs
from benchmarks.conditions import conditions, spread
from benchmarks.curves import Curve, Panel, draw

BAR_ROWS, BAR_SHARE = 20_000, 0.95
SIZES = (8, 16, 32, 64)
"""Sizes of batch the loops try."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[[], "rows", "loops", "llm"], help="all when left out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small data, to see that it runs")
    parser.add_argument("--plot", type=Path, help="where to draw memory by rows")
    asked = parser.parse_args()
    print(conditions())
    with tempfile.TemporaryDirectory(prefix="weftline-batch-") as folder:
        where = Path(folder)
        if not asked.what or "rows" in asked.what:
            _rows(where, asked.rounds, asked.quick, asked.plot)
        if not asked.what or "loops" in asked.what:
            _loops(where, asked.rounds, asked.quick)
        if not asked.what or "llm" in asked.what:
            _llm(where, asked.rounds, asked.quick)


def _rows(where: Path, rounds: int, quick: bool, plot: Path | None) -> None:
    pipeline = _written(where, "trivial", jobs.TRIVIAL)
    print("\n| rows | rows/s | with opening | job's peak MB | worker's peak MB |\n|---|---|---|---|---|")
    points: list[tuple[int, float, float]] = []
    for rows in (1_000, 10_000) if quick else (1_000, 10_000, 100_000, 1_000_000):
        data = jobs.write_words(where / f"{rows}.parquet", rows)
        runs = [_in_own_process(pipeline, data, where / f"out-{rows}-{n}") for n in range(rounds)]
        rates = [run["rows"] / run["seconds"] for run in runs]
        whole = [run["rows"] / run["all_seconds"] for run in runs]
        peak, worker = ([run[key] for run in runs] for key in ("peak_mb", "worker_mb"))
        points.append((rows, statistics.median(peak), statistics.median(worker)))
        print(f"| {rows} | {spread(rates)} | {spread(whole)} | {spread(peak)} | {spread(worker)} |", flush=True)
    print(f"\nbar: {BAR_ROWS} rows/s at the most rows")
    if plot is not None:
        lines = [
            Curve("the job's process", [(rows, job) for rows, job, _ in points]),
            Curve("a worker", [(rows, worker) for rows, _, worker in points]),
        ]
        plot.write_text(
            draw([Panel("Memory of a job by its rows", "rows", "peak resident memory, MB", lines, log=True)])
        )


def _loops(where: Path, rounds: int, quick: bool) -> None:
    print("\n| model | batch | loop, rows/s | job, rows/s | job / loop | mode |\n|---|---|---|---|---|---|")
    rows = 400 if quick else 6_000
    for subject in jobs.SUBJECTS:
        data = subject.write(where / f"{subject.name}.parquet", rows)
        best = max(SIZES, key=lambda size: _loop_rate(subject, data, where, size, rows))
        pipeline = _written(where, subject.name, subject.pipeline.replace("BATCH", str(best)))
        loops, runs, modes = [], [], set()
        for n in range(rounds):
            loops.append(_loop_rate(subject, data, where, best, rows))
            run = _in_own_process(pipeline, data, where / f"{subject.name}-{n}")
            runs.append(run["rows"] / run["seconds"])
            modes.add(run["mode"])
        ratios = [job / loop for job, loop in zip(runs, loops)]
        print(
            f"| {subject.name} | {best} | {spread(loops)} | {spread(runs)} | {spread(ratios, 2)} | {'/'.join(modes)} |"
        )
    print(f"\nbar: {BAR_SHARE} of the loop")


def _llm(where: Path, rounds: int, quick: bool) -> None:
    print("\n| | tokens/s | answers a round writes | job / engine alone |\n|---|---|---|---|")
    rows = 32 if quick else 256
    data = jobs.write_prompts(where / "prompts.parquet", rows)
    pipeline = _written(where, "chat", jobs.LLM)
    alone, job = [], []
    for n in range(rounds):
        alone.append(_child("llm", data=str(data)))
        job.append(_in_own_process(pipeline, data, where / f"chat-{n}"))
    floors = [one["tokens"] / one["seconds"] for one in alone]
    rates = [one["figures"]["tokens"] / one["seconds"] for one in job]
    print(f"| engine alone, all prompts at once | {spread(floors)} | {spread([one['wide'] for one in alone], 1)} | |")
    wide = [one["figures"]["tokens"] / one["figures"]["rounds"] for one in job]
    ratios = [rate / floor for rate, floor in zip(rates, floors)]
    print(f"| job, {rows} prompts | {spread(rates)} | {spread(wide, 1)} | {spread(ratios, 2)} |")


def _written(where: Path, name: str, text: str) -> Path:
    file = where / f"{name}.yaml"
    file.write_text(text)
    return file


def _in_own_process(pipeline: Path, data: Path, out: Path) -> Mapping[str, Any]:
    return _child("job", pipeline=str(pipeline), data=str(data), out=str(out))


def _loop_rate(subject: Any, data: Path, where: Path, size: int, rows: int) -> float:
    found = _child("loop", subject=subject.name, data=str(data), out=str(where / "loop.parquet"), batch=size)
    return float(rows / found["seconds"])


def _child(what: str, **arguments: Any) -> Mapping[str, Any]:
    """Run one job or loop in a process of its own, so that its memory is its own and nothing is warm."""
    command: Sequence[str] = [sys.executable, "-m", "benchmarks.batch_jobs", what, json.dumps(arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{what} failed:\n{ended.stderr[-2000:]}")
    found: Mapping[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
