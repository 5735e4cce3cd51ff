"""`weftline.testing`: its names are lazy, documented, and loaded by no worker that does not use them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from weftline import testing
from weftline.engine.session import load
from weftline.module_reference import PAGES
from weftline.nodes.catalog import CATALOG, FAKES
from weftline.pipelines.spec.builder import Builder

ROOT = Path(__file__).parents[3]

COST = """
import sys
import weftline.testing
print(*[name for name in sys.modules if name.startswith("weftline.testing.")])
"""

STEPS = """
import sys

def loaded(text: str) -> bool:
    return any(name.startswith("weftline.testing") for name in sys.modules)
"""


def test_every_name_is_lazy_and_can_be_imported() -> None:
    assert [name for name in testing.__all__ if getattr(testing, name) is None] == []
    assert dir(testing) == sorted(testing.__all__)
    assert set(testing._HOMES) == set(testing.__all__)


def test_an_unknown_name_lists_the_names() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Ecko'; it has .*Echo"):
        testing.Ecko  # noqa: B018


def test_every_name_and_no_other_has_its_heading_on_the_reference_page() -> None:
    text = (ROOT / PAGES["weftline.testing"]).read_text("utf-8")
    assert sorted(re.findall(r"^## (.+)$", text, re.MULTILINE)) == sorted(testing.__all__)
    assert sorted(re.findall(r"^- `(\w+)`: ", text.partition("\n## ")[0], re.MULTILINE)) == sorted(FAKES)


def test_the_fake_nodes_of_the_catalog_are_public_here() -> None:
    assert {CATALOG[name].partition(":")[2] for name in FAKES} <= set(testing.__all__)


def test_importing_the_package_imports_none_of_its_modules() -> None:
    ended = subprocess.run([sys.executable, "-c", COST], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == []


def test_a_worker_without_fakes_does_not_load_them(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS, "utf-8")
    p = Builder("plain", base_dir=tmp_path)
    text = p.input("text", "text")
    p.output("loaded", p.step("ask", "function", function="steps.py:loaded", text=text).output)
    with load(p).open() as session:
        assert session.run(text="")["loaded"] is False
