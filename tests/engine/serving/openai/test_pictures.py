"""Questions about pictures from the stock `openai` client, answered by vision-language models."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from PIL import Image

from tests.engine.llm import tiny
from tests.engine.llm.vision.tiny_vision import TinyVision, asked, make, picture
from tests.engine.serving.http.hosted import Hosted, hosted_pipelines
from weftline.engine.serving.config import ServedPipeline

CHAT = """
weftline: 1
name: {name}
inputs: {{messages: json, sampling: {{type: json, optional: true}}}}
steps:
  answer: {{node: llm, model: {model}, kv_bytes: 4000000, inputs: {{messages: messages, sampling: sampling}}}}
outputs: {{text: answer.text, usage: answer.usage}}
"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyVision:
    return make("qwen2_vl", tmp_path_factory.mktemp("qwen2_vl"))


@pytest.fixture(scope="module")
def endpoint(model: TinyVision, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    folder = tmp_path_factory.mktemp("pipelines")
    tiny.save(folder / "texts")
    (folder / "see.yaml").write_text(CHAT.format(name="see", model=model.folder))
    (folder / "read.yaml").write_text(CHAT.format(name="read", model=folder / "texts"))
    served = {name: ServedPipeline(folder / f"{name}.yaml") for name in ("see", "read")}
    with hosted_pipelines(served) as endpoint:
        yield endpoint


def _url(seed: int, height: int = 20, width: int = 30) -> str:
    data = io.BytesIO()
    Image.fromarray(picture(height, width, seed)).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def _said(*parts: str, text: str = "what is it") -> Any:
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in parts]
    return [{"role": "user", "content": [*shown, {"type": "text", "text": text}]}]


def test_a_question_about_pictures_is_answered_as_transformers_does(client: Any, model: TinyVision) -> None:
    options = {"temperature": 0, "max_tokens": 8}
    said = _said(_url(1), _url(2, 16, 40))
    whole = client.chat.completions.create(model="see", messages=said, **options)
    right = model.answer(asked(None, None, "what is it"), [picture(20, 30, 1), picture(16, 40, 2)], 8)
    expected = model.processor.tokenizer.decode(right, skip_special_tokens=True)
    assert whole.choices[0].message.content == expected
    assert whole.usage.prompt_tokens == len(
        model.inputs(asked(None, None, "what is it"), [picture(20, 30, 1), picture(16, 40, 2)])["input_ids"][0]
    )
    chunks = client.chat.completions.create(model="see", messages=said, stream=True, **options)
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == expected


def test_a_later_turn_finds_the_pictures_of_earlier_ones_cached(client: Any) -> None:
    first = _said(_url(3))
    again = [*first, {"role": "assistant", "content": "a"}, *_said(_url(4), text="and this?")]
    client.chat.completions.create(model="see", messages=first, max_tokens=4)
    answer = client.chat.completions.create(model="see", messages=again, max_tokens=4)
    assert answer.usage.prompt_tokens_details.cached_tokens >= 16


@pytest.mark.parametrize(
    ("model_name", "urls", "named"),
    [
        ("see", ["https://example.org/a.png"], "fetches no URLs"),
        ("see", ["data:image/png;base64,%%"], "base64"),
        ("see", ["data:image/png;base64,aGVsbG8="], "picture"),
        ("see", [_url(1)] * 33, "at most 32"),
        ("see", [_url(1, 300, 1)], "ratio"),
        ("read", [_url(1)], "reads texts only"),
    ],
)
def test_wrong_pictures_are_refused_with_the_field(client: Any, model_name: str, urls: list[str], named: str) -> None:
    with pytest.raises(openai.BadRequestError, match=named) as refused:
        client.chat.completions.create(model=model_name, messages=_said(*urls))
    assert refused.value.body["param"] == "messages"
