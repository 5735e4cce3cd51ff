"""Check that a server's model matches a pipeline file, by names and types of its ports.

What is behind the ports (models, prompts, versions of weights) no server tells; that the file it serves is the same is
the operator's word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from weftline.engine.client.model import DescribedModel, DescribedPort
from weftline.errors import InputError, PipelineError
from weftline.nodes.ports import PortType
from weftline.pipelines.check.checker import examine
from weftline.pipelines.spec.graph import Pipeline

Ports = Mapping[str, str]
"""Written types by name; of an input that may be left out, with a `?`."""


def ports_of(pipeline: Pipeline) -> tuple[Ports, Ports]:
    """Return a pipeline's inputs and outputs; PipelineError has everything that is wrong with it."""
    checked = examine(pipeline)
    if checked.problems:
        raise PipelineError(checked.problems)
    inputs = {
        one.name: _written(checked.sizes.settle(PortType.parse(one.type), ""), one.may_be_left_out)
        for one in checked.pipeline.inputs
        if not one.hidden
    }
    found = {name: checked.type_of(wire) for name, wire in checked.pipeline.outputs.items()}
    return inputs, {name: str(type) for name, type in found.items() if type is not None}


def described_ports(model: DescribedModel) -> tuple[Ports, Ports]:
    """Return a served model's inputs and outputs."""
    inputs = {name: _written(port.type or port, port.optional) for name, port in model.inputs.items()}
    return inputs, {name: str(port) for name, port in model.outputs.items()}


def check_same(pipeline: Pipeline, model: DescribedModel, address: str) -> None:
    """Raise InputError with both lists when a server's model cannot be this pipeline."""
    ours, theirs = ports_of(pipeline), described_ports(model)
    if ours == theirs:
        return
    lines = [f"model {model.name} at {address} is not the pipeline {pipeline.file or pipeline.name}"]
    for what, own, served in zip(("inputs", "outputs"), ours, theirs, strict=True):
        if own != served:
            lines.append(f"    {what} of the file:   {_listed(own)}")
            lines.append(f"    {what} of the server: {_listed(served)}")
    lines.append("    fix: name the file that is served, or the model that serves this file")
    raise InputError("\n".join(lines))


def types_of(ports: Iterable[DescribedPort], model: str, address: str) -> dict[str, PortType]:
    """Return types by port; InputError when the server does not know Weftline's types."""
    found = list(ports)
    if any(port.type is None for port in found):
        told = ", ".join(f"{port.name} ({port})" for port in found if port.type is None)
        raise InputError(
            f"model {model} at {address} tells no types of {told}"
            "\n    fix: a job needs a Weftline server, of this version or a later one"
        )
    return {port.name: port.type for port in found if port.type is not None}


def _written(type: object, optional: bool) -> str:
    return f"{type}?" if optional else str(type)


def _listed(ports: Ports) -> str:
    return ", ".join(f"{name}: {type}" for name, type in ports.items()) or "none"
