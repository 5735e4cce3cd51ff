"""Answers about videos: tokens equal to those of transformers' generate, in every way that rounds can be cut."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch

from tests.engine.llm.vision.test_answers import (
    ONE,
    TEXT,
    TOKENS,
    Request,
    add,
    answers,
    engine_of,
    expected,
    finish,
    inputs_of,
    opened,
)
from tests.engine.llm.vision.tiny_vision import VIDEO, VIDEO_FAMILIES, TinyVision, asked, clip, picture
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.request import LlmRequestOptions

CLIP: Request = (asked(VIDEO, "what is it"), [], [(clip(4), 24.0)])
SLOW: Request = (CLIP[0], [], [(clip(4), 0.5)])
ODD: Request = (
    asked("look ", VIDEO, " and ", VIDEO, "what"),
    [],
    [(clip(5, 24, 16, 1), 2.0), (clip(1, 12, 30, 2), 1.0)],
)
LONG: Request = (asked("and ", VIDEO), [], [(clip(12, 16, 16, 3), 0.7)])  # its time ends behind the text
EVEN: Request = (ODD[0], [], [(clip(5, 24, 16, 1), 2.0), (clip(5, 12, 30, 2), 1.0)])
MIXED: Request = (asked(None, "x", VIDEO, "y", None), [picture(seed=1), picture(30, 20, 2)], [(clip(3, seed=4), 1.0)])


@pytest.fixture(params=VIDEO_FAMILIES)
def model(request: pytest.FixtureRequest, models: Any) -> TinyVision:
    found: TinyVision = models(request.param)
    return found


def mixed(model: TinyVision) -> list[Request]:
    """Return texts, pictures and videos.

    transformers' SmolVLM has no prompts with pictures and videos, and counts the frames of the longest video for all.
    """
    return [ONE, CLIP, TEXT, *([EVEN] if model.folder.name == "smolvlm" else [ODD, MIXED]), LONG]


def test_prompts_have_the_tokens_of_the_models_own_processor(model):
    node = opened(model)
    for request in mixed(model):
        ids, _ = node._images.read(inputs_of(request), node._prompt_tokens)
        assert ids == model.inputs(*request)["input_ids"][0].tolist()
    node.close()


def test_a_mixed_batch_is_answered_as_each_alone_by_transformers(model):
    node, requests = opened(model), mixed(model)
    right = expected(model, requests)
    assert len({tuple(one) for one in right}) == len(right)
    assert answers(node, requests) == right
    node.close()


@pytest.mark.parametrize("round_tokens_max", [5, 40])
def test_a_video_that_spans_rounds_gives_the_same_answer(model, round_tokens_max):
    node, requests = opened(model, round_tokens_max=round_tokens_max), [LONG, TEXT, CLIP]
    assert answers(node, requests) == expected(model, requests)
    node.close()


def test_a_preempted_prompt_is_computed_again_with_its_videos(model):
    requests = [CLIP, SLOW, ONE, TEXT]
    node = opened(model, page_tokens=4, image_cache_bytes=1)
    page_bytes, tokens = engine_of(node).runner.page_bytes, len(model.inputs(*CLIP)["input_ids"][0])
    node.close()
    node = opened(model, page_tokens=4, image_cache_bytes=1, kv_bytes=(2 * tokens // 4 + 6) * page_bytes)
    encoder = engine_of(node).runner.vision
    for id, request in enumerate(requests):
        add(node, id, request, tokens_max=24, ignore_eos=True)
    parts = len(encoder._live)
    found = finish(node)
    assert engine_of(node).stats().preemptions > 0
    assert encoder.encoded == parts
    for id, right in enumerate(expected(model, requests)):
        assert found[id][: len(right)] == right
    node.close()


def test_equal_videos_share_pages_and_features_and_others_do_not(model):
    node = opened(model, page_tokens=4)
    engine, cached = engine_of(node), []
    other: Request = (CLIP[0], [], [(clip(4, seed=9), 24.0)])
    for request in (CLIP, CLIP, SLOW, SLOW, other):
        add(node, 1, request)
        found: list[int] = []
        while engine.busy:
            updates = engine.step()
            found += [token for update in updates for token in update.tokens]
        cached.append(updates[-1].cached_tokens)
        assert [found] == expected(model, [request])
    parts = 4 if model.folder.name == "smolvlm" else 2
    assert engine.runner.vision.encoded == 2 * parts  # of two contents, whatever their frames per second
    assert cached[0] == 0 and cached[1] == cached[3] > cached[4]
    if model.folder.name == "qwen2_5_vl":  # whose positions depend on them
        assert cached[2] < cached[1]
    if model.folder.name == "qwen2_vl":
        assert cached[2] == cached[1]
    node.close()


@torch.inference_mode()
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_a_conversation_goes_on_behind_a_video(models, family):
    model = models(family)
    node = opened(model, page_tokens=4)
    engine = engine_of(node)
    first: Request = (asked(VIDEO, "what"), [], [(clip(8), 0.5)])  # with Qwen2.5-VL, its time ends behind the text
    ids, images = node._images.read(inputs_of(first), node._prompt_tokens)
    engine.add(1, ids, SamplingParams(tokens_max=16, ignore_eos=True), LlmRequestOptions(images=images))
    longer = [*ids, *finish(node)[1], *node._tokens.raw("and then")]
    engine.add(2, longer, SamplingParams(tokens_max=TOKENS), LlmRequestOptions(images=images))
    found: list[int] = []
    while engine.busy:
        updates = engine.step()
        found += [token for update in updates for token in update.tokens]
    given = model.inputs(*first)
    given["input_ids"] = torch.tensor([longer])
    given["attention_mask"] = torch.ones(1, len(longer), dtype=torch.long)
    more = torch.zeros(1, len(longer) - len(ids), dtype=given["mm_token_type_ids"].dtype)
    given["mm_token_type_ids"] = torch.cat([given["mm_token_type_ids"], more], 1)
    out = model.reference.generate(**given, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    assert found == out[0, len(longer) :].tolist()
    assert updates[-1].cached_tokens > len(ids)
    node.close()


def test_parts_of_a_video_are_encoded_in_calls_of_limited_size(model, monkeypatch):
    monkeypatch.setattr("weftline.engine.llm.vision.encoder.IMAGES_PER_CALL_MAX", 4)
    node = opened(model)
    assert answers(node, [LONG]) == expected(model, [LONG])
    encoder = engine_of(node).runner.vision
    assert (encoder.calls, encoder.encoded) == ((3, 12) if model.folder.name == "smolvlm" else (2, 6))
    node.close()


def test_inputs_of_a_part_are_dropped_when_it_is_encoded(model, monkeypatch):
    monkeypatch.setattr("weftline.engine.llm.vision.encoder.IMAGES_PER_CALL_MAX", 2)
    node, alive = opened(model, round_tokens_max=5), []
    encoder, process = engine_of(node).runner.vision, node._images.videos.process

    def watched(frames: Any) -> Any:
        found = process(frames)
        alive.extend(weakref.ref(part["pixel_values"]) for part in found)
        return found

    node._images = dataclasses.replace(node._images, videos=dataclasses.replace(node._images.videos, process=watched))
    add(node, 1, LONG)
    held = []
    gc.collect()
    gc.freeze()  # else each collection below visits all that other tests of this process keep
    try:
        while engine_of(node).busy:
            engine_of(node).step()
            gc.collect()
            held.append(sum(one() is not None for one in alive))
            assert held[-1] == len(alive) - encoder.encoded
    finally:
        gc.unfreeze()
    assert len(set(held)) > 2
    node.close()


def test_pictures_and_videos_of_smolvlm_are_laid_out_in_order(models):
    """Its features are those of single tiles: the model's own forward pass takes them one after the other."""
    model = models("smolvlm")
    node = opened(model)
    request: Request = (asked("a", VIDEO, "b", None), [picture(seed=1)], [(clip(2, seed=2), 1.0)])
    ids, found = node._images.read(inputs_of(request), node._prompt_tokens)
    pixels = torch.cat([image.pixels.inputs(image.part)["pixel_values"] for image in found], 1)
    mask = torch.cat([image.pixels.inputs(image.part)["pixel_attention_mask"] for image in found], 1)
    given = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    with torch.inference_mode():
        out = model.reference.generate(
            **given, pixel_values=pixels, pixel_attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0
        )
    assert pixels.shape[1] == 2 + 5  # frames, and tiles of the picture
    assert answers(node, [request]) == [out[0, len(ids) :].tolist()]
    node.close()
