"""`precision`: what autocast and TF32 change, on the CPU and in torch's settings."""

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import whisper
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel

from tests.nodes.test_text_models import WORDS, save, write_onnx
from tests.nodes.test_whisper import DIMS, tone
from weftline.nodes.classify import Classify, ClassifyConfig
from weftline.nodes.contract import Batch, BatchNode, ConfigError, OpenContext, StepContext
from weftline.nodes.embed import Embed, EmbedConfig
from weftline.nodes.precision import compute_in_float32, computing_in, round_weights
from weftline.nodes.whisper import Whisper, WhisperConfig

TEXTS = ["good day", "bad key day key", "key", "bad bad bad day good"]
SMALL = BertConfig(
    vocab_size=len(WORDS), hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256,
    max_position_embeddings=32, id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1},
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("precision")
    write_onnx(folder / "guard")
    save(BertModel(SMALL), folder / "near")
    save(BertForSequenceClassification(SMALL), folder / "judge")
    network = whisper.model.Whisper(DIMS)
    network.decoder.positional_embedding.data.normal_()  # untrained, it is whatever lay in memory
    state = network.state_dict()
    torch.save({"dims": vars(DIMS), "model_state_dict": state}, folder / "model.pt")
    return folder


def opened(node: BatchNode, folder: Path) -> BatchNode:
    node.open(OpenContext(folder, items_max=4))
    node.warm_up()
    return node


def embeddings(folder: Path, precision: str) -> np.ndarray:
    node = opened(Embed(EmbedConfig("near", precision=precision)), folder)
    found: np.ndarray = node.run(Batch({"text": TEXTS}))["embedding"]
    return found


@pytest.mark.parametrize(("precision", "distance"), [("bfloat16", 1e-3), ("float16", 1e-5)])
def test_embeddings_by_autocast_are_near_those_in_float32_and_not_the_same(
    folder: Path, precision: str, distance: float
) -> None:
    plain, found = embeddings(folder, "float32"), embeddings(folder, precision)
    assert found.dtype == np.float32 and not np.array_equal(found, plain)
    assert np.all(1 - np.sum(found * plain, axis=1) < distance)
    assert np.array_equal(embeddings(folder, "tf32"), plain)  # on the CPU


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_labels_by_autocast_are_those_in_float32(folder: Path, precision: str) -> None:
    plain = opened(Classify(ClassifyConfig("judge")), folder).run(Batch({"text": TEXTS}))
    found = opened(Classify(ClassifyConfig("judge", precision)), folder).run(Batch({"text": TEXTS}))
    assert found["label"] == plain["label"] and found["scores"] != plain["scores"]
    for one, other in zip(found["scores"], plain["scores"]):
        assert one == pytest.approx(other, abs=0.01)


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "tf32"])
def test_whisper_computes_in_the_precision_of_its_step(folder: Path, precision: str) -> None:
    plain = opened(Whisper(WhisperConfig("model.pt")), folder)
    node = opened(Whisper(WhisperConfig("model.pt", precision=precision)), folder)
    seen: set[torch.dtype] = set()
    node._network.model.encoder.blocks[0].attn.query.register_forward_hook(lambda *call: seen.add(call[2].dtype))
    node._network.model.decoder.blocks[0].attn.query.register_forward_hook(lambda *call: seen.add(call[2].dtype))
    items = [tone(0.5), tone(1.0, 500)]
    wanted, found = plain.run(Batch({"audio": items})), node.run(Batch({"audio": items}))
    assert seen == {torch.float32 if precision == "tf32" else getattr(torch, precision)}
    for one, other in zip(found["segments"], wanted["segments"]):
        assert one[0]["logprob"] == pytest.approx(other[0]["logprob"], abs=0.1)


def test_weights_rounded_beforehand_give_the_numbers_of_autocast_alone() -> None:
    torch.manual_seed(0)
    network = BertForMaskedLM(SMALL).eval()  # its last layer has the weight of its first table
    rounded = copy.deepcopy(network)
    round_weights(rounded, "bfloat16")
    assert rounded.bert.encoder.layer[0].intermediate.dense.weight.dtype == torch.bfloat16
    assert rounded.cls.predictions.decoder.weight.dtype == torch.float32
    ids = torch.tensor([[2, 3, 4, 5]])
    with torch.inference_mode(), computing_in("bfloat16", "cpu"):
        assert torch.equal(network(input_ids=ids).logits, rounded(input_ids=ids).logits)


def test_tf32_is_allowed_in_calls_only_until_the_last_thread_ends() -> None:
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with computing_in("tf32", "cuda:0"):
            entered.set()
            leave.wait(10)

    beside = threading.Thread(target=stay)
    with pytest.raises(ValueError, match="its call failed"), computing_in("tf32", "cuda:0"):
        assert products.fp32_precision == "tf32"
        beside.start()
        assert entered.wait(10)
        raise ValueError("its call failed")
    assert products.fp32_precision == "tf32"
    leave.set()
    beside.join(10)
    assert products.fp32_precision == before
    with computing_in("tf32", "cpu"):
        assert products.fp32_precision == before


@pytest.fixture
def settings() -> Iterator[Callable[[], dict[str, Any]]]:
    """Read torch's settings of TF32 by all their names, as torch's own code does; they are as before afterwards."""
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    parts = {"matmul": products, "conv": cudnn.conv, "rnn": cudnn.rnn}
    allowed = products.allow_tf32, cudnn.allow_tf32
    before = {name: part.fp32_precision for name, part in parts.items()}

    def read() -> dict[str, Any]:
        with torch.backends.cudnn.flags(enabled=True):  # reads and writes the older names
            pass
        tf32 = {name: part.fp32_precision == "tf32" for name, part in parts.items()}
        return tf32 | {"products": products.allow_tf32, "cudnn": cudnn.allow_tf32}

    yield read
    products.allow_tf32, cudnn.allow_tf32 = allowed
    for name, part in parts.items():
        part.fp32_precision = before[name]


def test_convolutions_compute_in_float32_unless_tf32_is_asked_for(settings: Callable[[], dict[str, Any]]) -> None:
    names = ("matmul", "conv", "rnn", "products", "cudnn")
    compute_in_float32(torch)
    assert settings() == dict.fromkeys(names, False)
    with computing_in("tf32", "cuda:0"):
        assert settings() == dict.fromkeys(names, True)
    assert settings() == dict.fromkeys(names, False)


@pytest.mark.parametrize("asked", ["tf32", "ieee"])
def test_settings_that_a_users_code_made_come_back(asked: str, settings: Callable[[], dict[str, Any]]) -> None:
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    parts = [products, cudnn.conv, cudnn.rnn]
    for part in parts:  # by the newer names: the older ones cannot be read then where they differ
        part.fp32_precision = asked
    with computing_in("tf32", "cuda:0"):
        assert set(settings().values()) == {True}
    assert [part.fp32_precision for part in parts] == [asked] * 3
    assert set(settings().values()) == {asked == "tf32"}


def test_settings_of_older_torch_are_known() -> None:
    cudnn, matmul = SimpleNamespace(allow_tf32=True), SimpleNamespace(allow_tf32=False)
    compute_in_float32(SimpleNamespace(backends=SimpleNamespace(cudnn=cudnn, cuda=SimpleNamespace(matmul=matmul))))
    assert (cudnn.allow_tf32, matmul.allow_tf32) == (False, False)


@pytest.mark.parametrize(
    "node, config, found",
    [
        (Embed, EmbedConfig("near", precision="half"), "'half'"),
        (Embed, EmbedConfig("near", precision="auto"), "'auto'"),
        (Classify, ClassifyConfig("judge", "fp16"), "'fp16'"),
        (Classify, ClassifyConfig("guard", "bfloat16"), "guard is an ONNX model"),
        (Whisper, WhisperConfig("model.pt", precision="int8"), "'int8'"),
    ],
)
def test_a_precision_that_cannot_be_is_refused_when_checked(
    folder: Path, node: type[BatchNode], config: object, found: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        node.ports(config, StepContext(folder))
    assert refused.value.option == "precision" and found in refused.value.found and "float32" in refused.value.expected
