"""Crops of a picture, a function and a classifier on one made-up GPU: the answers of the same nodes by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import weftline
from tests.nodes.device_values import Bench, down
from weftline.nodes.contract import Batch, OpenContext
from weftline.nodes.crop import Crop, CropConfig
from weftline.nodes.detections import Detections
from weftline.nodes.onnx import Onnx, OnnxConfig
from weftline.pipelines.placement.machine import Device, Machine

EXAMPLES = Path(__file__).parents[2] / "examples"
FUNCTIONS = """
from __future__ import annotations
from typing import Annotated

def see(photo: "image") -> Detections:
    import numpy as np
    from weftline.node import Detections
    boxes = np.array([[10, 20, 110, 100], [0, 0, 640, 480], [300.5, 200.2, 332, 231]], np.float32)
    return Detections(boxes, np.array([0.9, 0.8, 0.7], np.float32), np.zeros(3, np.int32), ("shape",))

def scale(crop: Annotated[torch.Tensor, "uint8[32, 32, 3]"]) -> "float32[3, 32, 32]":
    return crop.permute(2, 0, 1).float() / 255
"""
PIPELINE = f"""
weftline: 1
name: shapes
inputs: {{photo: image}}
steps:
  see: {{node: function, function: "mine.py:see", inputs: {{photo: photo}}}}
  cut: {{node: crop, size: [32, 32], device: "fake:0", inputs: {{image: photo, detections: see.output}}}}
  scale: {{node: function, function: "mine.py:scale", tensors: torch, device: "fake:0",
          map: crop, inputs: {{crop: cut.crops}}}}
  look: {{node: onnx, model: {EXAMPLES}/models/tiny/shape-classifier.onnx, device: "fake:0",
         map: image, inputs: {{image: scale.output}}}}
outputs: {{scores: look.scores, found: see.output}}
"""


def without_an_engine(photo: np.ndarray, found: Detections) -> list[np.ndarray]:
    """Return the classifier's scores of the same crops, by way of the host."""
    look = Onnx(OnnxConfig("models/tiny/shape-classifier.onnx"))
    look.open(OpenContext(EXAMPLES))
    cut = Crop(CropConfig(size=(32, 32))).run(Batch({"image": [Bench().put(photo)], "detections": [found]}))
    scaled = [np.ascontiguousarray(down(crop).transpose(2, 0, 1), np.float32) / 255 for crop in cut["crops"][0]]
    return list(look.run(Batch({"image": scaled}))["scores"])


@pytest.mark.slow
def test_tensors_between_steps_stay_on_the_gpu_and_change_no_answer(tmp_path: Path) -> None:
    photo = np.asarray(Image.open(EXAMPLES / "data" / "photo.png").convert("RGB"))
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "shapes.yaml").write_text(PIPELINE)
    loaded = weftline.load(tmp_path / "shapes.yaml", machine=Machine(2, 4 << 30, (Device("fake:0", 8 << 30),)))
    lies = {step.name: (step.device_inputs, dict(step.device_outputs)) for step in loaded.plan.steps}
    assert lies == {
        "see": ((), {}), "cut": (("image",), {"crops": "device"}),
        "scale": (("crop",), {"output": "device"}), "look": (("image",), {}),
    }  # fmt: skip
    with loaded.open() as session:
        answer = session.run(photo=photo)
    scores = np.array(without_an_engine(photo, answer["found"]))
    assert scores.shape == (3, 4)
    np.testing.assert_allclose(np.array(answer["scores"]), scores, atol=1e-5)
