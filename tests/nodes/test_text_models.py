import json
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

from tests.nodes.model_files import Harm, broken
from tests.nodes.near_values import DEVICE, Bench, down, moves_of_modules
from weftline.errors import ModelError
from weftline.nodes.classify import Classify, ClassifyConfig
from weftline.nodes.contract import Batch, ConfigError, OpenContext, StepContext
from weftline.nodes.embed import Embed, EmbedConfig
from weftline.nodes.guardrail import Guardrail, GuardrailConfig
from weftline.nodes.text_classifier import open_classifier

WORDS = ["[PAD]", "[UNK]", "good", "bad", "day", "key"]


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def write_onnx(folder: Path) -> Path:
    """A classifier whose logits are how often 'bad' and 'key' stand in the text, times 4, against a constant 2."""
    folder.mkdir()
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


def classify(folder: Path, model: str, device: str = "cpu") -> Classify:
    node = Classify(ClassifyConfig(model))
    node.open(OpenContext(folder, device))
    node.warm_up()
    return node


def test_an_onnx_folder_classifies_a_batch_of_texts_of_any_length(folder: Path) -> None:
    answers = classify(folder, "guard").run(
        Batch({"text": ["good day", "bad bad day", "key", "", "good " * 50 + "bad"]})
    )
    assert answers["label"] == ["safe", "abuse", "secrets", "safe", "safe"]  # the last is judged by its first 8 tokens
    powers = np.exp([2.0, 8.0, 0.0])
    wanted = dict(zip(("safe", "abuse", "secrets"), powers / powers.sum()))
    assert answers["scores"][1] == pytest.approx(wanted, abs=1e-5)


def test_windows_find_what_stands_at_the_end_of_a_long_text(folder: Path) -> None:
    classifier = open_classifier("guard", OpenContext(folder))
    text = "good " * 700 + "bad"
    assert classifier.probabilities([text])[0, 1] < 0.2
    assert classifier.probabilities(["good", text], windows_max=1000)[1, 1] > 0.8


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
    room = np.zeros((2, 16), np.float32)
    found = node.run(Batch({"text": ["good day", "bad key day key"]}, room=lambda port, dtype, shape: room))[
        "embedding"
    ]
    assert found is room
    network = BertModel.from_pretrained(folder / "near").eval()
    for row, text in zip(found, ("good day", "bad key day key")):
        state = network(torch.tensor([tokenizer().encode(text).ids])).last_hidden_state[0].mean(0)
        np.testing.assert_allclose(row, (state / state.norm()).detach().numpy(), atol=1e-5)


def embed(folder: Path, device: str) -> Embed:
    node = Embed(EmbedConfig("near"))
    node.open(OpenContext(folder, device))
    node.warm_up()
    return node


@pytest.mark.parametrize("room", [False, True])
def test_on_a_device_embeddings_stay_there(folder: Path, room: bool) -> None:
    texts, bench = ["good day", "bad key day key"], Bench()
    wanted = embed(folder, "cpu").run(Batch({"text": texts}))["embedding"]
    node = embed(folder, DEVICE)
    for _ in range(2):
        found = node.run(bench.batch({"text": texts}, room))["embedding"]
        assert (found is bench.rooms.get("embedding")) is room and down(found).tobytes() == wanted.tobytes()
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


def test_asleep_a_networks_weights_are_in_host_memory_and_awake_where_they_were(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    snapshot = folder / "hub" / "models--someone--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"hidden_size": 24}')
    assert str(Embed.ports(EmbedConfig("someone/model"), StepContext(folder)).outputs[0].type) == "float32[24]"


@pytest.mark.parametrize(
    ("model", "found"), [("./absent", "no folder"), ("a/b/c", "no folder"), ("empty", "no config.json")]
)
def test_a_folder_that_is_no_model_is_named_when_checked(folder: Path, model: str, found: str) -> None:
    (folder / "empty").mkdir(exist_ok=True)
    with pytest.raises(ConfigError, match=found):
        Embed.ports(EmbedConfig(model), StepContext(folder))


def test_pickled_weights_are_not_loaded(folder: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(folder / "judge", tmp_path / "judge")
    (tmp_path / "judge" / "model.safetensors").unlink()
    torch.save({"a": Harm(tmp_path / "ran")}, tmp_path / "judge" / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled weights are not loaded"):
        classify(tmp_path, "judge")
    assert not (tmp_path / "ran").exists()


def test_code_beside_a_model_is_not_run(folder: Path, tmp_path: Path) -> None:
    import shutil

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
    import shutil

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
        assert time.process_time() - started < 1
    assert refused >= 95


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    write_onnx(tmp_path / "guard")
    (tmp_path / "guard" / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        open_classifier("guard", OpenContext(tmp_path))
