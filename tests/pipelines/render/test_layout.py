"""Boxes of a drawing never overlap, stand in order, and wires run forward."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from weftline.pipelines.render.layout import GAP_X, Box, Layout, Line, arrange


def overlaps(layout: Layout, boxes: list[Box]) -> list[tuple[str, str]]:
    def apart(one: Box, other: Box) -> bool:
        (x, y), (other_x, other_y) = layout.corners[one.key], layout.corners[other.key]
        beside = x + one.width <= other_x + 0.01 or other_x + other.width <= x + 0.01
        return beside or y + one.height <= other_y + 0.01 or other_y + other.height <= y + 0.01

    return [(one.key, other.key) for one, other in itertools.combinations(boxes, 2) if not apart(one, other)]


def through(points, layout: Layout, boxes: list[Box]) -> list[str]:
    """Return the boxes that a line runs through: level stretches by their height, bends anywhere beside a box."""
    hit = []
    for place, ((x, y), (next_x, next_y)) in enumerate(itertools.pairwise(points)):
        level = place % 2 == 0
        assert y == next_y or not level
        for box in boxes:
            left, top = layout.corners[box.key]
            beside = left + 0.01 < next_x and x < left + box.width - 0.01
            if beside and (not level or top < y < top + box.height):
                hit.append(box.key)
    return hit


@st.composite
def graphs(draw) -> tuple[list[Box], list[Line]]:
    count = draw(st.integers(1, 9))
    heights = draw(st.lists(st.integers(30, 120), min_size=count, max_size=count))
    boxes = [Box(f"b{place}", 60.0 + 7 * (place % 5), float(height)) for place, height in enumerate(heights)]
    pairs = [(low, high) for high in range(count) for low in range(high)]
    chosen = draw(st.lists(st.sampled_from(pairs), max_size=14, unique=True)) if pairs else []
    return boxes, [Line(f"b{low}", 15.0, f"b{high}", 20.0) for low, high in chosen]


@settings(max_examples=80, deadline=None)
@given(graphs())
def test_no_boxes_overlap_and_no_wire_runs_back_or_through_a_box(graph: tuple[list[Box], list[Line]]) -> None:
    boxes, lines = graph
    layout = arrange(boxes, lines)
    assert overlaps(layout, boxes) == []
    assert len(layout.points) == len(lines)
    for points in layout.points:
        xs = [x for x, _ in points]
        assert xs == sorted(xs)
        assert xs[-1] - xs[0] >= GAP_X - 0.01
        assert through(points, layout, boxes) == []
    for box in boxes:
        x, y = layout.corners[box.key]
        assert min(x, y) >= -0.01
        assert x + box.width <= layout.width + 0.01
        assert y + box.height <= layout.height + 0.01


def test_a_chain_is_drawn_straight() -> None:
    boxes = [Box(name, 80.0, 40.0) for name in "abc"]
    layout = arrange(boxes, [Line("a", 20.0, "b", 20.0), Line("b", 20.0, "c", 20.0)])
    assert [round(layout.corners[name][1], 3) for name in "abc"] == [0, 0, 0]


def test_the_last_boxes_share_the_last_column() -> None:
    boxes = [Box("in", 50.0, 30.0), Box("a", 80.0, 40.0), Box("b", 80.0, 40.0)]
    boxes += [Box("early", 50.0, 30.0, last=True), Box("late", 50.0, 30.0, last=True)]
    lines = [Line("in", 1, "a", 1), Line("a", 1, "b", 1), Line("a", 1, "early", 1), Line("b", 1, "late", 1)]
    layout = arrange(boxes, lines)
    assert layout.corners["early"][0] == layout.corners["late"][0] > layout.corners["b"][0]


def test_an_input_stands_right_before_its_first_reader() -> None:
    boxes = [Box(name, 80.0, 40.0) for name in ("far", "near", "a", "b")]
    lines = [Line("far", 1, "a", 1), Line("a", 1, "b", 1), Line("near", 1, "b", 1)]
    corners = arrange(boxes, lines).corners
    assert corners["near"][0] == corners["a"][0] > corners["far"][0]


def test_nothing_at_all_can_be_drawn() -> None:
    assert arrange([], []).corners == {}
