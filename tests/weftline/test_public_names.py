"""What `import weftline` gives, and what it costs."""

import statistics
import subprocess
import sys

import pytest

import weftline
from weftline import errors
from weftline.pipelines.spec.builder import Builder

FOREIGN = ("torch", "grpc", "numpy", "pydantic", "msgspec", "networkx", "yaml", "PIL", "typer", "rich")

COST = """
import sys, time
started = time.perf_counter()
import weftline
took = time.perf_counter() - started
print(took, *sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_every_public_name_can_be_imported_and_nothing_else_is_offered() -> None:
    assert {name for name in weftline.__all__ if getattr(weftline, name) is not None} == set(weftline.__all__)
    assert dir(weftline) == sorted(weftline.__all__)


def test_every_lazy_name_is_public_and_every_public_name_has_a_home() -> None:
    eager = {"PipelineError", "WeftlineError", "__version__"}
    assert set(weftline._HOMES) | eager == set(weftline.__all__)


def test_pipeline_is_the_builder_and_errors_are_the_one_tree() -> None:
    assert weftline.Pipeline is Builder
    assert weftline.PipelineError is errors.PipelineError


def test_an_unknown_name_says_which_ones_there_are() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'lod'; it has .*load"):
        weftline.lod  # noqa: B018


def test_the_version_is_a_version() -> None:
    assert weftline.__version__[0].isdigit()


def test_a_clone_that_is_not_installed_knows_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    def not_installed(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    installed = weftline._version()
    monkeypatch.setattr(metadata, "version", not_installed)
    assert weftline._version() == installed


def test_importing_is_quick_and_pulls_in_no_framework() -> None:
    runs = [
        subprocess.run([sys.executable, "-c", COST], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(3)
    ]
    assert not set(FOREIGN) & set(runs[0][1:])
    assert statistics.median(float(run[0]) for run in runs) < 0.3


def test_a_client_without_its_extra_names_the_command() -> None:
    code = (
        "import sys; sys.modules['grpc'] = None\n"
        "import weftline\n"
        "try:\n    weftline.Client\n"
        "except weftline.errors.MissingPackage as error:\n    print(error)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "pip install 'weftline[client]'" in ended.stdout, ended.stderr
