"""Tasks of node transformers on pictures give the answers of transformers' own pipelines."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.nodes import random_models
from tests.nodes.random_models import assert_same_scores, opened, pipeline, refused
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
