"""The tokens of a picture, from its size alone, are those of the model's own processor."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from num2words import num2words
from transformers.video_utils import VideoMetadata

from tests.engine.llm.vision.tiny_vision import FAMILIES, VIDEO, VIDEO_FAMILIES, asked, clip, picture
from weftline.engine.llm.vision.families import FAMILIES as KNOWN
from weftline.engine.llm.vision.layout import GridLayout, in_words, layout_of, video_layout_of
from weftline.errors import InputError, ModelError


def _layout(model):
    config, words = model.reference.config, model.processor.tokenizer
    found = KNOWN[config.model_type]
    token = words.convert_ids_to_tokens(config.image_token_id)
    return layout_of(
        found, config, model.processor.image_processor, token, lambda text: words.encode(text, add_special_tokens=False)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_alone_give_the_tokens_of_the_processor(models, family):
    model, rng = models(family), random.Random(1)
    layout, id = _layout(model), model.reference.config.image_token_id
    for _ in range(25):
        height, width = rng.randint(4, 90), rng.randint(4, 90)
        given = model.inputs(asked(None), [picture(height, width)])
        tokens = layout.tokens_of(height, width)
        whole = given["input_ids"][0].tolist()
        start = whole.index(tokens.tokens[0])
        assert tuple(whole[start : start + len(tokens.tokens)]) == tokens.tokens
        assert sum(map(len, tokens.runs)) == whole.count(id)
        if tokens.grid is not None:
            assert [1, 2 * tokens.grid[0], 2 * tokens.grid[1]] == given["image_grid_thw"][0].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_largest_picture_is_within_the_tokens_and_no_other_is_larger(models, family):
    layout = _layout(models(family))
    most = len(layout.tokens_of(*layout.largest(10_000)).tokens)
    assert len(layout.tokens_of(*layout.largest(12)).tokens) <= max(12, len(layout.tokens_of(1, 1).tokens))
    for height, width in ((1, 1), (16, 40), (90, 90), (1000, 1000), (1000, 300)):
        assert len(layout.tokens_of(height, width).tokens) <= most


def test_a_strip_is_refused():
    layout = GridLayout(5, 28, 56 * 56, 1000 * 28 * 28)
    assert layout.tokens_of(28, 28 * 200).grid is not None
    with pytest.raises(InputError, match="ratio of at most 200"):
        layout.tokens_of(10, 2001)


@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "idefics3"])
@pytest.mark.parametrize("size", [(1, 3000), (3000, 1), (0, 5), (5, 0), (0, 0)])
def test_a_picture_without_pixels_or_too_thin_is_refused(models, family, size):
    with pytest.raises(InputError, match=r"at least one pixel|sides of a ratio"):
        _layout(models(family)).tokens_of(*size)


def test_a_processor_without_a_fixed_size_is_refused(models):
    model = models("llava")

    class Processor:
        do_center_crop = False
        size = 16

    with pytest.raises(ModelError, match="expected a height and a width"):
        layout_of(KNOWN["llava"], model.reference.config, Processor(), "<image>", list)


@pytest.mark.parametrize("family", VIDEO_FAMILIES)
def test_sizes_of_videos_alone_give_the_tokens_of_the_processor(models, family):
    model, rng = models(family), random.Random(1)
    videos = video_layout_of(KNOWN[family], model.reference.config, model.processor.video_processor, _layout(model))
    for frames in (1, 2, 3, 4, 5, 12, 24):
        height, width = rng.randint(4, 90), rng.randint(4, 90)
        given = model.inputs(asked(VIDEO), [], [(clip(frames, height, width), 24.0)])
        tokens = videos.tokens_of(frames, height, width)
        ids = given["input_ids"][0].tolist()
        shown = sum(len(run) for one in tokens for run in one.runs)
        assert shown == ids.count(tokens[0].tokens[tokens[0].runs[0].start])
        assert shown == videos.features_of(frames, height, width)
        parts = videos.parts_of(frames)
        assert len(parts) == sum(len(one.runs) for one in tokens) == len(videos.times_of(frames, 24.0))
        assert [at for part in parts for at in part] == list(range(frames))
        if family != "smolvlm":
            rows, columns = tokens[0].grid
            assert given["video_grid_thw"][0].tolist() == [len(parts), 2 * rows, 2 * columns]


def test_frames_of_a_long_video_are_made_smaller(models):
    model = models("qwen2_vl")
    processor = copy.deepcopy(model.processor.video_processor)
    processor.cap_pixels_per_frame, processor.max_video_tokens = True, 40
    videos = video_layout_of(KNOWN["qwen2_vl"], model.reference.config, processor, _layout(model))
    counts = set()
    for frames in (2, 4, 8, 16, 40):
        found = processor(videos=[torch.zeros(frames, 3, 48, 40, dtype=torch.uint8)], return_tensors="pt")
        count, rows, columns = found["video_grid_thw"][0].tolist()
        tokens = videos.tokens_of(frames, 48, 40)[0]
        assert (len(tokens.runs), tokens.grid) == (count, (rows // 2, columns // 2))
        counts.add(tokens.grid)
    assert len(counts) > 1


@pytest.mark.parametrize(("frames", "fps"), [(1, 24.0), (24, 0.01), (12, 0.19), (7, 1 / 3), (6, 999.0)])
def test_times_of_frames_are_those_of_transformers(models, frames, fps):
    model = models("smolvlm")
    videos = video_layout_of(KNOWN["smolvlm"], model.reference.config, None, _layout(model))
    metadata = VideoMetadata(total_num_frames=frames, fps=fps, frames_indices=list(range(frames)))
    given = {"pixel_values": torch.zeros(1, frames, 1), "video_metadata": [metadata]}
    text = model.processor.replace_video_token(given, 0)
    tile = "".join(["<fake_token_around_image><global-img>", "<image>" * 4, "<fake_token_around_image>"])
    assert videos.text_of(frames, fps).replace("<image>", tile) == text


def test_numbers_are_written_as_num2words_writes_them():
    assert [in_words(number) for number in range(1000)] == [num2words(number) for number in range(1000)]
