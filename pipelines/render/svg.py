"""SVG renderer of a plan: steps as boxes with ports, wires coloured by type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from weftline.nodes.ports import PortType, list_of
from weftline.pipelines.placement.plan import Plan, PlannedOutput, PlannedStep
from weftline.pipelines.placement.transfers import device_wires
from weftline.pipelines.render.layout import Box, Layout, Line, arrange
from weftline.pipelines.render.text import notes, subtitle
from weftline.pipelines.spec.wire import Wire

COLOURS = {
    "text": "#2b6cb0", "audio": "#b7791f", "image": "#2f855a", "detections": "#6b46c1", "tensor": "#c05621",
    "json": "#2c7a7b", "bytes": "#4a5568", "any": "#718096",
}  # fmt: skip
"""Stroke of a wire by port kind; a list has that of its elements."""

NOTE_CHARS_MAX = 64
"""Longest note of a step in its box, in characters; `explain_text` has the whole text."""

CHAR_PX, PORT_PX, SMALL_PX, SPACE_PX = 9.2, 7.3, 6.8, 7.0
"""Average character of a name, a port and a type in the widest of the fonts, and a space; boxes are sized by them."""

HEAD_PX, NOTE_PX, ROW_PX, PAD_PX, PILL_PX, MARGIN_PX, TITLE_PX = 50.0, 16.0, 22.0, 14.0, 34.0, 28.0, 44.0
LINE_PX, DEVICE_PX = 1.8, 4.5
"""Width of a wire, and of one whose tensors stay on a GPU."""

_FONT = "ui-sans-serif, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"


@dataclass(frozen=True, slots=True)
class _End:
    """One end of a wire: the box and the height of the port below its top."""

    key: str
    y: float


@dataclass(frozen=True, slots=True)
class _Wire:
    """A wire with its colour.

    dotted: the input of a condition, or a fallback.
    on_device: its tensors stay on a GPU.
    """

    source: _End
    target: _End
    colour: str
    dotted: bool = False
    on_device: bool = False


def explain_svg(plan: Plan) -> str:
    """Return the plan as the text of an SVG file."""
    asked = [one for one in plan.inputs if not one.hidden]
    boxes = [Box(f"in:{one.name}", _pill_width(one.name, str(plan.input_types[one.name])), PILL_PX) for one in asked]
    boxes += [_step_box(step) for step in plan.steps]
    boxes += [Box(f"out:{one.name}", _pill_width(one.name, _answer(one)), PILL_PX, last=True) for one in plan.outputs]
    wires = _wires(plan)
    lines = [Line(one.source.key, one.source.y, one.target.key, one.target.y) for one in wires]
    layout = arrange(boxes, lines)
    body = [_path(points, one) for points, one in zip(layout.points, wires, strict=True)]
    for given in asked:
        type = plan.input_types[given.name]
        body.append(_pill(layout, f"in:{given.name}", given.name, str(type), _colour(type)))
    body += [_step(layout, step, boxes) for step in plan.steps]
    body += [_pill(layout, f"out:{one.name}", one.name, _answer(one), _colour(one.type)) for one in plan.outputs]
    return _page(plan, layout, body)


def _answer(one: PlannedOutput) -> str:
    return f"{one.type}, may be absent" if one.optional else str(one.type)


def _colour(type: PortType) -> str:
    return _colour(type.item) if type.item is not None else COLOURS[type.kind]


def _wires(plan: Plan) -> list[_Wire]:
    """Return every wire of the picture; constants have none."""
    steps, plain = {step.name: step for step in plan.steps}, COLOURS["any"]
    hidden = {Wire(None, one.name) for one in plan.inputs if one.hidden}
    wires, on_device = list[_Wire](), device_wires(plan)
    for step in plan.steps:
        key, top = f"step:{step.name}", _End(f"step:{step.name}", HEAD_PX / 2)
        for row, read in enumerate(step.inputs):
            if read.wire not in hidden:
                ends = _source(read.wire, steps), _End(key, _row_y(step, row))
                wires.append(_Wire(*ends, _colour(read.type), on_device=(step.name, read.port) in on_device))
        for wire in step.when.wires if step.when else ():
            if wire not in hidden:
                wires.append(_Wire(_source(wire, steps), top, plain, dotted=True))
        if step.fallback:
            wires.append(_Wire(top, _End(f"step:{step.fallback}", HEAD_PX / 2), plain, dotted=True))
    for one in plan.outputs:
        if one.wire not in hidden:
            wires.append(_Wire(_source(one.wire, steps), _End(f"out:{one.name}", PILL_PX / 2), _colour(one.type)))
    return wires


def _source(wire: Wire, steps: dict[str, PlannedStep]) -> _End:
    if wire.step is None:
        return _End(f"in:{wire.port}", PILL_PX / 2)
    names = [port.name for port in steps[wire.step].outputs]
    return _End(f"step:{wire.step}", _row_y(steps[wire.step], names.index(wire.port)))


def _row_y(step: PlannedStep, row: int) -> float:
    return _head_px(step) + ROW_PX * row + ROW_PX / 2


def _head_px(step: PlannedStep) -> float:
    """Return the height of a box above its ports: its name, its node, and a line for each note."""
    return HEAD_PX + NOTE_PX * len(notes(step))


def _subtitle(step: PlannedStep) -> str:
    copies = f" · {len(step.workers)} instances" if len(step.workers) > 1 else ""
    return subtitle(step, batch=True) + copies


def _notes(step: PlannedStep) -> list[str]:
    return [text if len(text) <= NOTE_CHARS_MAX else text[: NOTE_CHARS_MAX - 3] + "..." for text in notes(step)]


def _inputs(step: PlannedStep) -> list[tuple[str, PortType]]:
    return [(read.port, list_of(read.type) if read.port in step.map else read.type) for read in step.inputs]


def _outputs(step: PlannedStep) -> list[tuple[str, PortType]]:
    return [(port.name, list_of(port.type) if step.map else port.type) for port in step.outputs]


def _step_box(step: PlannedStep) -> Box:
    rows = max(len(step.inputs), len(step.outputs), 1)
    left = max((_label_width(*port) for port in _inputs(step)), default=0.0)
    right = max((_label_width(*port) for port in _outputs(step)), default=0.0)
    small = max(len(text) for text in (_subtitle(step), *_notes(step)))
    width = max(len(step.name) * CHAR_PX, small * SMALL_PX, left + right + 24) + 2 * PAD_PX
    return Box(f"step:{step.name}", width, _head_px(step) + rows * ROW_PX + 8)


def _label_width(name: str, type: PortType) -> float:
    """Return the width of a port's name and type; the name alone where the type repeats it."""
    return len(name) * PORT_PX + (0 if name == str(type) else len(str(type)) * SMALL_PX + SPACE_PX)


def _pill_width(name: str, type: str) -> float:
    return len(name) * CHAR_PX + len(type) * SMALL_PX + SPACE_PX + 2 * PAD_PX


def _pill(layout: Layout, key: str, name: str, type: str, colour: str) -> str:
    x, y = layout.corners[key]
    width = _pill_width(name, type)
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{PILL_PX:.1f}" rx="{PILL_PX / 2:.0f}"'
    return (
        f'{shape} fill="#fff" stroke="{colour}" stroke-width="1.6"/>'
        + _text("name", x + PAD_PX, y + 21.5, name)
        + _text("type", x + width - PAD_PX, y + 21.5, type, "end", colour)
    )


def _text(style: str, x: float, y: float, text: str, anchor: str = "start", fill: str = "") -> str:
    """Return one run of text; runs are placed one by one, since renderers anchor mixed lines differently."""
    more = (f' text-anchor="{anchor}"' if anchor != "start" else "") + (f' style="fill:{fill}"' if fill else "")
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}"{more}>{escape(text)}</text>'


def _step(layout: Layout, step: PlannedStep, boxes: Sequence[Box]) -> str:
    x, y = layout.corners[f"step:{step.name}"]
    box = next(box for box in boxes if box.key == f"step:{step.name}")
    size, head = f'width="{box.width:.1f}" height="{box.height:.1f}"', _head_px(step)
    dashes = ' stroke-dasharray="5 4"' if step.conditional else ""
    parts = [
        f'<rect x="{x:.1f}" y="{y:.1f}" {size} rx="8" fill="#fff" stroke="#cbd5e0" stroke-width="1.2"{dashes}/>',
        f'<path d="M{x + 8:.1f} {y + head - 4:.1f}h{box.width - 16:.1f}" stroke="#edf2f7" stroke-width="1.2"/>',
        _text("name", x + PAD_PX, y + 20, step.name),
        _text("sub", x + PAD_PX, y + 37, _subtitle(step)),
    ]
    parts += [_text("sub", x + PAD_PX, y + 37 + NOTE_PX * (at + 1), text) for at, text in enumerate(_notes(step))]
    parts += [_port(x, y + _row_y(step, row), *port, "start") for row, port in enumerate(_inputs(step))]
    right = x + box.width
    parts += [_port(right, y + _row_y(step, row), *port, "end") for row, port in enumerate(_outputs(step))]
    return "".join(parts)


def _port(x: float, y: float, name: str, type: PortType, anchor: str) -> str:
    """Return a port's dot at `x`, and its name and type inside the box: to the right of an input, left of an output."""
    colour, written = _colour(type), str(type)
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


def _path(points: Sequence[tuple[float, float]], wire: _Wire) -> str:
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
    dots = ' stroke-dasharray="2 4"' if wire.dotted else ""
    width = DEVICE_PX if wire.on_device else LINE_PX
    stroke = f'stroke="{wire.colour}" stroke-width="{width}" stroke-opacity="0.75"{dots}'
    if wire.on_device:
        return f'<path d="{"".join(d)}" fill="none" {stroke}><title>stays on a GPU</title></path>'
    return f'<path d="{"".join(d)}" fill="none" {stroke}/>'


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
