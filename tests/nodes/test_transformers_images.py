"""Tasks of node transformers on pictures give the answers of transformers' own pipelines."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.nodes import random_models
from tests.nodes.random_models import assert_same_scores, opened, pipeline, refused
from weftline.errors import ModelError
from weftline.nodes.contract import Batch

COLOURS = random_models.names("red", "green", "blue")


@pytest.mark.parametrize(
    ("options", "top_k"),
    [(COLOURS, None), (COLOURS, 2), ({**COLOURS, "problem_type": "multi_label_classification"}, None)],
)
def test_pictures_are_classified_as_the_pipeline_does(tmp_path: Path, options: Any, top_k: int | None) -> None:
    random_models.save_vit(tmp_path / "m", **options)
    pictures = random_models.pictures()
    node = opened(tmp_path, "image-classification", top_k=top_k)
    whole = node.run(Batch({"image": pictures}))
    own = pipeline(tmp_path, "image-classification")
    for place, picture in enumerate(pictures):
        wanted = own(Image.fromarray(picture), **({"top_k": top_k} if top_k else {}))
        assert len(wanted) == (top_k or 3)
        for found in (whole["scores"][place], node.run(Batch({"image": [picture]}))["scores"][0]):
            assert_same_scores(found, wanted)
        assert whole["label"][place] == wanted[0]["label"]


def test_an_image_classifier_whose_outputs_are_no_labels_is_refused(tmp_path: Path) -> None:
    random_models.save_vit(tmp_path / "m", num_labels=1)
    error = refused(tmp_path, "image-classification")
    assert "has one label" in error.found and error.option == "model"
    random_models.save_vit(tmp_path / "m", **COLOURS)
    assert refused(tmp_path, "image-classification", top_k=0).option == "top_k"


@pytest.mark.parametrize("kind", ["detr", "rt_detr"])
def test_objects_are_those_of_the_pipeline(tmp_path: Path, kind: str) -> None:
    save = random_models.save_detr if kind == "detr" else random_models.save_rt_detr
    save(tmp_path / "m", **COLOURS)
    pictures, threshold = random_models.pictures(), 0.3
    node = opened(tmp_path, "object-detection", threshold=threshold)
    own = pipeline(tmp_path, "object-detection", threshold=threshold)
    whole, seen = node.run(Batch({"image": pictures}))["detections"], 0
    for place, picture in enumerate(pictures):
        wanted = sorted(own(Image.fromarray(picture)), key=lambda one: -one["score"])
        seen += len(wanted)
        for found in (whole[place], node.run(Batch({"image": [picture]}))["detections"][0]):
            assert found.labels == [one["label"] for one in wanted]
            assert found.scores == pytest.approx([one["score"] for one in wanted], abs=1e-4)
            edges = np.array([picture.shape[1], picture.shape[0]] * 2)
            boxes = [np.clip([one["box"][side] for side in SIDES], 0, edges) for one in wanted]
            assert np.abs(found.boxes - np.array(boxes).reshape(-1, 4)).max(initial=0) < 1.001  # it cuts off decimals
            assert found.boxes.dtype == np.float32 and found.classes.dtype == np.int32
    assert seen > 4


SIDES = ("xmin", "ymin", "xmax", "ymax")


def test_a_backbone_of_a_missing_package_is_refused(tmp_path: Path) -> None:
    folder = random_models.save_detr(tmp_path / "m", **COLOURS)
    config = json.loads((folder / "config.json").read_text())
    for keys in ({"use_timm_backbone": True}, {"backbone_config": {"model_type": "timm_backbone"}}):
        (folder / "config.json").write_text(json.dumps({**config, **keys}))
        error = refused(tmp_path, "object-detection")
        assert "package timm" in error.found and "pip install timm" in error.fix
    (folder / "config.json").write_text(json.dumps(config))
    assert refused(tmp_path, "object-detection", threshold=1.5).option == "threshold"


@pytest.mark.parametrize("save", [random_models.save_dpt, random_models.save_depth_anything])
def test_depth_is_that_of_the_pipeline(tmp_path: Path, save: Callable[[Path], Path]) -> None:
    save(tmp_path / "m")
    pictures = random_models.pictures()
    node = opened(tmp_path, "depth-estimation")
    own = pipeline(tmp_path, "depth-estimation")
    whole = node.run(Batch({"image": pictures}))["depth"]
    for place, picture in enumerate(pictures):
        wanted = own(Image.fromarray(picture))["predicted_depth"].numpy()
        assert wanted.std() > 1e-3
        for found in (whole[place], node.run(Batch({"image": [picture]}))["depth"][0]):
            assert found.shape == picture.shape[:2] and found.dtype == np.float32
            np.testing.assert_allclose(found / wanted.max(), wanted / wanted.max(), atol=1e-5)


@pytest.mark.parametrize("hypothesis", [None, "{} is good"])
def test_zero_shot_labels_of_pictures_have_the_pipelines_scores(tmp_path: Path, hypothesis: str | None) -> None:
    random_models.save_clip(tmp_path / "m")
    pictures, labels = random_models.pictures(), ("good day", "paris", "bad")
    task = "zero-shot-image-classification"
    node = opened(tmp_path, task, labels=labels, hypothesis=hypothesis)
    own = pipeline(tmp_path, task)
    whole = node.run(Batch({"image": pictures}))
    given = {"hypothesis_template": hypothesis} if hypothesis else {}
    for place, picture in enumerate(pictures):
        wanted = own(Image.fromarray(picture), candidate_labels=list(labels), **given)
        for found in (whole["scores"][place], node.run(Batch({"image": [picture]}))["scores"][0]):
            assert_same_scores(found, wanted)
        assert whole["label"][place] == wanted[0]["label"]


def test_wrong_labels_and_a_missing_tokenizer_are_refused(tmp_path: Path) -> None:
    folder, task = random_models.save_clip(tmp_path / "m"), "zero-shot-image-classification"
    assert refused(tmp_path, task).option == "labels"
    assert refused(tmp_path, task, labels=("good", "")).option == "labels"
    assert refused(tmp_path, task, labels=("good",), hypothesis="{good}").option == "hypothesis"
    (folder / "tokenizer.json").unlink()
    assert refused(tmp_path, task, labels=("good",)).found == "m has no tokenizer"


def test_a_label_that_the_model_would_cut_is_refused_when_opened(tmp_path: Path) -> None:
    random_models.save_clip(tmp_path / "m")
    with pytest.raises(ModelError, match=r"labels: 'good good .* tokens with its hypothesis, and m reads at most"):
        opened(tmp_path, "zero-shot-image-classification", labels=("bad", "good " * 100))


def test_maps_of_classes_are_those_of_the_pipeline(tmp_path: Path) -> None:
    random_models.save_segformer(tmp_path / "m", **COLOURS)
    pictures = random_models.pictures()
    node = opened(tmp_path, "image-segmentation")
    own = pipeline(tmp_path, "image-segmentation")
    whole, seen = node.run(Batch({"image": pictures})), 0
    for place, picture in enumerate(pictures):
        wanted = {one["label"]: np.asarray(one["mask"]) == 255 for one in own(Image.fromarray(picture))}
        seen += len(wanted)
        alone = node.run(Batch({"image": [picture]}))
        for found, segments in (
            (whole["map"][place], whole["segments"][place]),
            (alone["map"][0], alone["segments"][0]),
        ):
            assert found.shape == picture.shape[:2] and found.dtype == np.int32
            assert {one["label"] for one in segments} == set(wanted)
            for one in segments:
                np.testing.assert_array_equal(found == one["class"], wanted[one["label"]])
                assert one["share"] == pytest.approx(wanted[one["label"]].mean(), abs=1e-6)
            shares = [one["share"] for one in segments]
            assert shares == sorted(shares, reverse=True)
    assert seen > 5


def test_a_processor_without_the_tasks_conversion_is_refused(tmp_path: Path) -> None:
    folder = random_models.save_segformer(tmp_path / "m", **COLOURS)
    path = folder / "preprocessor_config.json"
    settings = {**json.loads(path.read_text()), "image_processor_type": "ViTImageProcessor"}
    path.write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="post_process_semantic_segmentation"):
        opened(tmp_path, "image-segmentation")


OBJECT_MODELS: dict[str, Callable[..., Path]] = {
    "mask2former": random_models.save_mask2former,
    "maskformer": random_models.save_maskformer,
    "detr": lambda folder, **options: random_models.save_detr(folder, "DetrForSegmentation", **options),
}


@pytest.mark.parametrize("subtask", ["panoptic", "instance"])
@pytest.mark.parametrize("kind", OBJECT_MODELS)
def test_segments_of_objects_are_those_of_the_pipeline(tmp_path: Path, kind: str, subtask: str) -> None:
    OBJECT_MODELS[kind](tmp_path / "m", **COLOURS)
    pictures, threshold = random_models.pictures(), 0.35
    node = opened(
        tmp_path, "image-segmentation", threshold=threshold, subtask=subtask if subtask == "instance" else None
    )
    own = pipeline(tmp_path, "image-segmentation")
    whole, seen = node.run(Batch({"image": pictures})), 0
    for place, picture in enumerate(pictures):
        wanted = own(Image.fromarray(picture), subtask=subtask, threshold=threshold)
        masks = sorted((np.asarray(one["mask"]) == 255 for one in wanted), key=lambda mask: -mask.sum())
        seen += len(wanted)
        alone = node.run(Batch({"image": [picture]}))
        for found, segments in (
            (whole["map"][place], whole["segments"][place]),
            (alone["map"][0], alone["segments"][0]),
        ):
            assert found.shape == picture.shape[:2] and found.dtype == np.int32
            assert [one["id"] for one in segments] == list(range(1, len(wanted) + 1))
            assert sorted(one["label"] for one in segments) == sorted(one["label"] for one in wanted)
            assert sorted(one["score"] for one in segments) == pytest.approx(
                sorted(float(one["score"]) for one in wanted), abs=1e-4
            )
            for one, mask in zip(segments, masks, strict=True):
                assert one["share"] == pytest.approx(mask.mean(), abs=1e-6)
                assert any(np.array_equal(found == one["id"], other) for other in masks)
    assert seen > 1


def test_an_object_model_marks_the_class_of_every_pixel_too(tmp_path: Path) -> None:
    random_models.save_mask2former(tmp_path / "m", **COLOURS)
    node = opened(tmp_path, "image-segmentation", subtask="semantic")
    own = pipeline(tmp_path, "image-segmentation")
    (picture,) = random_models.pictures()[:1]
    found = node.run(Batch({"image": [picture]}))
    for one in own(Image.fromarray(picture), subtask="semantic"):
        number = next(segment["id"] for segment in found["segments"][0] if segment["label"] == one["label"])
        np.testing.assert_array_equal(found["map"][0] == number, np.asarray(one["mask"]) == 255)


def test_subtasks_that_a_model_lacks_are_refused(tmp_path: Path) -> None:
    folder = random_models.save_segformer(tmp_path / "m", **COLOURS)
    error = refused(tmp_path, "image-segmentation", subtask="panoptic")
    assert error.option == "subtask" and error.expected == "one that the model has: semantic"
    assert refused(tmp_path, "image-segmentation", threshold=0.5).option == "threshold"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["OneFormerForUniversalSegmentation"]}))
    error = refused(tmp_path, "image-segmentation")
    assert "marks the pixels of objects" in error.found and "Mask2Former" in error.expected
    assert "`task: image-segmentation`" not in error.fix


def test_depth_weights_may_lack_a_residual_that_is_not_used(tmp_path: Path) -> None:
    folder = random_models.save_dpt(tmp_path / "m")
    batch = Batch({"image": random_models.pictures()[:1]})
    wanted = opened(tmp_path, "depth-estimation").run(batch)["depth"][0]
    random_models.drop(folder, "neck.fusion_stage.layers.0.residual_layer1.")
    np.testing.assert_array_equal(opened(tmp_path, "depth-estimation").run(batch)["depth"][0], wanted)
    random_models.drop(folder, "neck.fusion_stage.layers.1.residual_layer1.")
    with pytest.raises(ModelError, match=r"layers\.1\.residual_layer1"):
        opened(tmp_path, "depth-estimation")
