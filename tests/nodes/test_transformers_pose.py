"""Task keypoint-detection of node transformers gives the answers of transformers' own processor and model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.nodes import random_models
from tests.nodes.random_models import opened, refused
from weftline.nodes.contract import Batch
from weftline.nodes.detections import Detections
from weftline.nodes.transformers_tasks.node import Transformers

TASK, POINTS = "keypoint-detection", ("nose", "left", "right")
WIRED = ("image", "detections")


def found(*boxes: list[float], classes: list[int] | None = None) -> Detections:
    scores = np.linspace(0.9, 0.5, len(boxes), dtype=np.float32)
    made = np.array(boxes, np.float32).reshape(-1, 4)
    return Detections(made, scores, np.array(classes or [0] * len(boxes), np.int32), ("person", "car"))


def own_answer(
    folder: Path, picture: np.ndarray, boxes: list[list[float]], threshold: float | None = None, **inputs: Any
) -> list[dict[str, Any]]:
    """Return transformers' keypoints of boxes x, y, width, height of one picture."""
    model = transformers.VitPoseForPoseEstimation.from_pretrained(folder / "m").eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder / "m")
    prepared = processor(Image.fromarray(picture), boxes=[boxes], return_tensors="pt")
    with torch.inference_mode():
        output = model(**prepared, **inputs)
    (answer,) = processor.post_process_pose_estimation(output, boxes=[boxes], threshold=threshold)
    result: list[dict[str, Any]] = answer
    return result


def assert_same(points: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    assert [one["name"] for one in points] == [POINTS[label] for label in wanted["labels"].tolist()]
    places = [[one["x"], one["y"]] for one in points]
    np.testing.assert_allclose(np.array(places).reshape(-1, 2), wanted["keypoints"], atol=0.02)
    np.testing.assert_allclose([one["score"] for one in points], wanted["scores"], atol=2e-4)


@pytest.mark.parametrize("simple", [True, False])
def test_keypoints_are_those_of_transformers(tmp_path: Path, simple: bool) -> None:
    random_models.save_vitpose(tmp_path / "m", *POINTS, simple=simple)
    node = opened(tmp_path, TASK, WIRED)
    pictures = random_models.pictures()
    seen = [found([2, 3, 20, 30], [0, 0, 30, 40]), found([10.5, 5.25, 60, 50]), found(), found([1, 1, 40, 9])]
    whole = node.run(Batch({"image": pictures, "detections": seen}))["keypoints"]
    for picture, detections, objects in zip(pictures, seen, whole, strict=True):
        assert [one["box"] for one in objects] == [one["box"] for one in detections.to_json()]
        assert [(one["name"], one["score"]) for one in objects] == [
            (one["name"], one["score"]) for one in detections.to_json()
        ]
        boxes = [[x1, y1, x2 - x1, y2 - y1] for x1, y1, x2, y2 in detections.boxes.tolist()]
        if boxes:
            for one, wanted in zip(objects, own_answer(tmp_path, picture, boxes), strict=True):
                assert_same(one["points"], wanted)
        alone = node.run(Batch({"image": [picture], "detections": [detections]}))["keypoints"][0]
        assert json.dumps(alone) == json.dumps(objects)


def test_a_picture_without_detections_is_one_box(tmp_path: Path) -> None:
    random_models.save_vitpose(tmp_path / "m", *POINTS)
    pictures = random_models.pictures()
    whole = opened(tmp_path, TASK).run(Batch({"image": pictures}))["keypoints"]
    for picture, (only,) in zip(pictures, whole, strict=True):
        height, width = picture.shape[:2]
        assert only["box"] == [0, 0, width, height] and set(only) == {"box", "points"}
        assert_same(only["points"], own_answer(tmp_path, picture, [[0.0, 0.0, float(width), float(height)]])[0])


def test_keypoints_below_the_threshold_are_left_out(tmp_path: Path) -> None:
    weights = random_models.save_vitpose(tmp_path / "m", *POINTS) / "model.safetensors"
    state = load_file(weights)
    state["head.conv.weight"] *= 0.1  # scores below 1
    save_file(state, weights, metadata={"format": "pt"})
    (picture,) = random_models.pictures()[:1]
    box = [0.0, 0.0, 30.0, 40.0]
    scores = sorted(own_answer(tmp_path, picture, [box])[0]["scores"].tolist())
    threshold = (scores[0] + scores[1]) / 2
    assert 0 < threshold < 1
    (only,) = opened(tmp_path, TASK, threshold=threshold).run(Batch({"image": [picture]}))["keypoints"][0]
    assert len(only["points"]) == 2
    assert_same(only["points"], own_answer(tmp_path, picture, [box], threshold)[0])


def test_the_expert_of_a_data_set_is_chosen(tmp_path: Path) -> None:
    random_models.save_vitpose(tmp_path / "m", *POINTS, experts=3)
    pictures = random_models.pictures()
    answers = []
    for dataset in (None, 0, 2):
        whole = opened(tmp_path, TASK, dataset=dataset).run(Batch({"image": pictures}))["keypoints"]
        for picture, (only,) in zip(pictures, whole, strict=True):
            box = [0.0, 0.0, float(picture.shape[1]), float(picture.shape[0])]
            wanted = own_answer(tmp_path, picture, [box], dataset_index=torch.tensor([dataset or 0]))[0]
            assert_same(only["points"], wanted)
        answers.append(whole)
    assert answers[0] == answers[1] != answers[2]
    assert "0 to 2" in refused(tmp_path, TASK, dataset=3).expected


def test_crops_of_all_pictures_share_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_models.save_vitpose(tmp_path / "m", *POINTS)
    node = opened(tmp_path, TASK, WIRED)
    rows: list[int] = []
    network = node._opened.model.network
    forward = network.forward
    monkeypatch.setattr(
        network, "forward", lambda pixel_values: rows.append(len(pixel_values)) or forward(pixel_values)
    )
    pictures = random_models.pictures()
    seen = [found(*[[0, 0, 20 + n, 30] for n in range(30)]) for _ in pictures]
    whole = node.run(Batch({"image": pictures, "detections": seen}))["keypoints"]
    assert rows == [64, 56] and [len(one) for one in whole] == [30] * 4


def test_objects_are_chosen_by_label_and_count(tmp_path: Path) -> None:
    random_models.save_vitpose(tmp_path / "m", *POINTS)
    node = opened(tmp_path, TASK, WIRED, labels=("person",), items_max=2)
    (picture,) = random_models.pictures()[:1]
    seen = found(*[[0, 0, 10 + n, 20] for n in range(5)], classes=[0, 1, 0, 0, 0])
    (objects,) = node.run(Batch({"image": [picture], "detections": [seen]}))["keypoints"]
    assert [one["box"][2] for one in objects] == [10, 12] and {one["name"] for one in objects} == {"person"}


def test_boxes_that_are_no_boxes_have_no_keypoints_and_harm_no_other(tmp_path: Path) -> None:
    random_models.save_vitpose(tmp_path / "m", *POINTS)
    node = opened(tmp_path, TASK, WIRED)
    (picture,) = random_models.pictures()[:1]
    odd = [[5, 5, 5, 5], [9, 9, 3, 3], [0, 0, 0.5, 0.5], [0, 0, 1e9, 5], [np.nan, 0, 5, 5], [0, 0, np.inf, 9]]
    (objects,) = node.run(Batch({"image": [picture], "detections": [found(*odd, [0, 0, 30, 40])]}))["keypoints"]
    assert [len(one["points"]) for one in objects] == [0] * len(odd) + [3]
    assert_same(objects[-1]["points"], own_answer(tmp_path, picture, [[0.0, 0.0, 30.0, 40.0]])[0])
    nothing = node.run(Batch({"image": [picture], "detections": [found()]}))
    assert nothing == {"keypoints": [[]]}


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"threshold": 2}, "threshold"), ({"labels": ("person",)}, "labels"), ({"items_max": 5}, "items_max"),
        ({"dataset": 0}, "dataset"), ({"top_k": 3}, "top_k"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(tmp_path: Path, options: dict[str, Any], option: str) -> None:
    random_models.save_vitpose(tmp_path / "m", *POINTS)
    assert refused(tmp_path, TASK, **options).option == option


def test_counts_and_labels_are_checked_where_detections_are_wired(tmp_path: Path) -> None:
    random_models.save_vitpose(tmp_path / "m", *POINTS)
    assert refused(tmp_path, TASK, WIRED, items_max=0).option == "items_max"
    assert refused(tmp_path, TASK, WIRED, labels=()).option == "labels"


def test_other_models_of_points_and_a_missing_scipy_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = random_models.save_vitpose(tmp_path / "m", *POINTS)
    error = refused(tmp_path, "object-detection")
    assert "marks keypoints" in error.found and "`task: keypoint-detection`" in error.fix
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "scipy" in refused(tmp_path, TASK).found
    monkeypatch.undo()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "id2label": {"0": "nose"}}))
    assert refused(tmp_path, TASK).found == "m has 1 keypoints"
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Sapiens2ForPoseEstimation"]}))
    error = refused(tmp_path, TASK)
    assert "marks points in pictures" in error.found and "node of your own" in error.fix


def test_a_picture_is_wired_without_detections(tmp_path: Path) -> None:
    random_models.save_vitpose(tmp_path / "m", *POINTS)
    ports = Transformers.ports(opened(tmp_path, TASK).config, random_models.StepContext(tmp_path))
    assert [(port.name, port.optional) for port in ports.inputs] == [("image", False), ("detections", True)]
