"""The llm node with videos: prompts, conversations, frames per second, and refusals."""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
import pytest

from tests.engine.llm import tiny
from tests.engine.llm.vision.test_answers import engine_of, expected, opened
from tests.engine.llm.vision.test_node import SAMPLING, answer, ask
from tests.engine.llm.vision.tiny_vision import VIDEO, VIDEO_FAMILIES, Clip, TinyVision, asked, clip, picture
from weftline import load
from weftline.engine.llm.node import Llm
from weftline.engine.llm.options import LlmConfig
from weftline.errors import InputError
from weftline.nodes import template
from weftline.nodes.contract import OpenContext
from weftline.pipelines.check.checker import examine
from weftline.pipelines.spec.loader import load_yaml

MARK = template.VIDEO


@pytest.fixture
def model(models: Any) -> TinyVision:
    found: TinyVision = models("qwen2_5_vl")
    return found


def text_of(model: TinyVision, messages: Any, images: Any, videos: list[Clip]) -> str:
    [tokens] = expected(model, [(messages, images, videos)])
    return str(model.processor.tokenizer.decode(tokens, skip_special_tokens=True))


def test_a_prompt_shows_videos_before_it_or_where_it_says(model):
    node, a, b = opened(model, sampling=SAMPLING), clip(4, seed=1), clip(3, 24, 16, 2)
    before = text_of(model, asked(VIDEO, VIDEO, "what"), [], [(a, 24.0), (b, 24.0)])
    assert answer(node, prompt="what", videos=[a, b]) == before
    after = text_of(model, asked("what", VIDEO), [], [(a, 24.0)])
    assert answer(node, prompt=f"what{MARK}", videos=a) == after  # one video, of a tensor type
    assert answer(node, prompt=f"what{MARK}", videos=list(a)) == after  # one video, as a list of pictures
    both = text_of(model, asked(None, VIDEO, "what"), [picture()], [(a, 24.0)])
    assert answer(node, prompt="what", videos=[a], images=[picture()]) == both
    mixed = text_of(model, asked(VIDEO, "what", None), [picture()], [(a, 24.0)])
    assert answer(node, prompt=f"{MARK}what{template.PICTURE}", videos=[a], images=[picture()]) == mixed
    node.close()


@pytest.mark.parametrize("family", VIDEO_FAMILIES)
def test_frames_per_second_are_those_of_the_request(models, family):
    model = models(family)
    node, a, b = opened(model, sampling=SAMPLING), clip(4, seed=1), clip(4, seed=2)
    messages = asked("a", VIDEO, "b", VIDEO)
    rates = ((24.0, 24.0), (0.5, 0.5), (0.5, 3.0))
    slow = {fps: text_of(model, messages, [], [(a, fps[0]), (b, fps[1])]) for fps in rates}
    assert answer(node, messages=messages, videos=[a, b]) == slow[24.0, 24.0]
    assert answer(node, messages=messages, videos=[a, b], fps=0.5) == slow[0.5, 0.5]
    assert answer(node, messages=messages, videos=[a, b], fps=[0.5, 3]) == slow[0.5, 3.0]
    messages[0]["content"][3]["fps"] = 3
    assert answer(node, messages=messages, videos=[a, b], fps=0.5) == slow[0.5, 3.0]
    node.close()


def test_videos_in_messages_are_shown_in_order_or_before_the_last_text(model):
    node, a = opened(model, sampling=SAMPLING), clip(4, seed=1)
    last = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "second"}, *asked("what")]
    shown = [*last[:2], *asked(None, VIDEO, "what")]
    right = text_of(model, shown, [picture()], [(a, 24.0)])
    assert answer(node, messages=shown, videos=[a], images=[picture()]) == right
    assert answer(node, messages=last, videos=[a], images=[picture()]) == right
    node.close()


@pytest.mark.parametrize("family", VIDEO_FAMILIES)
def test_names_of_placeholders_in_a_users_text_are_no_videos(models, family):
    model = models(family)
    node = opened(model)
    name = node._tokens.video_token
    ids, found = node._images.read({"prompt": f"a {name} b", "videos": [clip(2)]}, node._prompt_tokens)
    plain, _ = node._images.read({"prompt": "a  b", "videos": [clip(2)]}, node._prompt_tokens)
    assert len(found) == (2 if family == "smolvlm" else 1)
    placeholder = node._images.videos.layout.placeholder
    assert ids.count(placeholder) == plain.count(placeholder)
    assert name in node._tokens.decode(ids)
    node.close()


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        ({"videos": [clip(2)] * 33}, "videos: found 33 videos, expected at most 32"),
        ({"videos": [clip(384, 1, 1), clip(385, 1, 1)]}, "found 769 frames, expected 1 to 768 together"),
        ({"videos": [np.zeros((0, 4, 4, 3), np.uint8)]}, "found 0 frames"),
        ({"videos": np.zeros((0, 4, 4, 3), np.uint8)}, "found 0 frames"),
        ({"videos": [picture(), picture(20, 16)]}, "frames of 16 x 16, 16 x 20 pixels in one video"),
        ({"videos": [clip(2), picture()]}, "expected arrays uint8[frames, height, width, 3]"),
        ({"videos": [clip(1, 1, 300)]}, "videos: found a picture of 300 x 1 pixels"),
        ({"videos": [clip(400)]}, "at least 800 tokens with those of 1 pictures or videos, expected at most 511"),
        ({"videos": [clip(2)], "fps": 0}, "fps: found 0, expected frames per second"),
        ({"videos": [clip(2)], "fps": float("nan")}, "fps: found nan"),
        ({"videos": [clip(2)], "fps": True}, "fps: found True"),
        ({"videos": [clip(2)], "fps": [1, 2]}, "fps: found 2 numbers for 1 videos"),
        ({"videos": [clip(2)], "prompt": MARK * 2}, "shows 2 videos (U+FFFB), and input videos has 1"),
        ({"messages": asked(VIDEO), "prompt": None}, "parts of type video show 1 videos, and input videos has 0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}]},
            "messages[0].content[0]: found a video_url; no videos are decoded here",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video", "fps": "2"}]}], "videos": [clip(2)]},
            "messages[0].content[0].fps: found '2'",
        ),
    ],
)
def test_a_bad_request_is_refused_with_its_reason(model, inputs, named):
    node = opened(model)
    if "messages" not in inputs:
        inputs = {"prompt": "a", **inputs}
    refused = ask(node, **inputs)
    assert isinstance(refused.error, InputError)
    assert named in str(refused.error)
    node.close()


def test_pixels_of_a_request_have_a_limit(model, monkeypatch):
    monkeypatch.setattr("weftline.engine.llm.vision.messages.REQUEST_PIXELS_MAX", 4 * 16 * 16)
    node = opened(model, sampling=SAMPLING)
    assert answer(node, prompt="a", videos=[clip(4)])
    refused = ask(node, prompt="a", videos=[clip(4), clip(1, 1, 1)])
    assert "videos: found 1025 pixels, expected at most 1024" in str(refused.error)
    node.close()


def test_a_model_without_videos_refuses_them_by_name(models, tmp_path):
    texts = tiny.save(tmp_path / "texts")
    text_node = Llm(LlmConfig(model=texts.name, kv_bytes=4 << 20))
    text_node.open(OpenContext(base_dir=texts.parent))
    for node, named in (
        (opened(models("llava")), "llava reads pictures alone; videos need one of Qwen2VLForConditionalGeneration"),
        (text_node, "texts reads texts only; videos need one of Qwen2VLForConditionalGeneration"),
    ):
        for inputs in ({"prompt": "a", "videos": [clip(2)]}, {"messages": asked(VIDEO)}):
            refused = ask(node, **inputs)
            assert isinstance(refused.error, InputError)
            assert named in str(refused.error)
        node.close()


def test_a_model_whose_video_processor_cannot_be_used_reads_pictures(models, tmp_path):
    shutil.copytree(models("qwen2_vl").folder, tmp_path / "m")
    config = tmp_path / "m" / "video_preprocessor_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"video_processor_type": "Unknown"}))
    node = Llm(LlmConfig(model="m", kv_bytes=4 << 20, sampling=SAMPLING))
    node.open(OpenContext(base_dir=tmp_path))
    assert answer(node, prompt="a", images=[picture()])
    refused = ask(node, prompt="a", videos=[clip(2)])
    assert "videos: found videos; model m: its video processor cannot be loaded" in str(refused.error)
    node.close()


def test_a_template_that_shows_no_videos_is_named(models, tmp_path):
    shutil.copytree(models("qwen2_vl").folder, tmp_path / "m")
    chat = tmp_path / "m" / "chat_template.jinja"
    chat.write_text(chat.read_text().replace("<|video_pad|>", ""))
    node = Llm(LlmConfig(model="m", kv_bytes=4 << 20, sampling=SAMPLING))
    node.open(OpenContext(base_dir=tmp_path))
    refused = ask(node, prompt="a", videos=[clip(2)])
    assert "chat template writes 0 placeholders for 1 pictures or videos" in str(refused.error)
    assert answer(node, prompt="a", images=[picture()])
    node.close()


def test_a_base_model_without_a_template_reads_videos_in_its_prompt(models, tmp_path):
    for family, token in (("qwen2_vl", "<|video_pad|>"), ("smolvlm", "<video>")):
        model = models(family)
        shutil.copytree(model.folder, tmp_path / family)
        (tmp_path / family / "chat_template.jinja").unlink()
        node = Llm(LlmConfig(model=family, kv_bytes=4 << 20))
        node.open(OpenContext(base_dir=tmp_path))
        ids, _ = node._images.read({"prompt": f"a{MARK} what", "videos": clip(2)}, node._prompt_tokens)
        right = model.inputs_of_text(f"a{token} what", [], [(clip(2), 24.0)])
        assert ids == right["input_ids"][0].tolist()
        node.close()


def test_figures_count_parts_of_videos(model):
    node = opened(model, sampling=SAMPLING)
    answer(node, prompt="a", videos=[clip(6)])
    assert node.figures()["images_encoded_total"] == 3
    assert engine_of(node).runner.vision.held_bytes == 0
    node.close()


PIPELINE = """
weftline: 1
name: p
inputs: {clip: 'uint8[F, H, W, 3]', frames: 'list[image]', photo: image, fps: json}
steps:
  first:
    node: llm
    model: qwen2_5_vl
    kv_bytes: 4000000
    sampling: {tokens_max: 8}
    prompt: "a {{ photo }} b {{ clip }} what"
    inputs: {fps: fps}
  second:
    node: llm
    model: qwen2_5_vl
    kv_bytes: 4000000
    sampling: {tokens_max: 8}
    prompt: "{{ videos }} what {{ photo }}"
    inputs: {videos: frames, fps: {value: 2}}
outputs: {first: first.text, second: second.text}
"""


@pytest.mark.slow
def test_prompts_of_a_pipeline_show_videos(model):
    file = model.folder.parent / "p.yaml"
    file.write_text(PIPELINE)
    a, frames, photo = clip(5, seed=1), clip(4, 20, 16, seed=2), picture()
    with load(file).open() as session:
        found = session.run(clip=a, frames=list(frames), photo=photo, fps=0.5)
    assert found["first"] == text_of(model, asked("a ", None, " b ", VIDEO, " what"), [photo], [(a, 0.5)])
    assert found["second"] == text_of(model, asked(VIDEO, " what ", None), [photo], [(frames, 2.0)])


def test_checks_name_a_family_without_videos(models):
    folder = models("llava").folder
    text = PIPELINE.replace("qwen2_5_vl", folder.name)
    problems = examine(load_yaml(text, "p.yaml", folder.parent)).problems
    named = [problem for problem in problems if "reads pictures and no videos" in problem.found]
    assert [problem.path for problem in named] == ["steps.first.model", "steps.second.model"]
    assert all("Qwen2VLForConditionalGeneration" in problem.expected for problem in named)
