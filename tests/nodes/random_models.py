"""Folders of tiny models of transformers with random weights, each with its processor, and steps that run them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from weftline.nodes.contract import ConfigError, OpenContext, StepContext
from weftline.nodes.transformers_tasks.node import Transformers, TransformersConfig

WORDS = ["good", "bad", "day", "key", "paris", "anna", "lives", "in", "##ly", "##s", "un", "##der", "is", "this", ".", "?"]
SIDE = 32
"""Height and width of the pictures that the models see."""


def bert_tokenizer(**options: Any) -> Any:
    """Return a WordPiece tokenizer of a few words, with BERT's special tokens."""
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, model_input_names=["input_ids", "token_type_ids", "attention_mask"], **special, **options
    )


def bert_config(**options: Any) -> Any:
    return transformers.BertConfig(
        vocab_size=4 + len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=64, **options,
    )  # fmt: skip


def names(*labels: str) -> dict[str, Any]:
    """Return the options of a config for these labels."""
    return {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}


def save(network: Any, folder: Path, *processors_of_it: Any) -> Path:
    """Save a network with larger random weights, so that answers differ clearly, and its processors."""
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in network.parameters():
            if tensor.ndim > 1:
                tensor.normal_(0, 0.3)
    network.save_pretrained(folder)
    for one in processors_of_it:
        one.save_pretrained(folder)
    return folder


def save_bert(kind: str, folder: Path, tokenizer: dict[str, Any] | None = None, **options: Any) -> Path:
    """Save a model of a class such as 'BertForTokenClassification' with its tokenizer."""
    return save(getattr(transformers, kind)(bert_config(**options)), folder, bert_tokenizer(**(tokenizer or {})))


def save_vit(folder: Path, **options: Any) -> Path:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=SIDE,
        patch_size=8, **options,
    )  # fmt: skip
    processor = transformers.ViTImageProcessor(size={"height": SIDE, "width": SIDE})
    return save(transformers.ViTForImageClassification(config), folder, processor)


def pictures() -> list[np.ndarray]:
    """Return pictures uint8[H, W, 3] of different sizes, two of them of one size."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((40, 30), (64, 64), (40, 30), (17, 50))]


def opened(folder: Path, task: str, wired: tuple[str, ...] = (), **options: Any) -> Transformers:
    """Return a checked and opened step with the model in `folder`/m."""
    config = TransformersConfig(task, "m", **options)
    Transformers.ports(config, StepContext(folder, wired))
    node = Transformers(config)
    node.open(OpenContext(folder))
    node.warm_up()
    return node


def refused(folder: Path, task: str, wired: tuple[str, ...] = (), **options: Any) -> ConfigError:
    """Return the problem that `check` finds in a step with the model in `folder`/m."""
    with pytest.raises(ConfigError) as caught:
        Transformers.ports(TransformersConfig(task, "m", **options), StepContext(folder, wired))
    return caught.value


def pipeline(folder: Path, task: str, **options: Any) -> Any:
    """Return transformers' pipeline with the model in `folder`/m."""
    torch.set_num_threads(1)
    return transformers.pipeline(task, model=str(folder / "m"), device="cpu", **options)


def assert_same_scores(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert [one["label"] for one in found] == [one["label"] for one in wanted]
    assert [one["score"] for one in found] == pytest.approx([one["score"] for one in wanted], abs=1e-4)
