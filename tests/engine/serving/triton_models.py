"""Pipelines with the names, ports and results of the models that Triton's Python client examples ask for.

simple, simple_int8, simple_string          OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1, 16 elements each
simple_identity, custom_identity_int32      OUTPUT0 = INPUT0
simple_sequence                             OUTPUT = INPUT, plus 1 for the first of a sequence
simple_dyna_sequence                        the same, and the last of a sequence adds its id
simple_string_dyna_sequence                 sums of a sequence; the last adds its id
repeat_int32                                a stream: each element of IN by itself, after its DELAY in ms
densenet_onnx                               float32 [3, 224, 224] -> 1000 classes with labels
preprocess_inception_ensemble               an encoded picture -> classes with labels
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper

CLASSES, SIDE = 1000, 224
PREPARED_CLASSES = 3

CODE = '''
"""Functions of the models of Triton's examples."""

import time
from collections import deque
from typing import Annotated

import numpy as np

import weftline
from weftline.node import Piece, Ports, StreamNode, port

Ints = Annotated[np.ndarray, "int32[N]"]
Int = Annotated[np.ndarray, "int32[1]"]
Bytes = Annotated[np.ndarray, "int8[16]"]


def add_sub(INPUT0: Annotated[np.ndarray, "int32[16]"], INPUT1: Annotated[np.ndarray, "int32[16]"]) -> {
    "OUTPUT0": "int32[16]", "OUTPUT1": "int32[16]"
}:
    return {"OUTPUT0": INPUT0 + INPUT1, "OUTPUT1": INPUT0 - INPUT1}


def add_sub_int8(INPUT0: Bytes, INPUT1: Bytes) -> {"OUTPUT0": "int8[16]", "OUTPUT1": "int8[16]"}:
    return {"OUTPUT0": INPUT0 + INPUT1, "OUTPUT1": INPUT0 - INPUT1}


def add_sub_text(INPUT0: "list[text]", INPUT1: "list[text]") -> {"OUTPUT0": "list[text]", "OUTPUT1": "list[text]"}:
    pairs = [(int(a), int(b)) for a, b in zip(INPUT0, INPUT1, strict=True)]
    return {"OUTPUT0": [str(a + b) for a, b in pairs], "OUTPUT1": [str(a - b) for a, b in pairs]}


def first_plus_one(INPUT: Int) -> Int:
    return INPUT + np.int32(weftline.current().sequence.start)


def first_plus_one_last_plus_id(INPUT: Int) -> Int:
    part = weftline.current().sequence
    return INPUT + np.int32(part.start + (int(part.id) if part.end else 0))


class Sums:
    def __init__(self):
        self.sums = {}

    def __call__(self, INPUT: Int) -> Int:
        part = weftline.current().sequence
        self.sums[part.id] = INPUT + (0 if part.start else self.sums[part.id])
        return self.sums[part.id] + np.int32(int(part.id) if part.end else 0)

    def end_sequence(self, id):
        self.sums.pop(id, None)


def small(photo: "image") -> "float32[3, 8, 8]":
    rows, columns = (np.arange(8) * size // 8 for size in photo.shape[:2])
    return np.ascontiguousarray(photo[rows][:, columns].transpose(2, 0, 1), np.float32)


class Repeat(StreamNode):
    def __init__(self, config):
        super().__init__(config)
        self.items = {}

    @classmethod
    def ports(cls, config, step):
        ins = (port("IN", "int32[N]"), port("DELAY", "uint32[N]"), port("WAIT", "uint32[1]"))
        return Ports(inputs=ins, outputs=(port("OUT", "int32[?]", pieces=True),))

    def submit(self, item, inputs, urgency=None):
        values = np.array(inputs["IN"])
        self.items[item] = values, deque(zip(values.tolist(), inputs["DELAY"].tolist()))

    def cancel(self, item):
        self.items.pop(item, None)

    @property
    def busy(self):
        return bool(self.items)

    def round(self):
        pieces = []
        for item, (values, left) in list(self.items.items()):
            if left:
                value, delay_ms = left.popleft()
                time.sleep(min(delay_ms, 20) / 1000)
                pieces.append(Piece(item, {"OUT": np.array([value], np.int32)}))
            else:
                del self.items[item]
                pieces.append(Piece(item, {"OUT": values}, last=True))
        return pieces
'''

ADD_SUB = """weftline: 1
name: {name}
inputs: {{INPUT0: "{type}", INPUT1: "{type}"}}
steps:
  add_sub: {{node: function, function: "models.py:{function}", inputs: {{INPUT0: INPUT0, INPUT1: INPUT1}}}}
outputs: {{OUTPUT0: add_sub.OUTPUT0, OUTPUT1: add_sub.OUTPUT1}}
"""
IDENTITY = """weftline: 1
name: {name}
inputs: {{INPUT0: "{type}"}}
steps:
  same: {{node: echo, type: "{type}", inputs: {{value: INPUT0}}}}
outputs: {{OUTPUT0: same.value}}
"""
SEQUENCE = """weftline: 1
name: {name}
inputs: {{INPUT: "int32[1]"}}
steps:
  sequence:
    node: function
    function: models.py:{function}
    inputs: {{INPUT: INPUT}}
    idempotent: false
    sequence: {{live_max: 64}}
outputs: {{OUTPUT: sequence.output}}
"""
OTHERS = {
    "repeat_int32": """weftline: 1
name: repeat_int32
inputs: {IN: "int32[N]", DELAY: "uint32[N]", WAIT: "uint32[1]"}
steps:
  repeat: {node: "models.py:Repeat", inputs: {IN: IN, DELAY: DELAY, WAIT: WAIT}}
outputs: {OUT: repeat.OUT}
""",
    "densenet_onnx": """weftline: 1
name: densenet_onnx
inputs: {data_0: "float32[3, 224, 224]"}
steps:
  classes: {node: onnx, model: densenet.onnx, labels: densenet_labels.txt, inputs: {data_0: data_0}}
outputs: {fc6_1: classes.fc6_1}
""",
    "preprocess_inception_ensemble": """weftline: 1
name: preprocess_inception_ensemble
inputs: {INPUT: image}
steps:
  small: {node: function, function: "models.py:small", inputs: {photo: INPUT}}
  classes: {node: onnx, model: colours.onnx, labels: colours.txt, inputs: {x: small.output}}
outputs: {OUTPUT: classes.y}
""",
}


def write_models(folder: Path) -> list[Path]:
    """Write the models' files to a folder; return the pipelines' files."""
    pipelines = {
        "simple": ADD_SUB.format(name="simple", type="int32[16]", function="add_sub"),
        "simple_int8": ADD_SUB.format(name="simple_int8", type="int8[16]", function="add_sub_int8"),
        "simple_string": ADD_SUB.format(name="simple_string", type="list[text]", function="add_sub_text"),
        "simple_identity": IDENTITY.format(name="simple_identity", type="list[bytes]"),
        "custom_identity_int32": IDENTITY.format(name="custom_identity_int32", type="int32[N]"),
        "simple_sequence": SEQUENCE.format(name="simple_sequence", function="first_plus_one"),
        "simple_dyna_sequence": SEQUENCE.format(name="simple_dyna_sequence", function="first_plus_one_last_plus_id"),
        "simple_string_dyna_sequence": SEQUENCE.format(name="simple_string_dyna_sequence", function="Sums"),
        **OTHERS,
    }
    (folder / "models.py").write_text(CODE)
    _write_means(folder / "densenet.onnx", "data_0", "fc6_1", SIDE, CLASSES)
    (folder / "densenet_labels.txt").write_text("".join(f"class {index}\n" for index in range(CLASSES)))
    _write_means(folder / "colours.onnx", "x", "y", 8, PREPARED_CLASSES)
    (folder / "colours.txt").write_text("red\ngreen\nblue\n")
    for name, text in pipelines.items():
        (folder / f"{name}.yaml").write_text(text)
    return [folder / f"{name}.yaml" for name in pipelines]


def _write_means(path: Path, input: str, output: str, side: int, classes: int) -> None:
    """Write a model whose first three classes are the means of a picture's channels; further ones are 0."""
    nodes = [
        helper.make_node("ReduceMean", [input], ["means"], axes=[2, 3], keepdims=0),
        helper.make_node("Pad", ["means", "pads"], [output]),
    ]
    pads = helper.make_tensor("pads", TensorProto.INT64, [4], [0, 0, 0, classes - 3])
    graph = helper.make_graph(
        nodes,
        "means",
        [helper.make_tensor_value_info(input, TensorProto.FLOAT, ["batch", 3, side, side])],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["batch", classes])],
        [pads],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
