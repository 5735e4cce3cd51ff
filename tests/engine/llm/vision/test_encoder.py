"""Pictures are encoded once, together with those that wait, and failures stay alone."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch

from tests.engine.llm.vision.test_answers import ONE, OTHER, TEXT, TOKENS, WIDE, Request, add, engine_of, finish, opened
from tests.engine.llm.vision.tiny_vision import TinyVision, asked, picture
from weftline.engine.llm.node import Llm
from weftline.errors import LimitReached, ModelError, StepError


@pytest.fixture
def model(models: Any) -> TinyVision:
    found: TinyVision = models("qwen2_vl")
    return found


def encoder_of(node: Llm) -> Any:
    return engine_of(node).runner.vision


def shown(seed: int, height: int = 16, width: int = 16) -> Request:
    return asked(None, f"number {seed}"), [picture(height, width, seed)]


def test_pictures_of_requests_that_wait_share_a_call(model):
    node = opened(model, sequences_max=1)  # one request at a time: the others wait
    for id in range(5):
        add(node, id, shown(id))
    add(node, 5, shown(5, 40, 16))  # of another shape
    finish(node)
    encoder = encoder_of(node)
    assert (encoder.calls, encoder.encoded) == (2, 6)
    node.close()


def test_a_call_has_a_limit(model, monkeypatch):
    monkeypatch.setattr("weftline.engine.llm.vision.encoder.IMAGES_PER_CALL_MAX", 2)
    node = opened(model)
    for id in range(5):
        add(node, id, shown(id))
    finish(node)
    assert (encoder_of(node).calls, encoder_of(node).encoded) == (3, 5)
    node.close()


def test_nothing_is_encoded_ahead_that_the_cache_cannot_hold(model):
    node = opened(model, sequences_max=1, image_cache_bytes=1)
    for id in range(3):
        add(node, id, shown(id))
    finish(node)
    assert (encoder_of(node).calls, encoder_of(node).encoded) == (3, 3)
    node.close()


def test_a_picture_seen_again_is_encoded_once_for_each_caller(model):
    node = opened(model)
    encoder, encoded = encoder_of(node), []
    for number, salt in enumerate((b"one", b"two", b"one")):  # texts differ: no pages are found
        add(node, 1, (asked(f"{number} a", None), [picture()]), salt=salt)
        add(node, 2, (asked(f"{number} b", None, None), [picture(), picture()]), salt=salt)
        finish(node)
        encoded.append(encoder.encoded)
    assert encoded == [1, 2, 2]
    assert encoder.cache.hits > 0
    node.close()


def test_a_cancelled_request_leaves_no_picture(model):
    node = opened(model, sequences_max=1)
    engine = engine_of(node)
    add(node, 1, ONE)
    add(node, 2, OTHER)
    assert encoder_of(node).held_bytes > 0
    engine.step()
    assert encoder_of(node).held_bytes == 0  # both were encoded in one call
    add(node, 3, WIDE)
    assert encoder_of(node).held_bytes > 0
    engine.cancel(3)
    assert encoder_of(node).held_bytes == 0
    engine.cancel(1)
    assert finish(node)[2] == model.answer(*OTHER, TOKENS)
    assert encoder_of(node).encoded == 2
    node.close()


def test_inputs_are_dropped_when_the_features_exist(model, monkeypatch):
    node, alive = opened(model), []
    process = node._images.process

    def watched(pixels: Any) -> Any:
        found = process(pixels)
        alive.extend(weakref.ref(one) for one in (pixels, *found[0].values()))
        return found

    node._images = dataclasses.replace(node._images, process=watched)
    add(node, 1, shown(1), tokens_max=50, ignore_eos=True)
    add(node, 2, shown(2, 40, 16), tokens_max=50, ignore_eos=True)  # of another shape
    engine_of(node).step()
    gc.collect()
    assert engine_of(node).busy and len(alive) == 6
    assert not any(one() is not None for one in alive)
    finish(node)
    node.close()


def test_a_live_request_keeps_its_features_and_no_other_does(model):
    node = opened(model, image_cache_bytes=1)
    encoder, engine = encoder_of(node), engine_of(node)
    first, second, third = ((asked(text, None), [picture()]) for text in ("one", "two", "three"))  # no page is shared
    add(node, 1, first, tokens_max=50, ignore_eos=True)
    engine.step()
    add(node, 2, second)
    engine.cancel(1)
    assert finish(node)[2] == model.answer(*second, TOKENS)
    assert encoder.encoded == 1
    add(node, 3, third)
    finish(node)
    assert encoder.encoded == 2
    node.close()


def test_encoding_ahead_has_a_limit_of_bytes(model):
    node = opened(model, sequences_max=1)
    encoder = encoder_of(node)
    add(node, 0, shown(0))
    feature_bytes = encoder._feature_bytes * next(iter(encoder._live.values())).image.features
    encoder.cache.bytes_max = 2 * feature_bytes
    for id in range(1, 6):
        add(node, id, shown(id))
    engine_of(node).step()
    assert (encoder.calls, encoder.encoded) == (1, 3)  # one is read, two are ahead
    finish(node)
    assert (encoder.calls, encoder.encoded) == (2, 6)
    node.close()


def test_short_memory_halves_the_call_and_not_the_answers(model, monkeypatch):
    node, calls = opened(model), []
    vision = engine_of(node).runner.model.get_image_features
    limit = engine_of(node)._executor._prefill_limit

    def short(pixel_values: Any, image_grid_thw: Any) -> Any:
        calls.append(len(image_grid_thw))
        if len(image_grid_thw) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return vision(pixel_values=pixel_values, image_grid_thw=image_grid_thw)

    monkeypatch.setattr(engine_of(node).runner.model, "get_image_features", short)
    add(node, 0, ONE)
    add(node, 1, OTHER)
    found = finish(node)
    assert [found[0], found[1]] == [model.answer(*ONE, TOKENS), model.answer(*OTHER, TOKENS)]
    assert calls == [2, 1, 1]
    assert limit.failures == 0
    node.close()


@pytest.mark.parametrize(
    ("error", "named"), [(torch.OutOfMemoryError("out of memory"), LimitReached), (ValueError("wrong"), StepError)]
)
def test_a_picture_that_fails_fails_its_request_alone(model, monkeypatch, error, named):
    node = opened(model)
    encode = engine_of(node).runner.model.get_image_features
    bad = node._images.process(OTHER[1][0])[0]["pixel_values"][0]

    def failing(pixel_values: Any, **more: Any) -> Any:
        if (pixel_values == bad).all(1).any():
            raise error
        return encode(pixel_values=pixel_values, **more)

    monkeypatch.setattr(engine_of(node).runner.model, "get_image_features", failing)
    for id, request in enumerate((ONE, OTHER, TEXT)):
        add(node, id, request)
    engine, found, errors = engine_of(node), dict[int, list[int]](), {}
    while engine.busy:
        for update in engine.step():
            found.setdefault(update.id, []).extend(update.tokens)
            if update.error is not None:
                errors[update.id] = update.error
    assert isinstance(errors.pop(1), named)
    assert not errors
    assert engine._executor._prefill_limit.failures == 0  # of prompts, whose tokens have nothing to do with it
    assert (found[0], found[2]) == (model.answer(*ONE, TOKENS), model.answer(*TEXT, TOKENS))
    node.close()


def test_a_picture_that_is_read_in_several_rounds_is_encoded_once(model):
    node = opened(model, round_tokens_max=5, image_cache_bytes=1)
    add(node, 0, WIDE)
    assert finish(node)[0] == model.answer(*WIDE, TOKENS)
    assert encoder_of(node).encoded == len(WIDE[1])
    node.close()


def test_kept_features_have_memory_of_their_own(model):
    node = opened(model)
    for id in range(4):
        add(node, id, shown(id))
    finish(node)
    for features in encoder_of(node).cache._entries.values():
        assert features.untyped_storage().nbytes() == features.nbytes
    node.close()


def test_a_model_that_disagrees_with_its_processor_is_refused(models, monkeypatch):
    from weftline.engine.llm.vision.layout import FixedLayout

    monkeypatch.setattr("weftline.engine.llm.vision.layout._fixed_count", lambda config, processor: 17)
    assert FixedLayout(5, 17).tokens_of(1, 1).runs == (range(17),)
    with pytest.raises(ModelError, match="16 features, and the prompt 17 tokens"):
        opened(models("llava"))


def test_sleep_drops_the_features(model):
    node = opened(model)
    add(node, 1, ONE)
    finish(node)
    assert encoder_of(node).cache.bytes_used > 0
    node.sleep("host")
    assert encoder_of(node).cache.bytes_used == 0
    node.wake()
    add(node, 1, ONE)
    assert finish(node)[1] == model.answer(*ONE, TOKENS)
    node.close()


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "idefics3"])
def test_the_largest_pictures_can_be_computed_to_measure_memory(models, family):
    node = opened(models(family))
    encoder_of(node).compute_largest(200)
    assert encoder_of(node).encoded >= 1
    node.close()
