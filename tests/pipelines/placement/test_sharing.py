"""Steps that load the same share one node, and a pipeline is planned over what stands."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from weftline.engine.protocol.first_message import open_message
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.scheduler import Scheduler
from weftline.errors import PipelineError
from weftline.fields import classes
from weftline.nodes.catalog import CATALOG, resolve
from weftline.nodes.declared_files import FileIdentity
from weftline.nodes.ports import PortType
from weftline.pipelines.check.options import option_classes
from weftline.pipelines.placement.bare_plan import BarePlan, bare_plan
from weftline.pipelines.placement.load_key import LoadKey, load_keys
from weftline.pipelines.placement.machine import Device, Machine
from weftline.pipelines.placement.needs import Need, merged
from weftline.pipelines.placement.plan import PlannedStep
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.placement.sharing import SharedPlan, groups_of, over, plan_shared
from weftline.pipelines.spec import condition
from weftline.pipelines.spec.graph import Pipeline, Step
from weftline.pipelines.spec.loader import load_file, load_yaml
from weftline.pipelines.spec.policy import BatchPolicy, IdlePolicy, Retry, SequencePolicy

HERE = Path(__file__).parents[1]
ROOT = HERE.parents[1]
EXAMPLES = sorted(
    path for path in (ROOT / "examples").rglob("*.yaml") if "deploy" not in path.parts and path.name != "serve.yaml"
)
GIB = 1 << 30
MACHINE = Machine(4, 8 * GIB)
GPU_MACHINE = Machine(4, 64 * GIB, (Device("cuda:0", 80 * GIB), Device("cuda:1", 80 * GIB)))


INPUTS = "x: text, other: text, several: 'list[text]', t: 'float32[N]'"


def written(
    steps: str, inputs: str = "x: text", outputs: str = "y: s.value", more: str = "", at: Path = HERE
) -> Pipeline:
    if inputs == INPUTS:  # every input has a reader
        steps += "\n  rest: {node: template, template: '{{ x }}{{ other }}{{ several }}{{ t }}'}"
        outputs += ", r: rest.text"
    text = f"weftline: 1\nname: p\ninputs: {{{inputs}}}\nsteps:\n{steps}\noutputs: {{{outputs}}}\n{more}"
    return load_yaml(text, "p.yaml", at)


def one_step(keys: str = "", node: str = "echo", at: Path = HERE, **more: str) -> Pipeline:
    inputs = "" if "inputs:" in keys else ", inputs: {value: x}"
    return written(f"  s: {{node: {node}{inputs}{keys and ', ' + keys}}}", at=at, **more)


def key_of(pipeline: Pipeline, catalog: Mapping[str, str] = CATALOG, step: str = "s", **environment: str) -> LoadKey:
    bare = bare_plan(pipeline, MACHINE, catalog)
    assert bare.plan is not None, bare.checked.problems
    return load_keys(bare, environment)[step]


def shared(*pipelines: Pipeline, **more: Any) -> SharedPlan:
    return plan_shared({f"p{at}": one for at, one in enumerate(pipelines)}, MACHINE, **more)


# the key, field by field

STEP_CHANGES: dict[str, str | None] = {
    "name": None,  # an entry's key: below
    "pipeline": None,  # replaced by its steps before anything is planned
    "base_dir": None,  # of user code and of paths: below
    "sequence": None,  # stateful steps never share: below
    "node": "",  # another one: below
    "options": "busy: true",
    "inputs": "inputs: {value: other}",
    "batch": "batch: {items_max: 2}",
    "fallback": "fallback: absent",
    "idempotent": "idempotent: false",
    "worker": "worker: w",
    "instances": "instances: 2",
    "device": "device: cpu",
    "threads": "threads: 2",
    "share": "share: true",
    "device_bytes": "device_bytes: 4096",
    "run_max_ms": "run_max_ms: 5",
    "when": "when: other == 'a'",
    "map": "map: value, inputs: {value: several}",
    "retry": "retry: 2",
    "timeout_ms": "timeout_ms: 50",
    "reserved": "reserved: 1",
    "idle": "idle: 60",
    "finite": "finite: true",
}
"""A changed value of every key of a step."""

BATCH_CHANGES = {
    "items_max": "items_max: 5", "wait_max_ms": "wait_max_ms: 9", "wait": "wait: auto", "sizes": "sizes: [1, 4]",
    "shapes": "shapes: same", "pad": "pad: {N: [8]}", "pad_value": "pad_value: 1", "order": "order: arrival",
}  # fmt: skip
IDLE_CHANGES = {"after_s": "after_s: 61", "keep": "keep: host"}


def test_every_key_of_a_step_has_a_change_here() -> None:
    assert STEP_CHANGES.keys() == {one.name for one in dataclasses.fields(Step)}
    assert BATCH_CHANGES.keys() == {one.name for one in dataclasses.fields(BatchPolicy)}
    assert IDLE_CHANGES.keys() == {one.name for one in dataclasses.fields(IdlePolicy)}


def separates(of: type[Any], name: str) -> bool:
    given = classes(of)[name]
    assert given is not None
    return given.part == "load"


@pytest.mark.parametrize("name", [name for name, change in STEP_CHANGES.items() if change is not None])
def test_a_key_of_a_step_separates_by_its_class(name: str) -> None:
    usual = "instances: 3" if name == "reserved" else ""
    keys = ", ".join(filter(None, [usual, STEP_CHANGES[name]]))
    one = key_of(one_step(usual, inputs=INPUTS))
    other = key_of(one_step(keys, "fail" if name == "node" else "echo", inputs=INPUTS))
    assert one.fits(one) and one.fits(other) != separates(Step, name)


@pytest.mark.parametrize("name", BATCH_CHANGES)
def test_every_part_of_a_batch_policy_separates(name: str) -> None:
    usual = {"items_max": "items_max: 4", "wait_max_ms": "wait_max_ms: 1"}
    one, other = (
        key_of(one_step(f"type: 'float32[N]', inputs: {{value: t}}, batch: {{{', '.join(keys)}}}", inputs=INPUTS))
        for keys in (usual.values(), (usual | {name: BATCH_CHANGES[name]}).values())
    )
    assert one.differences(other) == ["batch"] and separates(BatchPolicy, name)


@pytest.mark.parametrize("name", IDLE_CHANGES)
def test_every_part_of_an_idle_policy_separates(name: str) -> None:
    usual = "after_s: 60" if name == "keep" else "keep: process"
    one = key_of(one_step("idle: {after_s: 60, keep: process}"))
    other = key_of(one_step(f"idle: {{{usual}, {IDLE_CHANGES[name]}}}"))
    assert one.differences(other) == ["idle"] and separates(IdlePolicy, name)


NO_DEFAULT = {
    "when": condition.parse("x"), "retry": Retry(1), "timeout_ms": 5.0, "idle": IdlePolicy(1.0), "base_dir": Path("/x"),
    "fallback": "s", "sequence": SequencePolicy(), "control": "first",
}  # fmt: skip
PLACED = {"device", "devices", "workers", "device_inputs", "device_outputs"}


def changed_value(name: str, value: Any) -> Any:
    if name == "files":
        return (FileIdentity("/weights", 1, 2, 3),)
    if name == "outputs":
        return tuple(dataclasses.replace(one, type=PortType("json")) for one in value)
    if value is None or name == "control":
        return NO_DEFAULT[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, BatchPolicy):
        return dataclasses.replace(value, items_max=value.items_max + 1)
    if isinstance(value, Mapping):
        return {**value, "more": 1}
    return (*value, "more") if isinstance(value, tuple) else f"{value}x"


def with_step(bare: BarePlan, **changes: Any) -> BarePlan:
    assert bare.plan is not None
    step = dataclasses.replace(bare.plan.steps[0], **changes)
    return dataclasses.replace(bare, plan=dataclasses.replace(bare.plan, steps=(step,)))


@pytest.mark.parametrize("name", [one.name for one in dataclasses.fields(PlannedStep)])
def test_a_field_of_a_planned_step_separates_by_its_class(name: str, catalog) -> None:
    seeing = one_step("model: m, share: true, inputs: {image: x}", "yolo", inputs="x: image", outputs="y: s.labels")
    bare = bare_plan(seeing, MACHINE, catalog)
    assert bare.plan is not None
    value = getattr(bare.plan.steps[0], name)
    if name == "inputs":
        other = with_step(bare, inputs=(dataclasses.replace(value[0], type=PortType("json")),))
    elif name in ("name", "control", "options"):
        return  # names of the check; a step without a node; options are those of the check: below
    else:
        other = with_step(bare, **{name: changed_value(name, value)})
    one, changed = load_keys(bare, {})["s"], load_keys(other, {})["s"]
    assert (one.fields != changed.fields) == (separates(PlannedStep, name) and name not in PLACED)
    assert changed.shares == (name != "sequence")


def other_config(node: Any, name: str) -> Any:
    values = {
        one.name: "x"
        for one in dataclasses.fields(node.Config)
        if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
    }
    config = node.Config(**values)
    object.__setattr__(config, name, "changed")
    return node.Config(**values), config


NODES = sorted({resolve(name, ROOT).__name__: name for name in CATALOG}.values())


@pytest.mark.parametrize("node", [name for name in NODES if dataclasses.fields(resolve(name, ROOT).Config)])
def test_an_option_separates_unless_it_travels_with_the_item(node: str) -> None:
    bare = bare_plan(one_step(), MACHINE)
    found = resolve(node, ROOT)

    def key(config: Any) -> LoadKey:
        step = dataclasses.replace(bare.checked.steps["s"], node=found, config=config)
        checked = dataclasses.replace(bare.checked, steps={"s": step})
        return load_keys(dataclasses.replace(bare, checked=checked), {})["s"]

    for name, given in option_classes(found).items():
        usual, changed = other_config(found, name)
        assert key(usual).differences(key(changed)) == (["options"] if given.part == "load" else []), name


def test_ports_separate_where_a_request_option_adds_some() -> None:
    def template(more: str) -> LoadKey:
        return key_of(one_step(f"template: '{{{{ x }}}}', inputs: {{x: x}}{more}", "template", outputs="y: s.text"))

    assert template("") == template(", output_chars_max: 5")
    assert template("").differences(template(", images: true")) == ["outputs"]


def test_connected_ports_and_their_types_separate() -> None:
    def key(type: str) -> LoadKey:
        return key_of(one_step("type: tensor", inputs=f"x: '{type}'"))

    assert key("float32[4]") == key("float32[4]") and key("float32[4]").differences(key("float32[5]")) == ["inputs"]


def test_an_input_that_arrives_in_pieces_separates(catalog) -> None:
    def key(keys: str) -> LoadKey:
        first = "a: {node: llm, model: m, inputs: {prompt: x}}"
        steps = f"  {first}\n  s: {{node: guardrail, share: true, inputs: {{text: {keys}}}}}"
        return key_of(written(steps, outputs="y: s.text, z: a.text"), catalog)

    assert {"fed", "inputs", "streams"} <= {*key("a.text").differences(key("x"))}


def test_variables_separate_by_value_and_are_not_shown() -> None:
    key = "node: llm, engine: openai, model: m, url: 'https://h/v1', key: WEFTLINE_TEST_KEY, inputs: {prompt: x}"
    os.environ["WEFTLINE_TEST_KEY"] = "a"
    try:
        pipeline = written(f"  s: {{{key}}}", outputs="y: s.text")
        one, same, other = (key_of(pipeline, WEFTLINE_TEST_KEY=value) for value in ("secret", "secret", "another"))
    finally:
        del os.environ["WEFTLINE_TEST_KEY"]
    assert one == same and one.differences(other) == ["variables"] and "secret" not in repr(one) + str(one.fields)


# files and folders


def onnx_at(folder: Path, model: str = "tabular.onnx") -> Pipeline:
    step = f"  s: {{node: onnx, model: {model}, inputs: {{measures: x, habitat: h}}}}"
    return written(step, inputs="x: 'float32[4]', h: 'int64[]'", outputs="y: s.probabilities", at=folder)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tabular.onnx"
    path.write_bytes((ROOT / "examples/models/tiny/tabular.onnx").read_bytes())
    return path


def test_a_file_that_is_written_or_replaced_separates(model: Path) -> None:
    one = key_of(onnx_at(model.parent))
    assert one == key_of(onnx_at(model.parent))
    os.utime(model)  # the change time alone
    touched = key_of(onnx_at(model.parent))
    copy = model.with_name("copy")
    copy.write_bytes(model.read_bytes())
    copy.replace(model)  # another inode
    replaced = key_of(onnx_at(model.parent))
    assert one.differences(touched) == touched.differences(replaced) == ["files"]


def test_every_part_of_a_files_state_separates(model: Path) -> None:
    bare = bare_plan(onnx_at(model.parent), MACHINE)
    assert bare.plan is not None
    (file,) = bare.plan.steps[0].files
    for name, value in (("path", "/other"), ("inode", 1), ("ctime_ns", 1), ("size_bytes", 1)):
        changed = with_step(bare, files=(dataclasses.replace(file, **{name: value}),))
        assert load_keys(bare, {})["s"].differences(load_keys(changed, {})["s"]) == ["files"]
    assert {one.name for one in dataclasses.fields(FileIdentity)} == {"path", "inode", "ctime_ns", "size_bytes"}


def test_folders_share_what_they_name_alike(model: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "folder"
    elsewhere.mkdir()
    one, other = onnx_at(model.parent), onnx_at(elsewhere, "../tabular.onnx")
    assert key_of(one) == key_of(other) == key_of(onnx_at(elsewhere, str(model)))
    (elsewhere / "tabular.onnx").write_bytes(model.read_bytes())
    assert key_of(one).differences(key_of(onnx_at(elsewhere))) == ["files", "options"]


def test_each_deployment_opens_in_the_folder_of_its_first_user(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        (folder / "f.py").write_text("def f(x: str) -> str:\n    return x\n")
    plan = shared(*(calling("threads: 1", folder) for folder in folders)).plan
    opened = [(open_message(plan, at, ROOT), folder) for at, folder in enumerate(folders)]
    assert all((message.steps[0].base_dir or message.base_dir) == str(folder) for message, folder in opened)


def calling(keys: str, at: Path) -> Pipeline:
    return one_step(f"function: 'f.py:f', inputs: {{x: x}}, {keys}", "function", at, outputs="y: s.output")


def test_a_long_text_beside_user_code_names_no_file(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("def f(x: str, y: str) -> str:\n    return x + y\n")
    bare = bare_plan(calling(f"share: true, arguments: {{y: '{'y' * 300}.py:f'}}", tmp_path), MACHINE)
    assert bare.plan is not None and {*bare.checked.steps["s"].files} == {tmp_path / "f.py"}


def test_user_code_of_two_folders_does_not_share(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f.py").write_text("def f(x: str) -> str:\n    return x\n")
        found.append(calling("share: true", tmp_path / name))
    assert {"base_dir", "files"} <= {*key_of(found[0]).differences(key_of(found[1]))}
    before = key_of(found[0])
    (tmp_path / "a" / "f.py").write_text("def f(x: str) -> str:\n    return x + x\n")
    assert before.shares and before.differences(key_of(found[0])) == ["files"]


# which steps share


@pytest.mark.parametrize(
    "keys, others, count",
    [
        ("", "", 1),
        ("share: true", "", 1),
        ("share: false", "", 2),
        ("share: false", "share: false", 2),
        ("timeout_ms: 5", "retry: 3", 1),
    ],
)
def test_nodes_of_weftline_share_by_default(keys: str, others: str, count: int) -> None:
    plan = shared(one_step(keys), one_step(others))
    assert len(plan.plan.steps) == count
    assert [one.deployments for one in plan.programs.values()] == [(0,), (count - 1,)]


@pytest.mark.parametrize("keys, count", [("", 2), ("share: false", 2), ("share: true", 1)])
@pytest.mark.parametrize("own", [True, False])
def test_user_code_shares_only_with_share_true(keys: str, count: int, own: bool, catalog, tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("def f(x: str) -> str:\n    return x\n")
    if own:
        pipeline = one_step(f"model: m, inputs: {{image: x}}, {keys}", "yolo", inputs="x: image", outputs="y: s.labels")
        plan = shared(pipeline, pipeline, catalog=catalog)
    else:
        plan = shared(*[calling(keys, tmp_path)] * 2)
    assert len(plan.plan.steps) == count


def test_user_code_declares_files_only_where_it_shares(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("def f(x: str, log: str) -> str:\n    return x\n")
    (tmp_path / "out.log").write_text("written by the node itself")
    named = "arguments: {log: out.log}"
    alone = make_plan(calling(named, tmp_path), MACHINE)
    sharing = make_plan(calling(f"share: true, {named}", tmp_path), MACHINE)
    assert alone.steps[0].files == ()
    assert [Path(one.path).name for one in sharing.steps[0].files] == ["f.py", "out.log"]


def test_stateful_steps_never_share(problems) -> None:
    plan = shared(*[one_step("sequence: {live_max: 2}")] * 2)
    assert len(plan.plan.steps) == 2 and not plan.keys[0].shares
    step = "{node: echo, share: true, sequence: {live_max: 2}, inputs: {value: x}}"
    found = problems(f"inputs: {{x: text}}\nsteps: {{s: {step}}}\noutputs: {{y: s.value}}")
    assert found["steps.s.share"].fix == "remove it"


def test_steps_of_one_worker_share_as_a_whole() -> None:
    def pair(first: str, second: str) -> Pipeline:
        entries = ("a", first), ("b", second)
        lines = (f"  {name}: {{node: echo, worker: w, inputs: {{value: x}}{keys}}}" for name, keys in entries)
        return written("\n".join(lines), outputs="y: a.value, z: b.value")

    one, equal, other = pair("", ", delay_ms: 1"), pair("", ", delay_ms: 1"), pair("", ", delay_ms: 2")
    assert [len(plan.steps) for plan in (shared(one, equal).plan, shared(one, other).plan)] == [2, 4]
    assert [worker.name for worker in shared(one, other).plan.workers] == ["p0.w", "p1.w"]
    assert len(shared(pair("", ", share: false, delay_ms: 1"), equal).plan.steps) == 4
    assert len(shared(one, one_step()).plan.steps) == 3  # alone in its process


def two_alike(share: bool = True) -> Pipeline:
    steps = """\
  rewrite: {node: echo, share: SHARE, inputs: {value: x}}
  answer: {node: echo, share: SHARE, inputs: {value: rewrite.value}}"""
    return written(steps.replace("SHARE", str(share).lower()), outputs="y: answer.value")


def test_two_steps_of_one_pipeline_share_and_the_plan_says_so() -> None:
    plan = shared(two_alike())
    assert plan.programs["p0"].deployments == (0, 0) and [step.name for step in plan.plan.steps] == ["rewrite"]
    assert plan.programs["p0"].plan.notes == ("rewrite and answer share one node: echo rewrite",)
    assert [step.workers for step in plan.programs["p0"].plan.steps] == [(0,), (0,)]
    apart = shared(two_alike(share=False))
    assert apart.plan == make_plan(two_alike(share=False), MACHINE) and apart.programs["p0"].deployments == (0, 1)


# the joint plan


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("machine", [MACHINE, GPU_MACHINE], ids=["cpu", "gpus"])
def test_one_pipeline_is_planned_as_before(path: Path, machine: Machine) -> None:
    pipeline = load_file(path)
    apart = (dataclasses.replace(one, share=False) if "model" in one.options else one for one in pipeline.steps)
    pipeline = dataclasses.replace(pipeline, steps=tuple(apart))
    plan = make_plan(pipeline, machine)
    found = plan_shared({"one": pipeline}, machine)
    assert found.plan == plan == found.programs["one"].plan and found.plan.notes == plan.notes
    assert found.programs["one"].deployments == tuple(range(len(plan.steps)))


def test_examples_planned_together_run_in_one_scheduler() -> None:
    pipelines = {path.stem: load_file(path) for path in EXAMPLES}
    assert len(pipelines) >= 9
    for machine in (MACHINE, GPU_MACHINE):
        found = plan_shared(pipelines, dataclasses.replace(machine, memory_bytes=64 * GIB))
        assert found.programs.keys() == pipelines.keys() and not found.refused
        names, workers = [step.name for step in found.plan.steps], [one.name for one in found.plan.workers]
        assert len({*names}) == len(names) and len({*workers}) == len(workers)
        scheduler = Scheduler(found.plan, alone=False)
        for number, one in enumerate(found.programs.values(), 1):
            scheduler.on(ev.OpenProgram(number, one.plan, one.deployments), 0.0)
            for step, at in zip(one.plan.steps, one.deployments, strict=True):
                assert (at < 0) == bool(step.control)
                if at >= 0:
                    deployment = found.plan.steps[at]
                    assert (step.workers, step.devices) == (deployment.workers, deployment.devices)
                    assert step.device_outputs == deployment.device_outputs and step.batch == deployment.batch
        opened = [step for at in range(len(workers)) for step in open_message(found.plan, at, ROOT).steps]
        assert {step.name for step in opened} == {step.name for step in found.plan.steps if step.workers}


def test_names_are_those_of_steps_where_they_are_unique() -> None:
    third = written("  t: {node: echo, inputs: {value: x}, delay_ms: 2}", outputs="y: t.value")
    plan = shared(one_step(), one_step("delay_ms: 1"), third)
    assert [step.name for step in plan.plan.steps] == ["p0.s", "p1.s", "t"]
    long = "n" * 64
    many = plan_shared({f"{long}{at}": one_step(f"delay_ms: {at}") for at in range(3)}, MACHINE).plan
    names = [step.name for step in many.steps]
    assert len({*names}) == 3 and all(len(name) <= 64 for name in names)


def test_pipelines_without_room_or_with_problems_are_refused_alone() -> None:
    def on_gpu(gib: int) -> Pipeline:
        return one_step(f"device: cuda, device_bytes: {gib * GIB}, delay_ms: {gib}")

    broken = one_step("delay_ms: 1, nonsense: 1")
    pipelines = {"a": on_gpu(30), "b": broken, "c": on_gpu(60), "d": on_gpu(40)}
    machine = dataclasses.replace(GPU_MACHINE, devices=GPU_MACHINE.devices[:1])
    found = plan_shared(pipelines, machine)
    assert [*found.programs] == ["a", "d"] and {*found.refused} == {"b", "c"}
    assert "nonsense" in str(found.refused["b"]) and "cuda:0 has 80 GiB" in str(found.refused["c"])
    assert found.refused["c"].problems[0].path.startswith("steps.s")  # by the pipeline's own name of the step
    with pytest.raises(PipelineError, match="nonsense"):
        plan_shared({"b": broken}, machine)
    nothing = plan_shared({"b": broken, "e": broken}, machine)
    assert nothing.plan.steps == () and {*nothing.refused} == {"b", "e"}


def test_pipelines_of_one_engine_agree_about_processes() -> None:
    policies = {"a": "", "b": "gpu: {processes: separate}\n", "c": "gpu: {arena_bytes: 100000}\n"}
    pipelines = {name: one_step(more=more) for name, more in policies.items()}
    assert groups_of(pipelines) == (("a", "c"), ("b",))
    found = plan_shared(pipelines, MACHINE)
    assert "gpu.processes: separate, and a, which is planned before it, has grouped" in str(found.refused["b"])


def test_limits_of_deployments_are_taken_from_all() -> None:
    texts = ("{arena_bytes: 100000, silence_max_ms: 9000, job_batch_ms: 10}", "{arena_bytes: 900000, requests_max: 4}")
    found = shared(*[one_step(more=f"limits: {text}\n") for text in texts])
    limits = found.plan.limits
    assert (limits.arena_bytes, limits.silence_max_ms, limits.job_batch_ms) == (900000, 9000, 10)
    assert limits.requests_max == 260 and found.programs["p1"].plan.limits.requests_max == 4
    kv = [one_step(more=f"limits: {{kv_bytes: {{cuda: {bytes}}}}}\n") for bytes in (1 << 20, 2 << 20)]
    assert "limits.kv_bytes.cuda: 2 MiB" in str(shared(*kv).refused["p1"]) and not shared(kv[0], kv[0]).refused


@pytest.mark.parametrize("devices", [("cuda", "cuda", None), ("cuda", None, "cuda:0"), ("cuda:0", "cuda", "cuda")])
def test_the_later_one_of_two_that_state_other_kv_memory_is_refused(devices: tuple[str | None, ...]) -> None:
    stated = [
        one_step(more="" if device is None else f"limits: {{kv_bytes: {{'{device}': {1 + bool(at)}048576}}}}\n")
        for at, device in enumerate(devices)
    ]
    found = shared(*stated)
    assert {*found.refused} == {f"p{at}" for at, device in enumerate(devices) if at and device is not None}
    assert {*found.plan.limits.kv_bytes.values()} == {1048576}


PHOTO = """
  find: {node: find, share: true, inputs: {image: x}}
  cut: {node: cut, share: true, inputs: {image: x, boxes: find.boxes}}
  name: {node: name, share: true, inputs: {image: cut.crops}, map: image}"""


def photo(more: str = "") -> Pipeline:
    return written(PHOTO, inputs="x: image", outputs=f"labels: name.label{more}")


def test_outputs_are_written_to_where_any_program_reads_them(device_catalog) -> None:
    machine = Machine(8, 64 * GIB, (Device("fake:0", 8 * GIB),))

    def crops(*pipelines: Pipeline) -> SharedPlan:
        return plan_shared({f"p{at}": one for at, one in enumerate(pipelines)}, machine, device_catalog)

    inside, outside = photo(), photo(", crops: cut.crops")
    alone, both = crops(inside), crops(inside, outside)
    assert len(both.plan.steps) == 3
    assert alone.plan.step("cut").device_outputs == {"crops": "device"}
    assert both.plan.step("cut").device_outputs == {"crops": "both"}
    assert all(one.plan.step("cut").device_outputs == {"crops": "both"} for one in both.programs.values())
    assert [one.device_arena_bytes > 0 for one in both.plan.workers] == [
        one.device_arena_bytes > 0 for one in alone.plan.workers
    ]
    assert (
        over(alone, inside, machine, device_catalog) is not None
        and over(both, outside, machine, device_catalog) is not None
    )
    assert over(alone, outside, machine, device_catalog) is None  # the crops are not in host memory


def test_a_shared_node_claims_memory_once_and_has_the_work_of_all(device_catalog) -> None:
    machine = Machine(8, 64 * GIB, (Device("cuda:0", 80 * GIB),))
    plans = [plan_shared(dict.fromkeys(names, photo()), machine, device_catalog).plan for names in (("a",), ("a", "b"))]
    assert plans[0].budgets == plans[1].budgets
    need = merged([Need({"cuda:0": 5}, ms={"cuda:0": 1.0}), Need({"cuda:0": 7, "cuda:1": 3}, ms={"cuda:0": 2.0})])
    assert need == Need({"cuda:0": 7, "cuda:1": 3}, ms={"cuda:0": 3.0})


def test_a_chain_of_one_program_holds_a_deployment_once() -> None:
    steps = "\n".join(
        f"  {name}: {{node: echo, worker: w, share: true, inputs: {{value: {source}}}}}"
        for name, source in (("a", "x"), ("b", "a.value"))
    )
    pipeline = written(steps, outputs="y: b.value")
    assert make_plan(pipeline, MACHINE).chains == ((0, 1),)
    found = shared(pipeline)
    assert found.programs["p0"].deployments == (0, 0) and found.programs["p0"].plan.chains == found.plan.chains == ()


def test_steps_that_load_no_model_keep_their_chain() -> None:
    lines = "  a: {node: echo, worker: w, inputs: {value: x}}\n  b: {node: echo, worker: w, inputs: {value: a.value}}"
    one = written(lines, outputs="y: b.value")
    found = shared(one, one)
    assert found.programs["p0"].deployments == found.programs["p1"].deployments == (0, 1)
    assert found.programs["p0"].plan.chains == ((0, 1),)
    again = over(found, one, MACHINE)
    assert again is not None and again.deployments == (0, 1)


# over what stands

PROMPTED = """\
  ask: {node: template, template: "PROMPT {{ x }}"}
  s: {node: echo, inputs: {value: ask.text}, delay_ms: 1}
  other: {node: echo, inputs: {value: x}}"""


def prompted(was: str = "", now: str = "", outputs: str = "y: s.value, z: other.value", more: str = "") -> Pipeline:
    return written(PROMPTED.replace(was, now), outputs=outputs, more=more)


@pytest.mark.parametrize(
    "change",
    [
        prompted("PROMPT", "Please answer:"),
        prompted("  other: {node: echo, inputs: {value: x}}", "  other: {node: echo, inputs: {value: s.value}}"),
        prompted("delay_ms: 1", "delay_ms: 1, when: x == 'a'"),
        prompted("delay_ms: 1", "delay_ms: 1, fallback: {value: none}"),
        prompted("delay_ms: 1", "delay_ms: 1, timeout_ms: 40"),
        prompted("delay_ms: 1", "delay_ms: 1, retry: 3"),
        prompted(outputs="y: s.value, z: other.value, w: ask.text"),
        prompted(more="limits: {requests_max: 3, deadline_ms: 100}\n"),
    ],
)
def test_a_changed_graph_is_planned_over_what_stands(change: Pipeline) -> None:
    stands = shared(prompted())
    program = over(stands, change, MACHINE)
    assert program is not None and program.plan.workers == stands.plan.workers
    names = [stands.plan.steps[at].name for at in program.deployments if at >= 0]
    assert names == [step.name for step in program.plan.steps if not step.control]
    scheduler = Scheduler(stands.plan, alone=False)
    scheduler.on(ev.OpenProgram(1, program.plan, program.deployments), 0.0)
    assert program.plan.step("ask").options["template"] == change.steps[0].options["template"]


@pytest.mark.parametrize(
    "change",
    [
        prompted("delay_ms: 1", "delay_ms: 2"),
        prompted("delay_ms: 1", "delay_ms: 1, device: cpu"),
        prompted("delay_ms: 1", "delay_ms: 1, batch: {items_max: 3}"),
        prompted("delay_ms: 1", "delay_ms: 1, instances: 2"),
        prompted("delay_ms: 1", "delay_ms: 1, threads: 2"),
        prompted("delay_ms: 1", "type: json, delay_ms: 1"),
        prompted(more="limits: {arena_bytes: 100000}\n"),
        prompted(more="gpu: {reserve_bytes: 5}\n"),
        prompted('x }}"', 'x }}", output_chars_max: 99000000'),
    ],
)
def test_what_is_not_loaded_is_not_planned_over(change: Pipeline) -> None:
    assert over(shared(prompted()), change, MACHINE) is None


def test_a_pipeline_with_problems_is_not_planned_over() -> None:
    with pytest.raises(PipelineError, match="nonsense"):
        over(shared(prompted()), one_step("nonsense: 1"), MACHINE)
