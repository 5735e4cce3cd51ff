"""The whole check on a fake device, where hardly anything is installed: as on a machine lent for ten minutes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from tests.weftline.gpu_check.planting import hidden, planted
from weftline.gpu_check import command, parts, programs
from weftline.gpu_check.context import CheckContext
from weftline.gpu_check.outcomes import CheckOutcome, PartsProcess, Skipped, Wrong, judged
from weftline.gpu_check.parts import PARTS, CheckPart
from weftline.gpu_check.report import SCHEMA

ROOT = Path(__file__).resolve().parents[3]
HIDDEN = ("pydantic", "msgspec", "networkx", "onnxruntime", "whisper", "ultralytics", "cuda")


def run(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weftline.gpu_check", *arguments],
        capture_output=True, text=True, check=False, timeout=900, env={**os.environ, **environment},
    )  # fmt: skip


LLM_HIDDEN = ("pydantic", "whisper", "ultralytics", "cuda")
"""What is hidden from the whole check: without the others transformers, which was installed with them, cannot load."""
CARD_ONLY = ("kernels", "decode 8b", "profile 8b", "transformers 8b", "together 70b fp8", "open as served", "features")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_it_runs_to_its_end_on_a_fake_where_hardly_anything_is_installed(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = run(["--device", "fake:0", "--quick", "--json", str(file)], hidden(tmp_path, *LLM_HIDDEN))
    assert done.returncode == 3, done.stdout + done.stderr
    found = json.loads(file.read_text())
    jsonschema.validate(found, SCHEMA)
    states = {part["name"]: part["state"] for part in found["parts"]}
    assert list(states) == [part.name for part in PARTS]
    hidden_parts = {*(f"llm: {name}" for name in CARD_ONLY), "pipeline", "llm step", "engine hops", "mps", "memcheck"}
    assert {name for name, state in states.items() if state == "skipped"} == hidden_parts
    assert "wrong" not in states.values()
    why = {part["name"]: part["why"] for part in found["parts"]}
    assert why["pipeline"] == "package pydantic is not installed"
    assert "a fake cannot show it" in why["llm: kernels"]
    listed = done.stdout.partition("not shown:\n")[2].splitlines()
    assert all(any(line.startswith(f"    {name}: ") for line in listed) for name in hidden_parts)
    assert found["fake"]
    assert found["finished"]
    assert {bar["met"] for part in found["parts"] for bar in part["bars"]} == {None}
    assert "no figure here is a GPU's" in done.stdout
    assert "bars are not judged on a fake" in done.stdout.splitlines()[-1]
    assert "kills: 200 kills" in done.stderr


def test_parts_of_the_device_run_where_only_numpy_is_installed(tmp_path: Path) -> None:
    done = run(["--device", "fake:0", "--quick", "--only", "share"], hidden(tmp_path, *HIDDEN, "torch"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_the_bindings_or_a_driver_parts_are_skipped_by_name(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = run(["--only", "V1", "llm: graphs", "--json", str(file)], hidden(tmp_path, "cuda", "triton"))
    assert done.returncode == 3, done.stdout + done.stderr
    assert "not shown:" in done.stdout
    share, graphs = json.loads(file.read_text())["parts"]
    assert (share["row"], share["state"]) == ("V1", "skipped")
    assert share["why"].startswith("package cuda-bindings is not installed")
    assert graphs["state"] == "skipped"
    assert graphs["why"] in ("NVIDIA's driver is not installed here", "package triton is not installed")


@pytest.mark.slow
def test_it_runs_in_the_root_of_a_source_tree_without_an_installation(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    for folder in ("weftline", "engine", "shm", "nodes", "pipelines"):
        shutil.copytree(ROOT / folder, root / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    packages = sorted({str(Path(str(np.__file__)).parents[1])})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(packages)}
    command = [sys.executable, "-S", "-m", "weftline.gpu_check", "--device", "fake:0", "--only", "share"]
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=300
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    where = [sys.executable, "-S", "-c", "import weftline.gpu_check as it; print(it.__file__)"]
    found = subprocess.run(where, cwd=root, env=environment, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).is_relative_to(root)


def made_of(*made: tuple[str, object]) -> tuple[CheckPart, ...]:
    def raising(error: object) -> object:
        if isinstance(error, Exception):
            raise error
        return error

    return tuple(CheckPart(name, "", "", 10, lambda context, what=what: raising(what), False) for name, what in made)


def test_a_part_that_is_wrong_ends_it_with_1_and_hides_none_of_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bar = judged("copy", 0.5, 0.85, "of it", at_least=True)
    outcomes = made_of(
        ("good", {"rate_gb_per_s": 2.5}),
        ("bad", Wrong("3 of 4 differ")),
        ("broken", RuntimeError("the driver is gone")),
        ("not here", Skipped("no tool")),
        ("slow", CheckOutcome("slow", "right", bars=[bar])),
    )
    monkeypatch.setattr(command, "PARTS", outcomes)
    assert command.main(["--device", "fake:0", "--json", str(tmp_path / "out.json")]) == 1
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in out[2:-1] if not line.startswith(" ") and not line.endswith(":")] == [
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
    second = CheckPart("second", "", "", 10, lambda context: look(), False)
    monkeypatch.setattr(command, "PARTS", (first, second))
    assert command.main(["--device", "fake:0", "--json", str(file)]) == 0
    jsonschema.validate(seen[0], SCHEMA)
    assert ([part["name"] for part in seen[0]["parts"]], seen[0]["finished"]) == (["first"], False)
    assert json.loads(file.read_text())["finished"]


def test_a_part_is_not_begun_without_time_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "PARTS", made_of(("late", {})))
    assert command.main(["--device", "fake:0", "--minutes", "0.1"]) == 3
    assert "s of 0.1 minutes are left, it may take 10 s; call again" in capsys.readouterr().out


def states(file: Path) -> dict[str, tuple[str, int]]:
    return {part["name"]: (part["state"], part["call"]) for part in json.loads(file.read_text())["parts"]}


def test_a_second_call_goes_on_with_what_the_first_did_not_show(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    asked = ["--device", "fake:0", "--json", str(file)]
    found = {"good": {"a": 1}, "bad": Wrong("3 of 4 differ"), "later": Skipped("no tool")}
    monkeypatch.setattr(command, "PARTS", made_of(*found.items()))
    assert command.main(asked) == 1
    monkeypatch.setattr(command, "PARTS", made_of(("good", Wrong("ran again")), ("bad", {}), ("later", {})))
    assert command.main(asked) == 1
    assert states(file) == {"good": ("right", 1), "bad": ("wrong", 1), "later": ("right", 2)}
    assert "good                   right    in call 1" in capsys.readouterr().out
    monkeypatch.setattr(parts, "PARTS", command.PARTS)
    assert command.main([*asked, "--only", "bad", "later"]) == 0  # what is wrong is repeated when it is named
    assert states(file)["bad"] == ("right", 3)
    assert command.main([*asked, "--again"]) == 1
    assert states(file)["good"] == ("wrong", 4)
    jsonschema.validate(json.loads(file.read_text()), SCHEMA)


def test_outcomes_of_something_else_are_not_gone_on_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    monkeypatch.setattr(command, "PARTS", made_of(("good", {})))
    assert command.main(["--device", "fake:0", "--json", str(file)]) == 0
    for changed, said in ((["--quick"], "it is of quick False"), (["--device", "fake:1"], "it is of device fake:0")):
        with pytest.raises(SystemExit) as ended:
            command.main(["--device", "fake:0", "--json", str(file), *changed])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err
    file.write_text("{}")
    with pytest.raises(SystemExit):
        command.main(["--device", "fake:0", "--json", str(file)])
    assert "it is not a report of this check" in capsys.readouterr().err


def test_skipped_parts_are_listed_and_set_the_exit_code_unless_allowed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "PARTS", made_of(("good", {}), ("not here", Skipped("no tool"))))
    assert command.main(["--device", "fake:0"]) == 3
    assert capsys.readouterr().out.splitlines()[-3:-1] == ["not shown:", "    not here: no tool"]
    assert command.main(["--device", "fake:0", "--allow-skipped"]) == 0


def test_a_bar_that_was_missed_is_listed_and_ends_it_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = CheckOutcome("slow", "right", bars=[judged("copy", 0.5, 0.85, "of it", at_least=True)])
    monkeypatch.setattr(command, "PARTS", made_of(("slow", slow)))
    assert command.main(["--device", "fake:0"]) == 1
    assert capsys.readouterr().out.splitlines()[-3:-1] == [
        "bars missed:", "    slow: copy: 0.5 of it, at least 0.85 wanted: missed by 41%",
    ]  # fmt: skip


def test_what_ran_before_the_code_changed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "PARTS", made_of(("good", {})))
    asked = ["--device", "fake:0", "--json", str(tmp_path / "out.json")]
    assert command.main(asked) == 0
    monkeypatch.setattr(command, "sources_digest", lambda: "another")
    capsys.readouterr()
    assert command.main(asked) == 0
    assert "shown before the code changed: good" in capsys.readouterr().out


def context_of(**given: object) -> CheckContext:
    return CheckContext("llm: transformers 8b", "cuda:0", False, False, time.monotonic() + 60, **given)


@pytest.mark.parametrize(("ours", "met"), [(6600.0, True), (5900.0, False)])
def test_transformers_rate_is_compared_with_that_of_the_closed_loop(
    monkeypatch: pytest.MonkeyPatch, ours: float, met: bool
) -> None:
    monkeypatch.setattr(programs, "require_driver", lambda: None)
    theirs = CheckOutcome("transformers 8b", "right", figures={"tokens_per_s": 2000.0})
    monkeypatch.setattr(PartsProcess, "run", lambda self, name, asked, limit_s: theirs)
    earlier = {"llm: together 8b": CheckOutcome("llm: together 8b", "right", figures={"tokens_per_s": ours})}
    (bar,) = programs.llm_part("transformers 8b")(context_of(earlier=earlier)).bars
    assert bar.met is met
    theirs.bars.clear()
    with pytest.raises(Skipped, match="has no rate to compare with"):
        programs.llm_part("transformers 8b")(context_of())


def test_parts_are_listed_and_asked_for_by_name_or_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(PARTS)
    assert [part.name for part in parts.chosen(["V9", "share"])] == ["share", "hops"]
    with pytest.raises(SystemExit):
        command.main(["--only", "V99"])
    assert "no part is called 'V99'" in capsys.readouterr().err


def test_a_fake_that_does_not_open_is_wrong_not_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = planted(tmp_path, "from weftline.testing.fake_gpu import gpu\ndel gpu.FakeGpu\n")
    done = run(["--device", "fake:0", "--only", "share"], broken)
    assert done.returncode == 1
    assert ["share", "wrong"] in [line.split()[:2] for line in done.stdout.splitlines()]


@pytest.mark.parametrize("device", ["gpu", "cpu", "cuda:x", "fake", ""])
def test_what_is_no_gpu_is_refused_with_an_example(capsys: pytest.CaptureFixture[str], device: str) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--device", device])
    assert ended.value.code == 2
    assert f"--device {device}: expected a GPU, such as cuda:0, or fake:0" in capsys.readouterr().err
