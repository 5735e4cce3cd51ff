"""GGUF files give the tokens of the models that they were written from, and of transformers' own loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from tests.engine.llm import tiny
from tests.engine.llm.gguf_files import FAMILIES, make, write_gguf
from tests.engine.llm.test_packed_weights import generated
from weftline.engine.llm import gguf
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.heads import open_head
from weftline.engine.llm.model_loader import RunnerOptions, load_model
from weftline.engine.llm.node import Llm
from weftline.engine.llm.options import LlmConfig
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.schedule import RoundLimits
from weftline.engine.llm.tokens import Tokens
from weftline.errors import InputError, MissingPackage, ModelError
from weftline.nodes.contract import ConfigError, OpenContext, StepContext

WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
"""K-quants have blocks of 256 weights."""


def answers(source: Path, prompts: list[list[int]], options: RunnerOptions | None = None) -> list[list[int]]:
    engine = Engine(Runner.open(source, options or RunnerOptions(kv_bytes=4 << 20)), None, RoundLimits(64, 8))
    return engine.generate(prompts, SamplingParams(tokens_max=12, temperature=0.0))


def by_transformers(file: Path) -> Any:
    folder, name = file.parent, file.name
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()


PROMPTS = tiny.prompts(3, seed=3, longest=60)


@pytest.mark.slow(but_first=3)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_the_model_that_was_written(tmp_path: Path, family: str) -> None:
    """Heads of qwen3 are narrower than its default, and windows of phi3 shorter than the prompts."""
    model = make(family, **({"sliding_window": tiny.WINDOW} if family == "phi3" else {}))
    file = write_gguf(tmp_path / "m.gguf", model)
    assert answers(file, PROMPTS) == [generated(model, prompt, 12) for prompt in PROMPTS]


@pytest.mark.slow(but_first=3)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16", "BF16", "Q4_1", "Q5_0", "Q5_1"])
def test_answers_from_quantised_files_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    file = write_gguf(tmp_path / "m.gguf", make("llama"), kind)
    model = by_transformers(file)
    assert answers(file, PROMPTS) == [generated(model, prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_answers_from_k_quants_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    file = write_gguf(tmp_path / "m.gguf", make("qwen2", **WIDE), kind)
    model = by_transformers(file)
    assert answers(file, PROMPTS) == [generated(model, prompt, 12) for prompt in PROMPTS]


def test_rotary_factors_of_the_file_are_applied(tmp_path: Path) -> None:
    """transformers' reader leaves them out."""
    scaled = tiny.FAMILIES["llama_rope"]["rope_parameters"]
    model = make("llama", rope_parameters=scaled)
    plain = make("llama").base_model.rotary_emb.inv_freq
    factors = (plain / model.base_model.rotary_emb.inv_freq).numpy()
    assert factors.max() > 2
    file = write_gguf(tmp_path / "m.gguf", model, tensors={"rope_freqs.weight": factors})
    expected = [generated(model, prompt, 12) for prompt in PROMPTS]
    assert answers(file, PROMPTS) == expected
    assert [generated(by_transformers(file), prompt, 12) for prompt in PROMPTS] != expected
    file = write_gguf(tmp_path / "odd.gguf", model, tensors={"rope_freqs.weight": factors[:-1].copy()})
    with pytest.raises(ModelError, match=r"its rope_freqs\.weight does not fit its rotary embedding"):
        load_model(file, RunnerOptions())


def test_caps_and_ends_of_the_file_are_used(tmp_path: Path) -> None:
    model = make("gemma2", attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
    settings = {
        "gemma2.attn_logit_softcapping": 2.0, "gemma2.final_logit_softcapping": 3.0, "tokenizer.ggml.eot_token_id": 7
    }  # fmt: skip
    file = write_gguf(tmp_path / "m.gguf", model, settings=settings)
    runner = Runner.open(file, RunnerOptions(kv_bytes=4 << 20))
    assert runner.ends == {model.config.eos_token_id, 7}
    found = Engine(runner, None, RoundLimits(64, 8)).generate(PROMPTS, SamplingParams(tokens_max=12, ignore_eos=True))
    model.generation_config.eos_token_id = None
    assert found == [generated(model, prompt, 12) for prompt in PROMPTS]


def test_the_tokenizer_and_its_template_are_the_files(tmp_path: Path) -> None:
    tokens = Tokens.open(write_gguf(tmp_path / "m.gguf", make("llama")), 128, "m.gguf")
    expected = Tokens(tiny.tokenizer(), 128)
    for text in ("the user asks", "hello Ä\n\n 12 <|im_end|> <think>", "assistant<|im_start|>"):
        assert tokens.raw(text) == expected.raw(text)
        assert tokens.decode(tokens.raw(text)) == expected.decode(expected.raw(text))
    turns = [{"role": "user", "content": "again <|im_end|>"}]
    assert tokens.chat(turns) == expected.chat(turns)


def test_a_template_of_a_file_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    tokens = Tokens.open(write_gguf(tmp_path / "m.gguf", make("llama"), template=template), 128, "m.gguf")
    with pytest.raises(InputError, match=r"template refuses them: access to attribute '__class__' .* is unsafe"):
        tokens.chat([{"role": "user", "content": "x"}])


def test_files_beside_the_model_are_not_read(tmp_path: Path) -> None:
    model = make("llama")
    file = write_gguf(tmp_path / "m.gguf", model)
    expected = answers(file, PROMPTS)
    for name in ("config", "adapter_config", "generation_config", "tokenizer_config", "tokenizer"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"eos_token_id": 1, "base_model_name_or_path": "x"}))
    assert answers(file, PROMPTS) == expected
    assert Tokens.open(file, 128).raw("asks") == Tokens(tiny.tokenizer(), 128).raw("asks")


def test_weights_of_a_file_are_quantised_anew(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    file = write_gguf(tmp_path / "m.gguf", make("llama"))
    runner = Runner.open(file, RunnerOptions(kv_bytes=4 << 20, weights="int8"))
    assert type(runner.model.model.layers[0].mlp.down_proj.weight.data).__name__ == "Int8Tensor"


def test_a_step_answers_from_a_file(tmp_path: Path) -> None:
    model = make("llama")
    write_gguf(tmp_path / "m.gguf", model)
    config = LlmConfig("m.gguf", sampling=SamplingParams(tokens_max=6, ignore_eos=True), kv_bytes=4 << 20)
    assert "text" in [one.name for one in Llm.ports(config, StepContext(tmp_path)).outputs]
    node = Llm(config)
    node.open(OpenContext(tmp_path))
    node.submit(0, {"prompt": "the user asks"})
    pieces = []
    while node.busy:
        pieces += node.round()
    node.close()
    expected = Tokens(tiny.tokenizer(), 128)
    model.generation_config.eos_token_id = None
    prompt = expected.chat([{"role": "user", "content": "the user asks"}])
    assert pieces[-1].outputs["text"] == expected.decode(generated(model, prompt, 6))


def test_what_cannot_be_loaded_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "m.gguf", make("llama"))
    with pytest.raises(ModelError, match=r"m\.gguf: a GGUF file is loaded for task generate only"):
        open_head(file, "embed", shown="m.gguf")
    with pytest.raises(ConfigError, match=r"m\.gguf is a GGUF file, which is loaded for task generate only"):
        Llm.ports(LlmConfig("m.gguf", task="embed"), StepContext(tmp_path))
    with pytest.raises(ConfigError, match=r"there is no file or folder other\.gguf"):
        Llm.ports(LlmConfig("other.gguf"), StepContext(tmp_path))
    short = write_gguf(tmp_path / "short.gguf", make("llama"), settings={"llama.rope.scaling.type": "linear"})
    with pytest.raises(ModelError, match=r"short\.gguf: its positions are scaled \(linear\)"):
        load_model(short, RunnerOptions(), shown="short.gguf")
    model = make("llama")
    del model.model.layers[1].mlp.up_proj
    with pytest.raises(ModelError, match=r"lacking\.gguf: 1 weights missing .*layers\.1\.mlp\.up_proj"):
        load_model(write_gguf(tmp_path / "lacking.gguf", model), RunnerOptions(), shown="lacking.gguf")
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match="gguf"):
        load_model(file, RunnerOptions())


def test_values_are_those_of_the_file(tmp_path: Path) -> None:
    model = make("llama")
    loaded = load_model(write_gguf(tmp_path / "m.gguf", model), RunnerOptions()).model.state_dict()
    assert all(np.array_equal(weight.numpy(), loaded[name].numpy()) for name, weight in model.state_dict().items())
