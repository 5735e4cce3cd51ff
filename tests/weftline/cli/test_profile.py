"""`weftline profile`: a table, a file beside the pipeline that plans read, and what is kept of an older one."""

import io
from pathlib import Path

import pytest

from weftline.cli import profile as cli_profile
from weftline.cli.profile import kept, with_measured
from weftline.pipelines.placement.machine import Device, Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.placement.profile_file import Measured, Profile, StepProfile, read_profile, step_digest, to_json
from weftline.pipelines.spec.loader import load_file

TWO = """
inputs: {x: text, n: text}
steps:
  a: {node: echo, delay_ms: 2, inputs: {value: x}, batch: {items_max: 3, wait_max_ms: 1}}
  b: {node: fail, every: 1, inputs: {value: n}}
outputs: {y: a.value, m: b.value}
"""
QUICK = ("--seconds", "0.1")


@pytest.mark.slow
def test_each_step_is_measured_by_itself_and_written_beside_the_pipeline(weft, write) -> None:
    file = write(TWO)
    beside = Path(file).with_suffix(".profile.json")
    beside.write_text("{")
    ended = weft("profile", file, *QUICK)
    assert ended.code == 0, ended.err
    rows = [line.split() for line in ended.out.splitlines()[4:]]
    assert [row[:3] for row in rows if row[0] == "a"] == [["a", "cpu", "1"]]
    assert [row[0] for row in rows] == ["a", "2", "3", "b"]
    assert ended.out.splitlines()[-1].startswith("b                    no time: it fails on generated inputs (")
    assert f"{beside} cannot be read, and is replaced\n" in ended.err
    assert "measuring a: 1, 2, 3 items\n" in ended.err
    assert ended.err.endswith(f"wrote {beside}\n")
    found = read_profile(beside)
    assert set(found.steps["a"].on["cpu"].run_ms) == {1, 2, 3}
    assert found.steps["a"].on["cpu"].run_ms[1] >= 2
    assert all(found.steps[name].on["cpu"].host_bytes > 10 << 20 for name in "ab")
    assert list(beside.parent.glob(".*")) == []


def known(file: str) -> tuple[Plan, Profile]:
    """Return a pipeline's plan, and a profile that knows both steps from elsewhere and from here."""
    plan = make_plan(load_file(file), Machine(2, 8 << 30))
    measured = {"cuda H200": Measured(5), "cpu": Measured(run_ms={1: 77.0})}
    return plan, Profile({step.name: StepProfile(step_digest(step), measured) for step in plan.steps}, {"cuda H200": 9})


def test_what_is_known_of_other_steps_and_other_devices_stays(write, tmp_path: Path) -> None:
    plan, profile = known(write(TWO))
    path = tmp_path / "x.profile.json"
    path.write_text(to_json(profile))
    here = Measured(run_ms={1: 2.0})
    found = with_measured(kept(path, plan, io.StringIO()), plan.steps[1], "cpu", here, 0)
    assert found.steps[plan.steps[0].name] == profile.steps[plan.steps[0].name]
    assert found.steps[plan.steps[1].name].on == {"cuda H200": Measured(5), "cpu": here}
    assert found.context_bytes == {"cuda H200": 9}
    assert with_measured(found, plan.steps[1], "cuda H200", here, 7).context_bytes == {"cuda H200": 7}
    assert with_measured(found, plan.steps[1], "cuda H200", here, 11).context_bytes == {"cuda H200": 9}


def test_what_was_measured_of_a_step_before_it_changed_is_dropped(write, tmp_path: Path) -> None:
    _, profile = known(write(TWO))
    path = tmp_path / "x.profile.json"
    path.write_text(to_json(profile))
    plan, _ = known(write(TWO.replace("delay_ms: 2", "delay_ms: 3")))
    assert set(kept(path, plan, io.StringIO()).steps) == {"b"}


def test_mistakes_are_reported_before_anything_is_opened(weft, write, tmp_path: Path) -> None:
    ended = weft("profile", write(TWO), "--steps", "aa")
    assert ended.code != 0
    assert "--steps aa: no step of test that runs in a worker" in ended.err
    assert "did you mean a?" in ended.err
    ended = weft("profile", write(TWO), "--out", str(tmp_path / "no" / "file.json"))
    assert "its folder does not exist" in ended.err
    assert "loading" not in ended.err
    ended = weft("profile", write(TWO), "--out", str(tmp_path))
    assert ended.code == 1
    assert "it is a folder" in ended.err
    assert "loading" not in ended.err
    assert weft("profile", write("steps: 3\n")).code == 2


@pytest.mark.slow
def test_a_step_that_does_not_open_keeps_no_other_from_being_measured(weft, write) -> None:
    file = write(
        "inputs: {x: text, n: text}\nsteps:\n"
        "  b: {node: fail, fail_open: true, inputs: {value: n}}\n"
        "  z: {node: fail, out_of_memory_above: 1, inputs: {value: x}, batch: {items_max: 2}}\n"
        "outputs: {y: z.value, m: b.value}\n"
    )
    ended = weft("profile", file, *QUICK)
    assert ended.code == 4
    rows = [line.split() for line in ended.out.splitlines()[4:]]
    assert [row[0] for row in rows] == ["b", "z", "no"]
    assert ended.out.endswith(" no time of 2 items, which never shared a call\n")
    assert rows[0][1:4] == ["does", "not", "open:"]
    assert ended.err.endswith("error: step b: failed on purpose\n")
    assert set(read_profile(Path(file).with_suffix(".profile.json")).steps) == {"z"}


@pytest.mark.slow
def test_where_nothing_opens_nothing_is_written(weft, write) -> None:
    file = write(TWO.replace("every: 1", "fail_open: true"))
    beside = Path(file).with_suffix(".profile.json")
    ended = weft("profile", file, "--steps", "b", *QUICK)
    assert ended.code == 4
    assert f"nothing was measured; {beside} is not written\n" in ended.err
    assert not beside.exists()


@pytest.mark.slow
def test_what_was_measured_on_a_gpu_is_planned_with(
    weft, write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "held.py").write_text(
        "from weftline.node import BatchNode, Ports, port\n\n\n"
        "class Held(BatchNode):\n    @classmethod\n    def ports(cls, config, step):\n"
        '        return Ports((port("x", "float32[262144]"),), (port("y", "json"),))\n\n    @classmethod\n'
        '    def device_ports(cls, config, ports):\n        return frozenset({"x"})\n\n    def run(self, batch):\n'
        '        batch.stacked("x")\n        return {"y": [0] * len(batch)}\n'
    )
    machine = Machine(2, 8 << 30, (Device("fake:0", 1 << 30),))
    monkeypatch.setattr(cli_profile, "this_machine", lambda: machine)
    file = write(
        "inputs: {x: 'float32[262144]'}\n"
        "gpu: {arena_bytes: 2097152, reserve_bytes: 1048576, context_bytes: 1048576}\n"
        "steps:\n  s: {node: 'held.py:Held', inputs: {x: x}, device: 'fake:0', batch: {items_max: 4}}\n"
        "outputs: {y: s.y}\n"
    )
    ended = weft("profile", file, *QUICK)
    assert ended.code == 0, ended.err
    profile = read_profile(Path(file).with_suffix(".profile.json"))
    measured = profile.steps["s"].on["fake"]
    assert measured.peak_bytes[4] >= 4 << 20
    assert any(line.split()[:3] == ["s", "fake", "1"] for line in ended.out.splitlines())
    (budget,) = make_plan(load_file(file), machine, profile=profile).budgets
    (claim,) = [claim for claim in budget.claims if claim.owner == "s" and claim.source == "measured"]
    assert claim.bytes == measured.device_bytes(4)
