"""Random requests with pictures and videos, cut, preempted, paused and cancelled at random: answers stay the same."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.engine.llm.vision.test_answers import TOKENS, Request, add, engine_of, expected, opened
from tests.engine.llm.vision.tiny_vision import VIDEO_FAMILIES, Clip, TinyVision, clip, picture
from weftline.engine.llm.engine import Engine

CONTEXT = 512
"""Tokens of a tiny model's context."""
WORDS = ("the user asks", "again", "what is it", "and the assistant answers")


def _request(rng: random.Random, pictures: list[np.ndarray], clips: list[Clip], mixed: bool) -> Request:
    """Return a conversation of one or two turns, with pictures and videos of which some occur in other requests too.

    mixed: it may have both.
    """
    kinds = ["image", *(["video"] if clips else [])]
    kinds = kinds if mixed else [rng.choice(kinds)]
    messages: list[dict[str, Any]] = []
    for role in ("user", "assistant", "user")[rng.choice((0, 2)) :]:
        content: list[dict[str, Any]] = [{"type": "text", "text": rng.choice(WORDS)}]
        for _ in range(rng.choice((0, 1, 1, 2)) if role == "user" else 0):
            content.insert(rng.randint(0, len(content)), {"type": rng.choice(kinds)})
        messages.append({"role": role, "content": content})
    shown = [part["type"] for message in messages for part in message["content"]]
    images = [rng.choice(pictures) for kind in shown if kind == "image"]
    return messages, images, [rng.choice(clips) for kind in shown if kind == "video"]


def _step(engine: Engine, found: dict[int, list[int]]) -> None:
    for update in engine.step():
        assert update.error is None, update.error
        found[update.id] += update.tokens


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_vl", "smolvlm", "idefics3", "llava"])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_answers_do_not_depend_on_rounds(models: Any, family: str, seed: int) -> None:
    model: TinyVision = models(family)
    rng = random.Random(seed)
    pictures = [picture(rng.randint(8, 34), rng.randint(8, 34), at) for at in range(5)]
    clips = [(clip(4, rng.randint(8, 34), rng.randint(8, 34), at), rng.choice((24.0, 1.0, 0.3))) for at in range(3)]
    clips = clips if family in VIDEO_FAMILIES else []
    made = [_request(rng, pictures, clips, mixed=family.startswith("qwen")) for _ in range(16)]
    lengths = [len(model.inputs(*request)["input_ids"][0]) for request in made]
    requests = [request for request, length in zip(made, lengths, strict=True) if length + TOKENS < CONTEXT]
    probe = opened(model, page_tokens=4)
    page_bytes = engine_of(probe).runner.page_bytes
    longest = max(length for length in lengths if length + TOKENS < CONTEXT) + TOKENS
    probe.close()
    node = opened(
        model, page_tokens=4, kv_bytes=(longest // 4 + 6) * page_bytes, round_tokens_max=rng.choice((6, 17, 40)),
        image_cache_bytes=rng.choice((1, 6000, 1 << 20)), sequences_max=5,
    )  # fmt: skip
    engine, found, cancelled = engine_of(node), dict[int, list[int]](), set[int]()
    waiting = list(range(len(requests)))
    while engine.busy or waiting:
        if waiting and rng.random() < 0.4:
            add(node, waiting[0], requests[waiting[0]], salt=rng.choice((b"", b"other")))
            found[waiting.pop(0)] = []
        if found and rng.random() < 0.05:
            cancelled.add(one := rng.choice(list(found)))
            engine.cancel(one)
        if found and rng.random() < 0.1:
            one = rng.choice(list(found))
            engine.pause(one)
            _step(engine, found)
            engine.resume(one)
        _step(engine, found)
        engine.check()
    assert engine.stats().pages_used == 0
    assert not engine.runner.vision._live
    assert engine.runner.vision.held_bytes == 0
    for id in set(found) - cancelled:
        assert [found[id]] == expected(model, [requests[id]]), id
    node.close()
