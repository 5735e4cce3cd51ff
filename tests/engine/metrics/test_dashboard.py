"""The Grafana dashboard asks for series that there are, by labels that they have, and draws them in their units."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from weftline.engine.metrics import series
from weftline.engine.metrics.reference import PROCESS
from weftline.engine.metrics.series import Series

FILE = Path(__file__).parents[3] / "examples/deploy/grafana/weftline.json"
DASHBOARD = json.loads(FILE.read_text("utf-8"))
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
NAME = re.compile(r"\b((?:weftline_|vllm:|process_)\w+)(?:\{([^}]*)\})?")

KNOWN: dict[str, Series] = {one.name: one for one in series.ALL if one.kind != "histogram"}
for one in series.ALL:
    if one.kind == "histogram":
        KNOWN |= {f"{one.name}{suffix}": one for suffix in ("_bucket", "_sum", "_count")}


def labels_of(name: str) -> set[str]:
    return set() if name in PROCESS else {*KNOWN[name].labels, *(["le"] if name.endswith("_bucket") else [])}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_names_series_and_labels_that_there_are(expression: str) -> None:
    named = NAME.findall(expression)
    assert named, "it asks for nothing of ours"
    for name, selector in named:
        assert name in KNOWN or name in PROCESS, name
        assert {*re.findall(r"(\w+)\s*[=!]~?", selector)} <= labels_of(name), name
        for grouped in re.findall(r"by \(([^)]*)\)", expression):
            assert {*re.split(r",\s*", grouped)} <= labels_of(name), name


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_counters_are_read_as_rates_and_gauges_as_they_are(expression: str) -> None:
    for name, _ in NAME.findall(expression):
        kind = KNOWN[name].kind if name in KNOWN else PROCESS[name][0]
        rated = re.search(rf"(?:rate|increase)\({re.escape(name)}[\[{{]", expression) is not None
        assert rated == (kind != "gauge"), name


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: str(panel["title"]))
def test_a_panels_unit_and_legend_fit_to_what_it_draws(panel: dict[str, Any]) -> None:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    assert panel["description"]
    for target in panel["targets"]:
        expression = target["expr"]
        names = [name for name, _ in NAME.findall(expression)]
        if "histogram_quantile" in expression:
            assert unit == "s" and all(name.endswith("_seconds_bucket") for name in names)
        elif all("_bytes" in name for name in names) and "/" not in expression:
            assert unit == ("Bps" if "rate(" in expression else "bytes")
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            assert all(label in labels_of(name) for name in names), label


def test_panels_do_not_lie_on_each_other_and_have_ids_of_their_own() -> None:
    placed: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not placed & cells, panel["title"]
        placed |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len({*ids}) == len(ids)


def test_it_shows_every_row_that_an_operator_looks_for() -> None:
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Overview", "Requests", "Steps", "Memory and workers", "Language models"]
    variables = {one["name"] for one in DASHBOARD["templating"]["list"]}
    assert {*re.findall(r"\$(?!__)\{?(\w+)", FILE.read_text("utf-8"))} <= variables
