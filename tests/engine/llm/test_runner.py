"""Opening a model: what is wrong with it is said, in one sentence, before anything runs."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, Gemma2Config, MambaConfig, OlmoConfig

from tests.engine.llm import tiny
from weftline.engine.llm import attention
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.model_loader import RunnerOptions
from weftline.engine.llm.node import Llm, LlmConfig
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.schedule import RoundLimits
from weftline.errors import ModelError
from weftline.nodes.contract import ConfigError, OpenContext


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def test_a_folder_opens_and_answers_as_the_model_in_it(saved):
    prompt = [5, 6, 7, 8]
    answer = Engine(Runner.open(saved), None).generate([prompt], SamplingParams(tokens_max=6, ignore_eos=True))[0]
    plain = AutoModelForCausalLM.from_pretrained(saved).eval()
    ids = torch.tensor([prompt])
    out = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert answer == out[0, 4:].tolist()


def test_the_memory_is_sized_in_bytes(saved):
    runner = Runner.open(saved, RunnerOptions(page_tokens=8, kv_bytes=100_000))
    assert runner.token_bytes == 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, width, bytes of float32
    assert runner.pages == 100_000 // (8 * runner.token_bytes)
    with pytest.raises(ModelError, match="one page of this model takes 4096"):
        Runner.open(saved, RunnerOptions(page_tokens=8, kv_bytes=5000))


@pytest.mark.parametrize(
    ("options", "named"),
    [({"context_max": 513}, "expected 1 to 512"), ({"dtype": "int8"}, "dtype"), ({"dtype": "save"}, "dtype")],
)
def test_options_the_model_cannot_have_are_refused(saved, options, named):
    with pytest.raises(ModelError, match=named):
        Runner.open(saved, RunnerOptions(**options))


def test_a_missing_folder_or_part_of_it_is_named(folder, tmp_path):
    with pytest.raises(ModelError, match="no such folder"):
        Runner.open(tmp_path / "nothing")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no \*.safetensors"):
        Runner.open(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        Runner.open(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "no-such-model"}', "\x00\x01"])
def test_a_config_that_is_none_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config"):
        Runner.open(folder)


@pytest.mark.parametrize("place", [4, 7, 8, 9, 60, 200, 0.3, 0.999])
def test_truncated_weights_are_refused(folder, place):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: place if isinstance(place, int) else int(len(whole) * place)])
    with pytest.raises(ModelError, match=r"model\.safetensors is no safetensors file, or a truncated one"):
        Runner.open(folder)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "{"), ("config.json", '{"model_type": "no-such-model"}'), ("config.json", None),
        ("model.safetensors", "x"), ("model.safetensors", None), ("tokenizer.json", "{"),
    ],
)  # fmt: skip
def test_errors_name_the_model_as_it_was_written(folder, file, text):
    (folder / file).write_text(text) if text else (folder / file).unlink()
    node = Llm(LlmConfig(model=folder.name))
    with pytest.raises((ModelError, ConfigError)) as caught:
        node.open(OpenContext(base_dir=folder.parent))
    error: BaseException | None = caught.value
    assert "model" in str(error)
    while error is not None:  # what it was raised from would be printed with it
        assert str(folder.parent) not in str(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def test_more_memory_for_pages_than_there_is_names_the_option(saved):
    with pytest.raises(ModelError, match=r"kv_bytes: \d+ bytes cannot be reserved on cpu"):
        Runner.open(saved, RunnerOptions(kv_bytes=1 << 55))


def test_a_flipped_byte_of_the_header_is_refused_or_changes_no_weight(folder, saved):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    header, wanted = 8 + int.from_bytes(whole[:8], "little"), Runner.open(saved).model.state_dict()
    refused, places = 0, [*range(8), *range(8, header, header // 24)]
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x15]) + whole[place + 1 :])
        try:
            found = Runner.open(folder).model.state_dict()
        except ModelError:
            refused += 1
        else:
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert refused > 0.8 * len(places)


def test_a_weight_that_is_missing_is_not_made_up(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"model.norm.weight", b"model.norn.weight"))
    with pytest.raises(ModelError, match=r"missing.*model\.norm\.weight"):
        Runner.open(folder)


def test_code_in_a_models_folder_is_not_run(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError, match="config cannot be read"):
        Runner.open(folder)


_SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}


@pytest.mark.parametrize("config", [MambaConfig(**_SMALL), BloomConfig(**_SMALL, n_head=2, n_layer=2)])
def test_a_model_whose_layers_bypass_the_attention_interface_is_refused(config):
    attention.register()
    with pytest.raises((ModelError, ValueError), match=r"attention|attend"):
        Runner(AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME), RunnerOptions())


@pytest.mark.parametrize(
    "config",
    [
        OlmoConfig(**_SMALL, intermediate_size=48, num_attention_heads=2, initializer_range=0.4),
        # Two kinds of layers, one of them with a window shorter than the prompt; soft caps in attention and logits.
        Gemma2Config(
            **_SMALL, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
            sliding_window=8, attn_logit_softcapping=5.0, initializer_range=0.4,
        ),
    ],
    ids=["olmo", "gemma2"],
)  # fmt: skip
def test_other_families_answer_as_transformers_does(config):
    attention.register()
    torch.manual_seed(1)
    config.eos_token_id = config.pad_token_id = None
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    ours = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    ours.load_state_dict(plain.state_dict())
    engine = Engine(Runner(ours, RunnerOptions(page_tokens=4)), None, RoundLimits(11, 4))
    prompts = [[5, 6, 7], list(range(3, 40)), [9] * 17]
    answers = engine.generate(prompts, SamplingParams(tokens_max=16, ignore_eos=True))
    for prompt, answer in zip(prompts, answers):
        ids = torch.tensor([prompt])
        out = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
        assert answer == out[0, len(prompt) :].tolist()
