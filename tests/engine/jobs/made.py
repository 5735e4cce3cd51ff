"""Small jobs for tests: data sets, runners without a process, and pipelines with one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from weftline.engine.jobs.progress import Tally
from weftline.engine.jobs.rows import BlockResult, RowBlock, RowError, row_seed, usable
from weftline.engine.jobs.runners.factory import RunnerFactory
from weftline.engine.jobs.spec import DataSpec, JobSpec, OutSpec
from weftline.nodes.ports import PortType

WORDS = """
weftline: 1
name: words
inputs: {text: text}
steps:
  work:
    node: function
    function: steps.py:work
    inputs: {text: text}
    batch: {items_max: 4}
    instances: 1
  end:
    node: template
    template: "{{ text }}."
    inputs: {text: work.output}
outputs:
  answer: end.text
"""

STEPS = """
import os, weftline

def work(text: str) -> str:
    if "die" in text:
        os.kill(os.getpid(), 9)
    if "fail" in text:
        raise ValueError("the text says so")
    return f"{text.upper()} {weftline.current().seed}"
"""


def write_pipeline(folder: Path, text: str = WORDS, steps: str = STEPS) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "steps.py").write_text(steps)
    (folder / "words.yaml").write_text(text)
    return folder / "words.yaml"


def write_rows(file: Path, texts: Iterable[Any]) -> Path:
    file.write_text("".join(json.dumps({"text": text, "n": n}) + "\n" for n, text in enumerate(texts)))
    return file


def spec_of(folder: Path, data: Path, out: str = "out", **more: Any) -> JobSpec:
    """Return a job with parts of 10 rows; names of fields of DataSpec, OutSpec and JobSpec go where they belong."""
    parts: dict[type, dict[str, Any]] = {DataSpec: {}, OutSpec: {"part_rows": 10}, JobSpec: {}}
    for name, value in more.items():
        kind = next(kind for kind in (JobSpec, DataSpec, OutSpec) if name in kind.__dataclass_fields__)
        parts[kind][name] = value
    return JobSpec(
        folder / "words.yaml",
        DataSpec((str(data),), **parts[DataSpec]),
        OutSpec(str(folder / out), **parts[OutSpec]),
        **parts[JobSpec],
    )


class Plain:
    """Answers rows in threads of this process.

    asked: the row numbers of the blocks that it was given.
    """

    def __init__(self, answer: Callable[[str, int], str], block_rows: int = 4) -> None:
        self.ahead, self.block_rows = 3, block_rows
        self.inputs: Mapping[str, PortType] = {"text": PortType("text")}
        self.outputs: Mapping[str, PortType] = {"answer": PortType("text")}
        self.repeatable: Mapping[str, str] = {"answer": "exact"}
        self.asked: list[Sequence[int]] = []
        self._answer = answer
        self._pool = ThreadPoolExecutor(3)

    def submit(self, block: RowBlock) -> Future[BlockResult]:
        self.asked.append([block.row_number_of(row) for row in range(len(block))])
        return self._pool.submit(self._block, block)

    def _block(self, block: RowBlock) -> BlockResult:
        errors: dict[int, RowError] = {}
        answers: list[str | None] = []
        for row in range(len(block)):
            answers.append(None)
            given = usable(block, row, errors)
            if given is None:
                continue
            try:
                answers[-1] = self._answer(given["text"], row_seed(0, block.row_number_of(row)))
            except ValueError as error:
                errors[row] = RowError("work", "StepError", str(error))
        tally = Tally()
        tally.of("work").add(1.0, 0.5, 4, len(block))
        return BlockResult({"answer": answers}, errors, tally)

    def figures(self) -> Mapping[str, float]:
        return {}

    def wait_for_figures(self) -> None: ...

    def close(self) -> None:
        self._pool.shutdown()


def answer_plainly(text: str, seed: int) -> str:
    """Return what the pipeline WORDS answers, or raise ValueError where it fails."""
    if "fail" in text:
        raise ValueError("the text says so")
    return f"{text.upper()} {seed}."


def plain(answer: Callable[[str, int], str] = answer_plainly, block_rows: int = 4) -> RunnerFactory:
    return RunnerFactory("rows", "", block_rows, 10, {"answer": "exact"}, lambda progress: Plain(answer, block_rows))


def visible(folder: Path, out: str = "out") -> dict[str, bytes]:
    """Return every file of the results but the records, whose times differ."""
    root = folder / out
    if root.is_file():
        return {out: root.read_bytes()} | {
            name: data for name, data in visible(folder, out + ".job").items() if name == "_errors.jsonl"
        }
    return {
        str(file.relative_to(root)): file.read_bytes()
        for file in sorted(root.rglob("*"))
        if file.is_file() and "_weftline" not in file.parts
    }
