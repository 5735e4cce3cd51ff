"""A plan shows where tensors travel, and pictures mark what stays on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from weftline.nodes.ports import PortType
from weftline.pipelines.placement.machine import Device, Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.placement.transfers import device_wires, hop_rows, hops, size_of
from weftline.pipelines.render.svg import DEVICE_PX, explain_svg
from weftline.pipelines.render.text import explain_mermaid, explain_text
from weftline.pipelines.spec.loader import load_yaml

GIB = 1 << 30
NONE = Machine(8, 64 * GIB)
ONE = Machine(8, 64 * GIB, (Device("cuda:0", 24 * GIB),))
TWO = Machine(8, 64 * GIB, (Device("cuda:0", 24 * GIB), Device("cuda:1", 24 * GIB)))
PHOTO = """
inputs: {photo: image, x: "float32[4, 8]"}
steps:
  find: {node: find, inputs: {image: photo}%s}
  cut: {node: cut, inputs: {image: find.image, boxes: find.boxes}}
  name: {node: name, inputs: {image: cut.crops}, map: image%s}
  feel: {node: feel, inputs: {x: x}}
  more: {node: feel, inputs: {x: feel.y}}
outputs: {labels: name.label, crops: cut.crops, y: more.y}
"""


@pytest.fixture
def planned(device_catalog: dict[str, str]):
    def make(text: str, machine: Machine = ONE) -> Plan:
        text = f"weftline: 1\nname: near\n{text}"
        return make_plan(load_yaml(text, "near.yaml", Path(), device_catalog), machine, device_catalog)

    return make


def paths(plan: Plan) -> dict[tuple[str, str], str]:
    return {(str(hop.giver), hop.reader): " ".join(hop.path) for hop in hops(plan)}


def test_each_array_has_one_row_for_each_reader(planned) -> None:
    assert paths(planned(PHOTO % ("", ""))) == {
        ("photo", "find.image"): "host cuda:0",
        ("x", "feel.x"): "host cuda:0",
        ("find.image", "cut.image"): "cuda:0",
        ("cut.crops", "name.image"): "cuda:0",
        ("cut.crops", "outputs and conditions"): "cuda:0 host",
        ("feel.y", "more.x"): "cuda:0",
        ("more.y", "outputs and conditions"): "cuda:0 host",
    }


def test_two_gpus_exchange_tensors_through_host_memory(planned) -> None:
    text = PHOTO
    found = paths(planned(text % ("", ", device: 'cuda:1'"), TWO))
    assert found["cut.crops", "name.image"] == "cuda:0 host cuda:1" and found["find.image", "cut.image"] == "cuda:0"
    found = paths(planned(text % ("", ", instances: {'cuda:0': 1, 'cuda:1': 1}"), TWO))
    assert found["cut.crops", "name.image"] == "cuda:0 host its GPU"
    fan = PHOTO.replace(
        "outputs:", "  blur: {node: blur, inputs: {image: cut.crops}, map: image, device: 'cuda:1'}\noutputs:"
    )
    plan = planned(fan.replace("crops: cut.crops", "crops: blur.image") % ("", ""), TWO)
    assert plan.step("cut").device_outputs == {"crops": "both"}
    found = paths(plan)
    assert found["cut.crops", "name.image"] == "cuda:0" and found["cut.crops", "blur.image"] == "cuda:0 host cuda:1"
    assert {str(hop.giver): str(hop.type) for hop in hops(plan)}["blur.image"] == "list[image]"
    found = paths(planned(text % (", device: cpu", ""), ONE))
    assert found["find.image", "cut.image"] == "host cuda:0" and ("photo", "find.image") not in found


def test_without_a_gpu_there_is_nothing_to_tell(planned) -> None:
    plan = planned(PHOTO % ("", ""), NONE)
    assert hops(plan) == () and "GPU" not in explain_text(plan) and "==>" not in explain_mermaid(plan)


def test_what_a_control_hands_on_travels_to_its_reader(planned) -> None:
    text = """
inputs: {photo: image, kind: text}
steps:
  find: {node: find, inputs: {image: photo}}
  one: {node: switch, inputs: {by: kind, a: find.image, default: photo}}
  name: {node: name, inputs: {image: one.value}}
outputs: {label: name.label}
"""
    plan = planned(text)
    assert paths(plan) == {
        ("photo", "find.image"): "host cuda:0",
        ("photo", "name.image"): "host cuda:0",
        ("find.image", "name.image"): "cuda:0",
    }
    chart = explain_mermaid(plan)
    assert chart.count("==>") == 2, "into the switch and out of it"


def test_a_wire_through_a_control_stays_on_the_gpu_of_its_reader(planned) -> None:
    text = """
inputs: {photo: image}
steps:
  find: {node: find, inputs: {image: photo}}
  blur: {node: blur, inputs: {image: photo}, device: 'cuda:1'}
  out: {node: first, inputs: {a: find.image, b: photo}}
  one: {node: first, inputs: {a: find.image, b: blur.image}}
  two: {node: first, inputs: {a: one.value}}
  name: {node: name, inputs: {image: two.value}}
  far: {node: name, inputs: {image: two.value}, device: 'cuda:1'}
outputs: {label: name.label, far: far.label, image: out.value}
"""
    on_cuda = planned(text.replace("find, inputs: {image: photo}", "find, inputs: {image: photo}, device: cuda")
                      .replace("two.value}}\n  far", "two.value}, device: cuda}\n  far"), TWO)  # fmt: skip
    assert device_wires(on_cuda) == {
        ("one", "a"), ("one", "b"), ("two", "a"), ("name", "image"), ("far", "image"),
    }  # fmt: skip
    assert device_wires(planned(text.replace(", device: 'cuda:1'", ""))) >= {("one", "b")}
    assert ("out", "a") not in device_wires(planned(text, TWO)), "that way leads to the caller alone"


def test_the_table_says_where_and_how_much(planned) -> None:
    rows = {(row[0][0], row[1][0]): (row[2][0], row[3][0]) for row in hop_rows(planned(PHOTO % ("", "")))}
    assert rows["feel.y", "-> more.x"] == ("stays on cuda:0", "128 B")
    assert rows["photo", "-> find.image"] == ("host -> cuda:0", "size by request")
    assert rows["cut.crops", "-> outputs and conditions"] == ("cuda:0 -> host", "size by request")


@pytest.mark.parametrize(
    ("type", "size"),
    [("float32[3, 640, 640]", 4915200), ("list[uint8[2, 3]]", 6), ("float16[]", 2), ("float32[N, 3]", None),
     ("image", None), ("audio", None), ("tensor", None), ("list[image]", None)],
)  # fmt: skip
def test_sizes_are_known_where_shapes_are(type: str, size: int | None) -> None:
    assert size_of(PortType.parse(type)) == size


def test_the_whole_of_it_is_explained(planned) -> None:
    text = explain_text(planned(PHOTO % (", idle: {after_s: 60, keep: host}", ", device_bytes: 3000000000")))
    for said in (
        "Tensors on GPUs, passed on when complete",
        "find.image  -> cut.image               stays on cuda:0  size by request",
        "gpu0  holds find, cut, name, feel, more  8 threads of 8  arena 72 MiB, on cuda:0 256 MiB",
        "Memory of cuda:0",
        "  2.8 GiB  name        weights and work  stated",
        "        ?  find        weights and work  unknown",
        "at most 19 GiB are left; not measured: find, cut, feel, more (`weftline profile`)",
        "find, cut, name, feel and more share process gpu0: without MPS, processes of one GPU run in turns; "
        "gpu.processes: separate starts one for each",
        "sleeps after 60 s without work, keeps its weights in host memory",
    ):
        assert said in text, (said, text)
    assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_event_ordering_is_said_aloud(planned) -> None:
    text = explain_text(planned(PHOTO % ("", "") + "gpu: {ordering: event}\n"))
    assert "Tensors on GPUs, passed on before completion" in text


def test_pictures_draw_thick_what_stays_on_a_gpu(planned) -> None:
    plan = planned(PHOTO % ("", ""))
    chart = explain_mermaid(plan)
    assert [line.split("|")[1] for line in chart.splitlines() if "==>" in line] == [
        '"image, stays on GPU"', '"crops: list[image], stays on GPU"', '"y: float32[4, 8], stays on GPU"'
    ]  # fmt: skip
    assert explain_svg(plan).count(f'stroke-width="{DEVICE_PX}"') == 3
    assert f'stroke-width="{DEVICE_PX}"' not in explain_svg(planned(PHOTO % ("", ""), NONE))
