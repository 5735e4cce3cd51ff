"""Answers about pictures: tokens equal to those of transformers' generate, in every way that rounds can be cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.engine.llm.vision.tiny_vision import FAMILIES, Clip, TinyVision, asked, picture
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.fusion.probe import PROBE_ROWS, probe_inputs
from weftline.engine.llm.node import Llm
from weftline.engine.llm.options import LlmConfig
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.request import LlmRequestOptions
from weftline.nodes.contract import OpenContext

TOKENS = 8
Request = (
    tuple[list[dict[str, Any]], Sequence[np.ndarray]] | tuple[list[dict[str, Any]], Sequence[np.ndarray], list[Clip]]
)
"""Messages, pictures, and videos with their frames per second."""
ONE: Request = (asked(None, "what is it"), [picture()])
TWO: Request = (asked("look ", None, " and then ", None, "what is it"), [picture(seed=1), picture(40, 28, seed=2)])
TEXT: Request = (asked("the user asks"), [])
WIDE: Request = (asked("and ", None), [picture(14, 50, seed=3)])
OTHER: Request = (ONE[0], [picture(seed=4)])


def opened(model: TinyVision, **options: Any) -> Llm:
    """Return the node of a model."""
    made = Llm(LlmConfig(model=model.folder.name, **({"kv_bytes": 4 << 20} | options)))
    made.open(OpenContext(base_dir=model.folder.parent))
    return made


def engine_of(node: Llm) -> Engine:
    engine, _ = node._opened()
    return engine


def inputs_of(request: Request) -> dict[str, Any]:
    """Return the inputs of the node for a request."""
    videos = [clip for clips in request[2:] for clip in clips]
    return {
        "messages": request[0],
        "images": list(request[1]),
        "videos": [frames for frames, _ in videos],
        "fps": [fps for _, fps in videos],
    }


def add(node: Llm, id: int, request: Request, salt: bytes = b"", **params: Any) -> int:
    """Add a request to the engine; return the number of its prompt tokens."""
    assert node._images is not None
    ids, images = node._images.read(inputs_of(request), node._prompt_tokens)
    options = LlmRequestOptions(images=images, salt=salt)
    engine_of(node).add(id, ids, SamplingParams(**{"tokens_max": TOKENS, **params}), options)
    return len(ids)


def finish(node: Llm) -> dict[int, list[int]]:
    """Run rounds until all requests have ended; return the tokens of each, and check that nothing is left behind."""
    engine, answers = engine_of(node), dict[int, list[int]]()
    while engine.busy:
        for update in engine.step():
            if update.error is not None:
                raise update.error
            answers.setdefault(update.id, []).extend(update.tokens)
    engine.check()
    assert engine.stats().pages_used == 0
    assert not engine.runner.vision._live
    assert engine.runner.vision.held_bytes == 0
    return answers


def answers(node: Llm, requests: Sequence[Request]) -> list[list[int]]:
    """Return the answers to requests that are computed together."""
    for id, request in enumerate(requests):
        add(node, id, request)
    found = finish(node)
    return [found[id] for id in range(len(requests))]


def expected(model: TinyVision, requests: Sequence[Request]) -> list[list[int]]:
    return [model.answer(request[0], request[1], TOKENS, *request[2:]) for request in requests]


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, models: Any) -> TinyVision:
    found: TinyVision = models(request.param)
    return found


def test_prompts_have_the_tokens_of_the_models_own_processor(model):
    node = opened(model)
    for messages, images in (ONE, TWO, TEXT, WIDE):
        ids, found = node._images.read({"messages": messages, "images": list(images)}, node._prompt_tokens)
        assert ids == model.inputs(messages, images)["input_ids"][0].tolist()
        assert len(found) == len(images)
    node.close()


def test_a_mixed_batch_is_answered_as_each_alone_by_transformers(model):
    node, requests = opened(model), [ONE, TEXT, TWO, WIDE, OTHER]
    right = expected(model, requests)
    assert len({tuple(one) for one in right}) == len(right)  # the pictures matter
    assert answers(node, requests) == right
    node.close()


@pytest.mark.parametrize("round_tokens_max", [5, 16])
def test_a_picture_that_spans_rounds_gives_the_same_answer(model, round_tokens_max):
    node, requests = opened(model, round_tokens_max=round_tokens_max), [TWO, ONE]
    assert answers(node, requests) == expected(model, requests)
    assert engine_of(node).runner.vision.encoded == 3
    node.close()


def test_a_preempted_prompt_is_computed_again_with_its_pictures(model):
    requests = [TWO, WIDE, ONE, OTHER]
    node = opened(model, page_tokens=4, image_cache_bytes=1)
    page_bytes = engine_of(node).runner.page_bytes
    node.close()
    node = opened(model, page_tokens=4, image_cache_bytes=1, kv_bytes=32 * page_bytes)
    for id, request in enumerate(requests):
        add(node, id, request, tokens_max=24, ignore_eos=True)
    found = finish(node)
    assert engine_of(node).stats().preemptions > 0
    for id, right in enumerate(expected(model, requests)):
        assert found[id][: len(right)] == right
    node.close()


def test_equal_pictures_share_pages_and_other_pictures_do_not(model):
    node = opened(model, page_tokens=4)
    engine, cached = engine_of(node), []
    right = {id(request): one for request, one in zip((ONE, OTHER), expected(model, [ONE, OTHER]), strict=True)}
    for request in (ONE, ONE, OTHER, OTHER):
        add(node, 1, request)
        found: list[int] = []
        while engine.busy:
            updates = engine.step()
            found += [token for update in updates for token in update.tokens]
        cached.append(updates[-1].cached_tokens)
        assert found == right[id(request)]
    before_picture = cached[0] + cached[2]  # nothing, and the pages before the first picture
    assert cached[0] == 0
    assert cached[1] == cached[3] > before_picture
    assert engine.runner.vision.encoded == 2
    node.close()


def test_several_answers_to_one_prompt_share_its_pictures(models):
    model = models("qwen2_vl")
    node = opened(model)
    add(node, 1, ONE, n=3)
    add(node, 2, ONE, n=3, temperature=1.0, seed=5)
    right, found, engine = expected(model, [ONE]), dict[tuple[int, int], list[int]](), engine_of(node)
    while engine.busy:
        for update in engine.step():
            found.setdefault((update.id, update.index), []).extend(update.tokens)
    assert [found[1, index] for index in range(3)] == right * 3
    assert len({tuple(found[2, index]) for index in range(3)}) == 3
    assert engine.runner.vision.encoded == 1
    node.close()


def test_several_answers_are_computed_again_with_their_pictures(models):
    model = models("qwen2_vl")
    node = opened(model, page_tokens=4)
    page_bytes = engine_of(node).runner.page_bytes
    node.close()
    node = opened(model, page_tokens=4, kv_bytes=24 * page_bytes)
    engine, found = engine_of(node), dict[tuple[int, int], list[int]]()
    engine._cache.enabled = False  # a preempted answer finds no page of its prompt
    for id, request in enumerate((ONE, OTHER)):
        add(node, id, request, n=2, tokens_max=24, ignore_eos=True)
    while engine.busy:
        for update in engine.step():
            found.setdefault((update.id, update.index), []).extend(update.tokens)
    assert engine.stats().preemptions > 0
    for id, right in enumerate(expected(model, (ONE, OTHER))):
        assert found[id, 0][: len(right)] == found[id, 1][: len(right)] == right
        assert found[id, 0] == found[id, 1]
    node.close()


@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "qwen2_5_vl", "idefics3"])
def test_layers_of_the_decoder_are_fused(models, family):
    node = opened(models(family))
    report = engine_of(node).runner.fusion
    assert report.counts["layer"] == 2  # the vision encoder has as many
    node.close()


def test_the_fusion_of_layers_is_probed_with_positions_of_pictures(models):
    positions = probe_inputs(models("qwen2_vl").reference)["position_ids"]
    assert positions.shape == (3, 1, PROBE_ROWS)
    assert not (positions[0] == positions[1]).all()
    assert not (positions[1] == positions[2]).all()
