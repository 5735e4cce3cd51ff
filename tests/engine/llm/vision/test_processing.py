"""Pictures and videos become the vision encoder's inputs, in the model's number format."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from tests.engine.llm.vision.tiny_vision import FAMILIES, VIDEO_FAMILIES, asked, clip, picture
from weftline.engine.llm.vision.processing import ImageProcessor, VideoProcessor, load_processor, settings_of
from weftline.errors import ModelError


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_of_a_picture_are_those_of_the_models_processor(models, family):
    model = models(family)
    given = model.inputs(asked(None), [picture()])
    for dtype in (torch.float32, torch.bfloat16):
        (found,) = ImageProcessor(model.processor.image_processor, dtype)(picture())
        assert (found["pixel_values"] == given["pixel_values"].to(dtype)).all()
        assert all(value.dtype == (dtype if name == "pixel_values" else torch.int64) for name, value in found.items())


@pytest.mark.parametrize("family", VIDEO_FAMILIES)
def test_all_frames_of_a_video_are_used_in_parts_of_their_own(models, family):
    processor = copy.deepcopy(models(family).processor.video_processor)
    processor.do_sample_frames, processor.num_frames, processor.fps = True, 2, None
    parts = VideoProcessor(processor, torch.float32)(clip(6))
    assert len(parts) == (6 if family == "smolvlm" else 3)
    assert len({part["pixel_values"].untyped_storage().data_ptr() for part in parts}) == len(parts)
    for part in parts:
        assert part["pixel_values"].untyped_storage().nbytes() == part["pixel_values"].nbytes


def test_a_picture_that_may_not_be_written_is_processed(models):
    pixels = picture()
    pixels.flags.writeable = False
    frames = np.stack([pixels, pixels])
    frames.flags.writeable = False
    processor = models("qwen2_vl").processor
    assert ImageProcessor(processor.image_processor, torch.float32)(pixels)
    assert VideoProcessor(processor.video_processor, torch.float32)(frames)


def test_settings_differ_where_a_processor_does(models):
    processor = models("qwen2_vl").processor
    changed = copy.deepcopy(processor.image_processor)
    changed.image_mean = [0.1, 0.2, 0.3]
    found = {
        settings_of(processor.image_processor, "a"), settings_of(processor.image_processor, "b"),
        settings_of(changed, "a"), settings_of(processor.video_processor, "a"),
    }  # fmt: skip
    assert len(found) == 4


@pytest.mark.parametrize("video", [False, True])
def test_a_folder_without_a_processor_is_an_error(tmp_path, video):
    with pytest.raises(ModelError, match=f"model m: its {'video' if video else 'image'} processor cannot be loaded"):
        load_processor(tmp_path, "m", video)
