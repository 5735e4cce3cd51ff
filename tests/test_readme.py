"""Every example of README.md runs: commands print what is shown, Python blocks end without an error."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
RUN_S = 300
NOT_RUN = {"make demo", "make test", "pip install"}
"""Starts of the lines of plain blocks that set up a machine; `make test` runs this file."""

SERVED = """
import re, runpy, subprocess, sys
from pathlib import Path
program, client, *words = sys.argv[1:]
server = subprocess.Popen([sys.executable, "-m", "weftline", *words], stdout=subprocess.PIPE, text=True)
try:
    lines = [server.stdout.readline() for _ in range(4)]
    grpc, http = (re.search(rf"^{kind} .*:(\\d+)$", "".join(lines), re.M)[1] for kind in ("grpc", "http"))
    text = Path(client).read_text().replace(":8001", f":{grpc}").replace(":8000", f":{http}")
    exec(compile(text, client, "exec"), {"__name__": "__main__"})
    print("".join(lines), end="")
finally:
    server.terminate()
    server.wait(120)
"""


def blocks(language: str) -> list[str]:
    return [body for kind, body in BLOCKS if kind == language]


def commands() -> list[tuple[str, str]]:
    """Return each command of the console blocks with the output shown below it."""
    parts = [part for body in blocks("console") for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]]
    return [(part.partition("\n")[0], part.partition("\n")[2]) for part in parts]


def words(text: str) -> list[str]:
    return re.findall(r"[\w.+-]+|[^\w\s]", text)


def matches(printed: str, shown: str) -> bool:
    """Compare words; a line `...` stands for any output."""
    parts = [re.escape(" ".join(words(part))) for part in re.split(r"^\.\.\.$", shown, flags=re.MULTILINE)]
    return re.fullmatch(" ?.*? ?".join(parts), " ".join(words(printed)), re.DOTALL) is not None


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Return a folder with the examples and the files that the README shows."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "pairs.jsonl").write_text(*blocks("json"))
    for body in blocks("yaml"):
        if named := re.match(r"# (\w+\.yaml)\n", body):
            (tmp_path / named[1]).write_text(body)
    yield tmp_path


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=RUN_S, env=environment
    )


def test_the_readme_has_no_block_of_an_unknown_kind() -> None:
    plain = [line for body in blocks("") for line in body.splitlines() if not line.startswith(tuple(NOT_RUN))]
    assert plain[0].startswith("$ weftline serve ") and len(plain) == 8, "a plain block that no test runs"
    assert {kind for kind, _ in BLOCKS} == {"", "console", "json", "python", "yaml"}
    assert len(blocks("json")) == 1 and len(blocks("python")) == 2


def test_the_steps_of_the_readme_are_those_of_the_bundled_example() -> None:
    example = yaml.safe_load((ROOT / "examples/voice_photo_assistant.yaml").read_text())
    assert yaml.safe_load(blocks("yaml")[0]) == {"steps": example["steps"]}


@pytest.mark.slow
@pytest.mark.timeout(RUN_S)
@pytest.mark.parametrize(("command", "shown"), commands(), ids=[command[:40] for command, _ in commands()])
def test_the_commands_of_the_readme_print_what_they_show(folder: Path, command: str, shown: str) -> None:
    pytest.importorskip("ultralytics")
    ended = run(folder, "-m", *shlex.split(command))
    printed = ended.stdout if ended.returncode == 0 else ended.stderr
    assert matches(printed, shown), f"{printed}\n{ended.stderr}"


@pytest.mark.slow
@pytest.mark.timeout(RUN_S)
def test_the_session_of_the_readme_answers(folder: Path) -> None:
    pytest.importorskip("ultralytics")
    ended = run(folder, "-c", blocks("python")[0])
    assert "There are 2 red circles. allow" in ended.stdout, ended.stderr


@pytest.mark.slow
@pytest.mark.timeout(RUN_S)
def test_the_clients_of_the_readme_reach_the_server(folder: Path) -> None:
    pytest.importorskip("ultralytics")
    (folder / "client.py").write_text(blocks("python")[1])
    (serve,) = [line for body in blocks("") for line in body.splitlines() if line.startswith("$ ")]
    options = [word if word != "8000" else "0" for word in shlex.split(serve)[2:]]
    ended = run(folder, "-c", SERVED, "serve", "client.py", *options, "--port", "0")
    assert ended.stdout.count("There are 2 red circles.") == 3, ended.stdout + ended.stderr
    assert re.findall(r"^model .*: ready, version 1$", ended.stdout, re.M) == re.findall(r"^model .*$", TEXT, re.M)
