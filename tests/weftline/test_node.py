"""`weftline.node`: its names, its import cost, its reference page, and the examples of its docstring in processes."""

import inspect
import re
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import numpy as np
import pytest

from tests.test_imports import FRAMEWORKS
from weftline import node
from weftline.engine.session import load
from weftline.module_reference import PAGES, module_reference

ROOT = Path(__file__).parents[2]

COST = f"""
import sys
import weftline
before = "weftline.node" in sys.modules
import weftline.node
print(before, *[name for name in {FRAMEWORKS!r} if name in sys.modules])
"""


def docstring_examples() -> list[str]:
    """Return the code blocks of the module's docstring."""
    blocks = re.findall(r"^    .*\n(?:^    .*\n|^\n)*", inspect.getdoc(node) or "", re.MULTILINE)
    return [textwrap.dedent(block) for block in blocks]


def pipeline(folder: Path, example: str, name: str, port: str) -> Path:
    """Write an example, unchanged, and a pipeline of its one node into a folder."""
    (folder / "own.py").write_text(example, "utf-8")
    text = f"""\
weftline: 1
name: own
inputs: {{value: {port}}}
steps:
  own: {{node: "own.py:{name}", inputs: {{{port}: value}}}}
outputs: {{value: own.{port}}}
"""
    (folder / "own.yaml").write_text(text, "utf-8")
    return folder / "own.yaml"


def test_the_public_names_are_those_of_the_module() -> None:
    names = {name for name, value in vars(node).items() if not name.startswith("_")}
    names -= {name for name in names if isinstance(vars(node)[name], types.ModuleType)} | {"annotations"}
    assert names == set(node.__all__)
    assert node.__all__ == sorted(node.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name))


def test_every_name_and_no_other_has_its_heading_on_the_reference_page() -> None:
    text = (ROOT / PAGES["weftline.node"]).read_text("utf-8")
    assert sorted(re.findall(r"^## (.+)$", text, re.MULTILINE)) == sorted(node.__all__)


@pytest.mark.parametrize("name", PAGES)
def test_the_reference_page_is_up_to_date(name: str) -> None:
    text = (ROOT / PAGES[name]).read_text("utf-8")
    assert text == module_reference(name), "run: python -m weftline.module_reference"


def test_every_name_and_method_is_documented() -> None:
    classes = [value for name in node.__all__ if inspect.isclass(value := getattr(node, name))]
    members = [(kind, name) for kind in classes for name in vars(kind) if not name.startswith("_")]
    methods = [
        (kind, name)
        for kind, name in members
        if inspect.isroutine(vars(kind)[name]) or isinstance(vars(kind)[name], property | classmethod)
    ]
    assert [f"{kind.__name__}.{name}" for kind, name in methods if not getattr(kind, name).__doc__] == []
    sections = re.split(r"^#{2,3} ", module_reference("weftline.node"), flags=re.MULTILINE)[1:]
    undocumented = [part.partition("\n")[0] for part in sections if part.rstrip().endswith("```")]
    assert undocumented == []


def test_importing_it_loads_no_framework_and_weftline_does_not_import_it() -> None:
    ended = subprocess.run([sys.executable, "-c", COST], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["False"]


def test_the_first_example_opens_and_answers(tmp_path: Path) -> None:
    with load(pipeline(tmp_path, docstring_examples()[0], "Shout", "text")).open() as session:
        assert session.run(value="quiet")["value"] == "QUIET"


@pytest.mark.slow
def test_the_second_example_opens_and_answers(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    with load(pipeline(tmp_path, docstring_examples()[1], "Mirror", "image")).open() as session:
        assert np.array_equal(session.run(value=image)["value"], image[:, ::-1])
