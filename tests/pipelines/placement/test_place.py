"""Steps get processes, devices and threads; what does not fit the machine is a problem."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weftline.pipelines.placement.place import Device, Machine, Placement, place, size_text
from weftline.pipelines.spec.graph import Step
from weftline.pipelines.spec.policy import Limits

GIB = 1 << 30
CPU = Machine(cores=4, memory_bytes=8 * GIB)
GPU = Machine(cores=16, memory_bytes=64 * GIB, devices=(Device("cuda:0", 80 * GIB), Device("cuda:1", 80 * GIB)))


def placed(steps: list[Step], heavy: set[str] = frozenset(), machine: Machine = CPU) -> Placement:
    placement, problems = place(steps, {step.name: step.name in heavy for step in steps}, Limits(), machine)
    assert problems == []
    return placement


def test_each_step_has_a_process_of_its_own() -> None:
    placement = placed([Step("a", "echo"), Step("b", "echo")])
    assert [(worker.name, worker.steps, worker.threads) for worker in placement.workers] == [
        ("a", ("a",), 1),
        ("b", ("b",), 1),
    ]
    assert placement.worker_indexes == {"a": (0,), "b": (1,)}


def test_each_instance_has_a_process_of_its_own() -> None:
    placement = placed([Step("a", "echo", instances=3), Step("b", "echo")])
    assert [worker.name for worker in placement.workers] == ["a", "a-2", "a-3", "b"]
    assert placement.worker_indexes == {"a": (0, 1, 2), "b": (3,)}


def test_steps_that_name_a_worker_share_it() -> None:
    steps = [Step("a", "echo", worker="w", instances=2), Step("b", "echo"), Step("c", "echo", worker="w")]
    placement = placed(steps)
    assert [(worker.name, worker.steps) for worker in placement.workers] == [
        ("w", ("a", "c")),
        ("w-2", ("a",)),
        ("b", ("b",)),
    ]
    assert placement.worker_indexes == {"a": (0, 1), "b": (2,), "c": (0,)}


def test_a_worker_named_like_a_step_is_not_that_steps() -> None:
    placement = placed([Step("a", "echo"), Step("b", "echo", worker="a"), Step("c", "echo", worker="a")])
    assert [(worker.name, worker.steps) for worker in placement.workers] == [("a", ("a",)), ("a-worker", ("b", "c"))]


@pytest.mark.parametrize(
    ("cores", "written", "threads"),
    [
        (8, {"c": 3}, [3, 2, 3]),  # a and b are heavy and divide what is left
        (8, {"a": 6}, [6, 2, 1]),
        (2, {"a": 6}, [6, 1, 1]),
        (8, {"a": 1, "b": 1, "c": 4}, [1, 1, 4]),
    ],
)
def test_stated_threads_hold_and_the_rest_is_divided(cores: int, written: dict[str, int], threads: list[int]) -> None:
    steps = [Step(name, "echo", threads=written.get(name)) for name in "abc"]
    placement = placed(steps, {"a", "b"}, Machine(cores, 8 * GIB))
    assert [worker.threads for worker in placement.workers] == threads


def test_of_steps_that_share_a_process_the_largest_number_holds() -> None:
    steps = [Step("a", "echo", worker="w", threads=2), Step("b", "echo", worker="w", threads=3)]
    assert [worker.threads for worker in placed(steps, {"a"}).workers] == [3]


@pytest.mark.parametrize(
    ("cores", "heavy", "threads"),
    [
        (4, "abc", [2, 1, 1, 1]), (16, "abc", [6, 5, 5, 1]), (2, "abcd", [1, 1, 1, 1]), (4, "", [1, 1, 1, 1]),
        (8, "d", [1, 1, 1, 8]), (1, "a", [1, 1, 1, 1]),
    ],
)  # fmt: skip
def test_heavy_processes_share_the_cores(cores: int, heavy: str, threads: list[int]) -> None:
    placement = placed([Step(name, "x") for name in "abcd"], set(heavy), Machine(cores, 8 * GIB))
    assert [worker.threads for worker in placement.workers] == threads


@pytest.mark.parametrize(
    ("device", "heavy", "machine", "got"),
    [
        ("auto", True, GPU, "cuda:0"), ("auto", False, GPU, "cpu"), ("auto", True, CPU, "cpu"),
        ("cpu", True, GPU, "cpu"),
        ("cuda", False, GPU, "cuda:0"), ("cuda:1", True, GPU, "cuda:1"),
    ],
)  # fmt: skip
def test_devices_are_what_was_asked_or_the_best_there_is(device: str, heavy: bool, machine: Machine, got: str) -> None:
    assert placed([Step("a", "x", device=device)], {"a"} if heavy else set(), machine).devices == {"a": (got,)}


@pytest.mark.parametrize(("device", "machine"), [("cuda", CPU), ("cuda:0", CPU), ("cuda:2", GPU)])
def test_a_device_the_machine_lacks_is_a_problem(device: str, machine: Machine) -> None:
    _, problems = place([Step("a", "x", device=device)], {"a": True}, Limits(), machine)
    assert [(one.path, "auto" in one.fix) for one in problems] == [("steps.a.device", True)]
    assert device in problems[0].found


def test_instances_are_spread_over_the_devices_they_name() -> None:
    steps = [Step("a", "x", instances={"cuda": 2, "cpu": 1}), Step("b", "x", instances=2)]
    placement = placed(steps, {"b"}, GPU)
    assert placement.devices == {"a": ("cuda:0", "cuda:0", "cpu"), "b": ("cuda:0", "cuda:0")}
    assert placement.worker_indexes == {"a": (0, 1, 2), "b": (0, 1)}
    assert [(one.name, one.steps) for one in placement.workers] == [
        ("gpu0", ("a", "b")), ("gpu0-2", ("a", "b")), ("a-3", ("a",))
    ]  # fmt: skip
    _, problems = place([Step("a", "x", instances={"cuda:7": 1, "cpu": 1})], {"a": True}, Limits(), GPU)
    assert [(one.path, one.found) for one in problems] == [
        ("steps.a.instances.cuda:7", "cuda:7, and this machine has cuda:0, cuda:1")
    ]
    assert problems[0].fix.startswith("name cuda:0 or cuda:1 there, or write a number alone")
    _, problems = place([Step("a", "x", instances={"cuda:7": 1})], {"a": True}, Limits(), CPU)
    assert problems[0].fix.startswith("write a number alone")


def test_arenas_that_do_not_fit_say_what_would() -> None:
    steps = [Step(name, "x") for name in "abc"]
    heavy = dict.fromkeys("abc", False)
    _, problems = place(steps, heavy, Limits(arena_bytes=GIB + 1), CPU)
    assert [one.path for one in problems] == ["limits.arena_bytes"]
    assert "4 arenas" in problems[0].found
    assert str(GIB) in problems[0].fix
    assert place(steps, heavy, Limits(arena_bytes=GIB), CPU)[1] == []


STEPS = st.lists(
    st.tuples(st.integers(1, 4), st.none() | st.sampled_from(["w", "v", "s0"]), st.booleans()), min_size=1, max_size=6
)


@settings(max_examples=100, deadline=None)
@given(STEPS, st.integers(1, 64))
def test_every_instance_has_one_place_and_threads_never_exceed_cores(rows, cores: int) -> None:
    steps = [Step(f"s{index}", "x", instances=count, worker=worker) for index, (count, worker, _) in enumerate(rows)]
    heavy = {step.name: row[2] for step, row in zip(steps, rows, strict=True)}
    placement, problems = place(steps, heavy, Limits(), Machine(cores, 1 << 50))
    assert problems == []
    for step in steps:
        assert len(set(placement.worker_indexes[step.name])) == step.instances
        assert all(step.name in placement.workers[index].steps for index in placement.worker_indexes[step.name])
    assert sum(len(worker.steps) for worker in placement.workers) == sum(step.instances for step in steps)
    assert len({worker.name for worker in placement.workers}) == len(placement.workers)
    busy = [worker for worker in placement.workers if any(heavy[name] for name in worker.steps)]
    if busy:
        total = sum(worker.threads for worker in busy)
        assert total == max(cores, len(busy)), "heavy workers use every core, and none goes without"


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (64 << 20, "64 MiB"), (5 << 40, "5 TiB")]
)
def test_sizes_are_written_for_people(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text
