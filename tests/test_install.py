"""Installation: extras resolve without constraints, the wheel is complete, type checkers find an editable install.

The slow tests need a package index and build environments of their own. Limits are on the processor time of pip and uv,
since wall time depends on what else the machine does; both are printed. pip's "looking at multiple versions" is the
message of its backtracking, which no supported combination may need.
"""

from __future__ import annotations

import email
import json
import re
import resource
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
VERSIONS = ("3.11", "3.12", "3.13")
COMBINATIONS = ("onnx,serve", "torch,serve", "llm,serve", "whisper,llm,serve", "batch,onnx", "all")
"""What people install: one model served, a loop around torch, a chat server, a voice assistant, a job, everything."""

RESOLVE_S, INSTALL_S, STUCK_S = 30.0, 90.0, 1200.0
"""Processor seconds for one resolution, for an installation with its first request; wall seconds of one command."""


def test_all_leaves_out_what_is_agpl_and_what_replaces_onnx() -> None:
    named = set(EXTRAS["all"][0].removeprefix("weftline[").removesuffix("]").split(","))
    assert set(EXTRAS) - named == {"all", "dev", "yolo", "gpu"}
    assert not any("ultralytics" in one or "onnxruntime-gpu" in one for extra in named for one in EXTRAS[extra])


def test_no_serving_package_refuses_the_protobuf_of_tritonclient() -> None:
    for extra in set(EXTRAS) - {"dev", "ray"}:  # Ray Serve needs grpcio-reflection itself
        assert not any(one.startswith(("grpcio-health", "grpcio-reflection")) for one in EXTRAS[extra]), extra


def test_every_extra_has_its_row_in_the_guide() -> None:
    guide = (ROOT / "docs/guides/install.md").read_text()
    rows = [line.split("`")[1] for line in guide.splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(set(EXTRAS) - {"dev"})


def test_an_editable_install_is_a_path_that_type_checkers_read() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert tool["distutils"]["editable_wheel"]["mode"] == "compat"


def test_the_page_of_the_package_index_has_no_relative_link() -> None:
    page = (ROOT / PROJECT["readme"]).read_text()
    links = [one or other for one, other in re.findall(r"\]\(([^)]+)\)|(?:src|href)=\"([^\"]+)", page)]
    assert [one for one in links if not one.startswith(("https://", "#"))] == []
    assert {name for name in EXTRAS if name != "dev"} <= set(re.findall(r"`([\w-]+)`", page))


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command and return its standard output; the test fails with its standard error."""
    ended = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=STUCK_S, check=False
    )
    assert ended.returncode == 0, f"{' '.join(map(str, command))}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
    return ended.stdout


def interpreter(version: str) -> Path:
    """Return a working interpreter of a version, of this process, of pyenv or on the path; skip when there is none."""
    own = [Path(sys.base_prefix) / "bin" / f"python{version}"]
    pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python{version}"))
    for path in [*own, *pyenv, Path("/usr/local/bin") / f"python{version}", Path("/usr/bin") / f"python{version}"]:
        if path.is_file():
            return path
    pytest.skip(f"no Python {version} on this machine")


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bin folder of an environment with the current pip, uv and build."""
    folder = tmp_path_factory.mktemp("tools")
    run(sys.executable, "-m", "venv", folder)
    bin_dir = folder / "bin"
    command = [
        bin_dir / "python",
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "-U",
        "pip",
        "uv",
        "build",
        "twine",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=STUCK_S, check=False)
    if "No matching distribution" in ended.stderr or "NewConnectionError" in ended.stderr:
        pytest.skip("no package index can be reached")
    assert ended.returncode == 0, ended.stderr[-4000:]
    return bin_dir


@pytest.fixture(scope="session")
def built(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the wheel and the source distribution; the wheel is built from the source distribution."""
    out = tmp_path_factory.mktemp("dist")
    run(tools / "python", "-m", "build", "-q", "--outdir", out, ROOT)
    (wheel,), (source,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, source


class Spent:
    """Processor and wall seconds of the commands run inside `with`."""

    def __enter__(self) -> Spent:
        self._from = self._processor(), time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.processor_s = self._processor() - self._from[0]
        self.wall_s = time.monotonic() - self._from[1]

    def __str__(self) -> str:
        return f"{self.processor_s:.1f} s of processor time, {self.wall_s:.1f} s"

    @staticmethod
    def _processor() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime


def report(capsys: pytest.CaptureFixture[str], line: str) -> None:
    with capsys.disabled():
        print(f"\n{line}", end="")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("resolution", ["highest", "lowest-direct"])
@pytest.mark.parametrize("version", VERSIONS)
def test_uv_resolves_every_extra_and_combination(
    version: str, resolution: str, tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = interpreter(version)
    for names in ("", *sorted(EXTRAS), *COMBINATIONS):
        extras = [word for name in names.split(",") if name for word in ("--extra", name)]
        with Spent() as spent:
            command = ["-q", "pyproject.toml", *extras, "--python", python, "--resolution", resolution]
            found = run(tools / "uv", "pip", "compile", "--no-header", *command)
        assert found and spent.processor_s < RESOLVE_S, f"{names}: {spent}"
        report(capsys, f"uv {resolution} {version} [{names}]: {spent}")


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    ("version", "names"),
    [
        *(("3.11", extra) for extra in sorted(set(EXTRAS) - {"all"})),
        *((version, names) for version in VERSIONS for names in COMBINATIONS),
    ],
)
def test_pip_resolves_without_backtracking(
    version: str,
    names: str,
    tools: Path,
    built: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Wheels are not downloaded: `fast-deps` reads the metadata out of them."""
    wanted = f"weftline[{names}] @ {built[0].as_uri()}"
    options = ["--dry-run", "--ignore-installed", "--use-feature=fast-deps", "--report", tmp_path / "report.json"]
    with Spent() as spent:
        said = run(tools / "python", "-m", "pip", "--python", interpreter(version), "install", *options, wanted)
    report(capsys, f"pip {version} [{names}]: {spent}")
    assert "looking at multiple versions" not in said
    assert spent.processor_s < RESOLVE_S, spent
    chosen = {one["metadata"]["name"].lower() for one in json.loads((tmp_path / "report.json").read_text())["install"]}
    assert "weftline" in chosen and not {"onnxruntime", "onnxruntime-gpu"} <= chosen
    assert names in ("yolo", "dev") or "ultralytics" not in chosen


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_the_wheel_has_the_package_and_nothing_beside_it(built: tuple[Path, Path]) -> None:
    names = {name for name in zipfile.ZipFile(built[0]).namelist() if ".dist-info/" not in name}
    tracked = run("git", "ls-files", "shm", "nodes", "pipelines", "engine").split()
    rooms = {f"weftline/{file}" for file in tracked if file.endswith(".py")}
    entry = {path.relative_to(ROOT).as_posix() for path in (ROOT / "weftline").glob("*.py")}
    own = [ROOT / "weftline" / folder for folder in ("cli", "gpu_check", "testing")]
    entry |= {path.relative_to(ROOT).as_posix() for folder in own for path in folder.rglob("*.py")}
    data = {"weftline/py.typed", "weftline/engine/jobs/report/report.html.j2"}
    assert names == rooms | entry | data
    assert {"weftline/testing/nodes.py", "weftline/testing/fake_gpu/gpu.py", "weftline/testing/recorder.py"} <= names


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_twine_accepts_the_wheel_and_the_source(tools: Path, built: tuple[Path, Path]) -> None:
    assert run(tools / "python", "-m", "twine", "check", "--strict", *built).count("PASSED") == 2


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_the_metadata_of_the_wheel_is_that_of_the_project(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        (name,) = [one for one in wheel.namelist() if one.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(wheel.read(name))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert set(metadata.get_all("Provides-Extra", [])) == set(EXTRAS)
    versions = [one.rpartition(" ")[2] for one in metadata.get_all("Classifier", []) if "Python :: 3." in one]
    assert tuple(versions) == VERSIONS


REQUEST = """
import subprocess, sys, threading
server = subprocess.Popen(
    [sys.executable, "-m", "weftline", "serve", sys.argv[1], "--port", "0"], stdout=subprocess.PIPE, text=True
)
try:
    address = next(line.split()[1] for line in server.stdout if line.startswith("grpc "))
    subprocess.run([sys.executable, sys.argv[2], address], check=True, timeout=300)
finally:
    server.terminate()
    server.wait(120)
"""


PHOTO = f"photo=@{ROOT / 'examples/data/photo.png'}"


def first_request(python: Path, cwd: Path) -> str:
    """Serve a small ONNX pipeline and ask it with Triton's client, both in the environment of `python`."""
    return run(python, "-c", REQUEST, ROOT / "examples/tabular.yaml", ROOT / "examples/clients/grpc_sync.py", cwd=cwd)


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_new_environment_answers_its_first_request_within_the_limit(
    version: str, built: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the pip that comes with the interpreter."""
    with Spent() as spent:
        run(interpreter(version), "-m", "venv", tmp_path / "new")
        python = tmp_path / "new/bin/python"
        run(python, "-m", "pip", "install", "-q", f"weftline[onnx,serve] @ {built[0].as_uri()}")
        run(python, "-m", "weftline", "check", ROOT / "examples/classifier.yaml", cwd=tmp_path)
        named = run(python, "-m", "weftline", "run", ROOT / "examples/classifier.yaml", "-i", PHOTO, cwd=tmp_path)
        answered = first_request(python, tmp_path)
    report(capsys, f"Python {version}, from nothing to the first answer: {spent}")
    assert "species" in answered and "label: " in named
    assert spent.processor_s < INSTALL_S, spent


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_the_lowest_versions_answer_a_request(tools: Path, built: tuple[Path, Path], tmp_path: Path) -> None:
    python = tmp_path / "low/bin/python"
    run(tools / "uv", "venv", "-q", "--python", interpreter("3.11"), tmp_path / "low")
    wanted = f"weftline[onnx,serve] @ {built[0].as_uri()}"
    run(tools / "uv", "pip", "install", "-q", "--python", python, "--resolution", "lowest-direct", wanted)
    assert "species" in first_request(python, tmp_path)


CORE = (
    *("shm/test_spec.py", "shm/test_allocator.py", "shm/test_arena.py", "shm/test_lease.py"),
    *("nodes/test_template.py", "nodes/test_media.py"),
    *("pipelines/check", "pipelines/spec/test_loader.py", "pipelines/spec/test_json_schema.py"),
    *("pipelines/render/test_reference.py", "engine/protocol", "engine/test_row_groups.py"),
    *("weftline/cli/test_show.py", "weftline/cli/test_run.py", "weftline/testing/test_nodes.py"),
)
"""Tests that need the base dependencies only: memory, nodes, pipeline files, messages, the command line, workers."""

CORE_TOOLS = ("pytest", "pytest-timeout", "hypothesis", "psutil")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("resolution", ["lowest-direct", "highest"])
@pytest.mark.parametrize("version", VERSIONS)
def test_the_core_passes_its_tests_on_each_python(
    version: str, resolution: str, tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the lowest and the newest base dependencies, from wheels only; without torch and the other extras."""
    python = tmp_path / "env/bin/python"
    install = (tools / "uv", "pip", "install", "-q", "--python", python)
    run(tools / "uv", "venv", "-q", "--python", interpreter(version), tmp_path / "env")
    run(*install, "--only-binary", ":all:", "--resolution", resolution, "-r", "pyproject.toml")
    run(*install, *CORE_TOOLS)
    files = [f"tests/{name}" for name in CORE]
    options = ("-m", "not slow", "-p", "no:cacheprovider", "--maxfail", "5")
    with Spent() as spent:
        said = run("env", f"PYTHONPATH={ROOT}", python, "-m", "pytest", *options, *files)
    report(capsys, f"core tests, Python {version}, {resolution}: {spent}")
    assert int(re.findall(r"(\d+) passed", said)[0]) > 500


SOURCE = """
import weftline

reveal_type(weftline.load)
weftline.load(3)
"""


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_type_checkers_find_an_editable_install(checker: str, tools: Path, tmp_path: Path) -> None:
    """With pip's defaults, from a project elsewhere, and with py.typed honoured: a wrong argument is an error."""
    python = tmp_path / "env/bin/python"
    run(tools / "uv", "venv", "-q", "--seed", "--python", interpreter("3.11"), tmp_path / "env")
    run(tools / "uv", "pip", "install", "-q", "--python", python, {"pyright": "pyright[nodejs]"}.get(checker, checker))
    run(python, "-m", "pip", "install", "-q", "-e", ROOT)
    (tmp_path / "project").mkdir()
    (tmp_path / "project/uses.py").write_text(SOURCE)
    options = {"mypy": ["--strict"], "pyright": ["--pythonpath", python]}[checker]
    command = [python, "-m", checker, *options, "uses.py"]
    ended = subprocess.run(
        command, cwd=tmp_path / "project", capture_output=True, text=True, timeout=STUCK_S, check=False
    )
    assert "OpenablePipeline" in ended.stdout, ended.stdout + ended.stderr
    assert "uses.py:5:" in ended.stdout and "1 error" in ended.stdout, ended.stdout
