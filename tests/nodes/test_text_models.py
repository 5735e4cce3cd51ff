import json
import pwd
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from tests.nodes.device_values import DEVICE, Bench, down, moves_of_modules
from tests.nodes.model_files import Harm, broken
from weftline.errors import InputError, ModelError
from weftline.nodes import sentence_head
from weftline.nodes.classify import Classify, ClassifyConfig, open_classifier
from weftline.nodes.contract import Batch, ConfigError, OpenContext, StepContext
from weftline.nodes.embed import Embed, EmbedConfig
from weftline.nodes.guardrail import Guardrail, GuardrailConfig
from weftline.nodes.hugging_face import find_folder, load_network, load_tokenizer
from weftline.pipelines.placement.machine import Machine
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.render.text import explain_text
from weftline.pipelines.spec.loader import load_file

WORDS = ["[PAD]", "[UNK]", "good", "bad", "day", "key"]


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def write_onnx(folder: Path) -> Path:
    """A classifier whose logits are how often 'bad' and 'key' stand in the text, times 4, against a constant 2."""
    folder.mkdir(parents=True)
    table = np.zeros((len(WORDS), 3), np.float32)
    table[3, 1] = table[5, 2] = 4
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
            helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
            helper.make_node("Unsqueeze", ["mask", "last"], ["mask3"]),
            helper.make_node("Mul", ["rows", "mask3"], ["real"]),
            helper.make_node("ReduceSum", ["real", "middle"], ["sums"], keepdims=0),
            helper.make_node("Add", ["sums", "bias"], ["logits"]),
        ],
        "g",
        [
            helper.make_tensor_value_info(name, TensorProto.INT64, ["N", "T"])
            for name in ("input_ids", "attention_mask")
        ],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 3])],
        [
            numpy_helper.from_array(table, "table"),
            numpy_helper.from_array(np.array([2, 0, 0], np.float32), "bias"),
            numpy_helper.from_array(np.array([2]), "last"),
            numpy_helper.from_array(np.array([1]), "middle"),
        ],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "model.onnx"
    )
    tokenizer().save(str(folder / "tokenizer.json"))
    config = {"id2label": {"0": "safe", "1": "abuse", "2": "secrets"}, "tokens_max": 8, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("text")
    write_onnx(folder / "guard")
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=32, id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1},
    )  # fmt: skip
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), pad_token="[PAD]", unk_token="[UNK]")
    for name, network in (("judge", BertForSequenceClassification(config)), ("near", BertModel(config))):
        network.save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    return folder


def classify(folder: Path, model: str, device: str = "cpu", **options: Any) -> Classify:
    node = Classify(ClassifyConfig(model, **options))
    node.open(OpenContext(folder, device))
    node.warm_up()
    return node


def test_an_onnx_folder_classifies_a_batch_of_texts_of_any_length(folder: Path) -> None:
    answers = classify(folder, "guard").run(Batch({"text": ["good day", "bad bad day", "key", ""]}))
    assert answers["label"] == ["safe", "abuse", "secrets", "safe"]
    powers = np.exp([2.0, 8.0, 0.0])
    wanted = dict(zip(("safe", "abuse", "secrets"), powers / powers.sum()))
    assert answers["scores"][1] == pytest.approx(wanted, abs=1e-5)
    assert answers["confidence"] == [max(one.values()) for one in answers["scores"]]


def test_a_text_that_is_too_long_to_classify_fails_alone(folder: Path) -> None:
    long = "good " * 50 + "bad"
    answers = classify(folder, "guard").run(Batch({"text": ["bad", long]}))
    for name in ("label", "confidence", "scores"):
        assert str(answers[name][1]).startswith("the text has 51 tokens, and the model reads at most 8\n    fix: ")
        assert isinstance(answers[name][1], InputError) and not isinstance(answers[name][0], InputError)
    for overflow, label in {"end": "safe", "start": "abuse"}.items():
        assert classify(folder, "guard", overflow=overflow).run(Batch({"text": ["key", long]}))["label"][1] == label
    assert refused(Classify, ClassifyConfig("guard", overflow="cut"), folder).option == "overflow"


@pytest.mark.parametrize("independent", [False, True])
def test_classify_joins_the_windows_of_a_long_text(tmp_path: Path, independent: bool) -> None:
    write_onnx(tmp_path / "guard")
    if independent:
        change(tmp_path / "guard" / "config.json", problem_type="multi_label_classification")
    node = classify(tmp_path, "guard", overflow="windows")
    text = "good " * 12 + "bad good good"  # windows of 8 tokens that share 2
    parts = ["good " * 8, "good " * 6 + "bad good", "bad good good"]
    alone = [[*one.values()] for one in node.run(Batch({"text": parts}))["scores"]]
    found = node.run(Batch({"text": ["good", text]}))
    wanted = np.max(alone, axis=0) if independent else np.mean(alone, axis=0)
    assert [*found["scores"][1].values()] == pytest.approx(wanted.tolist(), abs=1e-5)
    assert found["confidence"][1] == max(found["scores"][1].values())


def test_windows_find_what_stands_at_the_end_of_a_long_text(folder: Path) -> None:
    classifier = open_classifier("guard", OpenContext(folder))
    text = "good " * 50_000 + "bad"
    assert classifier.largest(["good"])[0, 1] < 0.2
    assert classifier.largest(["good", text])[1, 1] > 0.8


def test_a_guardrail_judges_all_of_its_longest_text(folder: Path) -> None:
    guard = Guardrail(GuardrailConfig(classifier="guard", policy={"block": ["abuse"]}, chars_max=1_000_000))
    guard.open(OpenContext(folder))
    found = guard.run(Batch({"text": ["good " * 50_000, "good " * 50_000 + "bad"]}))["verdict"]
    assert [one["action"] for one in found] == ["allow", "replace"]


def test_a_text_that_is_too_long_to_embed_fails_alone(folder: Path) -> None:
    node, long = embed(folder, "cpu"), "good bad " * 40
    rules = [None, None, "end", "start", {"side": "end", "tokens": 2}, {"tokens": 99}, "cut", {"side": "end", "n": 1}]
    texts = ["key", long, long + "key", "key " + long, long, long, long, long]
    found = node.run(Batch({"text": texts, "overflow": rules}))
    errors = [str(one) if isinstance(one, InputError) else "" for one in found["embedding"]]
    assert errors[1].startswith("the text has 80 tokens, and the model reads at most 32\n    fix: ")
    assert errors[5] == "overflow.tokens: found 99, expected at most 32, the limit of the model"
    assert errors[6].startswith("overflow: found 'cut', expected one of error, end, start, or ")
    assert errors[7].startswith("overflow: found {") and [bool(one) for one in errors[:5]] == [0, 1, 0, 0, 0]
    whole = node.run(Batch({"text": ["key", "good bad " * 16, "bad good " * 16, "good bad"]}))["embedding"]
    for place, wanted in zip((0, 2, 4), (whole[0], whole[1], whole[3]), strict=True):
        np.testing.assert_allclose(found["embedding"][place], wanted, atol=1e-5)
    np.testing.assert_allclose(found["embedding"][3], whole[1], atol=1e-5)  # 80 tokens end as they begin
    assert found["usage"][0] == {"prompt_tokens": 1, "truncated_tokens": 0}
    assert (
        found["usage"][2] == {"prompt_tokens": 32, "truncated_tokens": 49}
        and found["usage"][1] is found["embedding"][1]
    )
    assert refused(Embed, EmbedConfig("near", overflow="cut"), folder).option == "overflow"


def test_token_ids_are_embedded_as_they_are(folder: Path) -> None:
    node, long = embed(folder, "cpu"), [2, 3] * 40
    ids: list[Any] = [None, [5], [2, 3, 4], long, long, long, [2, 6], [2, -1], [], "2", [True]]
    rules = [*[None] * 4, "end", {"side": "start", "tokens": 1}, *[None] * 5]
    found = node.run(Batch({"text": ["key", *[""] * 10], "tokens": ids, "overflow": rules}))
    wanted = node.run(Batch({"text": ["key", "good bad day", "good bad " * 16, "bad"]}))["embedding"]
    for place, one in ((0, 0), (1, 0), (2, 1), (4, 2), (5, 3)):
        np.testing.assert_allclose(found["embedding"][place], wanted[one], atol=1e-5)
    assert found["usage"][5] == {"prompt_tokens": 1, "truncated_tokens": 79}
    errors = [str(found["embedding"][place]) for place in (3, 6, 7, 8, 9, 10)]
    assert errors[0].startswith("the text has 80 tokens, and the model reads at most 32")
    assert errors[1].startswith("tokens: found 6 at 1, expected token ids of the model, 0 to 5; send text, or ids of")
    assert errors[2].startswith("tokens: found -1 at 1") and errors[5].startswith("tokens: found True at 0")
    assert [one.partition(",")[0] for one in errors[3:5]] == ["tokens: found []", "tokens: found '2'"]


def test_errors_of_long_texts_stay_beside_embeddings_on_a_device(folder: Path) -> None:
    bench, texts = Bench(), ["good day", "good " * 40]
    found = embed(folder, DEVICE).run(bench.batch({"text": texts}, True))["embedding"]
    wanted = embed(folder, "cpu").run(Batch({"text": texts[:1]}))["embedding"]
    assert isinstance(found[1], InputError) and down(found[0]).tobytes() == wanted[0].tobytes()


def test_a_transformers_model_classifies_as_transformers_does(folder: Path) -> None:
    texts = ["good day", "bad", "good key day bad"]
    answers = classify(folder, "judge").run(Batch({"text": texts}))
    network = BertForSequenceClassification.from_pretrained(folder / "judge").eval()
    for text, scores, label in zip(texts, answers["scores"], answers["label"]):
        ids = torch.tensor([tokenizer().encode(text).ids])
        wanted = network(ids).logits.softmax(-1)[0].tolist()
        assert [scores["no"], scores["yes"]] == pytest.approx(wanted, abs=1e-5)
        assert label == ("no", "yes")[int(np.argmax(wanted))]


def test_embeddings_are_the_normalised_mean_of_the_tokens(folder: Path) -> None:
    ports = Embed.ports(EmbedConfig("near"), StepContext(folder))
    assert str(ports.outputs[0].type) == "float32[16]"
    node = Embed(EmbedConfig("near"))
    node.open(OpenContext(folder))
    node.warm_up()
    buffer = np.zeros((2, 16), np.float32)
    found = node.run(Batch({"text": ["good day", "bad key day key"]}, output_buffer=lambda port, dtype, shape: buffer))[
        "embedding"
    ]
    assert found is buffer
    network = BertModel.from_pretrained(folder / "near").eval()
    for row, text in zip(found, ("good day", "bad key day key")):
        state = network(torch.tensor([tokenizer().encode(text).ids])).last_hidden_state[0].mean(0)
        np.testing.assert_allclose(row, (state / state.norm()).detach().numpy(), atol=1e-5)


def embed(folder: Path, device: str) -> Embed:
    node = Embed(EmbedConfig("near"))
    node.open(OpenContext(folder, device))
    node.warm_up()
    return node


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("buffer", [False, True])
def test_on_a_device_embeddings_stay_there(folder: Path, buffer: bool) -> None:
    texts, bench = ["good day", "bad key day key"], Bench()
    wanted = embed(folder, "cpu").run(Batch({"text": texts}))["embedding"]
    node = embed(folder, DEVICE)
    for _ in range(2):
        found = node.run(bench.batch({"text": texts}, buffer))["embedding"]
        assert (found is bench.buffers.get("embedding")) is buffer and down(found).tobytes() == wanted.tobytes()
        assert node.sleep("host") and not node.sleep("nothing")
        node.wake()
    assert Embed.device_ports(node.config, Embed.ports(node.config, StepContext(folder))) == {"embedding"}


@pytest.mark.parametrize("model", ["guard", "judge"])
def test_on_a_device_a_classifier_gives_the_same_scores(folder: Path, model: str) -> None:
    texts = ["good day", "bad bad day", "key"]
    wanted, node = classify(folder, model).run(Batch({"text": texts})), classify(folder, model, DEVICE)
    assert node.run(Batch({"text": texts})) == wanted
    assert node.sleep("host") is (model == "judge")  # ONNX Runtime's session is opened again
    node.wake()
    assert node.run(Batch({"text": texts})) == wanted


def test_sleep_moves_weights_to_host_memory_and_wake_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge, near = classify(folder, "judge"), embed(folder, "cpu")
    guarded = Guardrail(GuardrailConfig(classifier="judge"))
    guarded.open(OpenContext(folder))
    sleepers = ((judge, judge._opened), (near, near), (guarded, guarded._classifier))
    moves = moves_of_modules(monkeypatch)
    for node, owner in sleepers:
        owner._device = "cuda:1"
        assert node.sleep("host") and not node.sleep("process")
        node.wake()
    assert moves == ["cpu", "cuda:1"] * 3
    assert Guardrail(GuardrailConfig()).sleep("nothing")  # nothing of it is on a device


@pytest.mark.slow
def test_first_token_pooling_and_no_normalisation_are_options(folder: Path) -> None:
    node = Embed(EmbedConfig("near", pooling="first", normalise=False, prefix="key "))
    node.open(OpenContext(folder))
    network = BertModel.from_pretrained(folder / "near").eval()
    wanted = network(torch.tensor([tokenizer().encode("key good").ids])).last_hidden_state[0, 0]
    np.testing.assert_allclose(node.run(Batch({"text": ["good"]}))["embedding"][0], wanted.detach().numpy(), atol=1e-5)


def test_ports_are_read_without_transformers_or_torch(folder: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path\n"
        "from weftline.nodes.embed import *; from weftline.nodes.classify import *\n"
        f"step = StepContext(Path({str(folder)!r}))\n"
        "Embed.ports(EmbedConfig('near'), step), Classify.ports(ClassifyConfig('guard'), step)\n"
        "print(sorted({'torch', 'transformers', 'onnxruntime', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "[]", done.stderr


def test_a_hub_model_that_is_not_here_has_a_named_width(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(folder / "hub"))
    assert str(Embed.ports(EmbedConfig("someone/model"), StepContext(folder)).outputs[0].type) == "float32[D]"
    (note,) = Embed.plan_notes(EmbedConfig("someone/model"), StepContext(folder))
    assert "someone/model is not on this machine" in note and "hf://someone/model@REVISION" in note
    snapshot = folder / "hub" / "models--someone--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"hidden_size": 24}')
    assert str(Embed.ports(EmbedConfig("someone/model"), StepContext(folder)).outputs[0].type) == "float32[24]"
    assert not Embed.plan_notes(EmbedConfig("someone/model"), StepContext(folder))


@pytest.mark.parametrize(
    ("model", "found"), [("./absent", "no folder"), ("a/b/c", "no folder"), ("empty", "no config.json")]
)
def test_a_folder_that_is_no_model_is_named_when_checked(folder: Path, model: str, found: str) -> None:
    (folder / "empty").mkdir(exist_ok=True)
    with pytest.raises(ConfigError, match=found):
        Embed.ports(EmbedConfig(model), StepContext(folder))


def test_pickled_weights_are_not_loaded(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "judge", tmp_path / "judge")
    (tmp_path / "judge" / "model.safetensors").unlink()
    torch.save({"a": Harm(tmp_path / "ran")}, tmp_path / "judge" / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled weights are not loaded"):
        classify(tmp_path, "judge")
    assert not (tmp_path / "ran").exists()


def test_code_beside_a_model_is_not_run(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "judge", tmp_path / "judge")
    config = json.loads((tmp_path / "judge" / "config.json").read_text())
    config |= {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "mine.C", "AutoModelForSequenceClassification": "mine.M"},
    }
    (tmp_path / "judge" / "config.json").write_text(json.dumps(config))
    (tmp_path / "judge" / "mine.py").write_text(f"import os; os.mkdir({str(tmp_path / 'ran')!r})")
    with pytest.raises(ModelError):
        classify(tmp_path, "judge")
    assert not (tmp_path / "ran").exists()


def test_weights_that_lack_a_tensor_are_refused_not_made_up(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder / "judge", tmp_path / "judge")
    state = load_file(tmp_path / "judge" / "model.safetensors")
    del state["classifier.weight"]
    save_file(state, tmp_path / "judge" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"classifier\.weight"):
        classify(tmp_path, "judge")


@pytest.mark.parametrize("file", ["model.onnx", "tokenizer.json", "config.json"])
def test_broken_files_of_an_onnx_folder_fail_with_a_reason(folder: Path, tmp_path: Path, file: str) -> None:
    write_onnx(tmp_path / "guard")
    data = (tmp_path / "guard" / file).read_bytes()
    refused = 0
    for candidate in broken(data, truncations=100, flips=range(40)):
        (tmp_path / "guard" / file).write_bytes(candidate)
        started = time.process_time()
        try:
            open_classifier("guard", OpenContext(tmp_path))
        except ModelError as error:
            refused += 1
            assert "guard" in str(error) and str(tmp_path) not in str(error)
        assert time.process_time() - started < 5
    assert refused >= 95


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    write_onnx(tmp_path / "guard")
    (tmp_path / "guard" / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        open_classifier("guard", OpenContext(tmp_path))


SIZES = {
    "vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 32,
}  # fmt: skip


def save(network: object, folder: Path) -> Path:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), pad_token="[PAD]", unk_token="[UNK]")
    network.save_pretrained(folder)  # type: ignore[attr-defined]
    fast.save_pretrained(folder)
    return folder


def change(path: Path, **keys: object) -> None:
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.is_file() else {}), **keys}))


def refused(node: type, config: object, folder: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        node.ports(config, StepContext(folder))  # type: ignore[attr-defined]
    return caught.value


@pytest.mark.parametrize(
    ("network", "keys", "found", "fix"),
    [
        (
            BertForSequenceClassification,
            {"num_labels": 1},
            r"one label \(num_labels=1\).* no probability",
            "two labels",
        ),
        (BertForSequenceClassification, {"problem_type": "regression"}, "is a regression", "two labels"),
        (
            BertForSequenceClassification,
            {"num_labels": 1, "problem_type": "multi_label_classification"},
            "one label, 'LABEL_0'",
            "guardrail",
        ),
        (BertForSequenceClassification, {"problem_type": "ranking"}, "problem_type .* is 'ranking'", ""),
        (
            BertForTokenClassification,
            {},
            "BertForTokenClassification, which labels single tokens",
            "token-classification",
        ),
        (BertForMaskedLM, {}, "BertForMaskedLM, which guesses masked words", "node embed"),
        (BertModel, {}, "a BertModel, which has no head", "node embed"),
    ],
)
def test_a_model_without_label_probabilities_is_refused_by_the_check(
    tmp_path: Path, network: type, keys: dict[str, object], found: str, fix: str
) -> None:
    save(network(BertConfig(**SIZES, **keys)), tmp_path / "m")
    error = refused(Classify, ClassifyConfig("m"), tmp_path)
    assert re.search(found, error.found) and fix in error.fix and error.option == "model"
    if "guardrail" not in fix:
        with pytest.raises(ModelError, match=found):  # the same where the file was not here when it was checked
            open_classifier("m", OpenContext(tmp_path))


def test_a_cross_encoder_is_refused_when_checked(folder: Path, tmp_path: Path) -> None:
    for keys in (
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid", "version": "5.0"}},
    ):
        shutil.copytree(folder / "judge", tmp_path / "judge", dirs_exist_ok=True)
        change(tmp_path / "judge" / "config.json", **keys)
        assert "two texts against each other" in refused(Classify, ClassifyConfig("judge"), tmp_path).found


def test_labels_that_do_not_exclude_each_other_have_scores_of_their_own(tmp_path: Path) -> None:
    config = BertConfig(**SIZES, num_labels=3, problem_type="multi_label_classification")
    network = BertForSequenceClassification(config).eval()
    save(network, tmp_path / "m")
    Classify.ports(ClassifyConfig("m"), StepContext(tmp_path))
    (scores,) = classify(tmp_path, "m").run(Batch({"text": ["good day"]}))["scores"]
    wanted = network(torch.tensor([tokenizer().encode("good day").ids])).logits.sigmoid()[0].tolist()
    assert list(scores.values()) == pytest.approx(wanted, abs=1e-5)


def test_two_labels_without_names_are_named_as_transformers_does(tmp_path: Path) -> None:
    save(BertForSequenceClassification(BertConfig(**SIZES)), tmp_path / "m")
    assert "id2label" not in json.loads((tmp_path / "m" / "config.json").read_text())
    Classify.ports(ClassifyConfig("m"), StepContext(tmp_path))
    assert set(classify(tmp_path, "m").run(Batch({"text": ["bad"]}))["scores"][0]) == {"LABEL_0", "LABEL_1"}


def test_a_decoder_judges_texts_of_unlike_lengths_at_their_own_last_token(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES, num_labels=2, pad_token_id=1)
    network = LlamaForSequenceClassification(config).eval()
    network.save_pretrained(tmp_path / "m")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer(), unk_token="[UNK]").save_pretrained(tmp_path / "m")
    texts = ["good", "bad key day good", "day bad"]
    found = classify(tmp_path, "m").run(Batch({"text": texts}))["scores"]
    for text, scores in zip(texts, found, strict=True):
        wanted = network(torch.tensor([tokenizer().encode(text).ids])).logits.softmax(-1)[0].tolist()
        assert list(scores.values()) == pytest.approx(wanted, abs=1e-5)


def test_token_types_are_zeros_and_other_ports_are_refused(tmp_path: Path) -> None:
    write_onnx(tmp_path / "guard")
    model = onnx.load(tmp_path / "guard" / "model.onnx")
    model.graph.input.append(helper.make_tensor_value_info("token_type_ids", TensorProto.INT64, ["N", "T"]))
    onnx.save(model, tmp_path / "guard" / "model.onnx")
    Classify.ports(ClassifyConfig("guard"), StepContext(tmp_path))
    assert classify(tmp_path, "guard").run(Batch({"text": ["bad"]}))["label"] == ["abuse"]
    model.graph.input[0].name = "tokens"
    onnx.save(model, tmp_path / "guard" / "model.onnx")
    error = refused(Classify, ClassifyConfig("guard"), tmp_path)
    assert "tokens (int64)" in error.found and "input_ids" in error.expected and "node onnx" in error.fix


# what a folder of sentence-transformers says


def sentence_folder(folder: Path, pooling: dict[str, object], *modules: str, **settings: object) -> BertModel:
    """Write a folder as sentence-transformers does and return its network."""
    torch.manual_seed(1)
    network = BertModel(BertConfig(**SIZES), add_pooling_layer=False).eval()
    save(network, folder)
    listed = []
    for index, name in enumerate(("Transformer", "Pooling", *modules)):
        path = "" if index == 0 else f"{index}_{name}"
        (folder / path).mkdir(exist_ok=True)
        listed.append({"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"})
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 16, **pooling}))
    change(folder / "config_sentence_transformers.json", **settings)
    return network


def states_of(network: BertModel, text: str) -> torch.Tensor:
    with torch.inference_mode():
        return network(torch.tensor([tokenizer().encode(text).ids])).last_hidden_state[0]


BY_HAND = {
    "cls": lambda states: states[0],
    "mean": lambda states: states.mean(0),
    "max": lambda states: states.max(0).values,
    "lasttoken": lambda states: states[-1],
    "mean_sqrt_len_tokens": lambda states: states.sum(0) / len(states) ** 0.5,
    "weightedmean": lambda states: (
        (states * torch.arange(1, len(states) + 1)[:, None]).sum(0) / (len(states) * (len(states) + 1) / 2)
    ),
}


@pytest.mark.parametrize("mode", BY_HAND)
@pytest.mark.parametrize("old", [True, False])
def test_embeddings_are_pooled_and_scaled_as_the_folder_says(tmp_path: Path, mode: str, old: bool) -> None:
    key = next(key for key, value in sentence_head._OLD_KEYS.items() if value == mode)
    other = dict.fromkeys(sentence_head._OLD_KEYS, False)
    network = sentence_folder(
        tmp_path / "m", {**other, key: True} if old else {"pooling_mode": mode}, *["Normalize"] * old
    )
    texts = ["good day", "bad key day key good", "key"]
    assert str(Embed.ports(EmbedConfig("m"), StepContext(tmp_path)).outputs[0].type) == "float32[16]"
    node = Embed(EmbedConfig("m"))
    node.open(OpenContext(tmp_path))
    for text, row in zip(texts, node.run(Batch({"text": texts}))["embedding"], strict=True):
        wanted = BY_HAND[mode](states_of(network, text))
        np.testing.assert_allclose(row, wanted / wanted.norm() if old else wanted, atol=1e-5)


def test_dense_layer_prompt_and_longest_text_come_from_the_folder(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    prompts = {"prompts": {"query": "Key "}, "default_prompt_name": "query"}
    network = sentence_folder(tmp_path / "m", {"pooling_mode_mean_tokens": True}, "Dense", "Normalize", **prompts)
    change(tmp_path / "m" / "sentence_bert_config.json", max_seq_length=3, do_lower_case=True)
    change(
        tmp_path / "m" / "2_Dense" / "config.json",
        in_features=16, out_features=4, bias=True, activation_function="torch.nn.modules.activation.Tanh",
    )  # fmt: skip
    layer = torch.nn.Linear(16, 4)
    save_file(
        {"linear.weight": layer.weight.data, "linear.bias": layer.bias.data},
        tmp_path / "m" / "2_Dense" / "model.safetensors",
    )
    step = StepContext(tmp_path)
    assert str(Embed.ports(EmbedConfig("m"), step).outputs[0].type) == "float32[4]"
    (line,) = Embed.plan_notes(EmbedConfig("m"), step)
    assert line == (
        "settings of m/modules.json: pooling mean, dense 16 to 4 (Tanh), length 1, prefix 'Key ', at most 3 tokens"
    )
    node = Embed(EmbedConfig("m", overflow="end"))
    node.open(OpenContext(tmp_path))
    (found,) = node.run(Batch({"text": ["Good bad day day day"]}))["embedding"]
    wanted = layer(states_of(network, "key good bad").mean(0)).tanh().detach()
    np.testing.assert_allclose(found, wanted / wanted.norm(), atol=1e-5)
    assert node.sleep("host")
    node.wake()
    np.testing.assert_array_equal(node.run(Batch({"text": ["Good bad day day day"]}))["embedding"][0], found)


@pytest.mark.parametrize("normalise", [True, False])
def test_embeddings_are_cut_and_then_scaled(tmp_path: Path, normalise: bool) -> None:
    network = sentence_folder(tmp_path / "m", {"pooling_mode_mean_tokens": True}, *["Normalize"] * normalise)
    config = EmbedConfig("m", dimensions=5)
    assert str(Embed.ports(config, StepContext(tmp_path)).outputs[0].type) == "float32[5]"
    assert "pooling mean, the first 5 numbers, " in Embed.plan_notes(config, StepContext(tmp_path))[0]
    found = embed_of(tmp_path, config, "good day", "bad key")
    for row, text in zip(found, ("good day", "bad key"), strict=True):
        wanted = states_of(network, text).mean(0)[:5]
        np.testing.assert_allclose(row, wanted / wanted.norm() if normalise else wanted, atol=1e-5)


def test_more_dimensions_than_the_model_has_are_refused(tmp_path: Path) -> None:
    sentence_folder(tmp_path / "m", {"pooling_mode_mean_tokens": True})
    save(BertModel(BertConfig(**SIZES)), tmp_path / "plain")
    for model in ("m", "plain"):
        Embed.ports(EmbedConfig(model, dimensions=16), StepContext(tmp_path))
        error = refused(Embed, EmbedConfig(model, dimensions=17), tmp_path)
        assert error.option == "dimensions" and f"{model} gives embeddings of 16 numbers" in error.found
        with pytest.raises(ModelError, match="embeddings of 16 numbers"):
            embed_of(tmp_path, EmbedConfig(model, dimensions=17), "good")
    assert refused(Embed, EmbedConfig("m", dimensions=0), tmp_path).expected == "a number from 1"
    ports = Embed.ports(EmbedConfig("someone/model-that-is-not-here", dimensions=7), StepContext(tmp_path)).outputs
    assert str(ports[0].type) == "float32[7]"


def test_a_prompt_of_the_folder_is_chosen_by_name(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "key ", "document": "day "}, "default_prompt_name": "query"}
    network = sentence_folder(tmp_path / "m", {"pooling_mode_cls_token": True}, **prompts)
    for name, prefix in ((None, "key "), ("query", "key "), ("document", "day ")):
        (found,) = embed_of(tmp_path, EmbedConfig("m", prompt=name), "good day")
        np.testing.assert_allclose(found, states_of(network, prefix + "good day")[0], atol=1e-5)
        assert f"prefix '{prefix}'" in Embed.plan_notes(EmbedConfig("m", prompt=name), StepContext(tmp_path))[0]


def test_an_unknown_prompt_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "key ", "document": "day "}}
    sentence_folder(tmp_path / "m", {"pooling_mode_mean_tokens": True}, **prompts)
    save(BertModel(BertConfig(**SIZES)), tmp_path / "plain")
    error = refused(Embed, EmbedConfig("m", prompt="passage"), tmp_path)
    assert error.option == "prompt" and "'passage' is no prompt" in error.found
    assert error.expected == "one of query, document"
    error = refused(Embed, EmbedConfig("plain", prompt="query"), tmp_path)
    assert error.option == "prompt" and "no modules.json" in error.found
    assert refused(Embed, EmbedConfig("m", prompt="query", prefix="x"), tmp_path).option == "prompt"
    change(tmp_path / "m" / "1_Pooling" / "config.json", include_prompt=False)
    Embed.ports(EmbedConfig("m"), StepContext(tmp_path))
    assert "include_prompt" in refused(Embed, EmbedConfig("m", prompt="query"), tmp_path).found


def test_an_option_goes_before_the_folder_and_the_plan_says_so(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "key "}, "default_prompt_name": "query"}
    network = sentence_folder(tmp_path / "m", {"pooling_mode_cls_token": True}, "Normalize", **prompts)
    config = EmbedConfig("m", pooling="max", normalise=False, prefix="")
    node = Embed(config)
    node.open(OpenContext(tmp_path))
    (found,) = node.run(Batch({"text": ["good day"]}))["embedding"]
    np.testing.assert_allclose(found, states_of(network, "good day").max(0).values, atol=1e-5)
    (tmp_path / "p.yaml").write_text(
        "weftline: 1\nname: p\ninputs: {text: text}\noutputs: {e: e.embedding}\n"
        "steps: {e: {node: embed, model: m, pooling: max, normalise: false, prefix: '', inputs: {text: text}}}\n"
    )
    plan = explain_text(make_plan(load_file(tmp_path / "p.yaml"), Machine(cores=2, memory_bytes=8 << 30)))
    assert "e: settings of m/modules.json: pooling max, not normalised, no prefix" in plan
    assert "e: option pooling: 'max' overrides 'first' of m/modules.json" in plan
    assert "option normalise: False" in plan and "option prefix: ''" in plan


@pytest.mark.parametrize(
    ("file", "keys", "found"),
    [
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "max"]}, "pools by mean and max"),
        ("1_Pooling/config.json", {"pooling_mode": "attention"}, "pools by attention"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt"),
        ("config_sentence_transformers.json", {"default_prompt_name": "absent"}, "default_prompt_name .* is 'absent'"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "is a SparseEncoder"),
        ("sentence_bert_config.json", {"max_seq_length": "long"}, "max_seq_length .* is 'long'"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "transformer_task .* is 'fill-mask'"),
        ("sentence_bert_config.json", {"query_expansion": {"length": 32}}, "query_expansion .* is {'length': 32}"),
        ("2_Dense/config.json", {"activation_function": "my.own.Thing"}, "activation_function .* is my.own.Thing"),
        ("2_Dense/config.json", {"use_residual": True}, "use_residual"),
        ("2_Dense/config.json", {"in_features": 8}, "has 8 inputs, and the module before it has 16 outputs"),
        ("2_Dense/model.safetensors", None, "no model.safetensors; pickled weights"),
        ("modules.json", "LayerNorm", "has Transformer, Pooling, LayerNorm"),
        ("modules.json", "../x", "the path '../x'"),
    ],
)
def test_unknown_settings_of_a_sentence_folder_are_refused_by_name(
    tmp_path: Path, file: str, keys: dict[str, object] | str | None, found: str
) -> None:
    prompts = {"prompts": {"query": "key "}, "default_prompt_name": "query"}
    sentence_folder(tmp_path / "m", {"pooling_mode_mean_tokens": True}, "Dense", **prompts)
    change(tmp_path / "m" / "2_Dense" / "config.json", in_features=16, out_features=4)
    (tmp_path / "m" / "2_Dense" / "model.safetensors").write_bytes(b"")
    Embed.ports(EmbedConfig("m"), StepContext(tmp_path))
    path = tmp_path / "m" / file
    if isinstance(keys, dict):
        change(path, **keys)
    elif keys is None:
        path.unlink()
    else:
        modules = json.loads(path.read_text())
        modules[2] |= {"path": keys} if "/" in keys else {"type": f"sentence_transformers.models.{keys}"}
        path.write_text(json.dumps(modules))
    error = refused(Embed, EmbedConfig("m"), tmp_path)
    assert re.search(found, error.found) and error.option == "model"


def test_a_network_in_a_folder_of_its_own_is_found(tmp_path: Path) -> None:
    network = sentence_folder(tmp_path / "m", {"pooling_mode_mean_tokens": True})
    (tmp_path / "m" / "0_Transformer").mkdir()
    for path in [path for path in (tmp_path / "m").iterdir() if path.is_file() and "modules" not in path.name]:
        path.rename(tmp_path / "m" / "0_Transformer" / path.name)
    modules = json.loads((tmp_path / "m" / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (tmp_path / "m" / "modules.json").write_text(json.dumps(modules))
    Embed.ports(EmbedConfig("m"), StepContext(tmp_path))
    node = Embed(EmbedConfig("m"))
    node.open(OpenContext(tmp_path))
    (found,) = node.run(Batch({"text": ["good day"]}))["embedding"]
    np.testing.assert_allclose(found, states_of(network, "good day").mean(0), atol=1e-5)


# folders that are not what a step wants


def test_a_masked_language_model_embeds_without_its_pooler(tmp_path: Path) -> None:
    network = BertForMaskedLM(BertConfig(**SIZES)).eval()
    save(network, tmp_path / "m")
    Embed.ports(EmbedConfig("m"), StepContext(tmp_path))
    (found,) = embed_of(tmp_path, EmbedConfig("m", normalise=False), "good day")
    np.testing.assert_allclose(found, states_of(network.bert, "good day").mean(0), atol=1e-5)


def embed_of(folder: Path, config: EmbedConfig, *texts: str) -> np.ndarray:
    node = Embed(config)
    node.open(OpenContext(folder))
    found: np.ndarray = node.run(Batch({"text": texts}))["embedding"]
    return found


def test_other_models_embed_only_with_a_stated_pooling(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=len(WORDS), n_embd=16, n_layer=1, n_head=2, n_positions=32)
    save(GPT2LMHeadModel(config), tmp_path / "lm")
    save(BertForSequenceClassification(BertConfig(**SIZES)), tmp_path / "judge")
    error = refused(Embed, EmbedConfig("lm"), tmp_path)
    assert "GPT2LMHeadModel, which is a language model" in error.found and "task: embed" in error.fix
    assert "use node classify" in refused(Embed, EmbedConfig("judge"), tmp_path).fix
    for model in ("lm", "judge"):
        Embed.ports(EmbedConfig(model, pooling="last"), StepContext(tmp_path))


@pytest.mark.parametrize(("node", "config"), [(Embed, EmbedConfig), (Classify, ClassifyConfig)])
def test_an_incomplete_folder_is_refused_with_a_fix(folder: Path, tmp_path: Path, node: type, config: type) -> None:
    model = "near" if node is Embed else "judge"
    shutil.copytree(folder / model, tmp_path / "m")
    weights, spare = tmp_path / "m" / "model.safetensors", (folder / model / "model.safetensors").read_bytes()

    def error(name: str = "m") -> ConfigError:
        return refused(node, config(name), tmp_path)

    assert "name its folder, m" in error("m/config.json").fix and "is a file" in error("m/config.json").found
    (tmp_path / "m" / "tokenizer.json").rename(tmp_path / "t")
    assert "m has no tokenizer" in error().found and "AutoTokenizer" in error().fix
    (tmp_path / "t").rename(tmp_path / "m" / "tokenizer.json")
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    assert "Git LFS pointer" in error().found and "git lfs pull" in error().fix
    weights.write_bytes(spare)
    change(
        tmp_path / "m" / "model.safetensors.index.json",
        weight_map={"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
    )
    assert "m lacks model-00001-of-00002.safetensors, model-00002-of-00002.safetensors" in error().found
    (tmp_path / "m" / "model.safetensors.index.json").unlink()
    weights.rename(tmp_path / "m" / "pytorch_model.bin")
    assert "has no *.safetensors, but pytorch_model.bin; pickled" in error().found
    assert ".from_pretrained('m').save_pretrained('m')" in error().fix
    (tmp_path / "m" / "config.json").rename(tmp_path / "m" / "adapter_config.json")
    assert "LoRA adapter" in error().fix
    shutil.copytree(folder / model, tmp_path / "out" / "snapshots" / "abc")
    assert "name the folder inside, out/snapshots/abc" in error("out").fix


def test_a_name_that_is_nowhere_says_what_could_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in ("model.gguf", "weights.safetensors"):
        assert f"there is no folder {file}" in refused(Embed, EmbedConfig(file), tmp_path).found
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="fix: name the model's folder"):
        classify(tmp_path, "no-such-model-anywhere")


def test_a_folder_is_loaded_without_the_bars_of_transformers(folder, capfd):
    load_network("BertModel", "near", OpenContext(folder))
    assert capfd.readouterr().err == ""


def test_a_user_without_a_home_folder_has_no_cached_hub_model(tmp_path, monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])  # no entry for the user
    assert find_folder("some/model", tmp_path) is None


def test_a_tokenizer_error_without_text_is_named_by_its_class(tmp_path, monkeypatch):
    def refuse(path):
        raise Exception("\n")

    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr("tokenizers.Tokenizer", type("Refusing", (), {"from_file": staticmethod(refuse)}))
    with pytest.raises(ModelError, match=r"models/m/tokenizer\.json is corrupt: Exception$"):
        load_tokenizer(tmp_path, "models/m")
