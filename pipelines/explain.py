"""A plan for people: as a table in text, and as a Mermaid flowchart. `drawing` has it as a picture."""

from __future__ import annotations

from collections.abc import Sequence

from weftline.nodes.catalog import CATALOG
from weftline.pipelines.graph import Input, Wire
from weftline.pipelines.place import size_text
from weftline.pipelines.plan import Plan, PlannedInput, PlannedStep

_HEADS = ("step", "node", "batch", "worker", "threads", "device", "reads", "gives")


def explain_text(plan: Plan) -> str:
    """Return the plan as text: inputs, steps in running order with their wires and types, outputs, workers, memory."""
    title = plan.name + (f"  ({plan.file})" if plan.file else "")
    parts = [title, *([plan.about] if plan.about else [])]
    inputs = [[[one.name], [str(plan.input_types[one.name])], [_limits_text(one, plan)]] for one in plan.inputs]
    parts += ["", "Inputs", *_table(inputs)]
    parts += ["", "Steps, in running order", *_table([_row(step, plan) for step in plan.steps], _HEADS)]
    outputs = [
        [[one.name], [f"<- {one.wire}"], [str(one.type) + (", in pieces" if one.pieces else "")]]
        for one in plan.outputs
    ]
    parts += ["", "Outputs", *_table(outputs)]
    parts += ["", "Workers, one process each", *_workers(plan), "", _memory(plan)]
    if plan.slo.latency_p99_ms is not None:
        parts.append(f"Deadline of a request that brings none: {plan.slo.latency_p99_ms:g} ms")
    return "\n".join(parts) + "\n"


def explain_mermaid(plan: Plan) -> str:
    """Return the plan as a Mermaid flowchart: wires are labelled with what travels on them."""
    names = {f"in:{one.name}": f"in{place}" for place, one in enumerate(plan.inputs)}
    names |= {f"step:{step.name}": f"step{place}" for place, step in enumerate(plan.steps)}
    lines = ["flowchart LR"]
    lines += [f'    {names[f"in:{one.name}"]}(["{_escaped(one.name)}"])' for one in plan.inputs]
    for step in plan.steps:
        about = f"{node_name(step)} · {step.device}"
        lines.append(f'    {names[f"step:{step.name}"]}["<b>{_escaped(step.name)}</b><br/>{_escaped(about)}"]')
    lines += [f'    out{place}(["{_escaped(one.name)}"])' for place, one in enumerate(plan.outputs)]
    for step in plan.steps:
        for read in step.inputs:
            label = _typed(read.wire.port, str(read.type)) if read.wire.step else str(read.type)
            lines.append(f'    {_from(read.wire, names)} -->|"{_escaped(label)}"| {names[f"step:{step.name}"]}')
    for place, one in enumerate(plan.outputs):
        label = _typed(one.wire.port, str(one.type)) if one.wire.step else str(one.type)
        lines.append(f'    {_from(one.wire, names)} -->|"{_escaped(label)}"| out{place}')
    return "\n".join(lines) + "\n"


def node_name(step: PlannedStep) -> str:
    """Return how a pipeline file names the step's node: the short name of a built-in one."""
    return next((short for short, path in CATALOG.items() if path == step.node), step.node)


def batch_text(step: PlannedStep) -> str:
    """Return a step's batch policy for people: 'up to 8, waits 5 ms'."""
    if step.streams:
        return "joins and leaves"
    if step.batch.items_max == 1:
        return "one by one"
    wait = f", waits {step.batch.wait_max_ms:g} ms" if step.batch.wait_max_ms else ""
    return f"up to {step.batch.items_max}{wait}"


def _row(step: PlannedStep, plan: Plan) -> list[list[str]]:
    workers = [plan.workers[index] for index in step.workers]
    return [
        [step.name],
        [node_name(step)],
        [batch_text(step)],
        [worker.name for worker in workers],
        [str(worker.threads) for worker in workers],
        [step.device],
        [f"{read.port} <- {read.wire}" + _type_after(read) for read in step.inputs],
        [_typed(port.name, str(port.type)) + ("" if step.readers[port.name] else " (unread)") for port in step.outputs],
    ]


def _typed(name: str, type: str) -> str:
    return name if name == type else f"{name}: {type}"


def _type_after(read: PlannedInput) -> str:
    return "" if str(read.type) in (read.port, read.wire.port) else f": {read.type}"


def _limits_text(one: Input, plan: Plan) -> str:
    kind = plan.input_types[one.name].kind
    seconds = one.seconds_max if one.seconds_max is not None else plan.limits.seconds_max if kind == "audio" else None
    pixels = one.pixels_max if one.pixels_max is not None else plan.limits.pixels_max if kind == "image" else None
    limits = [f"at most {seconds:g} s"] if seconds is not None else []
    limits += [f"at most {pixels:,} pixels"] if pixels is not None else []
    limits += [f"at most {size_text(one.bytes_max)}"] if one.bytes_max is not None else []
    return ", ".join([*limits, *([one.about] if one.about else [])])


def _workers(plan: Plan) -> list[str]:
    rows = []
    for worker in plan.workers:
        threads = f"{worker.threads} thread{'s' if worker.threads != 1 else ''} of {plan.cores}"
        rows.append(
            [[worker.name], [f"holds {', '.join(worker.steps)}"], [threads], [f"arena {size_text(worker.arena_bytes)}"]]
        )
    return _table(rows)


def _memory(plan: Plan) -> str:
    total = sum(worker.arena_bytes for worker in plan.workers) + plan.limits.arena_bytes
    count = len(plan.workers) + 1
    return f"Shared memory: {size_text(total)} in {count} arenas (one for each worker, one for requests)"


def _table(rows: Sequence[Sequence[Sequence[str]]], heads: Sequence[str] = ()) -> list[str]:
    """Return rows of cells as lines; a cell is a list of lines, and columns are as wide as their widest line."""
    if not rows:
        return ["  none"]
    tall = [[heads_cell] for heads_cell in heads]
    every = [tall, *rows] if heads else list(rows)
    widths = [max((len(line) for row in every for line in row[column]), default=0) for column in range(len(rows[0]))]
    lines = []
    for row in every:
        for place in range(max(len(cell) for cell in row)):
            cells = [cell[place] if place < len(cell) else "" for cell in row]
            lines.append(
                "  " + "  ".join(text.ljust(width) for text, width in zip(cells, widths, strict=True)).rstrip()
            )
    if heads:
        lines.insert(1, "  " + "  ".join("-" * width for width in widths))
    return lines


def _from(wire: Wire, names: dict[str, str]) -> str:
    return names[f"step:{wire.step}" if wire.step else f"in:{wire.port}"]


def _escaped(text: str) -> str:
    """Return text as it may stand in a quoted Mermaid label, where entities are written with #."""
    for char, entity in (("#", "#35;"), ("&", "#amp;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;")):
        text = text.replace(char, entity)
    return text
