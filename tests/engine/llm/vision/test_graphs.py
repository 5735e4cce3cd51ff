"""Rounds without pictures are replayed from graphs, with positions behind pictures; rounds with some are computed."""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any

import pytest
import torch

from tests.engine.llm.vision.test_answers import ONE, OTHER, TEXT, TOKENS, TWO, add, engine_of, expected, finish, opened
from tests.engine.llm.vision.test_videos import CLIP, LONG
from tests.engine.llm.vision.tiny_vision import VIDEO_FAMILIES, picture
from weftline.engine.llm import startup
from weftline.engine.llm.fusion import layer as fuse_layer
from weftline.engine.llm.fusion import rows as fuse_rows
from weftline.engine.llm.gpu.attention import GpuAttention
from weftline.engine.llm.gpu.fake_capture import FakeCapture
from weftline.engine.llm.node import Llm
from weftline.engine.llm.options import LlmConfig
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.request import LlmRequestOptions
from weftline.engine.llm.runner import Runner
from weftline.nodes.contract import OpenContext
from weftline.nodes.template import PICTURE


@pytest.fixture(autouse=True)
def gpu_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open models with a GPU's form of attention, and without what a fake cannot record."""
    monkeypatch.setattr(fuse_rows, "_compiled", lambda: None)
    monkeypatch.setattr(fuse_layer, "_STEADY_ROPES", frozenset())

    class Opening(Runner):
        @staticmethod
        def open(source: Any, options: Any, *more: Any) -> Runner:  # type: ignore[override]
            return Runner.open(source, dataclasses.replace(options, form="gpu"), *more)

    monkeypatch.setattr(startup, "Runner", Opening)


@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "qwen2_5_vl", "idefics3", "smolvlm"])
@pytest.mark.parametrize("recorded", [False, True])
def test_answers_are_those_of_transformers(models, family, recorded):
    model, requests = models(family), [ONE, TEXT, TWO, OTHER, *([CLIP, LONG] if family in VIDEO_FAMILIES else [])]
    node = opened(model, round_tokens_max=24)
    runner, computed = engine_of(node).runner, list[int]()
    assert isinstance(runner._backend, GpuAttention)
    assert runner.graphs is not None
    if recorded:
        runner.graphs.capture = FakeCapture()
    made = runner._pass

    def counted(inputs: Any, keep: list[int]) -> Any:
        computed.append("inputs_embeds" in inputs)
        return made(inputs, keep)

    runner._pass = counted
    for id, request in enumerate(requests):
        add(node, id, request)
    found = finish(node)
    assert [found[id] for id in range(len(requests))] == expected(model, requests)
    assert any(computed)
    if recorded:
        assert runner.graphs.recorded
        assert all(computed)  # only rounds with pictures
    assert not runner.graphs.failures
    node.close()


def test_a_pictures_token_at_the_end_of_a_prompt_has_its_features(models, tmp_path):
    model = models("llava")
    shutil.copytree(model.folder, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    node = Llm(LlmConfig(model="base", kv_bytes=4 << 20, round_tokens_max=5))
    node.open(OpenContext(base_dir=tmp_path))
    lengths = []
    for text in ("?", "?!", "?!;", "?!;,", "?!;,0"):  # in one of them the last chunk is one token
        ids, images = node._images.read({"prompt": f"{text}{PICTURE}", "images": [picture()]}, node._prompt_tokens)
        engine = engine_of(node)
        lengths.append(len(ids))
        engine.add(1, ids, SamplingParams(tokens_max=TOKENS), LlmRequestOptions(images=images))
        given = {"images": [torch.tensor(picture())], "input_data_format": "channels_last", "return_tensors": "pt"}
        out = model.reference.generate(
            **model.processor(text=[f"{text}<image>"], **given), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0
        )
        assert finish(node)[1] == out[0, len(ids) :].tolist()
    assert any(length % 5 == 1 for length in lengths)
    node.close()
