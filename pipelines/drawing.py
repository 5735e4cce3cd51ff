"""A plan as a picture: boxes with their ports, wires coloured by what travels on them, as one self-contained SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from weftline.nodes.ports import PortType
from weftline.pipelines.explain import batch_text, node_name
from weftline.pipelines.graph import Wire
from weftline.pipelines.layout import Box, Layout, Line, arrange
from weftline.pipelines.plan import Plan, PlannedStep

COLOURS = {
    "text": "#2b6cb0", "audio": "#b7791f", "image": "#2f855a", "detections": "#6b46c1", "tensor": "#c05621",
    "json": "#2c7a7b", "bytes": "#4a5568", "any": "#718096",
}  # fmt: skip
"""Stroke of a wire by the kind of what travels on it."""

CHAR_PX, PORT_PX, SMALL_PX, SPACE_PX = 9.2, 7.3, 6.8, 7.0
"""Average character of a name, a port and a type in the widest of the fonts, and a space; boxes are sized by them."""

HEAD_PX, ROW_PX, PAD_PX, PILL_PX, MARGIN_PX, TITLE_PX = 50.0, 22.0, 14.0, 34.0, 28.0, 44.0
_FONT = "ui-sans-serif, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"


@dataclass(frozen=True, slots=True)
class _End:
    """One end of a wire: the box and the height of the port below its top."""

    key: str
    y: float


def explain_svg(plan: Plan) -> str:
    """Return the plan as the text of an SVG file."""
    boxes = [Box(f"in:{one.name}", _pill_width(one.name, plan.input_types[one.name]), PILL_PX) for one in plan.inputs]
    boxes += [_step_box(step) for step in plan.steps]
    boxes += [Box(f"out:{one.name}", _pill_width(one.name, one.type), PILL_PX, last=True) for one in plan.outputs]
    wires = _wires(plan)
    lines = [Line(source.key, source.y, target.key, target.y) for source, target, _ in wires]
    layout = arrange(boxes, lines)
    body = [_path(points, type) for points, (_, _, type) in zip(layout.points, wires, strict=True)]
    body += [_pill(layout, f"in:{one.name}", one.name, plan.input_types[one.name]) for one in plan.inputs]
    body += [_step(layout, step, boxes) for step in plan.steps]
    body += [_pill(layout, f"out:{one.name}", one.name, one.type) for one in plan.outputs]
    return _page(plan, layout, body)


def _wires(plan: Plan) -> list[tuple[_End, _End, PortType]]:
    """Return both ends of every wire and what travels on it."""
    steps = {step.name: step for step in plan.steps}
    wires = []
    for step in plan.steps:
        for row, read in enumerate(step.inputs):
            wires.append((_source(read.wire, steps), _End(f"step:{step.name}", _row_y(row)), read.type))
    wires += [(_source(one.wire, steps), _End(f"out:{one.name}", PILL_PX / 2), one.type) for one in plan.outputs]
    return wires


def _source(wire: Wire, steps: dict[str, PlannedStep]) -> _End:
    if wire.step is None:
        return _End(f"in:{wire.port}", PILL_PX / 2)
    names = [port.name for port in steps[wire.step].outputs]
    return _End(f"step:{wire.step}", _row_y(names.index(wire.port)))


def _row_y(row: int) -> float:
    return HEAD_PX + ROW_PX * row + ROW_PX / 2


def _subtitle(step: PlannedStep) -> str:
    copies = f" · {len(step.workers)} instances" if len(step.workers) > 1 else ""
    return f"{node_name(step)} · {step.device} · {batch_text(step)}{copies}"


def _step_box(step: PlannedStep) -> Box:
    rows = max(len(step.inputs), len(step.outputs), 1)
    left = max((_label_width(read.port, read.type) for read in step.inputs), default=0.0)
    right = max((_label_width(port.name, port.type) for port in step.outputs), default=0.0)
    width = max(len(step.name) * CHAR_PX, len(_subtitle(step)) * SMALL_PX, left + right + 24) + 2 * PAD_PX
    return Box(f"step:{step.name}", width, HEAD_PX + rows * ROW_PX + 8)


def _label_width(name: str, type: PortType) -> float:
    """Return the width of a port's name and type; the name alone says enough where the type repeats it."""
    return len(name) * PORT_PX + (0 if name == str(type) else len(str(type)) * SMALL_PX + SPACE_PX)


def _pill_width(name: str, type: PortType) -> float:
    return len(name) * CHAR_PX + len(str(type)) * SMALL_PX + SPACE_PX + 2 * PAD_PX


def _pill(layout: Layout, key: str, name: str, type: PortType) -> str:
    x, y = layout.corners[key]
    width, colour = _pill_width(name, type), COLOURS[type.kind]
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{PILL_PX:.1f}" rx="{PILL_PX / 2:.0f}"'
    return (
        f'{shape} fill="#fff" stroke="{colour}" stroke-width="1.6"/>'
        + _text("name", x + PAD_PX, y + 21.5, name)
        + _text("type", x + width - PAD_PX, y + 21.5, str(type), "end", colour)
    )


def _text(style: str, x: float, y: float, text: str, anchor: str = "start", fill: str = "") -> str:
    """Return one run of text; runs are placed one by one, since renderers differ in how they anchor a mixed line."""
    more = (f' text-anchor="{anchor}"' if anchor != "start" else "") + (f' style="fill:{fill}"' if fill else "")
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}"{more}>{escape(text)}</text>'


def _step(layout: Layout, step: PlannedStep, boxes: Sequence[Box]) -> str:
    x, y = layout.corners[f"step:{step.name}"]
    box = next(box for box in boxes if box.key == f"step:{step.name}")
    size = f'width="{box.width:.1f}" height="{box.height:.1f}"'
    parts = [
        f'<rect x="{x:.1f}" y="{y:.1f}" {size} rx="8" fill="#fff" stroke="#cbd5e0" stroke-width="1.2"/>',
        f'<path d="M{x + 8:.1f} {y + HEAD_PX - 4:.1f}h{box.width - 16:.1f}" stroke="#edf2f7" stroke-width="1.2"/>',
        _text("name", x + PAD_PX, y + 20, step.name),
        _text("sub", x + PAD_PX, y + 37, _subtitle(step)),
    ]
    parts += [_port(x, y + _row_y(row), read.port, read.type, "start") for row, read in enumerate(step.inputs)]
    right = x + box.width
    parts += [_port(right, y + _row_y(row), port.name, port.type, "end") for row, port in enumerate(step.outputs)]
    return "".join(parts)


def _port(x: float, y: float, name: str, type: PortType, anchor: str) -> str:
    """Return a port's dot at `x`, and its name and type inside the box: to the right of an input, left of an output."""
    colour, written = COLOURS[type.kind], str(type)
    parts = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}" stroke="#fff" stroke-width="1.5"/>']
    if name == written:
        parts.append(_text("port", x + (PAD_PX if anchor == "start" else -PAD_PX), y + 4, name, anchor))
    elif anchor == "start":
        parts.append(_text("port", x + PAD_PX, y + 4, name))
        parts.append(_text("type", x + PAD_PX + len(name) * PORT_PX + SPACE_PX, y + 4, written, fill=colour))
    else:
        parts.append(_text("port", x - PAD_PX - len(written) * SMALL_PX - SPACE_PX, y + 4, name, "end"))
        parts.append(_text("type", x - PAD_PX, y + 4, written, "end", colour))
    return "".join(parts)


def _path(points: Sequence[tuple[float, float]], type: PortType) -> str:
    """Return a wire, level within layers and bent between them."""
    (x, y), *rest = points
    d = [f"M{x:.1f} {y:.1f}"]
    for place, (next_x, next_y) in enumerate(rest):
        if place % 2 == 0:
            d.append(f"L{next_x:.1f} {next_y:.1f}")
        else:
            middle = (x + next_x) / 2
            d.append(f"C{middle:.1f} {y:.1f} {middle:.1f} {next_y:.1f} {next_x:.1f} {next_y:.1f}")
        x, y = next_x, next_y
    return (
        f'<path d="{"".join(d)}" fill="none" stroke="{COLOURS[type.kind]}" stroke-width="1.8" stroke-opacity="0.75"/>'
    )


def _page(plan: Plan, layout: Layout, body: Sequence[str]) -> str:
    width = max(layout.width, len(plan.name) * 11.0) + 2 * MARGIN_PX
    height = layout.height + 2 * MARGIN_PX + TITLE_PX
    style = (
        f"text{{font-family:{_FONT};font-size:12px;fill:#1a202c}}.name{{font-size:14px;font-weight:600}}"
        ".sub,.type{font-size:11px}.sub{fill:#718096}.port{font-size:12px}.title{font-size:18px;font-weight:600}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'width="{width:.0f}" height="{height:.0f}" role="img">',
            f"<title>{escape(plan.name)}</title>",
            f"<style>{style}</style>",
            f'<rect width="{width:.0f}" height="{height:.0f}" fill="#f7fafc"/>',
            f'<text class="title" x="{MARGIN_PX:.0f}" y="{MARGIN_PX + 14:.0f}">{escape(plan.name)}</text>',
            f'<g transform="translate({MARGIN_PX:.0f} {MARGIN_PX + TITLE_PX:.0f})">',
            *body,
            "</g>",
            "</svg>",
            "",
        ]
    )
