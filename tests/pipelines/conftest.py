"""The sample nodes' folder and catalog, and a short way to write a pipeline around one point."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from weftline.errors import PipelineError, Problem
from weftline.pipelines.check.checker import check
from weftline.pipelines.spec.loader import load_yaml

HERE = Path(__file__).parent


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"weftline_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def samples() -> ModuleType:
    """The module of sample nodes."""
    return _module("sample_nodes")


@pytest.fixture(scope="session")
def catalog(samples: ModuleType) -> dict[str, str]:
    return dict(samples.CATALOG)


@pytest.fixture(scope="session")
def device_catalog() -> dict[str, str]:
    """Nodes that say which of their ports they take and give on their device."""
    return dict(_module("device_nodes").CATALOG)


@pytest.fixture
def problems(catalog: dict[str, str]) -> Callable[[str], dict[str, Problem]]:
    """Return every problem of a pipeline file by path; the head of the file is added when it is left out."""

    def find(text: str) -> dict[str, Problem]:
        text = text if text.startswith("weftline:") else f"weftline: 1\nname: sample\n{text}"
        try:
            found = check(load_yaml(text, "sample.yaml", HERE, catalog), catalog)
        except PipelineError as error:
            found = error.problems
        assert len({one.path for one in found}) == len(found), f"one place, two problems: {found}"
        return {one.path: one for one in found}

    return find
