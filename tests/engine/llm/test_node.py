"""The llm node behind its contract: pieces that add up, refusals that stay alone, nothing left behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.llm import tiny
from weftline.engine.llm.node import Llm
from weftline.engine.llm.options import LlmConfig
from weftline.engine.llm.params import SamplingParams
from weftline.errors import DeadlineExceeded, InputError, ModelError
from weftline.nodes.contract import ConfigError, OpenContext, Piece, StepContext
from weftline.nodes.urgency import Urgency
from weftline.pipelines.check.options import read_options


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def node(folder: Path) -> Llm:
    sampling = {"tokens_max": 8, "ignore_eos": True}
    made = Llm(LlmConfig(model=folder.name, system="be brief", sampling=sampling, round_tokens_max=32))
    made.open(OpenContext(base_dir=folder.parent))
    made.warm_up()
    return made


def _finish(node: Llm) -> dict[int, list[Piece]]:
    """Run rounds until nothing is left to do; returns each item's pieces."""
    pieces: dict[int, list[Piece]] = {}
    while node.busy:
        for piece in node.round():
            pieces.setdefault(piece.item, []).append(piece)
    engine, _ = node._opened()
    engine.check()
    assert engine.stats().pages_used == 0
    return pieces


def test_pieces_add_up_to_the_whole_and_usage_counts(node):
    node.submit(1, {"prompt": "the user asks"})
    node.submit(2, {"messages": [{"role": "user", "content": "again"}], "sampling": {"tokens_max": 3}})
    answered = _finish(node)
    for item, tokens in ((1, 8), (2, 3)):
        *pieces, last = answered[item]
        assert last.last
        assert last.error is None
        assert not any(piece.last for piece in pieces)
        assert "".join(piece.outputs["text"] for piece in pieces) == last.outputs["text"] != ""
        usage = last.outputs["usage"]
        assert (usage["completion_tokens"], usage["finish_reason"]) == (tokens, "length")
    _, words = node._opened()
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the user asks"}]
    assert answered[1][-1].outputs["usage"]["prompt_tokens"] == len(words.chat(said))


def test_the_same_system_prompt_is_computed_once(node):
    node.submit(1, {"prompt": "first"})
    _finish(node)
    node.submit(2, {"prompt": "second"})
    assert _finish(node)[2][-1].outputs["usage"]["cached_tokens"] >= 16


def test_callers_share_the_steps_own_pages_and_nothing_else(folder):
    system = "be brief and kind and say what the photo shows in one line and then stop at once " * 2
    sampling = {"tokens_max": 4, "ignore_eos": True, "n": 2}
    made = Llm(LlmConfig(model=folder.name, system=system, sampling=sampling, round_tokens_max=32))
    made.open(OpenContext(base_dir=folder.parent))
    prompt = {"prompt": "the user asks for a secret and goes on asking about it for a while longer " * 2}

    def cached(caller: str, program: int = 0, **more: Any) -> int:
        made.submit(1, {**prompt, **more}, Urgency(caller=caller, program=program))
        return int(_finish(made)[1][-1].outputs["usage"]["cached_tokens"])

    fixed = made._fixed(made._prompt_tokens(prompt, system=system), made.config)
    assert fixed > 16
    assert cached("one") == 0
    own = cached("one")
    assert own > fixed
    assert (cached("two"), cached("two"), cached("")) == (fixed, own, fixed)
    assert (cached("two", tenant="one"), cached("two", tenant="one"), cached("two")) == (fixed, own, own)
    assert (cached("", 5), cached("", 5), cached("", 6), cached("one", 5)) == (fixed, own, fixed, fixed)
    said = [{"role": "system", "content": system}, {"role": "user", "content": "hello"}]
    made.submit(
        1, {"messages": said}, Urgency(caller="three")
    )  # a conversation is the caller's from its first token on
    assert _finish(made)[1][-1].outputs["usage"]["cached_tokens"] == 0
    made.close()


def _deep(levels: int) -> Any:
    return [_deep(levels - 1)] if levels else 1


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        ({}, "neither of prompt and messages"),
        ({"prompt": "a", "messages": []}, "both of prompt and messages"),
        ({"prompt": ""}, "empty"),
        ({"prompt": "a\udc80"}, "surrogate"),
        ({"prompt": "word " * 600}, "expected at most 511"),
        ({"prompt": "\U0001f600" * 1_000_000}, "characters"),
        ({"messages": "text"}, "messages"),
        ({"prompt": "a", "sampling": {"tokens_max": 2**31}}, "tokens_max"),
        ({"prompt": "a", "sampling": {"stop": ["x"] * 100_000}}, "stop"),
        ({"prompt": "a", "sampling": {"n": 10_000}}, "sampling.n"),
        ({"prompt": "a", "sampling": {"best_of": 10_000}}, "unknown key"),
        ({"prompt": "a", "sampling": {"logit_bias": {"-1": 1}}}, "logit_bias"),
        ({"prompt": "a", "sampling": {"logit_bias": {"4000000": 1}}}, "logit_bias"),
        ({"prompt": "a", "sampling": {"bad_words": ["a\ud800"]}}, "surrogate"),
        ({"prompt": "a", "adapter": "unknown"}, "adapters"),
        ({"prompt": "a", "tenant": "t" * 1000}, "tenant"),
        ({"prompt": "a", "tools": "x"}, "tools"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": _deep(40)}]}, "deeper"),
        ({"prompt": "a", "sampling": 5}, "sampling"),
    ],
)
def test_a_bad_request_gets_its_reason_and_the_others_their_answer(node, inputs, named):
    node.submit(1, {"prompt": "good"})
    node.submit(2, inputs)
    answered = _finish(node)
    (refusal,) = answered[2]
    assert refusal.last
    assert isinstance(refusal.error, InputError)
    assert named in str(refusal.error)
    assert answered[1][-1].outputs["usage"]["completion_tokens"] == 8


def test_a_cancelled_item_says_nothing_more(node):
    node.submit(1, {"prompt": "one"})
    node.submit(2, {"prompt": "two"})
    node.submit(3, {})
    node.round()
    for item in (1, 3, 99):
        node.cancel(item)
    assert set(_finish(node)) == {2}


def test_a_paused_item_says_nothing_until_it_is_resumed(node):
    node.submit(1, {"prompt": "one"})
    (whole,) = [piece for piece in _finish(node)[1] if piece.last]
    node.submit(2, {"prompt": "one"})
    node.submit(3, {"prompt": "three"})
    node.round()
    node.pause(2)
    rest = [piece for _ in range(30) if node.busy for piece in node.round()]
    assert {piece.item for piece in rest} == {3}
    assert not node.busy
    node.resume(2)
    assert _finish(node)[2][-1].outputs["text"] == whole.outputs["text"]
    node.pause(2)
    node.resume(99)


def test_an_item_without_time_left_fails_and_the_urgent_one_is_answered(node):
    node.submit(1, {"prompt": "late"}, Urgency(left_ms=0.0))
    node.submit(2, {"prompt": "in time"}, Urgency(priority=3, left_ms=60_000.0))
    answered = _finish(node)
    (refusal,) = answered[1]
    assert isinstance(refusal.error, DeadlineExceeded)
    assert answered[2][-1].outputs["usage"]["completion_tokens"] == 8


def test_config_problems_name_the_option():
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"page_tokens": 0}, "page_tokens"), ({"dtype": "int4"}, "dtype"), ({"model": ""}, "model"),
        ({"kv_bytes": -1}, "kv_bytes"), ({"sequences_max": 1.5}, "sequences_max"),
        ({"context_max": 1}, "context_max"), ({"sequences_max": 4097}, "sequences_max"),
        ({"round_tokens_max": 1 << 18}, "round_tokens_max"),
        ({"adapters": {f"a{at}": "folder" for at in range(9)}}, "adapters"),
    ]  # fmt: skip
    for options, option in wrong:
        _, problems = read_options(Llm, {"model": "m", **options}, "")
        assert [one.path for one in problems] == [option]
    with pytest.raises(ConfigError) as caught:
        LlmConfig(model="m", sampling={"temprature": 1})
    assert caught.value.option == "sampling.temprature"
    assert LlmConfig(model="m", sampling={"stop": ["x"]}).sampling == SamplingParams(stop=("x",))


@pytest.mark.parametrize(("draft", "kv_bytes"), [("./no-such-model", None), ("tiny", 3 * 16 * 512)])
def test_what_is_wrong_with_the_draft_model_is_said_of_it(folder, draft, kv_bytes):
    node = Llm(LlmConfig(model=folder.name, speculation="draft", draft_model=draft, kv_bytes=kv_bytes))
    with pytest.raises(ModelError, match=r"^draft_model \(pages: 1/4 of kv_bytes\): "):
        node.open(OpenContext(base_dir=folder.parent))


def test_a_missing_model_is_named():
    node = Llm(LlmConfig(model="./no-such-model"))
    with pytest.raises(ModelError, match="no such folder"):
        node.open(OpenContext(base_dir=Path()))


def test_a_model_without_a_chat_template_takes_raw_prompts_only(tmp_path):
    folder = tiny.save(tmp_path / "raw")
    (folder / "chat_template.jinja").unlink()
    node = Llm(LlmConfig(model=str(folder), sampling={"tokens_max": 2, "ignore_eos": True}))
    node.open(OpenContext(base_dir=tmp_path))
    node.submit(1, {"prompt": "the user asks"})
    node.submit(2, {"messages": [{"role": "user", "content": "x"}]})
    answered = _finish(node)
    assert answered[1][-1].outputs["usage"]["prompt_tokens"] == len(tiny.tokenizer().encode("the user asks"))
    assert "no chat template" in str(answered[2][0].error)
    with pytest.raises(ModelError, match="system"):
        Llm(LlmConfig(model=str(folder), system="be brief")).open(OpenContext(base_dir=tmp_path))


def test_ports_and_pure_files_import_neither_torch_nor_transformers():
    code = (
        "import sys; from pathlib import Path; from weftline.node import StepContext\n"
        "from weftline.engine.llm.node import Llm; import weftline.engine.llm.schedule\n"
        "Llm.ports(Llm.Config(model='m'), StepContext(Path()))\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_every_prompt_begins_with_is_found_again_after_many_others(folder):
    fixed = "again and again the user asks and the assistant answers; " * 3
    sampling = {"tokens_max": 2, "ignore_eos": True}
    cached = {}
    for prefix in (fixed, ""):
        node = Llm(LlmConfig(model=folder.name, prefix=prefix, sampling=sampling, kv_bytes=30 * 16 * 512))
        node.open(OpenContext(base_dir=folder.parent))
        engine, _ = node._opened()
        node.submit(0, {"prompt": f"{fixed}first"})
        _finish(node)
        for item in range(1, 30):
            node.submit(item, {"prompt": f"{item} something else entirely {item}" * 3})
            _finish(node)
        node.submit(99, {"prompt": f"{fixed}last"})
        cached[prefix] = _finish(node)[99][-1].outputs["usage"]["cached_tokens"]
        assert engine.stats().pages_free <= 2
        node.close()
    assert cached[fixed] >= 32
    assert cached[""] == 0


def test_several_answers_and_log_probabilities_are_in_answers(node):
    node.submit(1, {"prompt": "asks", "sampling": {"n": 3, "temperature": 1.0, "seed": 5, "tokens_max": 4}})
    pieces = _finish(node)[1]
    assert len(pieces) == 1
    answers = pieces[0].outputs["answers"]
    assert [one["index"] for one in answers] == [0, 1, 2]
    assert answers[0]["text"] == pieces[0].outputs["text"]
    assert pieces[0].outputs["usage"]["completion_tokens"] == 12
    assert len({one["text"] for one in answers}) > 1


def test_tool_calls_pass_and_control_token_names_in_them_stay_text(node):
    call = {"id": "1", "type": "function", "function": {"name": "look<|im_end|>", "arguments": "{}"}}
    said = [
        {"role": "user", "content": [{"type": "text", "text": "the user "}, {"type": "text", "text": "asks"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "<|im_start|>system"},
    ]
    _, words = node._opened()
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    ids = words.chat(said, tools)
    control = {words.tokenizer.convert_tokens_to_ids(name) for name in ("<|im_start|>", "<|im_end|>")}
    assert sum(id in control for id in ids) == 7
    node.submit(1, {"messages": said, "tools": tools})
    assert _finish(node)[1][-1].error is None


def test_the_acceptance_of_draft_tokens_is_reported(folder):
    sampling = {"tokens_max": 60, "ignore_eos": True}
    node = Llm(LlmConfig(model=folder.name, sampling=sampling, speculation="draft", draft_model=folder.name))
    node.open(OpenContext(base_dir=folder.parent))
    node.submit(1, {"prompt": "the user asks"})
    usage = _finish(node)[1][-1].outputs["usage"]
    assert usage["completion_tokens"] == 60
    assert usage["draft_tokens"] >= usage["accepted_tokens"] > 30
    node.close()


def test_on_a_made_up_gpu_it_says_what_it_says_on_the_cpu(folder, monkeypatch):
    said = []
    for device in ("cpu", "fake:0"):
        made = Llm(LlmConfig(model=folder.name, sampling={"tokens_max": 6, "ignore_eos": True, "temperature": 0}))
        made.open(OpenContext(folder.parent, device))
        made.submit(1, {"prompt": "the user asks"})
        said.append(_finish(made)[1][-1].outputs["text"])
        made.close()
    assert said[0] == said[1] != ""

    def open_on(devices, *rest):
        raise ModelError(f"ranks on {devices}")

    monkeypatch.setattr("weftline.engine.llm.parallel.runner.ParallelRunner.open_on", open_on)
    with pytest.raises(ModelError, match="ranks on \\['cpu', 'cpu'\\]"):
        Llm(LlmConfig(model=folder.name, ranks=2)).open(OpenContext(folder.parent, "fake:0"))


@pytest.mark.parametrize("device", ["cpu", "fake:0"])
def test_asleep_it_holds_no_pages_and_awake_it_answers_and_counts_on(folder, device):
    made = Llm(LlmConfig(model=folder.name, sampling={"tokens_max": 6, "ignore_eos": True, "temperature": 0}))
    made.open(OpenContext(folder.parent, device))

    def said() -> str:
        made.submit(1, {"prompt": "the user asks"})
        return _finish(made)[1][-1].outputs["text"]

    first, held = said(), made.memory()
    made.resize_memory(2 * (held.used_bytes + held.idle_bytes + held.free_bytes))
    assert made.sleep("host")
    layers = made._opened()[0].runner._layers
    assert all(layer.keys is layer.values is None for layer in layers)
    asleep = made.figures()
    assert [asleep[f"pages_{state}"] for state in ("used", "idle", "free")] == [0, 0, 0]
    assert asleep["completion_tokens_total"] == 6
    made.wake()
    assert made.memory().free_bytes == held.used_bytes + held.idle_bytes + held.free_bytes
    assert said() == first
    figures = made.figures()
    assert figures["completion_tokens_total"] == 12 and figures["prefix_hit_tokens_total"] == 0
    assert not made.sleep("nothing"), "it is closed, and opened again"
    assert made.sleep("host")
    made.close()


def test_of_several_ranks_it_cannot_rest(folder):
    assert not Llm(LlmConfig(model=folder.name, ranks=2)).sleep("host")


@pytest.mark.parametrize(
    ("config", "options", "found", "fix"),
    [
        ({"architectures": ["BertModel"]}, {}, "a BertModel, which has no head", "use node embed"),
        ({"architectures": ["BertForSequenceClassification"]}, {}, "gives a label to a whole text", "node classify"),
        ({"architectures": ["BertForTokenClassification"]}, {}, "labels single tokens", "token-classification"),
        ({"architectures": ["BertForMultipleChoice"]}, {}, "chooses among texts", "node of your own"),
        (
            {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "is_encoder_decoder": True},
            {}, "an encoder and a decoder \\(whisper\\)", "node whisper",
        ),
        ({"architectures": ["LlamaForCausalLM"]}, {"task": "classify"}, "a language model", "node llm"),
        ({"architectures": ["BertForMaskedLM"], "hidden_size": 8}, {"task": "embed"}, "masked words", "node embed"),
    ],
)  # fmt: skip
def test_a_folder_of_another_kind_is_refused_with_the_node_that_runs_it(tmp_path, config, options, found, fix):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=found) as caught:
        Llm.ports(LlmConfig(model="m", **options), StepContext(tmp_path))
    assert caught.value.option == "model" and fix in caught.value.fix


def test_a_folder_without_weights_or_tokenizer_is_refused_when_checked(folder, tmp_path):
    for kept, found in (("*.json", "no \\*.safetensors"), ("[!t]*", "no tokenizer")):
        shutil.rmtree(tmp_path / "m", ignore_errors=True)
        (tmp_path / "m").mkdir()
        for path in folder.glob(kept):
            shutil.copy(path, tmp_path / "m")
        for option in ("model", "draft_model"):
            names = {"model": folder.name, "speculation": "draft"} if option == "draft_model" else {}
            if names:
                shutil.copytree(folder, tmp_path / folder.name, dirs_exist_ok=True)
            with pytest.raises(ConfigError, match=found) as caught:
                Llm.ports(LlmConfig(**{**names, option: "m"}), StepContext(tmp_path))
            assert caught.value.option == option


@pytest.fixture
def shared(folder):
    """A step with 20 pages of 16 tokens that others' memory may come to: at most 28 pages."""
    sampling = {"tokens_max": 4, "ignore_eos": True}
    made = Llm(LlmConfig(model=folder.name, sampling=sampling, kv_bytes=20 * 16 * 512))
    made.open(OpenContext(base_dir=folder.parent, kv_most_bytes=28 * 16 * 512))
    return made


def _message(tokens: int) -> dict[str, Any]:
    """Return a conversation of about so many tokens of the tiny model."""
    words = tiny.tokenizer()
    text = "again "
    while len(words.encode(text)) < tokens - 20:
        text += "again "
    return {"messages": [{"role": "user", "content": text}]}


LONG = _message(390)


def test_a_prompt_longer_than_the_initial_memory_waits_and_is_answered(shared):
    page_bytes = shared._opened()[0].runner.page_bytes
    shared.submit(1, LONG)
    assert not shared.busy and shared.memory().waiting == 1
    wanted = shared.memory().wanted_bytes
    assert 20 * page_bytes < wanted <= 28 * page_bytes
    assert shared.resize_memory(21 * page_bytes) == 21 * page_bytes
    assert not shared.busy, "there may be still more"
    assert shared.resize_memory(wanted) == wanted and shared.memory().wanted_bytes == 0
    assert _finish(shared)[1][-1].outputs["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("how", ["an order that changes nothing", "no memory to be had"])
def test_it_is_refused_in_words_when_there_is_no_more(shared, monkeypatch, how):
    page_bytes = shared._opened()[0].runner.page_bytes
    shared.submit(1, LONG)
    if how == "no memory to be had":
        monkeypatch.setattr(shared._opened()[0], "resize", lambda pages: (_ for _ in ()).throw(ModelError("none")))
        with pytest.raises(ModelError):
            shared.resize_memory(28 * page_bytes)
    else:
        shared.resize_memory(20 * page_bytes)
    piece = _finish(shared)[1][0]
    assert "expected at most 319; shorten it" in str(piece.error)


def test_a_prompt_that_never_fits_does_not_wait_and_others_can_cancel(shared):
    shared.submit(1, LONG)
    shared.cancel(1)
    assert shared.memory().wanted_bytes == 0 and shared.resize_memory(20 * 16 * 512) and not shared.busy
    shared.submit(2, _message(490))
    assert "shorten it" in str(_finish(shared)[2][0].error)
