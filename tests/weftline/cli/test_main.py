"""`weftline check`, `plan`, `nodes`, `schema`, and how the command line ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import weftline
from weftline import errors
from weftline.cli import main as cli
from weftline.cli.exit import exit_codes
from weftline.cli.main import COMMANDS
from weftline.nodes.catalog import CATALOG, FAKES

REAL = [name for name in CATALOG if name not in FAKES]

CHAIN = """
inputs: {x: text}
steps:
  a: {node: echo, inputs: {value: x}}
  b: {node: echo, inputs: {value: a.value}}
outputs: {y: b.value}
"""
WRONG = """
inputs: {x: text}
steps:
  a: {node: echo, delay: 3, inputs: {value: x}}
  b: {node: ecko, inputs: {value: a.value}}
outputs: {y: b.value}
"""


def test_check_says_ok_and_counts(weft, write) -> None:
    file = write(CHAIN)
    assert weft("check", file).out == f"{file}: ok (1 input, 2 steps, 1 output)\n"


def test_check_lists_every_problem_of_every_file(weft, write) -> None:
    good, bad = write(CHAIN), write(WRONG, "bad.yaml")
    ended = weft("check", bad, good, "nowhere.yaml")
    assert ended.code == 2
    assert ended.out == f"{good}: ok (1 input, 2 steps, 1 output)\n"
    assert f"{bad}:6  steps.a.delay: " in ended.err
    assert f"{bad}:7  steps.b.node: unknown node 'ecko'" in ended.err
    assert "did you mean echo?" in ended.err
    assert f"2 problems in {bad}; nothing was started" in ended.err
    assert "nowhere.yaml  there is no such file" in ended.err


def test_check_can_leave_the_machine_out(weft, write) -> None:
    huge = write(CHAIN + "limits: {arena_bytes: 1000000000000}\n")
    assert weft("check", huge).code == 2
    assert weft("check", "--file-only", huge).code == 0


@pytest.mark.parametrize("words", [(), ("--file-only",)])
def test_check_notes_an_objective_without_a_deadline(weft, write, words) -> None:
    objective = CHAIN + "slo: {latency_p99_ms: 500}\n"
    note = (
        "  slo.latency_p99_ms is an objective and fails no request; requests of this pipeline have no deadline. "
        "To fail late requests, set limits.deadline_ms\n"
    )
    assert weft("check", *words, write(objective)).out.endswith(f"output)\n{note}")
    assert note not in weft("check", *words, write(objective + "limits: {deadline_ms: 600}\n")).out


def test_check_works_without_torch(write, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import torch\nclass Model(torch.nn.Module):\n    pass\n")
    file = write(
        "inputs: {x: 'float32[3]'}\n"
        "steps:\n"
        "  a:\n    node: torch\n    module: 'model.py:Model'\n    accepts: {x: 'float32[3]'}\n"
        "    gives: {y: 'float32[3]'}\n    inputs: {x: x}\n"
        "outputs: {y: a.y}\n"
    )
    hidden = "import sys; sys.modules['torch'] = None\nfrom weftline.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    ended = subprocess.run([sys.executable, "-c", hidden, "check", file], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "ok (1 input, 1 step, 1 output)" in ended.stdout


def test_plan_shows_steps_and_cores(weft, write) -> None:
    ended = weft("plan", write(CHAIN), "--cores", "7")
    assert ended.code == 0
    assert "value <- a.value" in ended.out
    assert "of 7" in ended.out


def test_plan_and_check_of_a_serve_file_show_what_is_shared(weft, write, tmp_path: Path) -> None:
    first = Path(write(CHAIN))
    (first.parent / "two.yaml").write_text(first.read_text())
    serve = first.parent / "serve.yaml"
    serve.write_text(f"pipelines: {{one: {{file: {first.name}, expose: [a]}}, two: two.yaml}}\n")
    shown = weft("plan", str(serve)).out
    assert "Loaded once for all of its users" in shown and shown.count(" a: a") == 0
    assert all(user in shown for user in ("one: a", "one.a: a", "two: a"))
    assert "ok (2 pipelines)" in weft("check", str(serve)).out
    (first.parent / "two.yaml").write_text("weftline: 1\n")
    assert "two.yaml" in weft("check", str(serve)).err
    assert weft("plan", str(serve), "--svg").code != 0


def test_plan_and_check_accept_simulated_gpus(weft, write) -> None:
    file = write(CHAIN.replace("a: {node: echo", "a: {node: echo, device: 'cuda:1', device_bytes: 2147483648"))
    assert weft("check", file, "--gpus", "2:24GiB").code == 0
    assert "this machine has cuda:0" in weft("check", file, "--gpus", "1:24GiB").err
    assert "cuda:1 has 2 GiB, and 3.5 GiB of it are claimed" in weft("check", file, "--gpus", "2:2GiB").err
    ended = weft("plan", file, "--gpus", "2:24GiB:L4", "--cores", "7")
    assert ended.out.startswith("Planned for a hypothetical machine: 7 cores, ")
    assert ended.out.splitlines()[0].endswith(", 2 GPUs of 24 GiB each (L4)") and "cuda:1" in ended.out
    assert weft("plan", file, "--gpus", "2", "--mermaid").out.startswith("%% Planned for a hypothetical machine")
    assert "Planned for a hypothetical machine" in weft("plan", file, "--gpus", "2", "--svg").out
    assert "or 2:141GiB:H200" in weft("plan", file, "--gpus", "2xH200").err
    assert weft("check", "--file-only", file, "--gpus", "1").code == 2


def test_what_was_measured_is_found_beside_the_file(weft, write) -> None:
    file = write(CHAIN)
    beside = Path(file).with_suffix(".profile.json")
    beside.write_text(json.dumps({"weftline_profile": 1, "steps": {"a": {"digest": "0" * 16, "on": {}}}}))
    assert "a has changed since it was measured" in weft("plan", file).out
    assert weft("check", file).code == 0
    beside.write_text('{"weftline_profile": 2}')
    refused = weft("check", file)
    assert refused.code == 2 and str(beside) in refused.err and "weftline profile" in refused.err
    with pytest.raises(errors.PipelineError):
        weftline.load(file)


def test_problems_of_a_profile_and_of_its_pipeline_come_at_once(weft, write) -> None:
    file = write(CHAIN.replace("a: {node: echo", "a: {node: echo, device: 'cuda:9'"))
    Path(file).with_suffix(".profile.json").write_text("{")
    refused = weft("check", file, "--gpus", "1")
    assert refused.code == 2
    assert "not valid JSON" in refused.err and "steps.a.device: cuda:9, and this machine has cuda:0" in refused.err
    assert "2 problems in " in refused.err


def test_plan_as_mermaid_goes_to_a_file(weft, write, tmp_path: Path) -> None:
    ended = weft("plan", write(CHAIN), "--mermaid", "--output", str(tmp_path / "plan.mmd"))
    assert (ended.code, ended.out) == (0, "")
    assert (tmp_path / "plan.mmd").read_text().startswith("flowchart LR\n")


def test_plan_as_svg_is_a_picture(weft, write) -> None:
    assert weft("plan", write(CHAIN), "--svg").out.lstrip().startswith("<svg")


def test_plan_of_a_wrong_file_is_refused_like_check(weft, write) -> None:
    ended = weft("plan", write(WRONG))
    assert (ended.code, ended.out) == (2, "")
    assert "nothing was started" in ended.err


def test_a_file_that_cannot_be_written_is_a_clear_error(weft, write, tmp_path: Path) -> None:
    ended = weft("plan", write(CHAIN), "--output", str(tmp_path / "no" / "such" / "folder"))
    assert ended.code == 1
    assert "error: cannot write" in ended.err


@pytest.mark.parametrize(
    "words",
    [
        ("plan",),
        ("plan", "f", "--svg", "--mermaid"),
        ("plan", "f", "--cores", "0"),
        ("nosuch",),
        ("run", "f", "--json", "--stream"),
    ],
)
def test_a_wrong_command_line_ends_with_2(weft, words: tuple[str, ...]) -> None:
    ended = weft(*words)
    assert (ended.code, ended.out) == (2, "")
    assert "Usage: weftline" in ended.err


def test_nodes_lists_the_catalog_without_fakes(weft) -> None:
    listed = weft("nodes").out
    assert {name for name in CATALOG if f"\n{name} " in listed} == set(REAL)
    assert "weftline[onnx]" in listed
    assert [row["name"] for row in json.loads(weft("nodes", "--json").out)] == REAL


def test_nodes_lists_those_whose_framework_is_missing() -> None:
    hidden = (
        "import sys\nfor name in ('torch', 'onnxruntime', 'whisper', 'ultralytics', 'transformers'):\n"
        "    sys.modules[name] = None\nfrom weftline.cli.main import main\nsys.exit(main(['nodes', '--json']))"
    )
    ended = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=True)
    about = {row["name"]: row["about"] for row in json.loads(ended.stdout)}
    assert list(about) == REAL
    assert about["onnx"].startswith("Runs an ONNX file")


def test_one_node_is_shown_with_ports_and_options(weft) -> None:
    shown = weft("nodes", "echo").out
    assert "  value  text\n" in shown
    assert '  type: str, default "text"\n      port type of `value`, in and out.' in shown
    described = json.loads(weft("nodes", "echo", "--json").out)
    assert described["inputs"] == [{"name": "value", "type": "text", "optional": False, "pieces": False, "about": ""}]
    assert [(one["name"], one["default"]) for one in described["options"]] == [
        ("type", "text"),
        ("delay_ms", 0.0),
        ("delay_item_ms", 0.0),
        ("busy", False),
    ]


def test_a_node_whose_ports_depend_on_options_says_on_which(weft) -> None:
    assert "Ports depend on the options (model must be given)." in weft("nodes", "onnx").out


def test_an_unknown_node_is_a_usage_error_with_the_nearest_name(weft) -> None:
    ended = weft("nodes", "whsper")
    assert ended.code == 2
    assert "did you mean whisper?" in ended.err


def test_schema_knows_every_option(weft, tmp_path: Path) -> None:
    assert weft("schema", "--output", str(tmp_path / "schema.json")).code == 0
    written = (tmp_path / "schema.json").read_text()
    assert json.loads(written)["title"] == "Weftline pipeline"
    assert "delay_ms" in written
    assert weft("schema").out == written


def test_version_and_help(weft) -> None:
    assert weft("--version").out == f"weftline {weftline.__version__}\n"
    for command in ("check", "plan", "run", "nodes", "schema"):
        assert f"Examples:\n    weftline {command}" in weft(command, "--help").out


def test_help_and_a_typing_error_list_commands_without_importing_them(weft) -> None:
    script = (
        "import sys\nfrom weftline.cli.main import main\nassert main(['--help']) == 0\n"
        "print(*sorted(name for name in sys.modules if name.startswith(('numpy', 'weftline.'))))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    *shown, imported = ended.stdout.splitlines()
    assert [name for name, (_, about) in COMMANDS.items() if f"  {name:<9}{about}" in shown] == list(COMMANDS)
    light = ("cli", "cli.exit", "cli.main", "errors")
    assert imported.split() == [f"weftline.{name}" for name in light]
    assert "Did you mean 'serve'?" in weft("serv").err


def test_help_documents_the_exit_code_of_every_error(weft) -> None:
    shown = weft("--help").out
    for code, meaning in exit_codes().items():
        assert f"  {code:>3}  {meaning}" in shown
    assert {kind.exit_code for kind in errors.BY_NAME.values()} < set(exit_codes())


def test_an_unexpected_error_is_one_line_and_70(weft, write, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr("weftline.cli.check.make_plan", broken)
    ended = weft("check", write(CHAIN))
    assert ended.code == 70
    assert (
        ended.err == "unexpected error: ZeroDivisionError: two lines; run it again with --verbose for the traceback\n"
    )


def test_verbose_shows_the_traceback_of_an_unexpected_error(write, monkeypatch, capsys) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("weftline.cli.check.make_plan", broken)
    assert cli.main(["--verbose", "check", write(CHAIN)]) == 70
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error_message() -> None:
    script = f"{sys.executable} -m weftline schema | head -c 10"
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert (len(ended.stdout), ended.stderr) == (10, "")


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_no_error(write, closed: str) -> None:
    script = f"{sys.executable} -m weftline run {write(CHAIN)} --input x=hi {closed}"
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "error" not in ended.stderr


def test_check_says_the_limits_of_an_llm_step_on_a_gpu(weft, write) -> None:
    file = write(
        "inputs: {t: text}\nsteps:\n  s: {node: llm, model: some-org/some-model, device: cuda:0, inputs: {prompt: t}}\n"
        "outputs: {y: s.text}\n"
    )
    ended = weft("check", "--gpus", "1:80GiB", file)
    assert ended.code == 0
    assert ended.out.splitlines()[1].strip().startswith("s: at most 256 requests generate at a time (sequences_max), ")
    assert weft("check", "--file-only", file).out.count("\n") == 1


@pytest.mark.parametrize("node", ["mine.py:Mine", "mine_too:Mine"])
def test_without_imports_no_file_is_run(weft, tmp_path: Path, node: str) -> None:
    code = f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
    (tmp_path / f"{node.partition(':')[0].removesuffix('.py')}.py").write_text(code)
    file = tmp_path / "strange.yaml"
    file.write_text(
        "weftline: 1\nname: p\ninputs: {x: text}\n"
        f"steps: {{s: {{node: '{node}', inputs: {{x: x}}}}}}\noutputs: {{y: s.y}}\n"
    )
    for command in (["check"], ["check", "--file-only"], ["plan"]):
        ended = weft(*command, "--no-import", str(file))
        assert ended.code == 2 and "which --no-import does not run" in ended.err
    assert not (tmp_path / "ran").exists()
    weft("check", "--file-only", str(file))
    assert (tmp_path / "ran").exists()


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("step", "pipe", "found"),
    [
        ("{pipeline: sub.yaml, inputs: {x: x}}", "sub.yaml", "there is no file sub.yaml"),
        ("{node: llm, model: 's3://b/m', prompt: '{{ x }}'}", "models.lock.json", "it is no regular file"),
    ],
)
def test_check_does_not_wait_for_pipes_that_a_file_names(weft, write, tmp_path: Path, step, pipe, found) -> None:
    os.mkfifo(tmp_path / pipe)
    file = write(f"inputs: {{x: text}}\nsteps: {{s: {step}}}\noutputs: {{y: s.text}}\n")
    ended = weft("check", "--file-only", file)
    assert ended.code == 2 and found in ended.err
