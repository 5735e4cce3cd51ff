"""GPU requirements of steps: memory and time, stated or measured, and process isolation.

Stated values take precedence over measured ones. A measurement holds for a kind of device, so a step can be known on
one GPU of a machine and unknown on another.

A request is assumed to run every step once: lengths of `map:` lists and results of conditions are unknown at planning
time. A fallback step is assumed to have no work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
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

    bytes:    memory by device, without KV memory; devices on which it is unknown are missing.
    stated:   stated in the pipeline; otherwise measured.
    kv_bytes: KV memory; None: the remainder; 0: none.
    alone:    it is heavy and streams, so that other steps in its process would wait for its rounds.
    ranks:    number of GPUs, from its own device on.
    gives:    it may output tensors on its device, for which its process needs an arena.
    ms:       device time of one request, by device, of all instances together; devices without measurement are
              missing.
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

    context_bytes: base memory of a process on a device, where measured.
    notes:         lines about measurements that are outdated or for other devices.
    """

    steps: Mapping[str, Need]
    context_bytes: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def has_kv_memory(streams: bool, options: Mapping[str, Any]) -> bool:
    """Return True when a node's KV cache can be planned: it streams and has the option `kv_bytes`.

    Only of such a node is the option `ranks` its number of GPUs.
    """
    return streams and "kv_bytes" in options and isinstance(options["kv_bytes"], int | None)


def gpus_of(device: str, ranks: int) -> tuple[str, ...]:
    """Return the GPUs of an instance on `device`: one for each rank, from its own on.

    Ranks on a fake GPU all compute on the CPU and use that GPU's memory only.
    """
    if ranks == 1 or not is_gpu(device) or is_fake(device):
        return (device,)
    return tuple(f"{kind_of(device)}:{index_of(device) + rank}" for rank in range(ranks))


def needs_of(checked: Checked, machine: Machine, profile: Profile | None) -> Needs:
    """Return the known needs of a pipeline's steps; with problems, of the valid ones."""
    kinds = {device.name: device_kind(device.name, device.model) for device in machine.devices}
    known, notes, steps = profile or Profile(), [], {}
    elsewhere: dict[str, list[str]] = {}
    fallbacks = {one.step.fallback for one in checked.steps.values() if isinstance(one.step.fallback, str)}
    for name, one in checked.steps.items():
        if one.control:
            continue
        options = to_options(one.config)
        digest = digest_of(one.reference, options)
        if name in known.steps and known.steps[name].digest != digest:
            notes.append(f"{name} has changed since it was measured (node or options). Run `weftline profile`")
        measured = {device: known.measured(name, digest, kind) for device, kind in kinds.items()}
        there = {at: what for at, what in measured.items() if what is not None}
        steps[name] = _need(one, options, [*kinds], there, name in fallbacks)
        for kind in _other_kinds(known.steps.get(name), digest) if kinds and not there else ():
            elsewhere.setdefault(kind, []).append(name)
    here = ", ".join(dict.fromkeys(kinds.values()))
    notes += [
        f"{listed(names)} {'were' if len(names) > 1 else 'was'} measured on {kind}, and not on {here}: "
        "run `weftline profile` there, or state the model of hypothetical GPUs (`--gpus 1:80GiB:H200`)"
        for kind, names in elsewhere.items()
    ]
    contexts = {device: known.context_bytes[kind] for device, kind in kinds.items() if kind in known.context_bytes}
    return Needs(steps, contexts, tuple(notes))


def merged(needs: Sequence[Need]) -> Need:
    """Return the needs of steps that share one node: the largest memory that was found, and the work of all."""
    if len(needs) == 1:
        return needs[0]
    return dataclasses.replace(
        needs[0],
        bytes={at: max(one.bytes.get(at, 0) for one in needs) for at in _devices(one.bytes for one in needs)},
        ms={at: sum(one.ms.get(at, 0.0) for one in needs) for at in _devices(one.ms for one in needs)},
    )


def _devices(known: Iterable[Mapping[str, float]]) -> dict[str, None]:
    return {device: None for one in known for device in one}


def _other_kinds(measured: StepProfile | None, digest: str) -> list[str]:
    """Return the kinds of GPU that the current version of a step was measured on."""
    if measured is None or measured.digest != digest:
        return []
    return [kind for kind in measured.on if not kind.startswith("cpu")]


def _need(
    one: CheckedStep,
    options: Mapping[str, Any],
    devices: Sequence[str],
    measured: Mapping[str, Measured],
    is_fallback: bool,
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
        ms={at: 0.0 if is_fallback else each for at, each in ms.items() if each is not None},
    )


def _largest(measured: Measured) -> int:
    """Return the largest measured number of items: rounds of a streaming step have no other bound."""
    return max(measured.peak_bytes, default=1)
