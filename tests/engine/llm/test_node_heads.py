"""The llm node as an embedder and as a classifier, through the same rounds as answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, LlamaConfig

from tests.engine.llm import tiny
from weftline.engine.llm.node import Llm
from weftline.engine.llm.options import LlmConfig
from weftline.errors import InputError
from weftline.nodes.contract import ConfigError, OpenContext, StepContext
from weftline.pipelines.check.options import read_options

TEXTS = ["the user asks", "again", "the assistant answers again and again " * 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    tiny.save(made / "tiny")
    torch.manual_seed(6)
    words = tiny.tokenizer()
    sizes = {**tiny._SIZES, "vocab_size": len(words), "eos_token_id": words.eos_token_id, "num_labels": 3}
    model = AutoModelForSequenceClassification.from_config(LlamaConfig(**sizes))
    model.save_pretrained(made / "judge")
    words.save_pretrained(made / "judge")
    return made


def _run(node: Llm, inputs: list[dict]) -> dict[int, object]:
    for item, given in enumerate(inputs):
        node.submit(item, given)
    last = {}
    while node.busy:
        for piece in node.round():
            assert piece.last
            last[piece.item] = piece.error or piece.outputs
    return last


def _open(folder: Path, **options) -> Llm:
    node = Llm(LlmConfig(round_tokens_max=16, **options))
    node.open(OpenContext(base_dir=folder))
    node.warm_up()
    return node


@pytest.mark.parametrize("pooling", ["last", "mean", "first"])
def test_embeddings_are_those_of_the_plain_model_whatever_the_chunks(folder, pooling):
    node = _open(folder, model="tiny", task="embed", pooling=pooling)
    found = _run(node, [{"text": text} for text in TEXTS] * 2)
    plain = AutoModel.from_pretrained(folder / "tiny").eval()
    for item, text in enumerate(TEXTS * 2):
        ids = torch.tensor([node._tokens.raw(text)])
        with torch.no_grad():
            states = plain(input_ids=ids).last_hidden_state[0]
        wanted = {"last": states[-1], "mean": states.mean(0), "first": states[0]}[pooling]
        wanted = (wanted / wanted.norm()).numpy()
        np.testing.assert_allclose(found[item]["embedding"], wanted, atol=1e-5)
        assert found[item]["usage"]["prompt_tokens"] == ids.shape[1]
    engine, _ = node._opened()
    assert engine.stats().pages_used == 0
    node.close()


def test_scores_are_those_of_the_plain_model(folder):
    node = _open(folder, model="judge", task="classify")
    found = _run(node, [{"text": text} for text in TEXTS])
    plain = AutoModelForSequenceClassification.from_pretrained(folder / "judge").eval()
    plain.config.pad_token_id = None
    for item, text in enumerate(TEXTS):
        with torch.no_grad():
            wanted = plain(input_ids=torch.tensor([node._tokens.raw(text)])).logits[0].softmax(-1)
        assert list(found[item]["scores"]) == ["LABEL_0", "LABEL_1", "LABEL_2"]
        np.testing.assert_allclose(list(found[item]["scores"].values()), wanted.numpy(), atol=1e-5)
    node.close()


def test_ports_say_what_comes_out_and_what_does_not_go_together_is_refused(folder):
    step = StepContext(base_dir=folder)
    ports = Llm.ports(LlmConfig(model="tiny", task="embed"), step)
    assert [str(one.type) for one in ports.outputs] == ["float32[64]", "json"]
    assert [one.name for one in Llm.ports(LlmConfig(model="judge", task="classify"), step).outputs] == [
        "scores",
        "usage",
    ]
    with pytest.raises(ConfigError):
        Llm.ports(LlmConfig(model="tiny", task="embed", speculation="ngram"), step)
    for options in ({"task": "dream"}, {"pooling": "most"}):
        assert [one.path for one in read_options(Llm, {"model": "tiny", **options}, "")[1]] == list(options)


def test_a_text_that_is_too_long_fails_alone(folder):
    node = _open(folder, model="tiny", task="embed")
    found = _run(node, [{"text": "word " * 2000}, {"text": "asks"}])
    assert isinstance(found[0], InputError)
    assert found[1]["embedding"].shape == (64,)
    node.close()
