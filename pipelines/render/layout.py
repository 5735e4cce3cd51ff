"""Layered layout of a drawn plan: box positions and wire routes with few crossings.

The steps of Sugiyama's method (K. Sugiyama, S. Tagawa, M. Toda, 1981), each in its simplest form: longest-path layers,
a track through every layer that a long wire passes, barycentre sweeps for the order, and rows packed around the middle
of what they are wired to.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SWEEPS = 8
GAP_X, GAP_Y, TRACK_PX = 92.0, 26.0, 16.0
"""Space between layers and between boxes, and the height of a track, in pixels."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle to place: its size in pixels; last: it stands in the last layer."""

    key: str
    width: float
    height: float
    last: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """A wire from one box to another; the ports are heights below the tops of the two boxes, in pixels."""

    source: str
    source_y: float
    target: str
    target_y: float


@dataclass(frozen=True, slots=True)
class Layout:
    """Corners of the boxes, the points each line passes in order, and the size of the whole, in pixels.

    A line runs level from its first point to its second, bends to the third, runs level to the fourth, and so on; the
    bends lie between layers, where no box is.
    """

    corners: Mapping[str, tuple[float, float]]
    points: Sequence[Sequence[tuple[float, float]]]
    width: float
    height: float


@dataclass(slots=True)
class _Cell:
    """A box, or the track of a long line, in one layer."""

    key: str
    layer: int
    width: float
    height: float
    x: float = 0.0
    y: float = 0.0
    edge: float = 0.0  # right edge of the layer, as wide as its widest box
    before: list[tuple[_Cell, float, float]] = field(default_factory=list)  # (neighbour, its port, my port)
    after: list[tuple[_Cell, float, float]] = field(default_factory=list)


def arrange(boxes: Sequence[Box], lines: Sequence[Line]) -> Layout:
    """Compute the layout. Lines must run forward: no cycles."""
    layers_of = _layers(boxes, lines)
    cells = {box.key: _Cell(box.key, layers_of[box.key], box.width, box.height) for box in boxes}
    count = max(layers_of.values(), default=0) + 1
    rows: list[list[_Cell]] = [[] for _ in range(count)]
    for box in boxes:
        rows[layers_of[box.key]].append(cells[box.key])
    paths = [_connect(number, line, cells, rows) for number, line in enumerate(lines)]
    _place_columns(rows)
    _order(rows)
    for _ in range(SWEEPS):
        for row in rows:
            _settle(row, forward=True)
        for row in reversed(rows):
            _settle(row, forward=False)
    top = min((cell.y for row in rows for cell in row), default=0.0)
    for row in rows:
        for cell in row:
            cell.y -= top
    points = [_points(line, path) for line, path in zip(lines, paths, strict=True)]
    placed = [cell for row in rows for cell in row]
    return Layout(
        {box.key: (cells[box.key].x, cells[box.key].y) for box in boxes},
        points,
        max((cell.x + cell.width for cell in placed), default=0.0),
        max((cell.y + cell.height for cell in placed), default=0.0),
    )


def _layers(boxes: Sequence[Box], lines: Sequence[Line]) -> dict[str, int]:
    """Return each box's layer: one past the farthest of what it reads; inputs stand right before their first reader."""
    layer = {box.key: 0 for box in boxes}
    for _ in boxes:
        for line in lines:
            layer[line.target] = max(layer[line.target], layer[line.source] + 1)
    last = max(layer.values(), default=0)
    layer |= {box.key: last for box in boxes if box.last}
    reads = {line.target for line in lines}
    for box in boxes:
        readers = [layer[line.target] for line in lines if line.source == box.key]
        if box.key not in reads and readers:
            layer[box.key] = min(readers) - 1
    return layer


def _connect(number: int, line: Line, cells: Mapping[str, _Cell], rows: list[list[_Cell]]) -> list[_Cell]:
    """Link the two ends of a line through a track in every layer between them, and return the cells it passes."""
    source, target = cells[line.source], cells[line.target]
    tracks = [_Cell(f"track{number}", layer, 0.0, TRACK_PX) for layer in range(source.layer + 1, target.layer)]
    for track in tracks:
        rows[track.layer].append(track)
    path = [source, *tracks, target]
    for left, right in itertools.pairwise(path):
        out = line.source_y if left is source else TRACK_PX / 2
        into = line.target_y if right is target else TRACK_PX / 2
        left.after.append((right, into, out))
        right.before.append((left, out, into))
    return path


def _place_columns(rows: Sequence[Sequence[_Cell]]) -> None:
    x = 0.0
    for row in rows:
        width = max((cell.width for cell in row), default=0.0)
        for cell in row:
            cell.x, cell.width, cell.edge = x, cell.width or width, x + width  # a track is as wide as its layer
        x += width + GAP_X


def _order(rows: Sequence[list[_Cell]]) -> None:
    """Sort every layer by the mean position of its neighbours, forwards and backwards."""
    place = {id(cell): float(index) for row in rows for index, cell in enumerate(row)}
    for sweep in range(SWEEPS):
        forward = sweep % 2 == 0
        for row in rows if forward else list(reversed(rows)):
            means = {}
            for cell in row:
                near = cell.before if forward else cell.after
                spots = [place[id(other)] + port / max(other.height, 1.0) for other, port, _ in near]
                means[id(cell)] = sum(spots) / len(spots) if spots else place[id(cell)]
            row.sort(key=lambda cell: means[id(cell)])
            place |= {id(cell): float(index) for index, cell in enumerate(row)}
    for row in rows:
        y = 0.0
        for cell in row:
            cell.y, y = y, y + cell.height + GAP_Y


def _settle(row: list[_Cell], forward: bool) -> None:
    """Move a layer's cells, kept in order and apart, to where their lines run straightest."""
    wanted = []
    for cell in row:
        near = (cell.before if forward else cell.after) or cell.before or cell.after
        pulls = [other.y + port - own for other, port, own in near]
        wanted.append(sum(pulls) / len(pulls) if pulls else cell.y)
    # Cells that would overlap move as one block, to the mean of its members' targets.
    blocks: list[tuple[float, list[_Cell], list[float]]] = []
    for cell, y in zip(row, wanted, strict=True):
        blocks.append((y, [cell], [y]))
        while len(blocks) > 1 and blocks[-2][0] + _height(blocks[-2][1]) + GAP_Y > blocks[-1][0]:
            _, below, below_wants = blocks.pop()
            _, above, above_wants = blocks.pop()
            shift = _height(above) + GAP_Y
            wants = above_wants + [want - shift for want in below_wants]
            blocks.append((sum(wants) / len(wants), above + below, wants))
    for y, members, _ in blocks:
        for cell in members:
            cell.y, y = y, y + cell.height + GAP_Y


def _height(cells: Sequence[_Cell]) -> float:
    return sum(cell.height for cell in cells) + GAP_Y * (len(cells) - 1)


def _points(line: Line, path: Sequence[_Cell]) -> list[tuple[float, float]]:
    """Return where a line leaves its box and its layer, the two ends of each track it passes, and where it arrives."""
    source, target = path[0], path[-1]
    y = source.y + line.source_y
    points = [(source.x + source.width, y), (source.edge, y)]
    for track in path[1:-1]:
        middle = track.y + track.height / 2
        points += [(track.x, middle), (track.x + track.width, middle)]
    return [*points, (target.x, target.y + line.target_y)]
