"""Node yolo gives the results of ultralytics' own predictor for each of its tasks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.nodes.device_values import DEVICE, Bench
from tests.nodes.yolo_models import SIDE, SUFFIXES, network_of, pictures, predicted, random_weights, save_yolo
from weftline.errors import InputError, ModelError
from weftline.nodes import yolo_masks
from weftline.nodes.contract import Batch, ConfigError, OpenContext, StepContext
from weftline.nodes.shapes import decode_mask
from weftline.nodes.transformers_tasks.node import Transformers, TransformersConfig
from weftline.nodes.yolo import Yolo, YoloConfig, _middle
from weftline.nodes.yolo_tasks import COCO_POINTS, TASKS, default_points

FAMILIES = ["yolo11", pytest.param("yolo26", marks=pytest.mark.slow)]
NAMES = ("thing 0", "thing 1", "thing 2")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model for each task, called by its name."""
    folder = tmp_path_factory.mktemp("models")
    for task in SUFFIXES:
        save_yolo(folder / task, task)
    return folder


def opened(folder: Path, device: str = "cpu", **options: Any) -> Yolo:
    """Return a checked and opened step with the model in `folder`/m."""
    config = YoloConfig(**{"model": "m", **options})
    Yolo.ports(config, StepContext(folder))
    node = Yolo(config)
    node.open(OpenContext(folder, device, cache_dir=folder / "cache"))
    node.warm_up()
    return node


def alone(node: Yolo, images: list[np.ndarray]) -> dict[str, list[Any]]:
    """Return the outputs of calls with one picture each."""
    found = [node.run(Batch({"image": [image]})) for image in images]
    return {port: [one[port][0] for one in found] for port in found[0]}


def both(tmp_path: Path, task: str, family: str) -> tuple[list[dict[str, list[Any]]], list[Any]]:
    """Return the outputs in one batch and one by one, and ultralytics' results of a model for `task`."""
    save_yolo(tmp_path / "m", task, family)
    node = opened(tmp_path)
    assert [port.name for port in TASKS[task].outputs] == list(node.run(Batch({"image": pictures()})))
    wanted = predicted(network_of(task, tmp_path / "cache", family), pictures(), task)
    return [dict(node.run(Batch({"image": pictures()}))), alone(node, pictures())], wanted


def assert_same_boxes(found: Any, wanted: Any) -> None:
    assert len(found) == len(wanted.boxes) and found.names == NAMES
    np.testing.assert_allclose(found.boxes, wanted.boxes.xyxy, atol=1e-3)
    np.testing.assert_allclose(found.scores, wanted.boxes.conf, atol=1e-5)
    np.testing.assert_array_equal(found.classes, wanted.boxes.cls)


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_are_those_of_ultralytics(tmp_path: Path, family: str) -> None:
    runs, wanted, seen = *both(tmp_path, "segment", family), 0
    for found in runs:
        for place, (image, one) in enumerate(zip(pictures(), wanted, strict=True)):
            height, width = image.shape[:2]
            assert_same_boxes(found["detections"][place], one)
            marked, segments = found["map"][place], found["segments"][place]
            masks = [decode_mask(rle, height, width) for rle in found["masks"][place]]
            first = np.zeros((height, width), np.int32)
            for id, theirs in enumerate(one.masks.data.numpy() > 0, 1):
                assert (masks[id - 1] != theirs).mean() < 1e-3
                first[(first == 0) & masks[id - 1]] = id
            np.testing.assert_array_equal(marked, first)
            assert marked.dtype == np.int32 and len(segments) == len(masks) == len(found["detections"][place])
            for part in segments:
                at = part["id"] - 1
                assert (part["class"], part["label"]) == (one.boxes.cls[at], NAMES[part["class"]])
                assert part["score"] == pytest.approx(float(one.boxes.conf[at]), abs=1e-5)
                assert part["share"] == pytest.approx(masks[at].mean(), abs=1e-6)
            shares = [part["share"] for part in segments]
            assert shares == sorted(shares, reverse=True)
            seen += len(segments)
    assert seen > 10


@pytest.mark.parametrize("family", FAMILIES)
def test_keypoints_are_those_of_ultralytics(tmp_path: Path, family: str) -> None:
    runs, wanted, seen = *both(tmp_path, "pose", family), 0
    for found in runs:
        for detections, objects, one in zip(found["detections"], found["keypoints"], wanted, strict=True):
            assert_same_boxes(detections, one)
            assert [{**entry, "points": []} for entry in objects] == [
                {**entry, "points": []} for entry in detections.to_json()
            ]
            for entry, points in zip(objects, one.keypoints.data.numpy(), strict=True):
                assert [point["name"] for point in entry["points"]] == [str(place) for place in range(17)]
                ours = [[point["x"], point["y"], point["score"]] for point in entry["points"]]
                np.testing.assert_allclose(ours, points, atol=6e-3)
            seen += len(objects)
    assert seen > 10


@pytest.mark.parametrize("family", FAMILIES)
def test_oriented_boxes_are_those_of_ultralytics(tmp_path: Path, family: str) -> None:
    runs, wanted, seen = *both(tmp_path, "obb", family), 0
    for found in runs:
        for place, (image, one) in enumerate(zip(pictures(), wanted, strict=True)):
            detections, oriented = found["detections"][place], found["oriented"][place]
            height, width = image.shape[:2]
            upright = np.clip(one.obb.xyxy.numpy(), 0, [width, height] * 2)
            np.testing.assert_allclose(detections.boxes, upright, atol=2e-3)
            np.testing.assert_allclose(detections.scores, one.obb.conf, atol=1e-5)
            assert [entry["name"] for entry in oriented] == [NAMES[int(place)] for place in one.obb.cls]
            boxes = np.array([[*entry["box"], entry["angle"]] for entry in oriented]).reshape(-1, 5)
            np.testing.assert_allclose(boxes, one.obb.xywhr, atol=6e-3)
            corners = np.array([entry["corners"] for entry in oriented]).reshape(-1, 4, 2)
            np.testing.assert_allclose(corners, one.obb.xyxyxyxy, atol=6e-3)
            seen += len(oriented)
    assert seen > 10


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_are_those_of_ultralytics(tmp_path: Path, family: str) -> None:
    runs, wanted = both(tmp_path, "classify", family)
    for found in runs:
        for label, scores, one in zip(found["label"], found["scores"], wanted, strict=True):
            order = one.probs.data.argsort(descending=True).tolist()
            assert [entry["label"] for entry in scores] == [NAMES[place] for place in order]
            np.testing.assert_allclose([entry["score"] for entry in scores], one.probs.data[order], atol=1e-5)
            assert label == NAMES[one.probs.top1]
    assert len({json.dumps(scores) for scores in runs[0]["scores"]}) > 1
    (scores,) = opened(tmp_path, top_k=1).run(Batch({"image": pictures()[:1]}))["scores"]
    assert len(scores) == 1


@pytest.mark.slow
def test_detections_of_every_family_are_those_of_ultralytics(tmp_path: Path) -> None:
    for family in ("yolo11", "yolo26", "yolov10"):
        runs, wanted = both(tmp_path / family, "detect", family)
        for found in runs:
            for detections, one in zip(found["detections"], wanted, strict=True):
                assert_same_boxes(detections, one)
        assert sum(len(one.boxes) for one in wanted) > 4


@pytest.mark.slow
def test_yolo_world_finds_the_classes_that_are_stored_in_it(tmp_path: Path) -> None:
    network_of("detect", tmp_path / "cache")  # configures ultralytics
    from ultralytics.nn.tasks import WorldModel

    torch.manual_seed(0)
    network = random_weights(WorldModel("yolov8n-worldv2.yaml", ch=3, nc=3, verbose=False))
    torch.save({"model": network, "train_args": {"imgsz": SIDE}}, tmp_path / "own.pt")
    node = opened(tmp_path, model="own.pt", trust_pickle=True, confidence=1e-7, iou=0.5)
    found = node.run(Batch({"image": pictures()}))["detections"]
    for detections, one in zip(found, predicted(network, pictures(), "detect", conf=1e-7), strict=True):
        assert_same_boxes(detections, one)
        assert len(detections) > 3


@pytest.mark.parametrize("side", [64, 96])
def test_a_classifier_prepares_pictures_as_it_was_trained(tmp_path: Path, side: int) -> None:
    network = network_of("classify", tmp_path / "cache")
    from ultralytics.data.augment import classify_transforms

    network.transforms = classify_transforms(64, mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.3))
    torch.save({"model": network}, tmp_path / "own.pt")
    node = opened(tmp_path, model="own.pt", trust_pickle=True, image_size=side)
    found = node.run(Batch({"image": pictures()}))["scores"]
    for scores, one in zip(found, predicted(network, pictures(), "classify", imgsz=side), strict=True):
        ours = {entry["label"]: entry["score"] for entry in scores}
        np.testing.assert_allclose([ours[name] for name in NAMES], one.probs.data, atol=1e-5)


def test_the_nms_free_head_of_a_model_is_used_where_it_is_selected(tmp_path: Path) -> None:
    network = network_of("pose", tmp_path / "cache", "yolo26")
    network.end2end = True
    torch.save({"model": network, "train_args": {"imgsz": 160}}, tmp_path / "own.pt")
    for most in (7, 400):  # fewer, and more than the 300 that the head selects by itself
        node = opened(tmp_path, model="own.pt", trust_pickle=True, confidence=0.0, detections_max=most)
        found = node.run(Batch({"image": pictures()}))
        wanted = predicted(network, pictures(), "pose", conf=0.0, max_det=most, nms=False, imgsz=160)
        for detections, objects, one in zip(found["detections"], found["keypoints"], wanted, strict=True):
            assert len(objects) == most
            assert_same_boxes(detections, one)


@pytest.mark.parametrize("task", SUFFIXES)
def test_the_task_of_a_pickle_is_read_without_loading_it(
    tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"ema": network_of(task, tmp_path / "cache"), "model": None}, tmp_path / "own.pt")
    config = YoloConfig("own.pt", trust_pickle=True)
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    assert Yolo.ports(config, StepContext(tmp_path)).outputs == TASKS[task].outputs
    monkeypatch.undo()
    if task in ("pose", "classify"):
        node = opened(tmp_path, model="own.pt", trust_pickle=True, image_size=SIDE)
        answers = node.run(Batch({"image": pictures()[:1]}))
        assert list(answers) == [port.name for port in TASKS[task].outputs]


def problem(folder: Path, model: str, **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Yolo.ports(YoloConfig(model, **options), StepContext(folder))
    return caught.value


def test_a_wrong_task_is_refused_and_the_right_one_named(models: Path) -> None:
    torch.save({"model": network_of("obb", models / "cache")}, models / "own.pt")
    for model, right in (("segment", "segment"), ("own.pt", "obb"), ("yolo11n-cls.pt", "classify")):
        error = problem(models, model, task="pose", trust_pickle=True)
        assert (error.option, error.fix) == ("task", f"write task: {right}, or leave it out")
        assert error.found == f"{model} {TASKS[right].about}" and "keypoints" in error.expected
        assert Yolo.ports(YoloConfig(model, right, trust_pickle=True), StepContext(models))
    error = problem(models, "segment", task="segmentation")
    assert error.option == "task" and error.expected == "one of detect, segment, pose, obb, classify"
    with pytest.raises(ModelError, match=r"segment marks the pixels of objects(?s:.*)task: segment"):
        Yolo(YoloConfig("segment", "pose")).open(OpenContext(models, cache_dir=models / "cache"))


def test_a_model_that_is_not_here_has_the_task_of_its_name(tmp_path: Path) -> None:
    for suffix, task in (("", "detect"), ("-seg", "segment"), ("-pose", "pose"), ("-obb", "obb"), ("-cls", "classify")):
        config = YoloConfig(f"yolo11n{suffix}.pt", trust_pickle=True)
        assert Yolo.ports(config, StepContext(tmp_path)).outputs == TASKS[task].outputs
    assert "a task that this node lacks" in problem(tmp_path, "yolo26n-sem.pt", trust_pickle=True).found


def test_a_file_with_another_task_than_its_name_fails_when_opened(tmp_path: Path) -> None:
    from weftline.nodes.yolo_file import load_pickle

    torch.save({"model": network_of("obb", tmp_path / "cache")}, tmp_path / "own-seg.pt")
    with pytest.raises(ModelError, match="is a OBBModel, expected a SegmentationModel"):
        load_pickle("own-seg.pt", tmp_path / "own-seg.pt", TASKS["segment"], 0)


def test_a_network_of_other_pictures_than_colour_is_refused(tmp_path: Path) -> None:
    network = network_of("detect", tmp_path / "cache")
    network.yaml["channels"] = 4
    torch.save({"model": network}, tmp_path / "own.pt")
    with pytest.raises(ModelError, match="4 channels, expected 3"):
        opened(tmp_path, model="own.pt", trust_pickle=True)


def test_models_of_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    from ultralytics.nn.tasks import SemanticSegmentationModel

    network_of("detect", tmp_path / "cache")  # configures ultralytics
    torch.save({"model": SemanticSegmentationModel.__new__(SemanticSegmentationModel)}, tmp_path / "own.pt")
    error = problem(tmp_path, "own.pt", trust_pickle=True)
    assert error.found == "own.pt is a SemanticSegmentationModel, which this node does not run"


def test_a_model_of_another_node_is_named(models: Path, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"architectures": ["RTDetrForObjectDetection"]}')
    error = problem(tmp_path, "m")
    assert error.fix == "use node transformers with `task: object-detection` for it, or name another model"
    assert error.found == "m is a RTDetrForObjectDetection, which finds objects in pictures"
    with pytest.raises(ConfigError) as caught:
        Transformers.ports(TransformersConfig("keypoint-detection", "pose"), StepContext(models))
    assert (caught.value.found, caught.value.fix) == ("pose is a YOLO model", "use node yolo for it")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"head": [[-1, 1, "RTDETRDecoder", ["nc"]]]}, "ends in layer 'RTDETRDecoder'"),
        ({"channels": 4}, "channels is 4"),
        ({"kpt_shape": [17, 4]}, "kpt_shape"), ({"kpt_shape": [10**6, 3]}, "kpt_shape"),
        ({"kpt_shape": 17}, "kpt_shape"), ({"kpt_shape": None}, "kpt_shape"),
        ({"backbone": [[-1, 1, "TorchVision", [512, "resnet18"]]]}, "TorchVision"),
    ],
)  # fmt: skip
def test_an_architecture_of_another_kind_is_refused(
    models: Path, tmp_path: Path, change: dict[str, Any], found: str
) -> None:
    config = json.loads((models / "pose" / "config.json").read_text())
    config["architecture"] |= change
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    assert found in problem(tmp_path, "m").found


def test_keypoints_have_the_names_of_the_model(tmp_path: Path) -> None:
    folder = save_yolo(tmp_path / "m", "pose", kpt_shape=[2, 2])
    config = json.loads((folder / "config.json").read_text())
    for names, found in (({}, "0 1"), ({"keypoints": ["bow", "stern"]}, "bow stern")):
        (folder / "config.json").write_text(json.dumps({**config, **names}))
        objects = opened(tmp_path).run(Batch({"image": pictures()[:1]}))["keypoints"][0]
        assert " ".join(point["name"] for point in objects[0]["points"]) == found
        assert "score" not in objects[0]["points"][0]
    (folder / "config.json").write_text(json.dumps({**config, "keypoints": ["bow"]}))
    assert "no list of 2 names" in problem(tmp_path, "m").found
    network = network_of("pose", tmp_path / "cache", names=1)
    network.kpt_names = {0: [f"p{place}" for place in range(17)]}
    torch.save({"model": network}, tmp_path / "own.pt")
    assert opened(tmp_path, model="own.pt", trust_pickle=True, image_size=SIDE)._opened.points[16] == "p16"
    assert default_points(("person",), 17) == COCO_POINTS and default_points(("person",), 3) == ("0", "1", "2")


@pytest.mark.parametrize(
    ("task", "options", "option"),
    [
        ("classify", {"confidence": 0.5}, "confidence"), ("classify", {"detections_max": 5}, "detections_max"),
        ("classify", {"top_k": 0}, "top_k"), ("segment", {"detections_max": 1001}, "detections_max"),
        ("obb", {"detections_max": 4097}, "detections_max"), ("detect", {"top_k": 3}, "top_k"),
    ],
)  # fmt: skip
def test_options_of_other_tasks_and_counts_beyond_limits_are_named(
    models: Path, task: str, options: dict[str, Any], option: str
) -> None:
    assert problem(models, task, **options).option == option


def test_masks_are_the_same_computed_one_at_a_time(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = opened(models, model="segment")
    whole = node.run(Batch({"image": pictures()[:2]}))
    monkeypatch.setattr(yolo_masks, "PIXELS_MAX", 1)
    single = node.run(Batch({"image": pictures()[:2]}))
    for one, other in zip(whole["map"], single["map"], strict=True):
        assert (one != other).mean() < 1e-3 and one.max() > 1


def test_a_picture_with_too_many_runs_fails_alone(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = opened(models, model="segment")
    sizes = [sum(len(rle["counts"]) for rle in masks) for masks in node.run(Batch({"image": pictures()}))["masks"]]
    monkeypatch.setattr(yolo_masks, "TEXT_BYTES_MAX", sorted(sizes)[-2])
    found = node.run(Batch({"image": pictures()}))
    for port in ("detections", "map", "segments", "masks"):
        failed = [isinstance(value, InputError) for value in found[port]]
        assert failed == [size == max(sizes) for size in sizes]


def test_pictures_without_objects_have_empty_answers(models: Path) -> None:
    for task, empty in (("segment", "segments"), ("pose", "keypoints"), ("obb", "oriented")):
        found = opened(models, model=task, confidence=1.0).run(Batch({"image": pictures()[:2]}))
        assert found[empty] == [[], []] and [len(one) for one in found["detections"]] == [0, 0]
        if task == "segment":
            assert [one.shape for one in found["map"]] == [(60, 90), (96, 96)] and not found["map"][0].any()


def test_long_pictures_are_cut_before_they_grow() -> None:
    assert _middle(np.zeros((1, 5000, 3))).shape == (1, 32, 3) and _middle(np.zeros((500, 7, 3))).shape == (224, 7, 3)
    assert _middle(np.zeros((40, 90, 3))).shape == (40, 90, 3)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["segment", "pose", "obb"])
def test_pictures_on_a_device_have_the_same_answers(models: Path, task: str) -> None:
    bench, images = Bench(), pictures()[:2]
    host, there = (opened(models, device, model=task) for device in ("cpu", DEVICE))
    wanted = host.run(Batch({"image": images}))
    found = there.run(Batch({"image": [bench.put(image) for image in images]}))
    for one, other in zip(wanted["detections"], found["detections"], strict=True):
        assert abs(len(one) - len(other)) <= 1 and len(one) > 1
    assert list(found) == list(wanted)
