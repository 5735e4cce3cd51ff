"""Missing packages of a plan are found without importing any."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from weftline.nodes.catalog import CATALOG, ENGINES, resolve
from weftline.pipelines.check.packages import MODULES, missing_packages


def steps(**nodes: str) -> Any:
    return [
        SimpleNamespace(name=name, node=CATALOG.get(node, node), options={"model": "m"}, control="")
        for name, node in nodes.items()
    ]


def test_all_missing_packages_are_named_with_one_command() -> None:
    found = missing_packages(
        steps(see="onnx", hear="whisper", look="onnx", say="echo"), Path(), lambda module: module == "torch"
    )
    assert found == (
        "packages that steps need are not installed: onnxruntime (see, look); whisper or faster_whisper (hear)."
        " fix: pip install 'weftline[onnx,whisper]'"
    )


def test_nothing_is_said_when_everything_is_there() -> None:
    assert missing_packages(steps(see="onnx", hear="whisper"), Path(), lambda module: True) == ""
    assert missing_packages(steps(see="onnx"), Path(), lambda module: module == "onnxruntime") == ""
    assert missing_packages(steps(own="mine.py:Node"), Path(), lambda module: False) == ""


def test_a_classifier_in_onnx_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m/model.onnx").touch()
    found = missing_packages(steps(sort="classify"), tmp_path, lambda module: False)
    assert "onnxruntime (sort)" in found and "torch" not in found


def test_every_extra_of_a_built_in_node_has_its_modules() -> None:
    paths = [*CATALOG.values(), *(path for engines in ENGINES.values() for path in engines.values())]
    extras = {getattr(resolve(path, Path()), "extra", "") for path in paths}
    assert extras - {""} <= MODULES.keys()
