from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from weftline.engine.jobs.output import fingerprint
from weftline.engine.jobs.output.fingerprint import pipeline_parts, versions
from weftline.engine.session import plan_of
from weftline.fields import classes, result_fields, written_fields
from weftline.nodes.ports import Port
from weftline.pipelines.placement.plan import Plan, PlannedInput, PlannedOutput, PlannedStep
from weftline.pipelines.spec.graph import Input, StepPolicy
from weftline.pipelines.spec.policy import BatchPolicy, Limits, SequencePolicy

PIPELINE = """\
weftline: 1
name: say
inputs:
  text: text
  limit: {type: float32, default: 1.5}
steps:
  ask: {node: template, template: "Say {{ text }} {{ limit }}"}
  own: {node: "own.py:Own", weights: models/w.bin, inputs: {text: ask.text}, batch: {items_max: 4}}
outputs: {said: own.text}
"""

NODE = """\
from dataclasses import dataclass
from typing import Annotated
from weftline.node import *

@dataclass(frozen=True)
class Config:
    weights: str = ""
    kv_bytes: Annotated[int, RESOURCE] = 0

class Own(BatchNode):
    Config = Config
    @classmethod
    def ports(cls, config, step):
        return Ports((Port("text", PortType.parse("text")),), (Port("text", PortType.parse("text")),))
    def open(self, context): pass
    def run(self, items): return items
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path / "one")


def written(folder: Path, text: str = PIPELINE, name: str = "p.yaml") -> Path:
    (folder / "models").mkdir(parents=True, exist_ok=True)
    (folder / "own.py").write_text(NODE)
    (folder / "models" / "w.bin").write_bytes(b"weights")
    (folder / name).write_text(text)
    return folder


def of(folder: Path, name: str = "p.yaml") -> str:
    return pipeline_parts(plan_of(folder / name))["fingerprint"]


CLASSIFIED = [Plan, PlannedStep, PlannedInput, PlannedOutput, Port, Input, BatchPolicy, Limits, SequencePolicy]


@pytest.mark.parametrize("kind", CLASSIFIED, ids=lambda kind: kind.__name__)
def test_every_field_of_a_plan_has_a_class(kind: type) -> None:
    assert [name for name, found in classes(kind).items() if found is None] == []


def test_a_field_without_a_class_is_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class Bare:
        size: int = 1

    Bare.__module__ = __name__
    with pytest.raises(TypeError, match=r"Bare\.size has no class"):
        result_fields(Bare)


@pytest.mark.parametrize("key", [one.name for one in written_fields(StepPolicy)])
def test_a_key_of_a_step_is_compared_as_its_class_says(folder: Path, key: str) -> None:
    plan = plan_of(folder / "p.yaml")
    steps = [*plan.steps[:-1], dataclasses.replace(plan.steps[-1], **{key: "changed"})]
    changed = dataclasses.replace(plan, steps=tuple(steps))
    assert (pipeline_parts(changed) != pipeline_parts(plan)) == (key in result_fields(StepPolicy))


def test_a_job_begun_without_finite_does_not_resume_with_it(folder: Path) -> None:
    before = of(folder)
    assert of(written(folder, PIPELINE.replace("batch: {", "finite: true, batch: {"))) != before


def test_it_is_the_same_in_another_place_under_another_name(folder: Path, tmp_path: Path) -> None:
    assert of(folder) == of(written(tmp_path / "two", name="other.yaml"), "other.yaml")


@pytest.mark.parametrize(
    ("found", "instead"),
    [
        ("weftline: 1\n", "weftline: 1\n# a comment\nabout: what it does\n"),
        ("items_max: 4}", "items_max: 4, wait_max_ms: 3}"),
        ("batch: {", "instances: 2, batch: {"),
        ("batch: {", "retry: 2, timeout_ms: 100, run_max_ms: 1000, batch: {"),
        ("models/w.bin,", "models/w.bin, kv_bytes: 4096,"),
        ("outputs: {said: own.text}", "outputs: {said: own.text}\nlimits: {requests_max: 7}"),
    ],
)
def test_what_does_not_decide_results_is_not_in_it(folder: Path, found: str, instead: str) -> None:
    before = of(folder)
    assert found in PIPELINE
    assert of(written(folder, PIPELINE.replace(found, instead))) == before


@pytest.mark.parametrize(
    ("found", "instead"),
    [
        ('"Say ', '"Tell '),
        ("default: 1.5", "default: 1.25"),
        ("items_max: 4", "items_max: 8"),
        ("{said: own.text}", "{renamed: own.text}"),
        ("{said: own.text}", "{said: own.text, asked: ask.text}"),
        ("batch: {", "when: 'text == ask.text', batch: {"),
        ("batch: {", "finite: true, batch: {"),
        ("outputs: {said: own.text}", "outputs: {said: own.text}\nlimits: {request_bytes_max: 1000}"),
    ],
)
def test_what_decides_results_is_in_it(folder: Path, found: str, instead: str) -> None:
    before = of(folder)
    assert found in PIPELINE
    assert of(written(folder, PIPELINE.replace(found, instead))) != before


def test_arguments_of_a_function_are_in_it(folder: Path) -> None:
    (folder / "own.py").write_text("def add(text: str, mark: str = '!') -> str:\n    return text + mark\n")
    step = '  own: {node: function, function: "own.py:add", inputs: {text: ask.text}ARGUMENTS}\n'
    whole = PIPELINE[: PIPELINE.index("  own:")] + step + "outputs: {said: own.output}\n"
    found = []
    for arguments in ("", ", arguments: {mark: '?'}", ", arguments: {mark: '.'}"):
        (folder / "p.yaml").write_text(whole.replace("ARGUMENTS", arguments))
        found.append(of(folder))
    assert len(set(found)) == 3


def test_the_files_it_names_are_in_it_one_by_one(folder: Path) -> None:
    before = pipeline_parts(plan_of(folder / "p.yaml"))
    assert set(before) == {"name", "fingerprint", "graph", "file own.py", "file models/w.bin"}
    (folder / "models/w.bin").write_bytes(b"other")
    after = pipeline_parts(plan_of(folder / "p.yaml"))
    assert {name for name in before if before[name] != after[name]} == {"fingerprint", "file models/w.bin"}
    (folder / "own.py").write_text(NODE + "# changed\n")
    assert of(folder) != after["fingerprint"]


def test_a_models_folder_is_its_files_but_not_its_readme(folder: Path) -> None:
    text = PIPELINE.replace("models/w.bin", "models")
    before = pipeline_parts(plan_of(written(folder, text) / "p.yaml"))
    assert "file models/w.bin" in before
    (folder / "models/README.md").write_text("about")
    (folder / "models/.cache").write_text("about")
    assert of(folder) == before["fingerprint"]
    (folder / "models/tokenizer.json").write_text("{}")
    assert of(folder) != before["fingerprint"]


@pytest.mark.parametrize("value", [".", "..", "out", "/"])
def test_a_text_that_happens_to_name_a_folder_is_a_text(folder: Path, value: str) -> None:
    (folder / "out").mkdir()
    text = PIPELINE.replace("models/w.bin", f"'{value}'")
    before = of(written(folder, text))
    (folder / "out" / "part-00000.parquet").write_bytes(b"results")
    (folder / "new.json").write_bytes(b"{}")
    assert of(folder) == before


def test_a_large_file_is_its_size_its_beginning_and_its_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES_MAX", 1000)
    monkeypatch.setattr(fingerprint, "ENDS_BYTES", 100)
    seen = set()
    for content in (b"a" * 2000, b"b" + b"a" * 1999, b"a" * 1999 + b"b", b"a" * 2001):
        (folder / "models/w.bin").write_bytes(content)
        seen.add(of(folder))
    assert len(seen) == 4
    (folder / "models/w.bin").write_bytes(b"a" * 1000 + b"c" + b"a" * 1000)
    assert of(folder) in seen


def test_versions_are_read_without_importing_anything() -> None:
    code = (
        "import sys; from weftline.engine.jobs.output.fingerprint import versions; v = versions();"
        "assert 'numpy' in v and 'python' in v; import weftline.engine.jobs.output.store;"
        "print([m for m in ('torch', 'pyarrow', 'fsspec', 'transformers', 'onnxruntime') if m in sys.modules])"
    )
    path = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": path})  # fmt: skip
    assert done.stdout.strip() == "[]", done.stderr


def test_versions_know_the_kinds_of_devices(folder: Path) -> None:
    assert versions(plan_of(folder / "p.yaml"))["devices"] == "cpu"
