"""The picture of a plan is well-formed SVG with every step, port and wire in it."""

import dataclasses
import xml.etree.ElementTree as ET
from pathlib import Path

from weftline.nodes.ports import KINDS
from weftline.pipelines.placement.place import Machine
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.render.svg import COLOURS, explain_svg
from weftline.pipelines.spec.loader import load_yaml

HERE = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"


def drawn(text: str, catalog: dict[str, str]) -> ET.Element:
    return ET.fromstring(explain_svg(make_plan(load_yaml(text, "x.yaml", HERE), Machine(4, 8 << 30), catalog)))


def test_everything_of_the_plan_is_in_the_picture(samples, catalog) -> None:
    root = drawn(samples.ASSISTANT, catalog)
    texts = {one.text for one in root.iter(f"{SVG}text")}
    assert {"voice-photo-assistant", "hear", "see", "answer_prompt", "answer", "guard"} <= texts
    assert {"question", "photo", "transcript", "verdict", "see__detections", "hear__text"} <= texts
    wires = [one for one in root.iter(f"{SVG}path") if one.get("fill") == "none"]
    assert len(wires) == 6 + 3
    ports = len(list(root.iter(f"{SVG}circle")))
    assert ports == (1 + 1) + (1 + 2) + (2 + 1) + (1 + 1) + (1 + 2)


def test_all_text_and_boxes_lie_inside_the_page(samples, catalog) -> None:
    root = drawn(samples.ASSISTANT, catalog)
    width, height = float(root.get("width")), float(root.get("height"))
    group = root.find(f"{SVG}g")
    for rect in group.iter(f"{SVG}rect"):
        assert float(rect.get("x")) + float(rect.get("width")) <= width
        assert float(rect.get("y")) + float(rect.get("height")) <= height


def test_conditions_and_fallbacks_are_dotted_and_constants_not_drawn(catalog) -> None:
    root = drawn(
        "weftline: 1\nname: n\ninputs: {q: text, n: json, rows: 'list[text]'}\nsteps:\n"
        "  a: {node: echo, fallback: {value: Sorry}, retry: 1, inputs: {value: q},\n"
        f"      when: \"n.k == '{'x' * 90}'\"}}\n"
        "  each: {node: echo, map: value, inputs: {value: rows}}\n"
        "outputs: {y: a.value, z: each.value}\n",
        catalog,
    )
    wires = [one for one in root.iter(f"{SVG}path") if one.get("fill") == "none"]
    assert sorted(bool(one.get("stroke-dasharray")) for one in wires) == [False] * 4 + [True] * 2
    texts = [one.text for one in root.iter(f"{SVG}text")]
    assert {"a/fallback", "else a/fallback", "tried again 1 time", "text, may be absent", "list[text]"} <= {*texts}
    assert "a/fallback/value" not in texts
    assert [len(text) for text in texts if text.startswith("when")] == [64], "a long condition is cut short"
    group = root.find(f"{SVG}g")
    boxes = [one for one in group.iter(f"{SVG}rect") if one.get("rx") == "8"]
    heights = sorted(float(one.get("height")) for one in boxes)
    assert heights[-1] - heights[0] == 3 * 16, "a line for each note"


def test_every_kind_of_value_has_a_colour() -> None:
    assert set(COLOURS) == set(KINDS)


def test_names_are_escaped(catalog) -> None:
    text = (
        "weftline: 1\nname: n\ninputs: {q: text}\nsteps: {a: {node: echo, inputs: {value: q}}}\noutputs: {y: a.value}\n"
    )
    plan = make_plan(load_yaml(text, "x.yaml", HERE), Machine(4, 8 << 30), catalog)
    hostile = dataclasses.replace(plan, name="<script>&")
    assert ET.fromstring(explain_svg(hostile)).find(f"{SVG}title").text == "<script>&"
