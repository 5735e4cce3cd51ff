"""Which process and which device each step gets, and how many threads: from values to values, so it is testable.

One process for each instance of a step, unless steps share one by naming the same `worker`. Heavy nodes divide the
cores evenly among their processes, so that thread pools never fight; light ones have one thread each. `auto` puts a
heavy node on the first GPU and everything else on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weftline.errors import Problem
from weftline.pipelines.graph import Step
from weftline.pipelines.plan import PlannedWorker
from weftline.pipelines.policy import Limits
from weftline.shm.device.names import is_gpu

ARENA_SHARE = 0.5
"""Most of a machine's memory that arenas may reserve; models and their working memory need the rest."""


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator: 'cuda:0' and so on, and its memory."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to place a pipeline on."""

    cores: int
    memory_bytes: int
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """The processes, and for every step its devices and the indexes of its processes, one for each instance."""

    workers: tuple[PlannedWorker, ...]
    devices: Mapping[str, tuple[str, ...]]
    places: Mapping[str, tuple[int, ...]]


@dataclass(slots=True)
class _Process:
    name: str
    steps: list[str] = field(default_factory=list)
    heavy: bool = False
    device: str = ""


def place(
    steps: Sequence[Step], heavy: Mapping[str, bool], limits: Limits, machine: Machine
) -> tuple[Placement, list[Problem]]:
    """Return where each step runs, and every reason why it cannot run there, without file or line.

    heavy: by step name, whether its node computes for long stretches.
    """
    problems: list[Problem] = []
    devices = {step.name: _devices(step, heavy[step.name], machine, problems) for step in steps}
    processes, places = _processes(steps, heavy, devices, problems)
    _check_memory(processes, limits, machine, problems)
    threads = _threads(processes, machine.cores)
    workers = tuple(
        PlannedWorker(process.name, tuple(process.steps), share, limits.arena_bytes, process.device)
        for process, share in zip(processes, threads, strict=True)
    )
    return Placement(workers, devices, places), problems


def instance_count(step: Step) -> int:
    """Return how many loaded copies a step asks for."""
    return step.instances if isinstance(step.instances, int) else sum(step.instances.values())


def _devices(step: Step, heavy: bool, machine: Machine, problems: list[Problem]) -> tuple[str, ...]:
    """Return the device of each instance."""
    path = f"steps.{step.name}"
    if isinstance(step.instances, int):
        return (_device(f"{path}.device", step.device, heavy, machine, problems),) * step.instances
    found: list[str] = []
    for device, count in step.instances.items():
        found += [_device(f"{path}.instances.{device}", device, heavy, machine, problems)] * count
    return tuple(found)


def _device(path: str, written: str, heavy: bool, machine: Machine, problems: list[Problem]) -> str:
    names = [device.name for device in machine.devices]
    wanted = "cuda:0" if written == "cuda" else written
    if wanted == "auto":
        return names[0] if names and heavy else "cpu"
    if wanted != "cpu" and wanted not in names:
        found = f"{written}, and this machine has {', '.join(names) or 'no GPU'}"
        problems.append(Problem(path, found, fix="write auto, which uses a GPU where there is one"))
    return wanted


def _processes(
    steps: Sequence[Step],
    heavy: Mapping[str, bool],
    devices: Mapping[str, Sequence[str]],
    problems: list[Problem],
) -> tuple[list[_Process], dict[str, tuple[int, ...]]]:
    """Return the processes in order of their first step, and each step's place in them.

    A group has as many processes as its most replicated step has instances; a step is in the first ones.
    """
    processes: list[_Process] = []
    index: dict[tuple[bool, str, int], int] = {}
    places: dict[str, tuple[int, ...]] = {}
    taken: set[str] = set()
    for step in steps:
        own = []
        for copy in range(instance_count(step)):
            key = (step.worker is not None, step.worker or step.name, copy)
            if key not in index:
                index[key] = len(processes)
                processes.append(_Process(_free_name(key[1], copy, taken)))
            process = processes[index[key]]
            process.steps.append(step.name)
            process.heavy = process.heavy or heavy[step.name]
            _take_device(process, step.name, devices[step.name][copy], problems)
            own.append(index[key])
        places[step.name] = tuple(own)
    return processes, places


def _take_device(process: _Process, step: str, device: str, problems: list[Problem]) -> None:
    """Give a process the GPU of one of its steps; a second one is a problem."""
    if not is_gpu(device) or process.device == device:
        return
    if not process.device:
        process.device = device
        return
    found = f"{step} is on {device}, and the worker {process.name} that it shares uses {process.device}"
    fix = f"put its steps on one device, or let {step} have a worker of its own"
    problems.append(Problem(f"steps.{step}.worker", found, "one GPU for each process", fix))


def _free_name(name: str, copy: int, taken: set[str]) -> str:
    """Return a process name: 'see', 'see-2' for a second instance, 'see-worker' where a group has a step's name."""
    free = name if copy == 0 else f"{name}-{copy + 1}"
    while free in taken:
        free += "-worker"
    taken.add(free)
    return free


def _threads(processes: Sequence[_Process], cores: int) -> list[int]:
    """Divide the cores among heavy processes: evenly, the first ones get what is left over, nobody less than one."""
    heavy = [process.heavy for process in processes]
    share, over = divmod(max(cores, 1), max(sum(heavy), 1))
    return [max(share + (sum(heavy[:place]) < over), 1) if is_heavy else 1 for place, is_heavy in enumerate(heavy)]


def _check_memory(processes: Sequence[_Process], limits: Limits, machine: Machine, problems: list[Problem]) -> None:
    arenas = len(processes) + 1  # the ingress writes requests' inputs into one of its own
    wanted, most = arenas * limits.arena_bytes, int(machine.memory_bytes * ARENA_SHARE)
    if wanted <= most:
        return
    found = f"{arenas} arenas of {size_text(limits.arena_bytes)} are {size_text(wanted)} of shared memory"
    expected = f"at most {size_text(most)}, {ARENA_SHARE:.0%} of this machine's {size_text(machine.memory_bytes)}"
    fix = f"set limits.arena_bytes to at most {most // arenas}, or let steps share a worker"
    problems.append(Problem("limits.arena_bytes", found, expected, fix))


def size_text(size_bytes: int) -> str:
    """Return a size for people: '64 MiB'."""
    size, units = float(size_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if size >= 10 or size == int(size) else f"{size:.1f} {units[0]}"
