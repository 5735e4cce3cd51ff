"""Process assignment of instances, with the reason for each.

Instances of one step are always in different processes, and a step's own `worker` goes before everything else. On a GPU
processes only take turns, so that its steps share one (`gpu.processes: grouped`) unless they stream and compute for
long, as llm steps do: whatever shared their process would wait for their rounds. The second instance of a step goes in
a second shared process, and so on. `separate` gives every instance a process, as on the CPU.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from weftline.errors import Problem
from weftline.pipelines.spec.graph import Step
from weftline.pipelines.spec.policy import GpuPolicy
from weftline.shm.device.names import index_of, is_gpu

_Key = tuple[str, str, int]
"""What a process is for: 'worker', 'gpu' or 'step'; its name there; which copy."""


@dataclass(slots=True)
class Process:
    """A process to be: the steps in it, whether one of them computes for long, and its GPU; '' for none."""

    name: str
    steps: list[str] = field(default_factory=list)
    heavy: bool = False
    device: str = ""
    shared: bool = False


def grouped(
    steps: Sequence[Step],
    heavy: Mapping[str, bool],
    alone: Collection[str],
    devices: Mapping[str, Sequence[str]],
    gpu: GpuPolicy,
    problems: list[Problem],
) -> tuple[list[Process], dict[str, tuple[int, ...]]]:
    """Return the processes in order of their first step, and each step's place in them, one for each instance.

    alone: steps that share no process unless their `worker` says so.
    """
    keys = {step.name: [_key(step, copy, alone, devices[step.name], gpu) for copy in range(len(devices[step.name]))]
            for step in steps}  # fmt: skip
    members = {device: {name for name, own in keys.items() if any(key[:2] == ("gpu", device) for key in own)}
               for device in {key[1] for own in keys.values() for key in own if key[0] == "gpu"}}  # fmt: skip
    reserved = {step.name for step in steps} | {step.worker for step in steps if step.worker}
    processes: list[Process] = []
    index: dict[_Key, int] = {}
    places: dict[str, tuple[int, ...]] = {}
    taken: set[str] = set()
    for step in steps:
        own = []
        for copy, key in enumerate(keys[step.name]):
            if key[0] == "gpu" and len(members[key[1]]) == 1:
                key = "step", step.name, copy
            if key not in index:
                index[key] = len(processes)
                processes.append(Process(_name(key, taken, reserved), shared=key[0] == "gpu"))
            process = processes[index[key]]
            process.steps.append(step.name)
            process.heavy = process.heavy or heavy[step.name]
            _take_device(process, step.name, devices[step.name][copy], problems)
            own.append(index[key])
        places[step.name] = tuple(own)
    return processes, places


def reasons(processes: Sequence[Process], alone: Collection[str], gpu: GpuPolicy) -> tuple[str, ...]:
    """Return a line for each choice that was made for a GPU's processes."""
    lines = []
    for device in dict.fromkeys(process.device for process in processes if process.device):
        there = [process for process in processes if process.device == device]
        if gpu.processes == "separate" and len(there) > 1:
            turns = "if MPS runs they compute side by side" if gpu.mps else "take turns"
            lines.append(
                f"{_listed([one.name for one in there])} have a process each on {device}, and {turns} there; "
                "gpu.processes: grouped lets steps share one"
            )
            continue
        for one in (one for one in there if one.shared and len(one.steps) > 1):
            without = "with MPS they could compute side by side" if gpu.mps else (
                "without MPS processes of one GPU only take turns"
            )  # fmt: skip
            each = "gpu.processes: separate gives each its own"
            lines.append(f"{_listed(one.steps)} share process {one.name}: {without}; {each}")
        for one in (one for one in there if len(there) > 1 and len(one.steps) == 1 and one.steps[0] in alone):
            lines.append(
                f"{one.steps[0]} has process {one.name} to itself: whatever shared it would wait for its rounds"
            )
    if lines and gpu.mps:
        lines.append("gpu.mps: if NVIDIA's service runs, a fatal fault in one process of a GPU ends all of them")
    return tuple(lines)


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
    while free in taken or (kind == "gpu" and free in reserved):
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
    found = f"{step} is on {device}, and the worker {process.name} that it shares uses {process.device}"
    fix = f"put its steps on one device, or let {step} have a worker of its own"
    problems.append(Problem(f"steps.{step}.worker", found, "one GPU for each process", fix))


def _listed(names: Sequence[str]) -> str:
    """Return names for people: 'a, b and c'."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
