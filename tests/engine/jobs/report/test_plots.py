"""Plots: any amount of data, equal bytes for equal figures, and nothing of the outside in them."""

import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from tests.engine.jobs.report.made import HOSTILE, tally
from weftline.engine.jobs.progress import RatePoint
from weftline.engine.jobs.report import plots
from weftline.errors import MissingPackage


def texts(svg: str) -> list[str]:
    """Return the words in a drawing, which is well-formed."""
    return ["".join(one.itertext()).strip() for one in ElementTree.fromstring(svg).iter() if one.tag.endswith("}text")]


def test_without_data_there_is_no_plot() -> None:
    assert plots.throughput([]) == plots.latencies({}) == plots.lengths({"a": {}}) == plots.errors([]) == ""
    assert plots.utilisation([]) == plots.utilisation([("see", float("nan"), 0.0)]) == ""
    assert plots.throughput([RatePoint(1.0, float("nan"))]) == ""


@pytest.mark.parametrize("count", [1, 2, 3, 5000])
def test_throughput_is_drawn_from_any_number_of_points(count: int) -> None:
    svg = plots.throughput([RatePoint(float(n), 0.0 if n % 2 else 5.0) for n in range(count)])
    assert "rows/s" in texts(svg) and len(svg) < 60_000
    assert f"time ({'s' if count < 300 else 'min'})" in texts(svg)


@pytest.mark.parametrize("counts", [{20: 1}, {-60: 5}, {20: 7, 21: 1}, {-60: 1, 150: 1}])
def test_a_histogram_is_drawn_from_any_buckets(counts: dict[int, int]) -> None:
    svg = plots.latencies({"see": counts})
    assert f"see  ({sum(counts.values())})" in texts(svg) or f"see ({sum(counts.values())})" in texts(svg)
    assert "time of an item (ms)" in texts(svg)


def test_histograms_keep_every_item_and_bars_stand_at_their_values() -> None:
    assert plots._merged({1: 1, 2: 1, 3: 1, 0: 1, -1: 1}, 2) == {1: 2, 2: 1, 0: 2}
    labels = texts(plots.lengths({"answer": {-60: 9, 40: 3}}))
    assert any(re.fullmatch(r"answer\s+\(3\)", one) for one in labels), "empty texts have no place"
    assert "100" in labels, "bucket 40 ends at 100 characters"


@pytest.mark.slow
def test_many_steps_are_cut_to_the_busiest_and_axes_say_what_they_are() -> None:
    svg = plots.utilisation([(f"step{n}", n / 100, float(n)) for n in range(40)])
    words = texts(svg)
    assert "step39" in words and "step28" in words and "step27" not in words
    assert "39 %, 39 s" in words and any("(%)" in word for word in words)
    assert len(texts(plots.latencies({f"s{n}": {20: 1} for n in range(40)}))) < 60
    long = [f"a_step_with_a_long_name_{n}" for n in range(3)]
    names = texts(plots.utilisation([(name, 0.5, 1.0) for name in long]))
    assert {"a_step_with…long_name_0", "a_step_with…long_name_2"} < set(names), "their ends tell them apart"
    assert "1000000" in texts(plots.errors([("a", 1_000_000)])) and "1e6" not in texts(plots.errors([("a", 1_000_000)]))
    assert "150 %, 3 s" in texts(plots.utilisation([("llm", 1.5, 3.0)])), "above all it can be, and said"


def test_equal_figures_give_equal_bytes_and_ids_that_no_other_plot_has() -> None:
    steps = {name: one.run_ms for name, one in tally(200).steps.items()}
    first, again = plots.latencies(steps), plots.latencies(steps)
    assert first == again
    ids = [
        set(re.findall(r'\bid="([^"]*)"', svg))
        for svg in (first, plots.lengths({"a": {20: 1}}), plots.errors([("a", 1)]))
    ]
    assert ids[0] and not (ids[0] & ids[1] or ids[0] & ids[2] or ids[1] & ids[2])
    for used in re.findall(r'(?:href="#|url\(#)([^")]*)', first):
        assert used in ids[0]


def test_colours_and_font_are_the_pages_and_there_is_no_date() -> None:
    svg = plots.errors([("see", 3)])
    assert "var(--one)" in svg and "var(--ink)" in svg and "var(--font)" in svg
    assert "#0a0b" not in svg and "DejaVu" not in svg and "metadata" not in svg and "<?xml" not in svg
    head = svg[: svg.index(">")]
    assert "viewBox" in head and " width=" not in head and " height=" not in head


def test_hostile_names_are_words_in_the_drawing() -> None:
    for svg in (
        plots.errors([(HOSTILE, 1), ("$x^{", 2), ("", 3)]),
        plots.latencies({HOSTILE: {1: 1}, "日本語": {1: 1}}),
    ):
        assert "<script" not in svg and "<img" not in svg
        assert any("</td><scrip" in word for word in texts(svg))
    assert "$x^{$" in texts(plots.errors([("$x^{$", 2)])), "no mathematics"


def test_a_plot_leaves_matplotlibs_settings_alone() -> None:
    import matplotlib
    from matplotlib._pylab_helpers import Gcf

    before = dict(matplotlib.rcParams)
    plots.errors([("see", 3)])
    assert dict(matplotlib.rcParams) == before
    assert not Gcf.figs, "no figure stays"


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackage, match=r"weftline\[batch\]"):
        plots.errors([("see", 3)])
