"""The tokens of a picture, from its size alone, are those of the model's own processor."""

from __future__ import annotations

import random

import pytest

from tests.engine.llm.vision.tiny_vision import FAMILIES, asked, picture
from weftline.engine.llm.vision.families import FAMILIES as KNOWN
from weftline.engine.llm.vision.layout import GridLayout, layout_of
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
