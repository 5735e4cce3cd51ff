"""The llm node with pictures: prompts, conversations, refusals, and what users write stays text."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import shutil
import threading
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.engine.llm import tiny
from tests.engine.llm.vision.test_answers import engine_of, expected, opened
from tests.engine.llm.vision.tiny_vision import TinyVision, asked, picture
from weftline.engine.llm.model_check import template_of
from weftline.engine.llm.node import Llm
from weftline.engine.llm.options import LlmConfig
from weftline.engine.llm.vision.layout import FixedLayout
from weftline.engine.llm.vision.reader import ImageReader
from weftline.errors import InputError, LimitReached, ModelError, StepError
from weftline.nodes.contract import OpenContext, Piece
from weftline.nodes.template import PICTURE

SAMPLING = {"tokens_max": 8}


@pytest.fixture
def model(models: Any) -> TinyVision:
    found: TinyVision = models("idefics3")
    return found


def ask(node: Llm, **inputs: Any) -> Piece:
    """Return the last piece of the answer to a request."""
    node.submit(1, inputs)
    pieces: list[Piece] = []
    while node.busy:
        pieces += node.round()
    engine_of(node).check()
    return pieces[-1]


def answer(node: Llm, **inputs: Any) -> str:
    last = ask(node, **inputs)
    if last.error is not None:
        raise last.error
    return str(last.outputs["text"])


def text_of(model: TinyVision, messages: Any, images: Any) -> str:
    [tokens] = expected(model, [(messages, images)])
    return str(model.processor.tokenizer.decode(tokens, skip_special_tokens=True))


def url(image: Any) -> dict[str, Any]:
    data = io.BytesIO()
    Image.fromarray(image).save(data, "PNG")
    link = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": link}}


def test_a_prompt_shows_pictures_before_it_or_where_it_says(model):
    node, pictures = opened(model, sampling=SAMPLING), [picture(seed=1), picture(40, 20, 2)]
    before = text_of(model, asked(None, None, "what is it"), pictures)
    assert answer(node, prompt="what is it", images=pictures) == before
    shown = text_of(model, asked("a", None, "b", None), pictures)
    assert answer(node, prompt=f"a{PICTURE}b{PICTURE}", images=pictures) == shown
    alone = text_of(model, asked(None, "what is it"), pictures[:1])
    assert answer(node, prompt="what is it", images=pictures[0]) == alone  # of port type image
    assert answer(node, prompt="the user asks") == text_of(model, asked("the user asks"), [])
    node.close()


def test_pictures_in_messages_are_those_of_transformers(model):
    node, one, two = opened(model, sampling=SAMPLING), picture(seed=1), picture(40, 20, 2)
    said = asked("a", None, "b", None)
    right = text_of(model, said, [one, two])
    parts = said[0]["content"]
    sent = [{"role": "user", "content": [parts[0], url(one), parts[2], url(two)]}]
    assert answer(node, messages=sent) == right
    assert answer(node, messages=said, images=[one, two]) == right
    mixed = [{"role": "user", "content": [parts[0], url(one), *parts[2:]]}]
    assert answer(node, messages=mixed, images=[two]) == right
    node.close()


def test_a_system_message_is_shared_by_callers_and_pictures_are_not(model):
    system = "be brief and kind and say what the photo shows in one line and then stop at once " * 2
    node = opened(model, sampling=SAMPLING, system=system)
    said = [{"role": "system", "content": [{"type": "text", "text": system}]}, *asked(None, "what is it")]
    assert answer(node, prompt="what is it", images=[picture()]) == text_of(model, said, [picture()])
    cached = [
        ask(node, prompt="what is it", images=[picture(seed=seed)]).outputs["usage"]["cached_tokens"]
        for seed in (0, 5, 5)
    ]
    assert cached[0] == cached[2] > cached[1] > 16
    node.close()


def test_names_of_control_tokens_in_a_users_text_are_no_pictures(models):
    for family, name in (("llava", "<image>"), ("qwen2_vl", "<|image_pad|>"), ("idefics3", "<image>")):
        node = opened(models(family))
        ids, images = node._images.read({"prompt": f"a {name} b", "images": [picture()]}, node._prompt_tokens)
        placeholder = node._images.placeholder
        assert ids.count(placeholder) == images[0].features
        assert placeholder not in node._images.read({"prompt": f"a {name} b"}, node._prompt_tokens)[0]
        node.close()


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        ({"prompt": "a", "images": [picture()] * 33}, "at most 32"),
        ({"prompt": PICTURE * 2, "images": [picture()]}, "shows 2 pictures"),
        ({"prompt": "", "images": [picture()]}, "empty"),
        ({"images": [picture()]}, "neither of prompt and messages"),
        ({"prompt": "a", "images": np.zeros((0, 5, 3), np.uint8)}, "at least one pixel"),
        ({"prompt": "a", "images": [picture(90, 90)] * 20}, "with those of 20 pictures, expected at most 511"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "input images has 0"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}, {"type": "image"}]}]}, r"content[0]"),
        ({"messages": "x", "images": [picture()]}, "messages"),
    ],
)
def test_a_bad_request_is_refused_with_its_reason(model, inputs, named):
    node = opened(model)
    refused = ask(node, **inputs)
    assert isinstance(refused.error, InputError)
    assert named in str(refused.error)
    node.close()


def test_a_model_of_texts_refuses_pictures_by_name(tmp_path):
    folder = tiny.save(tmp_path / "texts")
    node = Llm(LlmConfig(model=folder.name, kv_bytes=4 << 20))
    node.open(OpenContext(base_dir=folder.parent))
    said = [{"role": "user", "content": [url(picture())]}]
    for inputs in ({"messages": said}, {"prompt": "a", "images": [picture()]}):
        refused = ask(node, **inputs)
        assert isinstance(refused.error, InputError)
        assert "reads texts only; pictures need one of LlavaForConditionalGeneration" in str(refused.error)
    node.close()


def test_a_base_model_without_a_template_reads_pictures_in_its_prompt(models, tmp_path):
    model = models("llava")
    shutil.copytree(model.folder, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    node = Llm(LlmConfig(model="base", kv_bytes=4 << 20))
    node.open(OpenContext(base_dir=tmp_path))
    ids, _ = node._images.read({"prompt": f"a{PICTURE} what", "images": [picture()]}, node._prompt_tokens)
    given = {"images": [picture()], "input_data_format": "channels_last", "return_tensors": "pt"}
    assert ids == model.processor(text=["a<image> what"], **given)["input_ids"][0].tolist()
    node.close()


def test_the_template_of_older_processors_is_used(models, tmp_path):
    model = models("llava")
    shutil.copytree(model.folder, tmp_path / "old")
    template = (tmp_path / "old" / "chat_template.jinja").read_text()
    (tmp_path / "old" / "chat_template.jinja").unlink()
    (tmp_path / "old" / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    node = Llm(LlmConfig(model="old", kv_bytes=4 << 20, sampling=SAMPLING))
    node.open(OpenContext(base_dir=tmp_path))
    assert answer(node, prompt="what is it", images=[picture()]) == text_of(
        model, asked(None, "what is it"), [picture()]
    )
    node.close()


def test_a_plan_reads_the_template_of_older_processors(models, tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(models("llava").folder, folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "<tool_call>"}))
    assert template_of("m", tmp_path) == "<tool_call>"


def test_a_template_that_shows_no_pictures_is_refused(models, tmp_path):
    shutil.copytree(models("llava").folder, tmp_path / "text")
    (tmp_path / "text" / "chat_template.jinja").write_text(tiny.TEMPLATE)
    node = Llm(LlmConfig(model="text", kv_bytes=4 << 20))
    with pytest.raises(ModelError, match="0 placeholders for a picture"):
        node.open(OpenContext(base_dir=tmp_path))


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_speculation_changes_no_answer(models, family):
    model, few = models(family), [10, 11, 12, 13]
    sampling = {"tokens_max": 40, "ignore_eos": True, "allowed_token_ids": few}
    plain, guessed = (opened(model, sampling=sampling, speculation=how) for how in ("none", "ngram"))
    for seed in range(3):
        inputs = {"prompt": "again and again, again and again", "images": [picture(20, 32, seed)]}
        assert answer(plain, **inputs) == answer(guessed, **inputs)
    assert engine_of(guessed).stats().accepted > 0
    for node in (plain, guessed):
        node.close()


def test_figures_count_pictures(model):
    node = opened(model, sampling=SAMPLING)
    answer(node, prompt="a", images=[picture(seed=1), picture(seed=2)])
    figures = node.figures()
    assert (figures["images_encoded_total"], figures["image_encoder_calls_total"]) == (2, 1)
    assert figures["image_cache_bytes"] > 0
    node.close()


def test_a_template_that_shows_a_picture_of_its_own_is_an_error():
    reader = ImageReader(FixedLayout(5, 2), 5, lambda pixels: [{}], b"", 100)
    with pytest.raises(InputError, match="shows a picture, and the request has none"):
        reader.read({"prompt": "a"}, lambda inputs, mark: [1, 5])
    with pytest.raises(InputError, match="2 placeholders for 1 pictures"):
        reader.read({"prompt": "a", "images": [picture()]}, lambda inputs, mark: [1, 5, 5])
    tokens, (image,) = reader.read({"prompt": "a", "images": [picture()]}, lambda inputs, mark: [1, 5])
    assert tokens == [1, 5, 5]
    assert image.runs == (range(1, 3),)


def test_a_family_that_was_not_checked_is_refused_when_it_opens(models, tmp_path):
    shutil.copytree(models("llava").folder, tmp_path / "next")
    config = tmp_path / "next" / "config.json"
    found = json.loads(config.read_text())
    found |= {"model_type": "llava_next", "architectures": ["LlavaNextForConditionalGeneration"]}
    config.write_text(json.dumps(found))
    node = Llm(LlmConfig(model="next"))
    with pytest.raises(
        ModelError, match="pictures are not supported here; expected a model for texts, or one of Llava"
    ):
        node.open(OpenContext(base_dir=tmp_path))
    node = Llm(LlmConfig(model=models("llava").folder.name, adapters={"a": "b"}))
    with pytest.raises(ModelError, match="adapters: found"):
        node.open(OpenContext(base_dir=models("llava").folder.parent))


def test_pixels_that_wait_for_the_encoder_have_a_limit(models, monkeypatch):
    monkeypatch.setattr("weftline.engine.llm.vision.reader.HELD_BYTES_MAX", 1000)
    node = opened(models("llava"), sampling=SAMPLING | {"ignore_eos": True}, sequences_max=1, image_cache_bytes=1)
    vision, pieces = engine_of(node).runner.vision, list[Piece]()
    node.submit(1, {"prompt": "a", "sampling": {"tokens_max": 200}})
    node.submit(2, {"prompt": "a", "images": [picture(20, 20)]})  # one may have more than the limit
    while vision.held_bytes == 0:
        pieces += node.round()
    assert vision.held_bytes > 1000
    node.submit(3, {"prompt": "a", "images": [picture(20, 20)]})
    node.submit(4, {"prompt": "a"})
    while node._decoding:
        pieces += node.round()
    node.cancel(1)
    while node.busy:
        pieces += node.round()
    last = {piece.item: piece for piece in pieces}
    assert isinstance(last[3].error, LimitReached)
    assert last[2].error is None and last[4].error is None
    assert vision.held_bytes == 0
    assert answer(node, prompt="a", images=[picture(20, 20)])
    node.close()


def test_pixels_of_requests_that_wait_for_memory_count(models, monkeypatch):
    monkeypatch.setattr("weftline.engine.llm.vision.reader.HELD_BYTES_MAX", 1000)
    node = opened(models("llava"), sampling=SAMPLING)
    node._kv_most_bytes = 1 << 30
    monkeypatch.setattr(type(engine_of(node)), "context_max", property(lambda engine: 1))
    last: dict[int, Piece] = {}
    for item in (1, 2):
        node.submit(item, {"prompt": "a", "images": [picture(20, 20)]})
        while item not in last and not node._long[item - 1 :]:
            last |= {piece.item: piece for piece in node.round()}
    assert isinstance(last[2].error, LimitReached) and len(node._long) == 1
    assert node.memory().waiting == 1
    node.close()


def test_a_picture_that_cannot_be_processed_fails_its_request_alone(model, monkeypatch):
    node = opened(model, sampling=SAMPLING)
    process = node._images.process

    def failing(pixels: Any) -> Any:
        if pixels.shape[1] == 21:
            raise MemoryError("no memory")
        return process(pixels)

    node._images = dataclasses.replace(node._images, process=failing)
    node.submit(1, {"prompt": "a", "images": [picture(), picture(20, 21)]})
    node.submit(2, {"prompt": "a", "images": [picture()]})
    last: dict[int, Piece] = {}
    while node.busy:
        last |= {piece.item: piece for piece in node.round()}
    assert isinstance(last[1].error, StepError) and last[2].error is None
    assert not engine_of(node).runner.vision._live
    node.close()


def test_pictures_are_processed_beside_the_rounds_and_only_where_needed(model):
    node, threads = opened(model, sampling=SAMPLING), list[str]()
    process = node._images.process

    def watched(pixels: Any) -> Any:
        threads.append(threading.current_thread().name)
        return process(pixels)

    node._images = dataclasses.replace(node._images, process=watched)
    first = answer(node, prompt="a", images=[picture(), picture(seed=1), picture()])
    assert len(threads) == 2 and all(name.startswith("pictures") for name in threads)
    assert answer(node, prompt="a", images=[picture(), picture(seed=1), picture()]) == first
    assert len(threads) == 2  # the features are known
    engine_of(node).runner.vision.cache.clear()
    node._images = dataclasses.replace(node._images, knows=lambda key: True)  # and evicted before the request is added
    assert answer(node, prompt="b", images=[picture(seed=1)])
    assert len(threads) == 3
    node.close()


@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "idefics3"])
def test_an_empty_picture_fails_its_request_alone(models, family):
    node = opened(models(family), sampling=SAMPLING)
    node.submit(1, {"prompt": "a", "images": [np.zeros((0, 5, 3), np.uint8)]})
    node.submit(2, {"prompt": "a", "images": [picture()]})
    last: dict[int, Piece] = {}
    while node.busy:
        last |= {piece.item: piece for piece in node.round()}
    assert isinstance(last[1].error, InputError) and last[2].error is None
    node.close()


def test_a_request_that_cannot_be_prepared_fails_alone(model, monkeypatch):
    node = opened(model, sampling=SAMPLING)
    real = type(node._images.layout).tokens_of
    wrong = lambda layout, height, width: real(layout, height, width // (width - 21))  # noqa: E731
    monkeypatch.setattr(type(node._images.layout), "tokens_of", wrong)
    node.submit(1, {"prompt": "a", "images": [picture(20, 21)]})
    node.submit(2, {"prompt": "a"})
    last: dict[int, Piece] = {}
    while node.busy:
        last |= {piece.item: piece for piece in node.round()}
    assert isinstance(last[1].error, StepError) and last[2].error is None
    node.close()


def test_answers_about_pictures_can_be_constrained(model):
    node = opened(model, sampling=SAMPLING)
    texts = {answer(node, prompt="a", images=[picture(seed=1)], sampling={"choice": ["yes", "no"]})}
    assert texts <= {"yes", "no"}
    node.close()


def test_a_request_is_cancelled_while_its_pictures_are_decoded(model, monkeypatch):
    node = opened(model, sampling=SAMPLING)
    node.submit(1, {"prompt": "a", "images": [picture()]})
    assert node.busy
    node.cancel(1)
    assert ask(node, prompt="what is it").item == 1  # the number is free again
    assert not node._decoding
    assert node.figures()["finished_abort_total"] == 1
    node.close()
