"""What steps need of a GPU: memory there, as stated or as measured, and whether they want a process to themselves.

Stated goes before measured. What was measured holds for a kind of device, so that a step can be known on one GPU of a
machine and unknown on another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weftline.nodes.contract import StreamNode
from weftline.pipelines.checked import Checked, CheckedStep
from weftline.pipelines.machine import Machine
from weftline.pipelines.options import to_options
from weftline.pipelines.policy import BatchPolicy
from weftline.pipelines.profile_file import Measured, Profile, device_kind, digest_of


@dataclass(frozen=True, slots=True)
class Need:
    """What one instance of a step needs of a GPU.

    bytes:    memory by device, KV memory aside; devices on which it is not known are missing.
    stated:   the pipeline says so; otherwise it was measured.
    kv_bytes: KV memory; None: it takes what is left; 0: it has none.
    alone:    it computes for long and streams, so that whatever shared its process would wait for its rounds.
    ranks:    how many GPUs it uses, from its own device on.
    gives:    it may give tensors on its device, for which its process then has an arena.
    """

    bytes: Mapping[str, int] = field(default_factory=dict)
    stated: bool = True
    kv_bytes: int | None = 0
    alone: bool = False
    ranks: int = 1
    gives: bool = False


@dataclass(frozen=True, slots=True)
class Needs:
    """The needs of a pipeline's steps on one machine.

    context_bytes: what a process takes of a device before it holds anything, where that was measured.
    notes:         lines about measurements that do not hold any more.
    """

    steps: Mapping[str, Need]
    context_bytes: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def needs_of(checked: Checked, machine: Machine, profile: Profile | None) -> Needs:
    """Return what is known of the steps of a pipeline; with problems, of those that are sound."""
    kinds = {device.name: device_kind(device.name, device.model) for device in machine.devices}
    known, notes, steps = profile or Profile(), [], {}
    for name, one in checked.steps.items():
        if one.control:
            continue
        options = to_options(one.config)
        digest = digest_of(one.reference, options)
        if name in known.steps and known.steps[name].digest != digest:
            notes.append(f"{name} is not what was measured: its node or its options are others. Run `weftline profile`")
        measured = {device: known.measured(name, digest, kind) for device, kind in kinds.items()}
        steps[name] = _need(one, options, [*kinds], {at: what for at, what in measured.items() if what is not None})
    contexts = {device: known.context_bytes[kind] for device, kind in kinds.items() if kind in known.context_bytes}
    return Needs(steps, contexts, tuple(notes))


def _need(
    one: CheckedStep, options: Mapping[str, Any], devices: Sequence[str], measured: Mapping[str, Measured]
) -> Need:
    stated, ranks = one.step.device_bytes, options.get("ranks") or 1
    streams = issubclass(one.node, StreamNode)
    items = (one.step.batch or BatchPolicy(*one.node.batch_default)).items_max
    bytes = {at: what.device_bytes(_largest(what) if streams else items) for at, what in measured.items()}
    return Need(
        bytes=bytes if stated is None else dict.fromkeys(devices, stated),
        stated=stated is not None,
        kv_bytes=_kv_bytes(options, ranks) if streams else 0,
        alone=streams and one.node.heavy,
        ranks=ranks,
        gives=not streams and any(port.name in one.device_ports for port in one.ports.outputs),
    )


def _largest(measured: Measured) -> int:
    """Return the most items that were measured: rounds of a streaming step have no other bound."""
    return max(measured.peak_bytes, default=1)


def _kv_bytes(options: Mapping[str, Any], ranks: int) -> int | None:
    if "kv_bytes" not in options:
        return 0
    own = options["kv_bytes"]
    return int(own) if own else None if ranks == 1 else 0
