"""The check from an installed wheel, outside the source tree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest

from weftline.gpu_check.report import sources_digest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("weftline", "engine", "shm", "nodes", "pipelines", "pyproject.toml", "README.md", "LICENSE")


def install_wheel(folder: Path) -> Path:
    """Build the wheel of this source tree, install it without dependencies, and return the environment's Python."""
    tree = folder / "tree"
    tree.mkdir()
    ignored = shutil.ignore_patterns("__pycache__")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tree / name)
    pip = [sys.executable, "-m", "pip"]
    build = [*pip, "wheel", str(tree), "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv")
    (packages,) = (folder / "venv").glob("lib/*/site-packages")
    install = [*pip, "install", "--no-deps", "--no-index", "--target", str(packages), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    (packages / "dependencies.pth").write_text(f"{Path(str(np.__file__)).parents[1]}\n")
    return folder / "venv/bin/python"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_installed_wheel_runs_the_check(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    python, elsewhere, file = install_wheel(tmp_path), tmp_path / "elsewhere", tmp_path / "out.json"
    elsewhere.mkdir()
    parts = ["share", "hops", "llm step", "engine hops", "pipeline"]
    command = [str(python), "-m", "weftline.gpu_check", "--device", "fake:0", "--full", "--json", str(file)]
    done = subprocess.run(
        [*command, "--only", *parts], cwd=elsewhere, capture_output=True, text=True, check=False, timeout=600,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )  # fmt: skip
    assert done.returncode == 3, done.stdout + done.stderr
    found = {part["name"]: part for part in json.loads(file.read_text())["parts"]}
    assert [found[name]["state"] for name in parts] == ["right", "right", "right", "skipped", "skipped"], found
    assert found["llm step"]["figures"]["answers"] == "the same as the CPU's"
    for name, missing in (
        ("engine hops", "benchmarks/device_hop.py"),
        ("pipeline", "examples/voice_photo_assistant.yaml"),
    ):
        assert found[name]["why"] == f"{missing} is in a source tree only, and this is an installed package"
    assert found["share"]["sources"] == sources_digest()
