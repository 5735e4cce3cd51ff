"""References become node classes, and what is wrong with one is said without a traceback."""

from pathlib import Path

import pytest

from weftline.nodes.catalog import CATALOG, dotted, resolve
from weftline.nodes.contract import BatchNode, ConfigError, Node
from weftline.testing.nodes import Echo

NODE = """
from weftline.node import BatchNode, Node, Ports, port

class Shout(BatchNode):
    @classmethod
    def ports(cls, config, step):
        return Ports((port("text", "text"),), (port("text", "text"),))

    def run(self, batch):
        return {"text": [text.upper() for text in batch["text"]]}

class Unfinished(BatchNode):
    pass

class Bare(Node):
    @classmethod
    def ports(cls, config, step):
        return Ports((port("text", "text"),), (port("text", "text"),))

    def run(self, batch):
        return {"text": batch["text"]}

class Rounds(Bare):
    run = None

    def round(self):
        return []

class Unpaired(Shout):
    batch_default = 5

class Empty(Shout):
    batch_default = (0, 1.0)

class Hurried(Shout):
    batch_default = (8, -1.0)

shout = Shout
number = 3
"""


def refused(reference: str, base_dir: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolve(reference, base_dir)
    assert caught.value.option == "node"
    return caught.value


@pytest.mark.parametrize("name", CATALOG)
def test_every_name_of_the_catalog_is_a_node(name: str) -> None:
    node = resolve(name, Path())
    assert issubclass(node, Node)
    assert f"{node.__module__}:{node.__qualname__}" == CATALOG[name] == dotted(name)


def test_a_dotted_path_is_what_it_names() -> None:
    assert resolve("weftline.testing.nodes:Echo", Path()) is Echo
    assert dotted("weftline.testing.nodes:Echo") == "weftline.testing.nodes:Echo"


def test_a_class_of_a_file_is_found_beside_the_pipeline(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(NODE)
    found = resolve("mine.py:Shout", tmp_path)
    assert issubclass(found, BatchNode)
    assert resolve("mine.py:Shout", tmp_path) is found, "a file is run once"


def test_a_class_of_a_package_beside_the_pipeline_is_found(tmp_path: Path) -> None:
    (tmp_path / "my_nodes_for_test").mkdir()
    (tmp_path / "my_nodes_for_test" / "__init__.py").write_text("")
    (tmp_path / "my_nodes_for_test" / "loud.py").write_text(NODE)
    assert resolve("my_nodes_for_test.loud:Shout", tmp_path).__module__ == "my_nodes_for_test.loud"


@pytest.mark.parametrize(
    ("reference", "found", "fix"),
    [
        ("ecko", "unknown node 'ecko'", "did you mean echo?"),
        ("nothing_like_it", "unknown node", ""),
        ("mine.py", "unknown node", "mine.py:YourNode"),
        ("package.module.Class", "unknown node", "package.module:Class"),
        ("gone.py:Shout", "there is no file gone.py", ""),
        ("gone.module:Shout", "there is no Python module gone.module", ""),
        ("mine.py:Gone", "defines no Gone", ""),
        ("mine.py:number", "is no node", ""),
        ("mine.py:Unfinished", "does not define ports, run", ""),
        ("mine.py:Bare", "is derived from neither BatchNode nor StreamNode", "class Bare(BatchNode)"),
        ("mine.py:Rounds", "is derived from neither BatchNode nor StreamNode", "class Rounds(StreamNode)"),
        ("mine.py:Unpaired", "batch_default of mine.py:Unpaired is 5", ""),
        ("mine.py:Empty", "batch_default of mine.py:Empty is (0, 1.0)", ""),
        ("mine.py:Hurried", "batch_default of mine.py:Hurried is (8, -1.0)", ""),
        ("weftline.nodes.gone:Gone", "not part of this installation", ""),
        ("weftline.testing.nodes:Gone", "has no class Gone", ""),
        ("mine.py:", "'mine.py:'", ""),
    ],
)
def test_what_is_no_node_says_why(tmp_path: Path, reference: str, found: str, fix: str) -> None:
    (tmp_path / "mine.py").write_text(NODE)
    error = refused(reference, tmp_path)
    assert found in error.found
    assert fix in error.fix


@pytest.mark.parametrize(
    ("source", "where", "what"),
    [
        ("x = 1\n\nraise RuntimeError('not today')\n", "bad.py:3", "RuntimeError: not today"),
        ("def f():\n    return 1 / 0\n\nf()\n", "bad.py:2", "ZeroDivisionError"),
        ("import no_such_package_here\n", "bad.py:1", "No module named 'no_such_package_here'"),
        ("x = (\n", "bad.py:1", "never closed"),
    ],
)
def test_a_file_that_fails_to_import_names_its_own_line(tmp_path: Path, source: str, where: str, what: str) -> None:
    (tmp_path / "bad.py").write_text(source)
    error = refused("bad.py:Node", tmp_path)
    assert where in error.found
    assert what in error.found
    assert "Traceback" not in error.found
