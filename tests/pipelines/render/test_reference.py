"""The reference page is the one the code writes."""

from pathlib import Path

from weftline.nodes.catalog import CATALOG, FAKES
from weftline.pipelines.render.reference import COMMAND, YAML_PAGE, yaml_reference
from weftline.pipelines.spec.json_schema import catalog_nodes, node_options

ROOT = Path(__file__).parents[3]


def test_the_committed_page_is_up_to_date() -> None:
    assert (ROOT / YAML_PAGE).read_text(encoding="utf-8") == yaml_reference(), f"run `{COMMAND}`"


def test_every_node_and_option_is_on_the_page() -> None:
    page, nodes = yaml_reference(), catalog_nodes()
    assert list(nodes) == list(CATALOG)
    assert [name for name in FAKES if f"### `{name}`" in page] == []
    for name, node in nodes.items():
        section = page.partition(f"### `{name}`\n")[2].partition("\n### ")[0]
        for option, entry in node_options(node).get("properties", {}).items():
            assert name in FAKES or f"| `{option}` |" in section, f"{name}.{option}"
            assert entry.get("description"), f"{name}.{option} has no documentation"
