"""Where the kernels can be used, why not elsewhere, and what importing them brings along."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from weftline.engine.llm.kernels import availability
from weftline.engine.llm.kernels.availability import available

ROOT = Path(__file__).resolve().parents[4]
ALLOWED = {"torch", "triton", "numpy", "weftline"}


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Pretend that there is one GPU of compute capability 9.0, and Triton."""
    monkeypatch.setattr(availability, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(availability, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(availability.Path, "is_file", lambda path: True)
    monkeypatch.delenv("CC", raising=False)
    return monkeypatch


def test_a_cpu_is_no_place_for_them() -> None:
    assert available("cpu") == "the kernels are made for CUDA devices, this one is cpu"


def test_a_new_gpu_is(hopper: pytest.MonkeyPatch) -> None:
    assert available("cuda") is None
    assert available("cuda:0") is None


def test_each_thing_that_is_missing_is_named(hopper: pytest.MonkeyPatch) -> None:
    assert available("cuda:1") == "there is no cuda:1, torch finds 1"
    hopper.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert available("cuda") == "the GPU has compute capability 7.5, the kernels need 8.0"
    hopper.setattr(torch.version, "hip", "6.0")
    assert available("cuda") == "this torch is made for AMD GPUs, on which the kernels were never tried"
    hopper.setattr(torch.cuda, "is_available", lambda: False)
    assert available("cuda") == "torch finds no CUDA device"
    hopper.setattr(availability, "find_spec", lambda name: None)
    assert available("cuda") == "package triton is not installed"


def test_without_a_c_compiler_the_reason_names_what_to_install(
    hopper: pytest.MonkeyPatch,
) -> None:
    hopper.setattr(availability, "which", lambda name: "/usr/bin/clang" if name == "clang" else None)
    assert available("cuda") is None
    hopper.setattr(availability, "which", lambda name: None)
    assert available("cuda") == "Triton needs a C compiler and finds none; fix: install gcc or clang, or set CC"
    hopper.setenv("CC", "/opt/nowhere/gcc")
    assert "CC names '/opt/nowhere/gcc', which is not there" in str(available("cuda"))
    hopper.setattr(availability, "which", lambda name: name)
    assert available("cuda") is None
    hopper.setattr(availability.Path, "is_file", lambda path: False)
    assert f"{sysconfig.get_paths()['include']}/Python.h, which is not there" in str(available("cuda"))


@pytest.mark.slow
def test_asking_loads_no_triton() -> None:
    script = (
        "import sys; from weftline.engine.llm.kernels.availability import available; available('cpu'); "
        "print('triton' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ended.stdout.split() == ["False"]


@pytest.mark.slow
def test_kernels_import_nothing_but_torch_triton_numpy_and_themselves() -> None:
    pytest.importorskip("triton")
    names = [f"weftline.engine.llm.kernels.{path.stem}" for path in (ROOT / "engine/llm/kernels").glob("*.py")]
    modules = [name.removesuffix(".__init__") for name in names]
    # what torch and triton bring along by themselves does not count
    script = (
        "import sys, json, importlib, torch, triton, triton.language, triton.compiler, triton.testing\n"
        f"before = set(sys.modules)\nfor name in {modules!r}:\n    importlib.import_module(name)\n"
        "fresh = {name for name in set(sys.modules) - before}\n"
        "roots = {name.partition('.')[0] for name in fresh} - set(sys.stdlib_module_names)\n"
        "print(json.dumps([sorted(roots), sorted(n for n in fresh if n.startswith('weftline'))]))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    roots, ours = json.loads(ended.stdout)
    assert set(roots) <= ALLOWED
    # the reference of the sampling kernel, which is torch alone
    sampling = {f"weftline.engine.llm.sampling{name}" for name in ("", ".draw")}
    parents = {"weftline", "weftline.errors", "weftline.engine", "weftline.engine.llm"}
    assert set(ours) - set(modules) == parents | sampling
