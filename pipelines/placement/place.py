"""Placement: process, device and threads of each step; pure functions of values.

Each instance of a step has a process of its own, unless steps share one: by naming the same `worker`, because they are
light, or on a GPU. Instances of one step are always in different processes, and a step's own `worker` takes precedence
over other rules.

Light steps run no model and no user code, and cost microseconds (`Node.light_output_bytes`). Those on the CPU share
process `light`, which has a small arena. A step with `worker`, `threads`, `idle` or `reserved` is not part of it.

Processes of one GPU run in turns, so its steps share one (`gpu.processes: grouped`). Steps that stream and compute for
long, as llm steps do, have one of their own, because others would wait for their rounds. The second instance of a step
goes to a second shared process. `separate` gives every instance a process, as on the CPU.

A process has the number of threads that its steps state. Other heavy nodes divide the remaining cores evenly among
their processes, so that thread pools do not compete; nodes that are not heavy have one thread. `auto` puts a heavy
node on a GPU (see `gpu_assignment`), and every other node on the CPU or on the GPU of its neighbours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from weftline.errors import Problem
from weftline.pipelines.placement.gpu_assignment import assign_gpus, work_of
from weftline.pipelines.placement.loads import AUTO
from weftline.pipelines.placement.machine import Device, Machine
from weftline.pipelines.placement.needs import Need, Needs, gpus_of
from weftline.pipelines.placement.plan import DeviceWork, PlannedWorker
from weftline.pipelines.spec.graph import Step
from weftline.pipelines.spec.policy import GpuPolicy, Limits
from weftline.shm.block import PAGE_BYTES, align_up
from weftline.shm.device.names import index_of, is_gpu

_Key = tuple[str, str, int]
"""Key of a process: 'worker', 'gpu', 'light' or 'step'; the name of that; index of the copy."""

LIGHT = "light"
"""Name of the process of light steps."""


@dataclass(slots=True)
class Process:
    """A planned process: its steps, whether one of them is heavy, and its GPU ('' for none).

    shared: its steps share it because of their GPU, or because they are light.
    """

    name: str
    steps: list[str] = field(default_factory=list)
    heavy: bool = False
    device: str = ""
    shared: bool = False


def assign_processes(
    steps: Sequence[Step],
    heavy: Mapping[str, bool],
    alone: Collection[str],
    devices: Mapping[str, Sequence[str]],
    gpu: GpuPolicy,
    problems: list[Problem],
    light: Collection[str] = (),
) -> tuple[list[Process], dict[str, tuple[int, ...]]]:
    """Return the processes in order of their first step, and each step's place in them, one for each instance.

    alone: steps that share no process unless they state a `worker`.
    light: steps that share the process of light steps.
    """
    keys = {
        step.name: [
            (LIGHT, LIGHT, copy) if step.name in light else _key(step, copy, alone, devices[step.name], gpu)
            for copy in range(len(devices[step.name]))
        ]
        for step in steps
    }
    groups = {key[:2] for own in keys.values() for key in own if key[0] in ("gpu", LIGHT)}
    members = {group: {name for name, own in keys.items() if any(key[:2] == group for key in own)} for group in groups}
    reserved = {step.name for step in steps} | {step.worker for step in steps if step.worker}
    processes: list[Process] = []
    index: dict[_Key, int] = {}
    places: dict[str, tuple[int, ...]] = {}
    taken: set[str] = set()
    for step in steps:
        own = []
        for copy, key in enumerate(keys[step.name]):
            if len(members.get(key[:2], ())) == 1:
                key = "step", step.name, copy
            if key not in index:
                index[key] = len(processes)
                processes.append(Process(_name(key, taken, reserved), shared=key[:2] in members))
            process = processes[index[key]]
            process.steps.append(step.name)
            process.heavy = process.heavy or heavy[step.name]
            _take_device(process, step.name, devices[step.name][copy], problems)
            own.append(index[key])
        places[step.name] = tuple(own)
    return processes, places


def process_notes(processes: Sequence[Process], alone: Collection[str], gpu: GpuPolicy) -> tuple[str, ...]:
    """Return a line for each decision about shared processes and those of a GPU."""
    light = [
        f"{_listed(one.steps)} share process {one.name}: they run no model and no user code; "
        "a `worker:` of its own parts a step"
        for one in processes
        if one.shared and not one.device and len(one.steps) > 1
    ]
    return (*light, *_gpu_process_notes(processes, alone, gpu))


def _gpu_process_notes(processes: Sequence[Process], alone: Collection[str], gpu: GpuPolicy) -> list[str]:
    lines = []
    for device in dict.fromkeys(process.device for process in processes if process.device):
        there = [process for process in processes if process.device == device]
        if gpu.processes == "separate" and len(there) > 1:
            turns = "run concurrently if MPS is active" if gpu.mps else "run in turns"
            lines.append(
                f"{_listed([one.name for one in there])} have a process each on {device} and {turns}; "
                "gpu.processes: grouped lets steps share one"
            )
            continue
        for one in (one for one in there if one.shared and len(one.steps) > 1):
            without = "with MPS separate processes could run concurrently" if gpu.mps else (
                "without MPS, processes of one GPU run in turns"
            )  # fmt: skip
            each = "gpu.processes: separate starts one for each"
            lines.append(f"{_listed(one.steps)} share process {one.name}: {without}; {each}")
        for one in (one for one in there if len(there) > 1 and len(one.steps) == 1 and one.steps[0] in alone):
            lines.append(
                f"{one.steps[0]} has process {one.name} to itself: other steps in it would wait for its rounds"
            )
    if lines and gpu.mps:
        lines.append("gpu.mps: if NVIDIA's service is active, a fatal fault in one process of a GPU ends all of them")
    return lines


def _key(step: Step, copy: int, alone: Collection[str], devices: Sequence[str], gpu: GpuPolicy) -> _Key:
    if step.worker is not None:
        return "worker", step.worker, copy
    device = devices[copy]
    if gpu.processes == "grouped" and is_gpu(device) and step.name not in alone:
        return "gpu", device, list(devices[:copy]).count(device)
    return "step", step.name, copy


def _name(key: _Key, taken: set[str], reserved: Collection[str]) -> str:
    """Return a process name: 'see', 'see-2' for a second instance, 'see-worker' where a group has a step's name."""
    kind, name, copy = key
    base = f"gpu{index_of(name)}" if kind == "gpu" else name
    free = base if copy == 0 else f"{base}-{copy + 1}"
    while free in taken or (kind in ("gpu", LIGHT) and free in reserved):
        free += "-worker"
    taken.add(free)
    return free


def _take_device(process: Process, step: str, device: str, problems: list[Problem]) -> None:
    """Assign a process the GPU of one of its steps; report a second GPU as a problem."""
    if not is_gpu(device) or process.device == device:
        return
    if not process.device:
        process.device = device
        return
    found = f"{step} is on {device}, and its shared worker {process.name} uses {process.device}"
    fix = f"put its steps on one device, or put {step} in a worker of its own"
    problems.append(Problem(f"steps.{step}.worker", found, "one GPU for each process", fix))


def _listed(names: Sequence[str]) -> str:
    """Return names as 'a, b and c'."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


__all__ = ["ARENA_SHARE", "Device", "Machine", "Placement", "instance_count", "place", "size_text"]

ARENA_SHARE = 0.5
"""Largest share of a machine's memory for arenas; models and their working memory need the rest."""

LIGHT_ARENA_SHARE = 8
"""A light step needs one part in 8 of `limits.arena_bytes`, or room for its largest batch: most of its outputs are so
small that they travel in messages."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The processes, and for every step its devices and process indexes, one for each instance.

    process_notes: a line for each decision about shared processes and those of a GPU.
    work: measured load of each GPU with reasons; empty without measurements on GPUs.
    """

    workers: tuple[PlannedWorker, ...]
    devices: Mapping[str, tuple[str, ...]]
    worker_indexes: Mapping[str, tuple[int, ...]]
    process_notes: tuple[str, ...] = ()
    work: tuple[DeviceWork, ...] = ()


def place(
    steps: Sequence[Step],
    heavy: Mapping[str, bool],
    limits: Limits,
    machine: Machine,
    gpu: GpuPolicy | None = None,
    needs: Needs | None = None,
    edges: Collection[tuple[str, str]] = (),
    light: Mapping[str, int] | None = None,
    ingress: Sequence[int] = (),
) -> tuple[Placement, list[Problem]]:
    """Return the placement of each step, and the problems of it, without file or line.

    heavy: by step name, True when its node computes for long stretches.
    light: of each light step, the bytes of the outputs of its largest batch.
    needs: known GPU requirements of the steps.
    edges: pairs of steps, writer and reader, whose tensors can stay on a device.
    ingress: sizes of the arenas for requests' inputs, one for each pipeline; default: one of `limits.arena_bytes`.
    """
    problems: list[Problem] = []
    gpu, needs = gpu or GpuPolicy(), needs or Needs({})
    written = {step.name: _written(step, machine, problems) for step in steps}
    devices, balance = assign_gpus(steps, written, heavy, needs.steps, edges, machine, gpu, needs.context_bytes)
    problems += [one for step in steps for one in _lacking(step.name, devices[step.name], needs.steps, machine)]
    alone = {name for name, need in needs.steps.items() if need.alone}
    batch_bytes = {step.name: light[step.name] for step in steps if light and _is_light(step, light, devices)}
    processes, places = assign_processes(steps, heavy, alone, devices, gpu, problems, batch_bytes)
    arenas = [_arena_bytes(process, batch_bytes, limits) for process in processes]
    _check_memory([*arenas, *(ingress or (limits.arena_bytes,))], limits, machine, problems)
    threads = _threads(processes, {step.name: step.threads for step in steps}, machine.cores)
    workers = tuple(
        PlannedWorker(process.name, tuple(process.steps), share, arena_bytes, process.device)
        for process, share, arena_bytes in zip(processes, threads, arenas, strict=True)
    )
    work = work_of(steps, written, devices, needs.steps, balance) if balance is not None else ()
    return Placement(workers, devices, places, process_notes(processes, alone, gpu), work), problems


def instance_count(step: Step) -> int:
    """Return the number of instances of a step."""
    return step.instances if isinstance(step.instances, int) else sum(step.instances.values())


def _is_light(step: Step, light: Collection[str], devices: Mapping[str, Sequence[str]]) -> bool:
    """Return True for a light step on the CPU that states nothing about its process."""
    states = step.worker or step.threads or step.idle or step.reserved
    return step.name in light and not states and not any(map(is_gpu, devices[step.name]))


def _arena_bytes(process: Process, batch_bytes: Mapping[str, int], limits: Limits) -> int:
    """Return the size of a process's arena: `limits.arena_bytes`, or the sum of the needs of light steps."""
    if not all(name in batch_bytes for name in process.steps):
        return limits.arena_bytes
    least = max(limits.arena_bytes // LIGHT_ARENA_SHARE, PAGE_BYTES)
    needs = (min(max(least, batch_bytes[name]), limits.arena_bytes) for name in process.steps)
    return sum(align_up(need, PAGE_BYTES) for need in needs)


def _written(step: Step, machine: Machine, problems: list[Problem]) -> tuple[str, ...]:
    """Return the stated device of each instance: 'auto' or a full name."""
    path = f"steps.{step.name}"
    if isinstance(step.instances, int):
        return (_device(f"{path}.device", step.device, machine, problems),) * step.instances
    found: list[str] = []
    for device, count in step.instances.items():
        found += [_device(f"{path}.instances.{device}", device, machine, problems)] * count
    return tuple(found)


def _device(path: str, written: str, machine: Machine, problems: list[Problem]) -> str:
    names = [device.name for device in machine.devices]
    wanted = "cuda:0" if written == "cuda" else written
    if wanted not in (AUTO, "cpu", *names):
        found = f"{written}, and this machine has {', '.join(names) or 'no GPU'}"
        problems.append(Problem(path, found, fix=_alternatives(path, names)))
    return wanted


def _alternatives(path: str, names: Sequence[str]) -> str:
    """Return alternatives to a device that does not exist."""
    if path.endswith(".device"):
        return "write auto, which uses a GPU where there is one"
    here = f"name {' or '.join(names[:4])} there, or " if names else ""
    return f"{here}write a number alone, such as `instances: 2`, which uses a GPU where there is one"


def _lacking(step: str, devices: Sequence[str], needs: Mapping[str, Need], machine: Machine) -> Iterator[Problem]:
    """Yield a problem for each GPU from which a step of several ranks does not have enough GPUs."""
    ranks, names = needs[step].ranks if step in needs else 1, [device.name for device in machine.devices]
    for device in dict.fromkeys(devices):
        if device in names and not {*gpus_of(device, ranks)} <= {*names}:
            found = f"{ranks} GPUs from {device} on, and this machine has {', '.join(names)}"
            yield Problem(f"steps.{step}.ranks", found, fix="lower it, or start on an earlier GPU (`device:`)")


def _threads(processes: Sequence[Process], written: Mapping[str, int | None], cores: int) -> list[int]:
    """Return each process's threads: as stated, else a heavy process's share of the cores, else one.

    Heavy processes divide the remaining cores evenly, at least one each; the first ones get the odd cores.
    """
    stated = [max((written[name] or 0 for name in process.steps), default=0) for process in processes]
    heavy = [process.heavy and not threads for process, threads in zip(processes, stated, strict=True)]
    share, over = divmod(max(cores - sum(stated), 1), max(sum(heavy), 1))
    return [
        threads or (max(share + (sum(heavy[:place]) < over), 1) if heavy[place] else 1)
        for place, threads in enumerate(stated)
    ]


def _check_memory(arenas: Sequence[int], limits: Limits, machine: Machine, problems: list[Problem]) -> None:
    count, wanted, most = len(arenas), sum(arenas), int(machine.memory_bytes * ARENA_SHARE)
    if wanted <= most:
        return
    size = f"{'' if wanted == count * limits.arena_bytes else 'up to '}{size_text(limits.arena_bytes)}"
    found = f"{count} arenas of {size} are {size_text(wanted)} of shared memory"
    expected = f"at most {size_text(most)}, {ARENA_SHARE:.0%} of this machine's {size_text(machine.memory_bytes)}"
    fix = f"set limits.arena_bytes to at most {most // count}, or let steps share a worker"
    problems.append(Problem("limits.arena_bytes", found, expected, fix))


def size_text(size_bytes: int) -> str:
    """Format a size: '64 MiB'."""
    size, units = float(size_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if size >= 10 or size == int(size) else f"{size:.1f} {units[0]}"
