"""Triton's `classification` (class_count): the greatest classes of an output, as 'value:index:label'."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weftline.engine.serving.backend import Answer
from weftline.engine.serving.model_info import ModelInfo, PortInfo, model_info
from weftline.engine.serving.v2.classification import SELECTED_MAX, check_classes
from weftline.engine.serving.v2.elements import Written, decode_elements, encode_elements
from weftline.engine.serving.v2.messages import InferRequest, Region, WantedOutput
from weftline.engine.serving.v2.response import to_response
from weftline.errors import InputError
from weftline.nodes.class_labels import CLASSES_MAX
from weftline.pipelines.placement.machine import Machine
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec.loader import load_file

ROOT = Path(__file__).parents[4]
GUARD = """weftline: 1
name: guard
inputs: {{text: text}}
steps:
  kinds: {{node: classify, model: "{model}", inputs: {{text: text}}}}
outputs: {{scores: kinds.scores}}
"""
LABELS = ("cat", "dog", "owl")
BFLOAT16 = (np.float32([1, 0, 4]).view(np.uint32) >> 16).astype(np.uint16)
SCORES = [{"label": "owl", "score": 0.75}, {"label": "cat", "score": 0.25}]


def classes(type: str, *values: Any, count: Any, labels: tuple[str, ...] = LABELS, batch: int | None = None) -> Any:
    """Return the elements and the shape of output `y` with `classification: count`."""
    wanted = WantedOutput("y", None, {"classification": count})
    port = PortInfo("y", type, labels=labels)
    check_classes(wanted, port)
    answers = [Answer({"y": value}, version=1) for value in values]
    model = ModelInfo("m", 1, (), (port,))
    (tensor,) = to_response(InferRequest("m", (), (wanted,)), model, answers, batch).outputs
    assert tensor.datatype == "BYTES" and tensor.raw is not None
    return [bytes(one).decode() for one in decode_elements(tensor.raw, int(np.prod(tensor.shape)))], tensor.shape


@pytest.mark.parametrize(
    ("type", "value", "expected"),
    [
        ("float32[3]", np.float32([0.25, 2, -1]), ["2.000000:1:dog", "0.250000:0:cat"]),
        ("float32[1, 3]", np.float32([[0.25, 2, -1]]), ["2.000000:1:dog", "0.250000:0:cat"]),
        ("float16[3, 1, 1]", np.float16([0, 1, 2]).reshape(3, 1, 1), ["2.000000:2:owl", "1.000000:1:dog"]),
        ("int32[3]", np.int32([-3, 7, -9]), ["7:1:dog", "-3:0:cat"]),
        ("uint8[C]", np.uint8([1, 255, 0]), ["255:1:dog", "1:0:cat"]),
        ("bfloat16[3]", BFLOAT16, ["4.000000:2:owl", "1.000000:0:cat"]),
        ("float32[3]", np.float32([5, 5, 5]), ["5.000000:0:cat", "5.000000:1:dog"]),
        ("float32[3]", np.float32([np.nan, 1, np.inf]), ["inf:2:owl", "1.000000:1:dog"]),
        ("json", {"cat": 0.25, "dog": 0.0, "owl": 0.75}, ["0.750000:2:owl", "0.250000:0:cat"]),
        ("json", SCORES, ["0.750000:2:owl", "0.250000:0:cat"]),
        ("json", Written(encode_elements([b'{"cat":0,"dog":1,"owl":0}']), 1), ["1.000000:1:dog", "0.000000:0:cat"]),
        ("tensor", np.float64([0, 1]), ["1.000000:1:dog", "0.000000:0:cat"]),
    ],
)  # fmt: skip
def test_the_greatest_classes_have_value_index_and_label(type: str, value: Any, expected: list[str]) -> None:
    assert classes(type, value, count=2) == (expected, (2,))


def test_classes_without_labels_have_value_and_index() -> None:
    assert classes("float32[3]", np.float32([1, 3, 2]), count=1, labels=())[0] == ["3.000000:1"]


def test_more_classes_than_there_are_is_all_of_them() -> None:
    found, shape = classes("float32[3]", np.float32([1, 3, 2]), count=1 << 40)
    assert shape == (3,) and found[0] == "3.000000:1:dog"


def test_each_item_of_a_batch_has_its_classes() -> None:
    rows = np.float32([[1, 0, 0], [0, 0, 1]])
    assert classes("float32[3]", *rows, count=1, batch=2) == (["1.000000:0:cat", "1.000000:2:owl"], (2, 1))
    assert classes("float32[3]", rows[0], count=2, batch=1)[1] == (1, 2)


def test_classes_are_those_of_a_sorted_vector_at_any_count() -> None:
    values = np.random.default_rng(1).integers(0, 40, 200).astype(np.float32)
    values[[3, 70]] = np.nan
    order = np.argsort(-values, kind="stable")
    for count in (1, 7, 100, 198, 199, 200):
        found, _ = classes("float32[C]", values, count=count, labels=())
        assert [int(one.split(":")[1]) for one in found] == order[:count].tolist()


def test_the_numbers_of_classes_have_limits() -> None:
    """A server sorts and writes them between the requests of others."""
    long, short = np.zeros(CLASSES_MAX + 1, np.float32), np.zeros(CLASSES_MAX, np.float32)
    with pytest.raises(InputError, match=r"classification: found 65537 classes, expected at most 65536"):
        classes("float32[C]", long, count=1)
    batch = SELECTED_MAX // CLASSES_MAX
    assert len(classes("float32[C]", *[short] * batch, count=1 << 40, batch=batch)[0]) == SELECTED_MAX
    with pytest.raises(InputError, match=r"found 65536 classes of each of 5 items, expected at most 262144 in all"):
        classes("float32[C]", *[short] * (batch + 1), count=1 << 40, batch=batch + 1)


@pytest.mark.parametrize(
    ("type", "labels", "found"),
    [
        ("text", LABELS, "text"), ("float32[3, 4]", LABELS, "float32[3, 4]"), ("image", (), "image"),
        ("float32[]", (), "float32[]"), ("bool[3]", (), "bool[3]"), ("list[float32[3]]", (), "list[float32[3]]"),
        ("json", (), "json without labels"), ("audio", (), "audio"), ("any", (), "any"),
        ("detections", (), "detections"),
    ],
)  # fmt: skip
def test_an_output_without_classes_is_refused(type: str, labels: tuple[str, ...], found: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"classification: found {found}, expected a vector of numbers")):
        classes(type, None, count=1, labels=labels)


def test_the_shape_of_any_tensor_is_checked_when_it_is_known() -> None:
    with pytest.raises(InputError, match=r"found float32 \[2, 2\], expected a vector of numbers"):
        classes("tensor", np.ones((2, 2), np.float32), count=1)


@pytest.mark.parametrize("count", [-1, True, 1.5, "3"])
def test_a_count_that_is_no_count_is_refused(count: Any) -> None:
    with pytest.raises(InputError, match="classification: expected a number of classes from 1"):
        classes("float32[3]", np.float32([1, 2, 3]), count=count)


def test_classes_are_not_written_to_shared_memory() -> None:
    wanted = WantedOutput("y", Region("r", 0, 64), {"classification": 1})
    with pytest.raises(InputError, match="not supported with shared memory"):
        check_classes(wanted, PortInfo("y", "float32[3]", labels=LABELS))


def test_labels_of_a_classifier_reach_the_models_metadata(tmp_path: Path) -> None:
    (tmp_path / "guard.yaml").write_text(GUARD.format(model=ROOT / "examples/models/guardrail"))
    plan = make_plan(load_file(tmp_path / "guard.yaml"), Machine(cores=2, memory_bytes=8 << 30))
    (scores,) = model_info("guard", 1, plan).outputs
    config = json.loads((ROOT / "examples/models/guardrail/config.json").read_text())
    assert scores.labels == tuple(config["id2label"].values())
    check_classes(WantedOutput("scores", None, {"classification": 2}), scores)


@pytest.mark.parametrize("value", [{"fox": 1.0}, [{"label": "cat"}], ["cat"], {"cat": "high"}, 3])
def test_scores_of_other_labels_are_refused(value: Any) -> None:
    with pytest.raises(InputError, match="found no scores of the step's labels"):
        classes("json", value, count=1)
