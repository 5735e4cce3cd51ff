"""Tensors stay on a GPU if all readers are on it, else they are copied to host memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from weftline.errors import PipelineError
from weftline.pipelines.placement.place import Device, Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.placement.transfers import Readers
from weftline.pipelines.spec.loader import load_yaml
from weftline.pipelines.spec.wire import Wire

GIB = 1 << 30
ONE = Machine(8, 64 * GIB, (Device("fake:0", 8 * GIB),))
TWO = Machine(8, 64 * GIB, (Device("fake:0", 8 * GIB), Device("fake:1", 8 * GIB)))
NONE = Machine(8, 64 * GIB)

PHOTO = """
inputs: {photo: image}
steps:
  find: {node: find, inputs: {image: photo}%s}
  cut: {node: cut, inputs: {image: photo, boxes: find.boxes}%s}
  name: {node: name, inputs: {image: cut.crops}, map: image%s}
outputs: {labels: name.label%s}
"""


@pytest.fixture
def planned(device_catalog: dict[str, str]):
    def make(text: str, machine: Machine = ONE) -> Plan:
        text = f"weftline: 1\nname: near\n{text}"
        return make_plan(load_yaml(text, "near.yaml", Path(), device_catalog), machine, device_catalog)

    return make


def near(plan: Plan) -> dict[str, tuple[tuple[str, ...], Mapping[str, str]]]:
    return {step.name: (step.device_inputs, step.device_outputs) for step in plan.steps}


def test_photo_crops_and_labels_touch_the_host_on_the_way_in_and_out_alone(planned) -> None:
    plan = planned(PHOTO % ("", "", "", ""))
    assert near(plan) == {
        "find": (("image",), {}),
        "cut": (("image",), {"crops": "device"}),
        "name": (("image",), {}),
    }


def test_on_two_gpus_it_goes_through_host_memory(planned) -> None:
    plan = planned(PHOTO % ("", "", ", device: fake:1", ""), TWO)
    assert near(plan) == {"find": (("image",), {}), "cut": (("image",), {}), "name": (("image",), {})}


def test_a_pipeline_output_is_a_reader_in_host_memory(planned) -> None:
    assert near(planned(PHOTO % ("", "", "", ", crops: cut.crops")))["cut"] == (("image",), {"crops": "both"})


def test_without_a_gpu_nothing_is_near(planned) -> None:
    plan = planned(PHOTO % ("", "", "", ""), NONE)
    assert near(plan) == {name: ((), {}) for name in ("find", "cut", "name")}
    assert all((worker.device, worker.device_arena_bytes) == ("", 0) for worker in plan.workers)


def test_instances_on_several_devices_read_there_and_give_in_host_memory(planned) -> None:
    found = near(planned(PHOTO % ("", ', instances: {"fake:0": 1, "fake:1": 1}', "", ""), TWO))
    assert found["cut"] == (("image",), {})
    found = near(planned(PHOTO % ("", "", ', instances: {"fake:0": 1, "fake:1": 1}', ""), TWO))
    assert found["cut"] == (("image",), {}), "one of its readers may be elsewhere"
    assert near(planned(PHOTO % ("", "", ', instances: {"fake:0": 1, cpu: 1}', "")))["name"] == ((), {})
    assert near(planned(PHOTO % ("", ", instances: 2", ", instances: 3", "")))["cut"] == (
        ("image",),
        {"crops": "device"},
    )


def test_a_node_that_takes_arrays_is_a_reader_in_host_memory(planned) -> None:
    text = """
inputs: {photo: image}
steps:
  find: {node: find, inputs: {image: photo}}
  blur: {node: blur, inputs: {image: find.image}}
  count: {node: count, inputs: {image: blur.image}}
outputs: {count: count.count}
"""
    assert near(planned(text)) == {
        "find": (("image",), {"image": "device"}), "blur": (("image",), {}), "count": ((), {})
    }  # fmt: skip
    both = text.replace(
        "outputs: {", "  name: {node: name, inputs: {image: blur.image}}\noutputs: {label: name.label, "
    )
    assert near(planned(both))["blur"] == (("image",), {"image": "both"})


def test_what_first_and_switch_hand_on_is_read_by_their_readers(planned) -> None:
    text = """
inputs: {photo: image, kind: text}
steps:
  find: {node: find, inputs: {image: photo}}
  blur: {node: blur, inputs: {image: photo}}
  one: {node: switch, inputs: {by: kind, a: find.image, default: blur.image}}
  name: {node: name, inputs: {image: one.value}}
outputs: {label: name.label%s}
"""
    plan = near(planned(text % ""))
    assert plan["find"][1] == plan["blur"][1] == {"image": "device"}
    plan = near(planned(text % ", image: one.value"))
    assert plan["find"][1] == plan["blur"][1] == {"image": "both"}
    text = text.replace("switch", "first").replace("by: kind, ", "").replace(", kind: text", "")
    plan = near(planned(text % ""))
    assert plan["find"][1] == plan["blur"][1] == {"image": "device"}


def test_a_fallback_gives_where_the_step_would_have(planned) -> None:
    text = """
inputs: {photo: image}
steps:
  find: {node: find, inputs: {image: photo}, fallback: blur}
  blur: {node: blur, inputs: {image: photo}}
  name: {node: name, inputs: {image: find.image}}
outputs: {label: name.label}
"""
    plan = near(planned(text))
    assert plan["find"][1] == plan["blur"][1] == {"image": "device"}


def test_what_a_condition_looks_at_is_in_host_memory_too(planned) -> None:
    text = """
inputs: {photo: image}
steps:
  find: {node: find, inputs: {image: photo}}
  cut: {node: cut, inputs: {image: photo, boxes: find.boxes}}
  name: {node: name, inputs: {image: cut.crops}, map: image, when: len(cut.crops) > 1}
outputs: {label: name.label}
"""
    assert near(planned(text))["cut"][1] == {"crops": "both"}


def test_streams_and_padded_batches_are_in_host_memory(planned) -> None:
    text = """
inputs: {x: "float32[N, 8]"}
steps:
  one: {node: feel, inputs: {x: x}}
  two: {node: feel, inputs: {x: one.y}%s}
  grow: {node: grow, inputs: {x: two.y}}
outputs: {y: grow.y}
"""
    assert near(planned(text % "")) == {"one": (("x",), {"y": "device"}), "two": (("x",), {}), "grow": ((), {})}
    padded = near(planned(text % ", batch: {items_max: 4, pad: {N: [8, 16]}}"))
    assert padded == {"one": (("x",), {}), "two": ((), {}), "grow": ((), {})}


def test_workers_have_a_gpu_and_an_arena_for_their_device_outputs(planned) -> None:
    plan = planned(PHOTO % ("", "", "", ""))
    arenas = {step.name: plan.workers[step.workers[0]].device_arena_bytes for step in plan.steps}
    assert {worker.device for worker in plan.workers} == {"fake:0"}
    assert arenas["cut"] == 256 << 20 and plan.ordering == "host"


def test_steps_that_share_a_process_are_on_one_gpu(planned) -> None:
    with pytest.raises(PipelineError) as refused:
        planned(PHOTO % (", worker: w, device: fake:0", "", ", worker: w, device: fake:1", ""), TWO)
    (problem,) = refused.value.problems
    assert problem.path == "steps.name.worker" and problem.line == 8
    assert problem.found == "name is on fake:1, and its shared worker w uses fake:0"


def test_a_node_that_cannot_say_its_ports_is_a_problem(planned, device_catalog, monkeypatch) -> None:
    from weftline.nodes.catalog import resolve

    node = resolve("name", Path(), device_catalog)
    monkeypatch.setattr(node, "device_ports", classmethod(lambda cls, config, ports: {"imge"}))
    with pytest.raises(PipelineError) as refused:
        planned(PHOTO % ("", "", "", ""))
    assert [(one.path, one.found, one.fix) for one in refused.value.problems] == [
        ("steps.name", "Name.device_ports names imge", "did you mean image?")
    ]
    monkeypatch.setattr(node, "device_ports", classmethod(lambda cls, config, ports: 1 // 0))
    with pytest.raises(PipelineError) as refused:
        planned(PHOTO % ("", "", "", ""))
    assert "device_ports failed: ZeroDivisionError" in refused.value.problems[0].found


def test_jobs_bring_blocks_of_rows_through_host_memory(planned) -> None:
    from weftline.engine.jobs.runners.plans import block_plan

    text = PHOTO.replace(", map: image", "").replace("cut.crops", "find.image") % ("", "", "", "")
    plan = planned(text.replace("  cut: {node: cut, inputs: {image: photo, boxes: find.boxes}}\n", ""))
    assert plan.step("find").device_outputs == {"image": "device"}
    rows = block_plan(plan).plan
    assert all((step.device_inputs, step.device_outputs) == ((), {}) for step in rows.steps)
    assert all(worker.device_arena_bytes == 0 for worker in rows.workers)


CROPS = """
inputs: {photo: image}
steps:
  see: {node: yolo, model: shapes-detector, inputs: {image: photo}}
  cut: {node: crop, size: [32, 32], inputs: {image: photo, detections: see.detections}}
  small: {node: function, function: "small.py:small", tensors: torch, inputs: {crop: cut.crops}, map: crop%s}
  shape: {node: onnx, model: tiny/shape-classifier.onnx, inputs: {image: small.output}, map: image%s}
  named: {node: function, function: "small.py:named", inputs: {scores: shape.scores}, map: scores}
outputs: {labels: named.output, boxes: see.detections}
"""
SMALL = """\
from typing import Annotated
import numpy as np

def small(crop: Annotated[object, "uint8[32, 32, 3]"]) -> Annotated[object, "float32[3, 32, 32]"]:
    return crop.permute(2, 0, 1).float() / 255

def named(scores: Annotated[np.ndarray, "float32[4]"]) -> str:
    return str(scores.argmax())
"""


@pytest.mark.parametrize(("more", "machine", "crossed"), [("", ONE, ()), (", device: fake:1", TWO, ("small.output",))])
def test_objects_found_cut_and_named_by_the_nodes_of_the_catalog(
    tmp_path: Path, more: str, machine: Machine, crossed: tuple[str, ...]
) -> None:
    from weftline.pipelines.placement.transfers import hops

    models = Path(__file__).parents[3] / "examples/models"
    for name in ("tiny", "shapes-detector"):
        (tmp_path / name).symlink_to(models / name)
    (tmp_path / "small.py").write_text(SMALL)
    text = "weftline: 1\nname: crops\n" + CROPS % (", device: fake:0" if more else "", more)
    plan = make_plan(load_yaml(text, "crops.yaml", tmp_path), machine)
    stay = {str(hop.giver): hop.stays for hop in hops(plan)}
    assert stay == {
        "photo": False, "cut.crops": True, "small.output": "small.output" not in crossed, "shape.scores": False
    }, "the way in, the way out, and what goes from one GPU to another"  # fmt: skip
    assert {step.name: step.device for step in plan.steps if step.device != "fake:0"} == (
        {"named": "cpu"} | ({"shape": "fake:1"} if crossed else {})
    )


def test_a_reader_behind_many_ways_through_controls_is_found_once(planned) -> None:
    chain = [f"  c{at}: {{node: first, inputs: {{a: {wire}, b: {wire}}}}}"
             for at, wire in enumerate(["find.image", *(f"c{at}.value" for at in range(19))])]  # fmt: skip
    steps = "\n".join(["  find: {node: find, inputs: {image: photo}}", *chain])
    plan = planned(
        f"inputs: {{photo: image}}\nsteps:\n{steps}\n  name: {{node: name, inputs: {{image: c19.value}}}}\n"
        "outputs: {label: name.label}\n"
    )
    found = [*Readers(plan.steps, ()).of(Wire("find", "image"))]
    assert [(step.name, port) for step, port in found] == [("name", "image")]
    assert plan.step("find").device_outputs == {"image": "device"}
