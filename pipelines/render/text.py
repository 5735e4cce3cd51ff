"""Text tables and Mermaid flowcharts of a plan."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from weftline.nodes.catalog import CATALOG, engines_of
from weftline.nodes.ports import Port, PortType
from weftline.pipelines.placement.budget import WORK, budget_lines
from weftline.pipelines.placement.gpu_assignment import work_rows
from weftline.pipelines.placement.place import size_text
from weftline.pipelines.placement.plan import Plan, PlannedInput, PlannedStep
from weftline.pipelines.placement.sharing import SharedPlan
from weftline.pipelines.placement.transfers import device_wires, hop_rows
from weftline.pipelines.spec.graph import Input
from weftline.pipelines.spec.wire import Wire

_ABSENT = " (may be absent)"
_KEPT = {"host": "its weights in host memory", "process": "its process", "nothing": "nothing"}
_ORDERINGS = {"host": "passed on when complete", "event": "passed on before completion"}
_HEADS = ("step", "node", "batch", "worker", "threads", "device", "reads", "gives")


def explain_text(plan: Plan) -> str:
    """Return the plan as text: inputs, steps in running order with their wires and types, outputs, workers, memory.

    With GPUs, also the transfers of tensors, the claims on each GPU's memory, and its measured load.
    """
    title = plan.name + (f"  ({plan.file})" if plan.file else "")
    parts = [title, *([plan.about] if plan.about else [])]
    asked = [one for one in plan.inputs if not one.hidden]
    inputs = [[[one.name], [str(plan.input_types[one.name])], [_limits_text(one, plan)]] for one in asked]
    parts += ["", "Inputs", *_table(inputs)]
    parts += ["", "Steps, in running order", *_table([_row(step, plan) for step in plan.steps], _HEADS)]
    outputs = [
        [
            [one.name],
            [f"<- {one.wire}"],
            [str(one.type) + (", in chunks" if one.pieces else "") + (_ABSENT if one.optional else "")],
        ]
        for one in plan.outputs
    ]
    parts += ["", "Outputs", *_table(outputs)]
    if plan.budgets:
        parts += ["", f"Tensors on GPUs, {_ORDERINGS[plan.ordering]}", *_table(hop_rows(plan))]
    parts += ["", "Workers, one process each", *_workers(plan)]
    if plan.chains:
        parts += ["", "Passed on inside a worker", *_table([_chain(chain, plan) for chain in plan.chains])]
    for budget in plan.budgets:
        parts += ["", f"Memory of {budget.device}", *(f"  {line}" for line in budget_lines(budget))]
    if plan.work:
        parts += ["", "Work of GPUs for one request, as measured", *_table(work_rows(plan.work))]
    if plan.notes:
        parts += ["", "Good to know", *(f"  {note}" for note in plan.notes)]
    parts += ["", *_memory(plan)]
    if plan.limits.deadline_ms is not None:
        parts.append(f"Default deadline of requests: {plan.limits.deadline_ms:g} ms (limits.deadline_ms)")
    if plan.slo.latency_p99_ms is not None:
        objective = f"99 % of answers within {plan.slo.latency_p99_ms:g} ms (slo.latency_p99_ms)"
        parts.append(f"Latency objective: {objective}")
    return "\n".join(parts) + "\n"


def explain_shared(shared: SharedPlan) -> str:
    """Return what pipelines load together as text: each deployment with the steps that use it, processes and memory."""
    plan = shared.plan
    used = users(shared)
    heads = ("name", "node", "instances", "batch", "memory", "worker", "used by")
    rows = [
        [
            [step.name],
            [subtitle(step)],
            [str(len(step.workers))],
            [batch_text(step)],
            [_claimed_text(step, plan)],
            [plan.workers[one].name for one in step.workers],
            list(used[at]),
        ]
        for at, step in enumerate(plan.steps)
        if not step.control
    ]
    parts = ["Loaded once for all of its users", *_table(rows, heads)]
    parts += ["", "Workers, one process each", *_workers(plan)]
    for budget in plan.budgets:
        parts += ["", f"Memory of {budget.device}", *(f"  {line}" for line in budget_lines(budget))]
    parts += ["", *_memory(plan)]
    return "\n".join(parts) + "\n"


def _claimed_text(step: PlannedStep, plan: Plan) -> str:
    """Return what all instances of a step claim of GPUs, for display."""
    claims = [one for budget in plan.budgets for one in budget.claims if (one.owner, one.what) == (step.name, WORK)]
    if any(claim.source == "unknown" for claim in claims):
        return "not measured"
    return size_text(sum(claim.bytes for claim in claims)) if claims else "-"


def users(shared: SharedPlan) -> list[list[str]]:
    """Return the steps that use each deployment, as `pipeline: step`."""
    found: list[list[str]] = [[] for _ in shared.plan.steps]
    for name, program in shared.programs.items():
        for step, at in zip(program.plan.steps, program.deployments, strict=True):
            if at >= 0 and not step.control:
                found[at].append(f"{name}: {step.name}")
    return found


def explain_mermaid(plan: Plan) -> str:
    """Return the plan as a Mermaid flowchart; wires are labelled with port and type.

    Dotted: inputs of conditions, and fallbacks. Thick: tensors that stay on a GPU.
    """
    on_device = device_wires(plan)
    asked = [one for one in plan.inputs if not one.hidden]
    names = {f"in:{one.name}": f"in{place}" for place, one in enumerate(asked)}
    names |= {f"step:{step.name}": f"step{place}" for place, step in enumerate(plan.steps)}
    lines = ["flowchart LR"]
    lines += [f'    {names[f"in:{one.name}"]}(["{_escaped(one.name)}"])' for one in asked]
    for step in plan.steps:
        about = " · ".join([subtitle(step), *notes(step)])
        lines.append(f'    {names[f"step:{step.name}"]}["<b>{_escaped(step.name)}</b><br/>{_escaped(about)}"]')
    lines += [f'    out{place}(["{_escaped(one.name)}"])' for place, one in enumerate(plan.outputs)]
    for step in plan.steps:
        own = names[f"step:{step.name}"]
        for read in step.inputs:
            label = _typed(read.wire.port, travels(read, step)) if read.wire.step else travels(read, step)
            label += ", streams" if read.pieces else ""
            if (source := _from(read.wire, names)) is not None:
                arrow, label = (
                    ("==>", f"{label}, stays on GPU") if (step.name, read.port) in on_device else ("-->", label)
                )
                lines.append(f'    {source} {arrow}|"{_escaped(label)}"| {own}')
        for wire in step.when.wires if step.when else ():
            if (source := _from(wire, names)) is not None:
                lines.append(f'    {source} -.->|"when"| {own}')
        if step.fallback:
            lines.append(f'    {own} -.->|"fallback"| {names[f"step:{step.fallback}"]}')
    for place, one in enumerate(plan.outputs):
        label = _typed(one.wire.port, str(one.type)) if one.wire.step else str(one.type)
        label += _ABSENT if one.optional else ""
        if (source := _from(one.wire, names)) is not None:
            lines.append(f'    {source} -->|"{_escaped(label)}"| out{place}')
    return "\n".join(lines) + "\n"


def node_name(step: PlannedStep) -> str:
    """Return the step's node as a pipeline file names it: the short name of a built-in one."""
    names = {path: name for name, path in CATALOG.items()}
    names |= {path: f"{name} ({engine})" for name in CATALOG for engine, path in engines_of(name).items()}
    return step.control or names.get(step.node, step.node)


def model_name(step: PlannedStep) -> str:
    """Return the model that a step's option `model` names, without the folder or address that it is in; '' for none."""
    model = step.options.get("model")
    if not isinstance(model, str):
        return ""
    if "://" in model:  # the host may have a password, and the query a signature
        model = "/" + re.split("[?#]", model.partition("://")[2], maxsplit=1)[0].partition("/")[2]
    return model.rstrip("/").rpartition("/")[2] if model.startswith(("/", "~", ".")) else model


def subtitle(step: PlannedStep, batch: bool = False) -> str:
    """Return a step's node and, if a worker runs it, its devices and optionally its batch policy, for display."""
    if step.control:
        return f"{node_name(step)} · decided without a worker"
    parts = [node_name(step), ", ".join(dict.fromkeys(step.devices or (step.device,)))]
    return " · ".join([*parts, *([batch_text(step)] if batch else [])])


def batch_text(step: PlannedStep) -> str:
    """Return a step's batch policy for display: 'up to 8, waits 5 ms'."""
    if step.control:
        return "decided at once"
    if step.streams:
        return "joins and leaves"
    parts = ["one by one" if step.batch.items_max == 1 else f"up to {step.batch.items_max}"]
    if step.batch.wait == "auto" and step.batch.items_max > 1:
        parts.append(f"waits while it pays, at most {step.batch.wait_ms:g} ms")
    elif step.batch.wait_max_ms:
        parts.append(f"waits {step.batch.wait_max_ms:g} ms")
    parts += [f"rather {' or '.join(map(str, step.batch.sizes))}"] if step.batch.sizes else []
    parts += ["equal shapes"] if step.batch.shapes == "same" else []
    parts += [f"{name} padded to {' or '.join(map(str, sizes))}" for name, sizes in step.batch.pad.items()]
    return ", ".join(parts)


def notes(step: PlannedStep) -> list[str]:
    """Return further properties of a step: condition, failure handling, idle policy."""
    found = [f"when {step.when.text.strip()}"] if step.when else []
    found += [f"for each element of {', '.join(step.map)}"] if step.map else []
    found += [f"remembers up to {step.sequence.live_max} sequences"] if step.sequence else []
    if step.retry and step.retry.attempts:
        found.append(f"tried again {step.retry.attempts} time{'s' if step.retry.attempts > 1 else ''}")
    found += [f"times out after {step.timeout_ms:g} ms"] if step.timeout_ms is not None else []
    found += [f"else {step.fallback}"] if step.fallback else []
    found += ["else absent"] if step.absent_on_failure else []
    if step.idle is not None:
        found.append(f"sleeps after {step.idle.after_s:g} s without work, keeps {_KEPT[step.idle.keep]}")
    found += [f"{step.reserved} of {len(step.workers)} instances take no job rows"] if step.reserved else []
    return found


def travels(read: PlannedInput, step: PlannedStep) -> str:
    """Return the type on a wire: under `map:` a list of the node's input type."""
    return f"list[{read.type}]" if read.port in step.map else str(read.type)


def gives(step: PlannedStep, type: PortType) -> str:
    """Return the type that a step's readers receive: under `map:` a list of the node's output type."""
    return f"list[{type}]" if step.map else str(type)


def _row(step: PlannedStep, plan: Plan) -> list[list[str]]:
    workers = [plan.workers[index] for index in step.workers]
    constants = {one.name: one for one in plan.inputs if one.hidden}
    absent = _ABSENT if step.conditional else ""
    return [
        [step.name],
        [node_name(step)],
        [batch_text(step), *notes(step)],
        [worker.name for worker in workers],
        [str(worker.threads) for worker in workers],
        list(step.devices) if len(set(step.devices)) > 1 else [step.device],
        [_reads(read, step, constants) for read in step.inputs],
        [_gives(port, step, plan) + absent for port in step.outputs],
    ]


def _reads(read: PlannedInput, step: PlannedStep, constants: Mapping[str, Input]) -> str:
    if read.wire.step is None and read.wire.port in constants:
        return f"{read.port} = {constants[read.wire.port].default!r:.60}"
    type = travels(read, step)
    typed = "" if type in (read.port, read.wire.port) else f": {type}"
    return f"{read.port} <- {read.wire}{typed}" + (", streams" if read.pieces else "")


def _gives(port: Port, step: PlannedStep, plan: Plan) -> str:
    stands_in = any(other.fallback == step.name for other in plan.steps)
    unread = " (unread)" if not step.readers[port.name] and not stands_in else ""
    return _typed(port.name, gives(step, port.type)) + unread


def _chain(chain: Sequence[int], plan: Plan) -> list[list[str]]:
    steps = [plan.steps[index] for index in chain]
    workers = ", ".join(plan.workers[index].name for index in steps[0].workers)
    return [[" -> ".join(step.name for step in steps)], [f"inside {workers}"]]


def _typed(name: str, type: str) -> str:
    return name if name == type else f"{name}: {type}"


def _limits_text(one: Input, plan: Plan) -> str:
    kind = plan.input_types[one.name].kind
    seconds = one.seconds_max if one.seconds_max is not None else plan.limits.seconds_max if kind == "audio" else None
    pixels = one.pixels_max if one.pixels_max is not None else plan.limits.pixels_max if kind == "image" else None
    limits = [f"at most {seconds:g} s"] if seconds is not None else []
    limits += [f"at most {pixels:,} pixels"] if pixels is not None else []
    limits += [f"at most {size_text(one.bytes_max)}"] if one.bytes_max is not None else []
    if one.default is not None:
        limits.append(f"{one.default!r:.60} when left out")
    elif one.optional:
        limits.append("may be left out")
    return ", ".join([*limits, *([one.about] if one.about else [])])


def _workers(plan: Plan) -> list[str]:
    rows = []
    for worker in plan.workers:
        threads = f"{worker.threads} thread{'s' if worker.threads != 1 else ''} of {plan.cores}"
        arena = f"arena {size_text(worker.arena_bytes)}"
        if worker.device_arena_bytes:
            arena += f", on {worker.device} {size_text(worker.device_arena_bytes)}"
        rows.append([[worker.name], [f"holds {', '.join(worker.steps)}"], [threads], [arena]])
    return _table(rows)


def _memory(plan: Plan) -> list[str]:
    total = sum(worker.arena_bytes for worker in plan.workers) + plan.ingress_arena_bytes
    count = len(plan.workers) + 1
    lines = [f"Shared memory: {size_text(total)} in {count} arenas (one for each worker, one for requests)"]
    if plan.decode_bytes_max:
        decoding = f"Decoding of pictures and recordings: at most {size_text(plan.decode_bytes_max)} at a time"
        where = "limits.decode_bytes_max" if plan.limits.decode_bytes_max is not None else "one of the largest"
        lines.append(f"{decoding} ({where})")
    return lines


def _table(rows: Sequence[Sequence[Sequence[str]]], heads: Sequence[str] = ()) -> list[str]:
    """Format rows of cells as lines; a cell is a list of lines, a column is as wide as its widest line."""
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


def _from(wire: Wire, names: Mapping[str, str]) -> str | None:
    """Return the Mermaid id of a wire's source; None for a constant, which is not drawn."""
    return names.get(f"step:{wire.step}" if wire.step else f"in:{wire.port}")


def _escaped(text: str) -> str:
    """Escape text for a quoted Mermaid label, where entities are written with #."""
    for char, entity in (("#", "#35;"), ("&", "#amp;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;")):
        text = text.replace(char, entity)
    return text
