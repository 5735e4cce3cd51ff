"""The page of metrics and spans is what the code has."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from weftline.engine.metrics import series
from weftline.engine.metrics.reference import COMMAND, PROCESS, metrics_reference
from weftline.engine.metrics.registry import Metrics

ROOT = Path(__file__).parents[3]


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs/reference/metrics.md").read_text("utf-8") == metrics_reference(), f"run: {COMMAND}"


def test_every_series_is_on_it_once_and_nothing_else() -> None:
    listed = re.findall(r"^\| `([\w:]+)` \| (?:counter|gauge|histogram) \|", metrics_reference(), re.MULTILINE)
    assert sorted(listed) == sorted([*(one.name for one in series.ALL), *PROCESS])


def test_the_process_series_match_the_listed_names_and_kinds() -> None:
    families = text_string_to_metric_families(Metrics(dict).render().decode())
    shown = {sample.name: family.type for family in families for sample in family.samples}
    assert {name: kind for name, kind in shown.items() if name.startswith("process_")} == {
        name: kind for name, (kind, _, _) in PROCESS.items()
    }


def test_the_table_keeps_its_own_rules() -> None:
    names = [one.name for one in series.ALL]
    assert len({*names}) == len(names)
    for one in series.ALL:
        assert re.fullmatch(r"weftline_[a-z_]+|vllm:[a-z0-9_]+", one.name), one.name
        assert (one.kind == "counter") == one.name.endswith("_total"), one.name
        assert (one.kind == "histogram") == bool(one.bounds) and list(one.bounds) == sorted({*one.bounds}), one.name
        assert not any(letter in one.about for letter in '\\\n"|'), one.name
        for word, unit in (("_seconds", "seconds"), ("_bytes", "bytes")):
            assert not one.name.removesuffix("_total").endswith(word) or one.unit == unit, one.name
        assert not re.search(r"_(ms|milliseconds|kb|mb|percent)\b", one.name), one.name
