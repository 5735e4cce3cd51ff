"""Pipelines inside pipelines end somewhere, or it is said why not."""

from pathlib import Path

import pytest

from weftline.nodes.contract import ConfigError
from weftline.pipelines.spec.nested_files import DEPTH_MAX, check_nesting


def file(folder: Path, name: str, *named: str) -> Path:
    steps = "".join(f"  s{place}: {{pipeline: {one}}}\n" for place, one in enumerate(named))
    (folder / name).write_text(f"weftline: 1\nname: n\nsteps:\n  a: {{node: echo}}\n{steps}outputs: {{}}\n")
    return folder / name


def test_a_tree_of_files_is_fine_however_often_one_is_used(tmp_path: Path) -> None:
    for place in range(DEPTH_MAX):
        file(tmp_path, f"{place}.yaml", *[f"{place + 1}.yaml"] * 3 if place < DEPTH_MAX - 1 else [])
    check_nesting(tmp_path / "0.yaml", ())
    with pytest.raises(ConfigError, match="nested too deep"):
        check_nesting(tmp_path / "0.yaml", (tmp_path / "outer.yaml",))


def test_a_file_met_again_further_inside_is_measured_there(tmp_path: Path) -> None:
    for place in range(1, DEPTH_MAX):
        file(tmp_path, f"{place}.yaml", *[f"{place + 1}.yaml"] if place < DEPTH_MAX - 1 else [])
    check_nesting(file(tmp_path, "a.yaml", "1.yaml"), ())
    file(tmp_path, "b.yaml", "1.yaml")
    with pytest.raises(ConfigError, match="nested too deep"):
        check_nesting(file(tmp_path, "a.yaml", "1.yaml", "b.yaml"), ())


def test_a_circle_is_named(tmp_path: Path) -> None:
    file(tmp_path, "a.yaml", "b.yaml")
    file(tmp_path, "b.yaml", "c.yaml")
    path = file(tmp_path, "c.yaml", "b.yaml")
    with pytest.raises(ConfigError, match=r"circle: b.yaml -> c.yaml -> b.yaml$"):
        check_nesting(tmp_path / "a.yaml", ())
    with pytest.raises(ConfigError, match=r"circle: c.yaml -> b.yaml -> c.yaml$"):
        check_nesting(tmp_path / "b.yaml", (path,))


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"steps: [", b"steps: 3", b"steps: {a: 3, b: {pipeline: 4}}", b"- a"]
)
def test_a_file_that_is_no_pipeline_names_no_others(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.yaml").write_bytes(content)
    check_nesting(tmp_path / "a.yaml", ())
    check_nesting(tmp_path / "gone.yaml", ())
