"""The whole check on a fake device, where hardly anything is installed: as on a machine lent for ten minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from tests.engine.gpu_check.planting import hidden, planted
from weftline.engine.gpu_check import command, parts
from weftline.engine.gpu_check.parts import PARTS, Part
from weftline.engine.gpu_check.report import SCHEMA
from weftline.engine.gpu_check.running import Outcome, Skipped, Wrong, judged

HIDDEN = ("pydantic", "msgspec", "networkx", "onnxruntime", "whisper", "ultralytics", "cuda")


def run(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weftline.engine.gpu_check", *arguments],
        capture_output=True, text=True, check=False, timeout=100, env={**os.environ, **environment},
    )  # fmt: skip


def test_it_runs_to_its_end_on_a_fake_where_only_numpy_and_torch_are_installed(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = run(["--device", "fake:0", "--quick", "--json", str(file)], hidden(tmp_path, *HIDDEN))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    jsonschema.validate(found, SCHEMA)
    states = {part["name"]: part["state"] for part in found["parts"]}
    assert list(states) == [part.name for part in PARTS]
    ours = ("surroundings", "share", "costs", "exporter killed", "read-only", "leases", "copy-in", "contexts", "hops")
    assert {name for name, state in states.items() if state == "right"} == {*ours, "fault", "kills"}
    assert "wrong" not in states.values()
    why = {part["name"]: part["why"] for part in found["parts"]}
    assert why["pipeline"] == "package msgspec is not installed"
    assert "fake" in why["llm: kernels"]
    assert found["fake"]
    assert found["finished"]
    assert {bar["met"] for part in found["parts"] for bar in part["bars"]} == {None}
    assert "no figure here is a GPU's" in done.stdout
    assert "bars are not judged on a fake" in done.stdout.splitlines()[-1]
    assert "kills: 200 kills" in done.stderr


def test_without_the_bindings_or_a_driver_parts_are_skipped_by_name(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = run(["--only", "V1", "llm: graphs", "--json", str(file)], hidden(tmp_path, "cuda", "triton"))
    assert done.returncode == 0, done.stdout + done.stderr
    share, graphs = json.loads(file.read_text())["parts"]
    assert (share["row"], share["state"]) == ("V1", "skipped")
    assert share["why"].startswith("package cuda-bindings is not installed")
    assert graphs["state"] == "skipped"
    assert graphs["why"] in ("NVIDIA's driver is not installed here", "package triton is not installed")


def made_of(*made: tuple[str, object]) -> tuple[Part, ...]:
    def raising(error: object) -> object:
        if isinstance(error, Exception):
            raise error
        return error

    return tuple(Part(name, "", "", 10, lambda trial, what=what: raising(what), False) for name, what in made)


def test_a_part_that_is_wrong_ends_it_with_1_and_hides_none_of_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bar = judged("copy", 0.5, 0.85, "of it", at_least=True)
    outcomes = made_of(
        ("good", {"rate_gb_per_s": 2.5}),
        ("bad", Wrong("3 of 4 differ")),
        ("broken", RuntimeError("the driver is gone")),
        ("not here", Skipped("no tool")),
        ("slow", Outcome("slow", "right", bars=[bar])),
    )
    monkeypatch.setattr(command, "PARTS", outcomes)
    assert command.main(["--device", "fake:0", "--json", str(tmp_path / "out.json")]) == 1
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in out[2:-1] if not line.startswith(" ")] == [
        ["good", "right"], ["bad", "wrong"], ["broken", "wrong"], ["not", "here"], ["slow", "right"],
    ]  # fmt: skip
    assert "    bar  copy: 0.5 of it, at least 0.85 wanted: missed by 41%" in out
    made = json.loads((tmp_path / "out.json").read_text())
    jsonschema.validate(made, SCHEMA)
    assert [part["why"] for part in made["parts"]][1:4] == [
        "3 of 4 differ", "RuntimeError: the driver is gone", "no tool",
    ]  # fmt: skip


def test_the_file_is_whole_after_every_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    seen = []

    def look() -> dict[str, int]:
        seen.append(json.loads(file.read_text()))
        return {}

    first, second = made_of(("first", {}), ("second", {}))
    second = Part("second", "", "", 10, lambda trial: look(), False)
    monkeypatch.setattr(command, "PARTS", (first, second))
    assert command.main(["--device", "fake:0", "--json", str(file)]) == 0
    jsonschema.validate(seen[0], SCHEMA)
    assert ([part["name"] for part in seen[0]["parts"]], seen[0]["finished"]) == (["first"], False)
    assert json.loads(file.read_text())["finished"]


def test_a_part_is_not_begun_without_time_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "PARTS", made_of(("late", {})))
    assert command.main(["--device", "fake:0", "--minutes", "0.1"]) == 0
    assert "no time is left of 0.1 minutes; ask for it by --only" in capsys.readouterr().out


def test_parts_are_listed_and_asked_for_by_name_or_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(PARTS)
    assert [part.name for part in parts.chosen(["V9", "share"])] == ["share", "hops"]
    with pytest.raises(SystemExit):
        command.main(["--only", "V99"])
    assert "no part is called 'V99'" in capsys.readouterr().err


def test_a_fake_that_does_not_open_is_wrong_not_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = planted(tmp_path, "from weftline.shm.device import fake\ndel fake.FakeGpu\n")
    done = run(["--device", "fake:0", "--only", "share"], broken)
    assert done.returncode == 1
    assert ["share", "wrong"] in [line.split()[:2] for line in done.stdout.splitlines()]


@pytest.mark.parametrize("device", ["gpu", "cpu", "cuda:x", "fake", ""])
def test_what_is_no_gpu_is_refused_with_an_example(capsys: pytest.CaptureFixture[str], device: str) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--device", device])
    assert ended.value.code == 2
    assert f"--device {device}: expected a GPU, such as cuda:0, or fake:0" in capsys.readouterr().err
