"""GPU requirements of steps: memory and time, stated or measured, and process isolation.

Stated goes before measured. What was measured holds for a kind of device, so that a step can be known on one GPU of a
machine and unknown on another.

A request is taken to run every step once: how long the lists of `map:` are and how often conditions hold is not known
when a plan is made. A step that answers only where another fails is taken to have no work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weftline.nodes.contract import StreamNode
from weftline.pipelines.check.checked import Checked, CheckedStep
from weftline.pipelines.check.options import to_options
from weftline.pipelines.check.problems import listed
from weftline.pipelines.placement.machine import Machine
from weftline.pipelines.placement.profile_file import Measured, Profile, StepProfile, device_kind, digest_of
from weftline.pipelines.spec.policy import BatchPolicy
from weftline.shm.device.names import index_of, is_fake, is_gpu, kind_of


@dataclass(frozen=True, slots=True)
class Need:
    """GPU requirements of one instance of a step.

    bytes:    memory by device, KV memory aside; devices on which it is not known are missing.
    stated:   the pipeline says so; otherwise it was measured.
    kv_bytes: KV memory; None: it takes what is left; 0: it has none.
    alone:    it computes for long and streams, so that whatever shared its process would wait for its rounds.
    ranks:    how many GPUs it uses, from its own device on.
    gives:    it may give tensors on its device, for which its process then has an arena.
    ms:       time of the device for one request, by device, of all instances together; devices on which it was not
              measured are missing.
    """

    bytes: Mapping[str, int] = field(default_factory=dict)
    stated: bool = True
    kv_bytes: int | None = 0
    alone: bool = False
    ranks: int = 1
    gives: bool = False
    ms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Needs:
    """The needs of a pipeline's steps on one machine.

    context_bytes: what a process takes of a device before it holds anything, where that was measured.
    notes:         lines about measurements that do not hold any more, or not here.
    """

    steps: Mapping[str, Need]
    context_bytes: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def has_kv_memory(streams: bool, options: Mapping[str, Any]) -> bool:
    """Return True when a node's KV cache can be planned: it streams and has the option `kv_bytes`.

    Of such a node alone does an option `ranks` say how many GPUs it uses.
    """
    return streams and "kv_bytes" in options and isinstance(options["kv_bytes"], int | None)


def gpus_of(device: str, ranks: int) -> tuple[str, ...]:
    """Return what an instance on `device` computes on: a GPU for each rank, from its own on.

    Ranks on a made-up GPU all compute on the CPU, and take its memory alone.
    """
    if ranks == 1 or not is_gpu(device) or is_fake(device):
        return (device,)
    return tuple(f"{kind_of(device)}:{index_of(device) + rank}" for rank in range(ranks))


def needs_of(checked: Checked, machine: Machine, profile: Profile | None) -> Needs:
    """Return what is known of the steps of a pipeline; with problems, of those that are sound."""
    kinds = {device.name: device_kind(device.name, device.model) for device in machine.devices}
    known, notes, steps = profile or Profile(), [], {}
    elsewhere: dict[str, list[str]] = {}
    stand_ins = {one.step.fallback for one in checked.steps.values() if isinstance(one.step.fallback, str)}
    for name, one in checked.steps.items():
        if one.control:
            continue
        options = to_options(one.config)
        digest = digest_of(one.reference, options)
        if name in known.steps and known.steps[name].digest != digest:
            notes.append(f"{name} is not what was measured: its node or its options are others. Run `weftline profile`")
        measured = {device: known.measured(name, digest, kind) for device, kind in kinds.items()}
        there = {at: what for at, what in measured.items() if what is not None}
        steps[name] = _need(one, options, [*kinds], there, name in stand_ins)
        for kind in _other_kinds(known.steps.get(name), digest) if kinds and not there else ():
            elsewhere.setdefault(kind, []).append(name)
    here = ", ".join(dict.fromkeys(kinds.values()))
    notes += [
        f"what {listed(names)} {'take' if len(names) > 1 else 'takes'} was measured on {kind}, and not on {here}: "
        "run `weftline profile` there, or say what made-up GPUs are (`--gpus 1:80GiB:H200`)"
        for kind, names in elsewhere.items()
    ]
    contexts = {device: known.context_bytes[kind] for device, kind in kinds.items() if kind in known.context_bytes}
    return Needs(steps, contexts, tuple(notes))


def _other_kinds(measured: StepProfile | None, digest: str) -> list[str]:
    """Return the kinds of GPU that a step, as it is now, was measured on."""
    if measured is None or measured.digest != digest:
        return []
    return [kind for kind in measured.on if not kind.startswith("cpu")]


def _need(
    one: CheckedStep,
    options: Mapping[str, Any],
    devices: Sequence[str],
    measured: Mapping[str, Measured],
    stands_in: bool,
) -> Need:
    stated, streams = one.step.device_bytes, issubclass(one.node, StreamNode)
    has_kv = has_kv_memory(streams, options)
    ranks = int(options.get("ranks") or 1) if has_kv else 1
    items = (one.step.batch or BatchPolicy(*one.node.batch_default)).items_max
    bytes = {at: what.device_bytes(_largest(what) if streams else items) for at, what in measured.items()}
    ms = {at: what.item_ms(max(what.run_ms, default=1) if streams else items) for at, what in measured.items()}
    return Need(
        bytes=bytes if stated is None else dict.fromkeys(devices, stated),
        stated=stated is not None,
        kv_bytes=(options["kv_bytes"] or (None if ranks == 1 else 0)) if has_kv else 0,
        alone=streams and one.node.heavy,
        ranks=ranks,
        gives=not streams and any(port.name in one.device_ports for port in one.ports.outputs),
        ms={at: 0.0 if stands_in else each for at, each in ms.items() if each is not None},
    )


def _largest(measured: Measured) -> int:
    """Return the most items that were measured: rounds of a streaming step have no other bound."""
    return max(measured.peak_bytes, default=1)
