"""Each part is seen to fail: a mistake is planted in the processes that it starts, and it must be the one to say so."""

from __future__ import annotations

import os
import random
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.weftline.gpu_check.planting import planted
from weftline.gpu_check import failures, flagship, leases, memory, programs
from weftline.gpu_check.context import OVERTIME_S, CheckContext
from weftline.gpu_check.outcomes import CheckOutcome, Wrong, outcome_of
from weftline.gpu_check.parts import PARTS
from weftline.gpu_check.processes import Process, ProcessGroup

DRIVER = "from weftline.shm.device.driver import DriverError\nfrom weftline.testing.fake_gpu.gpu import FakeGpu\n"
SHORT_COPIES = f"""{DRIVER}
whole = FakeGpu.copy
FakeGpu.copy = lambda gpu, to, source, size, stream: whole(gpu, to, source, max(size - 1, 1), stream)
"""
READS_EARLY = f"""{DRIVER}
FakeGpu.wait = lambda gpu, stream, event: None
"""
SAYS_DONE_EARLY = f"""{DRIVER}
FakeGpu.synchronize = lambda gpu, stream: None
"""
NO_DELAYS = """
from weftline.gpu_check.kernels import FakeKernels
FakeKernels.delay = lambda kernels, stream, microseconds: None
"""
NO_WAITS = f"""{DRIVER}
FakeGpu.wait_event = lambda gpu, event: (_ for _ in ()).throw(DriverError("wait_event", "NOT_READY"))
"""
WRITABLE = f"""{DRIVER}
usual = FakeGpu.map
FakeGpu.map = lambda gpu, memory, size, writable: usual(gpu, memory, size, True)
"""
NO_FAULTS = """
from weftline.gpu_check.kernels import FakeKernels
FakeKernels.poke = lambda kernels, stream: None
"""
NO_MEMORY_FIGURES = f"""{DRIVER}
FakeGpu.memory = lambda gpu: (_ for _ in ()).throw(DriverError("memory", "UNKNOWN"))
"""
LEAK = f"""{DRIVER}
asked = iter(range(1, 1000))
FakeGpu.memory = lambda gpu: ((8 << 30) - next(asked) * (64 << 20), 8 << 30)
"""
HANG = """
import time
from weftline.gpu_check import device_commands
device_commands.settle = device_commands.DEVICE_COMMANDS["settle"] = lambda worker: time.sleep(60)
"""
WAITS_FOR_EVER = """
import time
from weftline.gpu_check import device_commands
from weftline.shm.device.driver import DeviceLost
whole = device_commands.check
def check(worker, **about):
    try:
        return whole(worker, **about)
    except DeviceLost:
        time.sleep(60)
device_commands.DEVICE_COMMANDS["check"] = check
"""


class WritersDie(random.Random):
    def random(self) -> float:
        return 0.3


def run(name: str, environment: dict[str, str] | None = None, left_s: float = 60.0) -> CheckOutcome:
    part = next(part for part in PARTS if part.name == name)
    context = CheckContext(name, "fake:0", True, False, time.monotonic() + left_s, environment)
    return outcome_of(name, lambda: part.run(context))


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize(
    ("name", "mistake", "said"),
    [
        ("share", SHORT_COPIES, "share mode descriptor, 1 MiB at 0: checksum"),
        ("costs", NO_WAITS, "the maker failed to time_events: wait_event: NOT_READY"),
        ("exporter killed", SHORT_COPIES, "the first heir, 1 MiB at 0: checksum"),
        ("read-only", WRITABLE, "after a guest's write: checksum"),
        ("leases", SHORT_COPIES, "ordering host: 32 of 32 leases are not as written"),
        ("leases", READS_EARLY, "ordering event: "),
        ("leases", SAYS_DONE_EARLY, "ordering host: "),
        ("leases", NO_DELAYS, "a reader that does not wait was right 20 times"),
        ("copy-in", SHORT_COPIES.replace("whole(", "missing("), "the maker failed to time_copies: NameError"),
        ("contexts", NO_MEMORY_FIGURES, "the watcher failed to open: memory: UNKNOWN"),
        ("hops", SHORT_COPIES, "pass, ordering host, 1 KiB: 32 of 32 tensors were not as sent"),
        ("fault", NO_FAULTS, "a kernel wrote to an unmapped address without an error"),
        ("kills", LEAK, "bytes of the device are free"),
        ("kills", HANG, "did not settle within 0 s"),
    ],
)
def test_a_planted_mistake_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, mistake: str, said: str
) -> None:
    monkeypatch.setattr(failures, "HANG_S", 0.4 if name == "kills" else failures.HANG_S)
    monkeypatch.setattr(leases, "FAKE_DELAYS_US", (0, 150_000))  # longer than any message takes, on any machine
    found = run(name, planted(tmp_path, mistake))
    assert (found.state, said in found.why) == ("wrong", True), found.why


@pytest.mark.slow
def test_a_part_that_hangs_is_wrong_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("weftline.gpu_check.context.OVERTIME_S", 0.0)
    hangs = HANG.replace("import device_commands", "import device_worker").replace(
        'device_commands.settle = device_commands.DEVICE_COMMANDS["settle"] = lambda worker',
        "device_worker.DeviceWorker.do_make = lambda *given, **about",
    )
    found = run("read-only", planted(tmp_path, hangs), left_s=2.0)
    assert (found.state, found.why[:-4]) == ("wrong", "the maker did not make within"), found.why  # 1 or 2 seconds


def test_a_part_that_runs_out_of_time_is_skipped_with_the_reason() -> None:
    found = run("share", left_s=-OVERTIME_S)
    assert found.state == "skipped" and found.why.startswith("took too long: its time was over before the guest")


def test_processes_are_all_ended_even_when_one_is_there_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    def stays(one: Process) -> float:
        raise Wrong("it was killed and is still there")

    with pytest.raises(Wrong, match="still there"), ProcessGroup("fake:0") as group:
        first, second = group.start("the first"), group.start("the second")
        monkeypatch.setattr(first, "kill", partial(stays, first))
    with pytest.raises(ProcessLookupError):
        os.kill(second.pid, 0)
    monkeypatch.undo()
    first.kill()


@pytest.mark.slow
def test_a_reader_that_waits_for_a_dead_writer_for_ever_is_ended_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(failures, "QUICK_KILLS", 1)
    monkeypatch.setattr(failures, "PATIENCE_S", 0.3)
    monkeypatch.setattr(failures, "MOMENT_MAX_S", 0.5)
    monkeypatch.setattr(
        failures, "Traffic", partial(failures.Traffic, delays_us=(400_000,))
    )  # the writer dies meanwhile
    monkeypatch.setattr(failures, "random", SimpleNamespace(Random=WritersDie))
    found = run("kills", planted(tmp_path, WAITS_FOR_EVER))
    assert (found.state, found.why) == ("right", "")
    assert found.figures["of them, waited on their device until they were ended"] == 1


def test_a_slow_copy_into_an_arena_misses_its_bar_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {"plain": [4e11, 4e11, 4e11], "arena": [1e11, 3e11, 3.2e11]}
    monkeypatch.setattr("weftline.gpu_check.processes.Process.ask", lambda process, verb, **about: {"fds": [], **slow})
    context = CheckContext("copy-in", "cuda:0", False, False, time.monotonic() + 60)
    (bar,) = memory.check_copies(context).bars
    assert (bar.found, bar.met) == (0.75, False)
    assert str(bar).endswith("missed by 12%")


def tool(folder: Path, name: str, body: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


def on_path(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PATH", f"{folder}:{Path(sys.executable).parent}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("body", "state", "said"),
    [
        ("echo '========= ERROR SUMMARY: 0 errors'", "right", ""),
        ("echo '========= Invalid __global__ write of size 4 bytes'; exit 9", "wrong", "found: ========= Invalid"),
        ("echo 'kills wrong' >&2; exit 1", "wrong", "ended with 1: kills wrong"),
    ],
)
def test_what_compute_sanitizer_finds_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, state: str, said: str
) -> None:
    tool(tmp_path, programs.SANITIZER, body)
    on_path(monkeypatch, tmp_path)
    found = run("memcheck")
    assert found.state == state
    assert said in found.why
    assert found.state == "wrong" or found.figures == {"memcheck": "ERROR SUMMARY: 0 errors"}


def test_the_sanitizer_is_given_every_process_of_the_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool(tmp_path, programs.SANITIZER, f'echo "$@" > {tmp_path}/asked; echo "========= nothing"')
    on_path(monkeypatch, tmp_path)
    assert run("memcheck").state == "right"
    asked = (tmp_path / "asked").read_text()
    assert "--tool memcheck --target-processes all --error-exitcode 9 --report-api-errors no" in asked
    assert "-m weftline.gpu_check --device fake:0 --quick --only share leases hops" in asked


def test_the_service_is_started_used_and_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool(tmp_path, programs.DAEMON, f'echo "$1" "$CUDA_MPS_PIPE_DIRECTORY" "$(cat)" >> {tmp_path}/log')
    on_path(monkeypatch, tmp_path)
    seen: list[str] = []

    def part(context: CheckContext) -> CheckOutcome:
        seen.append(dict(context.environment or {})["CUDA_MPS_PIPE_DIRECTORY"])
        return CheckOutcome("a part", "right")

    monkeypatch.setattr(programs, "check_share", lambda context: part(context).figures)
    monkeypatch.setattr(programs, "check_leases", part)
    monkeypatch.setattr(programs, "check_hops", part)
    found = run("mps")
    assert (found.state, found.why) == ("right", "")
    assert found.figures["other clients that serve on"] == "2 of 2"  # a fake's processes share no fate
    started, ended = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert (started, ended) == (["-d", seen[0]], [seen[0], "quit"])


def test_a_service_that_does_not_start_is_a_reason_to_skip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool(tmp_path, programs.DAEMON, "echo 'no permission' >&2; exit 1")
    on_path(monkeypatch, tmp_path)
    found = run("mps")
    assert (found.state, found.why) == ("skipped", f"{programs.DAEMON} ended with 1: no permission")


def test_a_pipeline_that_cannot_be_read_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("steps: 3\n")
    monkeypatch.setattr(programs, "FLAGSHIP", broken)
    context = CheckContext("pipeline", "fake:0", False, True, time.monotonic() + 60)
    found = outcome_of("pipeline", lambda: programs.check_pipeline(context))
    assert found.state == "wrong"
    assert found.why.startswith("PipelineError: ")


def test_a_process_that_ends_otherwise_than_a_worker_would_is_wrong(tmp_path: Path) -> None:
    ends = """
from weftline.gpu_check.device_worker import DeviceWorker
def poke(one):
    one.wire.send({"lost": "ILLEGAL_ADDRESS"})
    raise SystemExit(3)
DeviceWorker.do_poke = poke
"""
    found = run("fault", planted(tmp_path, ends))
    assert (found.state, found.why) == ("wrong", "the doomed lost the device and ended with 3; a worker ends with 70")


@pytest.mark.parametrize(
    ("body", "said"),
    [("raise SystemExit('no such device')", "ended with 1: no such device"), ("print('nothing')", "gave no figure")],
)
def test_engine_hops_that_fail_or_say_nothing_are_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, said: str
) -> None:
    script = tmp_path / "hops.py"
    script.write_text(body)
    monkeypatch.setattr(programs, "ENGINE_HOPS", script)
    context = CheckContext("engine hops", "fake:0", False, True, time.monotonic() + 60)
    found = outcome_of("engine hops", lambda: programs.check_engine_hops(context))
    assert (found.state, said in found.why) == ("wrong", True), found.why


def test_engine_hops_are_figures_by_way_size_and_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "hops.py"
    script.write_text("print(f\"{'in place':9} {65536:>11} B  {'cuda:0, ordering host':26} 0.061 [0.060-0.064]\")")
    monkeypatch.setattr(programs, "ENGINE_HOPS", script)
    context = CheckContext("engine hops", "fake:0", False, True, time.monotonic() + 60)
    assert programs.check_engine_hops(context) == {
        "in place 65536 bytes, cuda:0, ordering host: one more hop, ms": "0.061 [0.060-0.064]"
    }


@pytest.mark.slow
def test_two_models_on_one_device_answer_as_on_the_cpu(tmp_path: Path) -> None:
    context = CheckContext("llm step", "fake:0", True, True, time.monotonic() + 500)
    found = outcome_of("llm step", lambda: programs.check_llm_step(context))
    assert (found.state, found.why) == ("right", "")
    assert found.figures["steps on the device"] == "answer, embed"


def test_an_answer_that_is_not_the_cpus_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"answers": "other than the CPU's: answer"}
    monkeypatch.setattr(flagship, "check", lambda *given: CheckOutcome("llm step", "right", figures=figures))
    with pytest.raises(Wrong, match="its answers are other than the CPU's: answer"):
        flagship.check_shared("fake:0", 1)
