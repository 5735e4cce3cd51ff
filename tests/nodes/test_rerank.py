"""Reranking: scores equal transformers' own on the same pairs, whatever else is in the batch."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

import weftline
from tests.engine.serving.http.hosted import hosted
from tests.nodes.device_values import DEVICE, moves_of_modules
from weftline.engine.repository import Repository
from weftline.engine.serving.config import ServedPipeline
from weftline.engine.serving.local import LocalBackend
from weftline.errors import ModelError
from weftline.nodes.classify import Classify, ClassifyConfig
from weftline.nodes.contract import Batch, ConfigError, OpenContext, StepContext
from weftline.nodes.embed import Embed, EmbedConfig
from weftline.nodes.rerank import Rerank, RerankConfig, calls_of

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
WORDS = [f"w{number}" for number in range(60)]
SIZES = {
    "vocab_size": len(SPECIAL) + len(WORDS), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 16, "initializer_range": 0.5, "pad_token_id": 0, "num_labels": 1,
}  # fmt: skip
KINDS: dict[str, Any] = {
    "bert": lambda: BertForSequenceClassification(BertConfig(**SIZES, max_position_embeddings=40)),
    "roberta": lambda: RobertaForSequenceClassification(
        RobertaConfig(**SIZES, max_position_embeddings=42, type_vocab_size=1)
    ),
    "xlm-roberta": lambda: XLMRobertaForSequenceClassification(
        XLMRobertaConfig(**SIZES, max_position_embeddings=42, type_vocab_size=1)
    ),
}
"""Small models with random weights that read 40 tokens."""


def save(network: Any, folder: Path) -> Path:
    """Write a model with a tokenizer that marks pairs as its kind does, and no activation."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*SPECIAL, *WORDS])}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    bert = network.config.model_type == "bert"
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1" if bert else "<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 1), ("</s>", 2)],
    )
    names = ["input_ids", "token_type_ids", "attention_mask"] if bert else ["input_ids", "attention_mask"]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", model_input_names=names, model_max_length=512
    )
    network.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("rerank")
    for name, make in KINDS.items():
        save(make(), folder / name)
    return folder


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


def scores_by_transformers(folder: Path, query: str, passages: list[str], activation: str = "sigmoid") -> np.ndarray:
    """Score pairs one at a time with transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    found = []
    with torch.inference_mode():
        for passage in passages:
            inputs = tokenizer([query], [passage], truncation="longest_first", max_length=40, return_tensors="pt")
            found.append(network(**inputs).logits[0, 0])
        scores = torch.tensor(found)
        return (scores.sigmoid() if activation == "sigmoid" else scores).numpy()


def opened(folder: Path, model: str, device: str = "cpu", **options: Any) -> Rerank:
    config = RerankConfig(model, **options)
    Rerank.ports(config, StepContext(folder))
    node = Rerank(config)
    node.open(OpenContext(folder, device))
    node.warm_up()
    return node


def scores(node: Rerank, *items: tuple[str, list[str]]) -> list[Any]:
    batch = Batch({"query": [query for query, _ in items], "passages": [passages for _, passages in items]})
    return list(node.run(batch)["scores"])


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("activation", ["sigmoid", "none"])
def test_scores_equal_transformers_for_all_requests_of_a_batch(folder: Path, model: str, activation: str) -> None:
    rng = random.Random(5)
    items = [(text(rng, rng.randint(1, 6)), [text(rng, rng.randint(0, 30)) for _ in range(n)]) for n in (7, 0, 1, 19)]
    items.append((text(rng, 30), [text(rng, 200), "w1", text(rng, 25)]))  # truncated, in either text
    found = scores(opened(folder, model, activation=activation, pairs_max=4, overflow="end"), *items)
    assert [one.shape for one in found] == [(7,), (0,), (1,), (19,), (3,)]
    for (query, passages), one in zip(items, found, strict=True):
        assert one.dtype == np.float32
        np.testing.assert_allclose(
            one, scores_by_transformers(folder / model, query, passages, activation), atol=1e-5, rtol=1e-5
        )
    assert np.ptp(found[3]) > 0.01, "the passages have different scores"


def test_calls_are_bounded_in_pairs_and_in_padded_tokens() -> None:
    calls = calls_of([10, 500, 20, 480, 15, 500, 900], 3, tokens_max=1000)
    assert calls == [[6], [1, 5], [3, 2], [4, 0]]
    assert calls_of([], 3) == [] and calls_of([5000], 3, tokens_max=1000) == [[0]]
    assert [len(call) for call in calls_of([0, 0, 1], 2)] == [2, 1]


def test_a_batch_of_empty_lists_runs_no_model(folder: Path) -> None:
    node = opened(folder, "bert")
    node._network = None
    assert [one.shape for one in scores(node, ("w1", []), ("w2", []))] == [(0,), (0,)]


def test_an_item_that_fails_leaves_the_others_their_scores(folder: Path) -> None:
    node = opened(folder, "bert")
    bad = "w1 \udc80"  # no text that the tokenizer accepts
    wanted = scores(node, ("w1", ["w2", "w3 w4"]))[0]
    found = scores(node, ("w1", ["w2", "w3 w4"]), ("w1", ["w2", bad]), ("w1", []))
    np.testing.assert_allclose(found[0], wanted, atol=1e-6)
    assert isinstance(found[1], Exception) and found[2].shape == (0,)
    for items in ([("w1", [bad])], [("w1", [bad]), (bad, ["w2"])]):
        with pytest.raises(TypeError):
            scores(node, *items)


def test_memory_that_runs_out_fails_the_batch_so_that_it_is_halved(folder: Path) -> None:
    node = opened(folder, "bert")
    calls: list[int] = []

    def call(encoded: Any) -> np.ndarray:
        calls.append(len(encoded))
        raise MemoryError

    node._call = call  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        scores(node, ("w1", ["w2"]), ("w1", ["w3"]))
    assert calls == [2], "items are not tried one by one"


@pytest.mark.parametrize(
    ("file", "keys", "found"),
    [
        ("config.json", {}, "sigmoid"),
        ("config.json", {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "none"),
        ("config.json", {"sbert_ce_default_activation_function": None}, "sigmoid"),
        ("config.json", {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "none"),
        ("config.json", {"sentence_transformers": {"version": "5.0"}}, "sigmoid"),
        (
            "config_sentence_transformers.json",
            {"activation_fn": "torch.nn.modules.linear.Identity", "model_type": "CrossEncoder", "prompts": {}},
            "none",
        ),
    ],
)
def test_the_activation_is_that_of_the_folder(tmp_path: Path, file: str, keys: dict[str, Any], found: str) -> None:
    save(KINDS["bert"](), tmp_path / "m")
    change(tmp_path / "m" / file, **keys)
    expected = scores_by_transformers(tmp_path / "m", "w1 w2", ["w3", "w4 w5"], found)
    np.testing.assert_allclose(scores(opened(tmp_path, "m"), ("w1 w2", ["w3", "w4 w5"]))[0], expected, atol=1e-5)
    (note,) = Rerank.plan_notes(RerankConfig("m"), StepContext(tmp_path))
    assert note == f"settings of m: activation {found}, at most 512 tokens"


def test_texts_are_cut_on_the_side_that_is_stated(tmp_path: Path) -> None:
    save(KINDS["bert"](), tmp_path / "m")
    change(tmp_path / "m" / "tokenizer_config.json", truncation_side="left")
    rng = random.Random(8)
    query, passages = text(rng, 25), [text(rng, 60), text(rng, 3)]
    found = scores(opened(tmp_path, "m", overflow="start"), (query, passages))[0]
    np.testing.assert_allclose(found, scores_by_transformers(tmp_path / "m", query, passages), atol=1e-5)


def test_a_pair_that_is_too_long_fails_its_item_alone(folder: Path) -> None:
    rng, node = random.Random(9), opened(folder, "bert")
    long, query = text(rng, 60), text(rng, 5)
    batch = {"query": [query] * 3, "passages": [["w1"], ["w1", long], ["w1", long]], "overflow": [None, None, "end"]}
    found = node.run(Batch(batch))
    assert str(found["scores"][1]).startswith(
        "passages[1]: the pair has 68 tokens, and the model reads at most 40\n    fix:"
    )
    assert found["usage"][1] is found["scores"][1]
    wanted = scores_by_transformers(folder / "bert", query, ["w1", long])
    np.testing.assert_allclose(found["scores"][2], wanted, atol=1e-5)
    assert found["usage"][0] == {"prompt_tokens": 9, "truncated_tokens": 0}
    assert found["usage"][2] == {"prompt_tokens": 49, "truncated_tokens": 28}
    assert refused(folder, config=RerankConfig("bert", overflow="windows")).option == "overflow"


def test_the_folder_of_a_cross_encoder_sets_case_and_longest_pair(tmp_path: Path) -> None:
    save(KINDS["bert"](), tmp_path / "m")
    write_modules(tmp_path / "m", "Transformer")
    change(
        tmp_path / "m" / "sentence_bert_config.json",
        transformer_task="sequence-classification", max_seq_length=7, do_lower_case=True,
    )  # fmt: skip
    found = scores(opened(tmp_path, "m", overflow="end"), ("W1 w2", ["w3 W4 w5 w6 w7"]))[0]
    np.testing.assert_allclose(found, scores_by_transformers(tmp_path / "m", "w1 w2", ["w3 w4"]), atol=1e-5)


def write_modules(folder: Path, *names: str) -> None:
    listed = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))


def change(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.is_file() else {}), **keys}))


def refused(folder: Path, node: Any = Rerank, config: Any = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        node.ports(config or RerankConfig("m"), StepContext(folder))
    return caught.value


@pytest.mark.parametrize(
    ("file", "keys", "found", "fix"),
    [
        ("config.json", {"id2label": {"0": "no", "1": "yes"}}, "m has 2 labels: no, yes", "use node classify"),
        (
            "config.json",
            {"id2label": {"0": "no", "1": "yes"}, "sentence_transformers": {"activation_fn": None}},
            "m has 2 labels",
            "node of your own",
        ),
        ("config.json", {"architectures": ["Qwen3ForCausalLM"]}, "is a language model", "use node llm"),
        (
            "config.json",
            {"sbert_ce_default_activation_function": "my.own.Thing"},
            "sbert_ce_default_activation_function in m/config.json is 'my.own.Thing'",
            "activation: none",
        ),
        (
            "config.json",
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
            "sentence_transformers.activation_fn in m/config.json is 'torch.nn.modules.activation.Tanh'",
            "activation: none",
        ),
        ("config_sentence_transformers.json", {"activation_fn": 5}, "is 5", "activation: none"),
        ("config_sentence_transformers.json", {"model_type": "SentenceTransformer"}, "is a Sentence", "use node embed"),
        (
            "config_sentence_transformers.json",
            {"default_prompt_name": "query", "prompts": {"query": "w1"}},
            "default prompt, 'query'",
            "node of your own",
        ),
        ("sentence_bert_config.json", {"transformer_task": "text-generation"}, "transformer_task", "node of your own"),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {}}}, "processing_kwargs", "node of your own"),
    ],
)
def test_what_is_no_cross_encoder_is_refused_by_name(
    tmp_path: Path, file: str, keys: dict[str, Any], found: str, fix: str
) -> None:
    save(KINDS["bert"](), tmp_path / "m")
    Rerank.ports(RerankConfig("m"), StepContext(tmp_path))
    change(tmp_path / "m" / file, **keys)
    error = refused(tmp_path)
    assert re.search(found, error.found) and fix in error.fix and error.option == "model"
    with pytest.raises(ModelError, match=found):  # the same where the file was not here when it was checked
        Rerank(RerankConfig("m")).open(OpenContext(tmp_path))


@pytest.mark.parametrize("network", [BertModel, BertForMaskedLM])
def test_an_embedding_model_is_referred_to_embed(tmp_path: Path, network: Any) -> None:
    save(network(BertConfig(**SIZES)), tmp_path / "m")
    assert "use node embed" in refused(tmp_path).fix
    save(KINDS["bert"](), tmp_path / "m")
    write_modules(tmp_path / "m", "Transformer", "Pooling")
    error = refused(tmp_path)
    assert "has Transformer, Pooling in 1_Pooling" in error.found and "use node embed" in error.fix


def test_classify_and_embed_refer_a_model_with_one_label_to_rerank(folder: Path, tmp_path: Path) -> None:
    assert "use node rerank" in refused(folder, Classify, ClassifyConfig("bert")).fix
    assert "use node rerank" in refused(folder, Embed, EmbedConfig("bert")).fix
    save(KINDS["roberta"](), tmp_path / "m")
    change(tmp_path / "m" / "config.json", sentence_transformers={"activation_fn": None})
    assert "use node rerank" in refused(tmp_path, Classify, ClassifyConfig("m")).fix
    write_modules(tmp_path / "m", "Transformer")
    change(tmp_path / "m" / "config_sentence_transformers.json", model_type="CrossEncoder")
    assert "use node rerank" in refused(tmp_path, Embed, EmbedConfig("m")).fix


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"activation": "tanh"}, "activation"), ({"precision": "int8"}, "precision"),
        ({"pairs_max": 0}, "pairs_max"), ({"pairs_max": 5000}, "pairs_max"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_when_checked(folder: Path, options: dict[str, Any], option: str) -> None:
    assert refused(folder, config=RerankConfig("bert", **options)).option == option


def test_weights_that_are_missing_are_refused_when_checked(tmp_path: Path) -> None:
    save(KINDS["bert"](), tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    assert "no *.safetensors" in refused(tmp_path).found


def test_an_option_goes_before_an_unknown_activation(tmp_path: Path) -> None:
    save(KINDS["bert"](), tmp_path / "m")
    change(tmp_path / "m" / "config.json", sbert_ce_default_activation_function="my.own.Thing")
    found = scores(opened(tmp_path, "m", activation="none"), ("w1", ["w2"]))[0]
    np.testing.assert_allclose(found, scores_by_transformers(tmp_path / "m", "w1", ["w2"], "none"), atol=1e-5)


def test_ports_are_read_without_a_framework(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path\nfrom weftline.nodes.rerank import *\n"
        f"print(Rerank.ports(RerankConfig('bert'), StepContext(Path({str(folder)!r}))).outputs[0].type)\n"
        "print(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.split("\n")[:2] == ["float32[N]", "[]"], done.stderr


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_moves_scores_a_little(folder: Path, precision: str) -> None:
    rng = random.Random(9)
    item = (text(rng, 4), [text(rng, 12) for _ in range(8)])
    wanted = scores(opened(folder, "roberta"), item)[0]
    found = scores(opened(folder, "roberta", precision=precision), item)[0]
    assert 0 < np.abs(found - wanted).max() < 0.05


def test_scores_are_the_same_on_a_device_and_after_sleep(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    item = ("w1 w2", ["w3", "w4 w5 w6"])
    wanted, node = scores(opened(folder, "bert"), item)[0], opened(folder, "bert", DEVICE)
    np.testing.assert_array_equal(scores(node, item)[0], wanted)
    assert not node.sleep("nothing") and node.sleep("host")
    node.wake()
    np.testing.assert_array_equal(scores(node, item)[0], wanted)
    moves = moves_of_modules(monkeypatch)
    node._device = "cuda:1"
    assert node.sleep("host")
    node.wake()
    assert moves == ["cpu", "cuda:1"]


@pytest.fixture
def file(folder: Path) -> Path:
    file = folder / "p.yaml"
    file.write_text(
        "weftline: 1\nname: p\ninputs: {query: text, passages: 'list[text]'}\noutputs: {scores: r.scores}\n"
        "steps: {r: {node: rerank, model: bert, inputs: {query: query, passages: passages}}}\n"
    )
    return file


@pytest.mark.slow
def test_a_server_ranks_documents_as_transformers_scores_them(folder: Path, file: Path) -> None:
    with Repository() as repository:

        async def open_backend() -> LocalBackend:
            backend = LocalBackend(repository, {"p": ServedPipeline(file)})
            await backend.open()
            return backend

        documents = ["w3", "w4 w5 w6", "w9 w8", "w7"]
        with hosted(open_backend) as endpoint:
            body = {"model": "p", "query": "w1 w2", "documents": documents, "top_n": 3}
            response = httpx.post(f"{endpoint.url}/v1/rerank", json=body, timeout=60)
            assert response.status_code == 200, response.text
    wanted = scores_by_transformers(folder / "bert", "w1 w2", documents)
    results = response.json()["results"]
    assert [one["index"] for one in results] == np.argsort(-wanted).tolist()[:3]
    np.testing.assert_allclose([one["relevance_score"] for one in results], np.sort(wanted)[::-1][:3], atol=1e-5)


@pytest.mark.slow
def test_a_pipeline_reranks_and_scores_nothing_for_no_passages(folder: Path, file: Path) -> None:
    with weftline.load(file).open() as session:
        passages = ["w3", "w4 w5 w6", "w3"]
        found = session.run(query="w1 w2", passages=passages)["scores"]
        np.testing.assert_allclose(found, scores_by_transformers(folder / "bert", "w1 w2", passages), atol=1e-5)
        assert session.run(query="w1", passages=[])["scores"].shape == (0,)
