"""Folders of tiny models of transformers with random weights, each with its processor, and steps that run them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from weftline.nodes.contract import ConfigError, OpenContext, StepContext
from weftline.nodes.transformers_tasks.node import Transformers, TransformersConfig

WORDS = [
    "good",
    "bad",
    "day",
    "key",
    "paris",
    "anna",
    "lives",
    "in",
    "##ly",
    "##s",
    "un",
    "##der",
    "is",
    "this",
    ".",
    "?",
]
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


def drop(folder: Path, prefix: str) -> None:
    """Remove the tensors whose names start with `prefix` from the weights of a folder."""
    state = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in state.items() if not name.startswith(prefix)}
    assert len(kept) < len(state)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def save_bert(kind: str, folder: Path, tokenizer: dict[str, Any] | None = None, **options: Any) -> Path:
    """Save a model of a class such as 'BertForTokenClassification' with its tokenizer."""
    return save(getattr(transformers, kind)(bert_config(**options)), folder, bert_tokenizer(**(tokenizer or {})))


def t5_tokenizer() -> Any:
    """Return a tokenizer of whole words that ends every text, as T5's does."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def save_t5(folder: Path, **options: Any) -> Path:
    config = transformers.T5Config(
        vocab_size=3 + len(WORDS), d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, decoder_start_token_id=0,
        **options,
    )  # fmt: skip
    return save(transformers.T5ForConditionalGeneration(config), folder, t5_tokenizer())


def save_vit(folder: Path, **options: Any) -> Path:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=SIDE,
        patch_size=8, **options,
    )  # fmt: skip
    processor = transformers.ViTImageProcessor(size={"height": SIDE, "width": SIDE})
    return save(transformers.ViTForImageClassification(config), folder, processor)


def save_detr(folder: Path, kind: str = "DetrForObjectDetection", **options: Any) -> Path:
    """Save a DETR whose processor keeps the proportions of a picture, so that sizes differ within a batch."""
    detector = kind == "DetrForObjectDetection"
    width, heads = (16, 2) if detector else (64, 8)  # the least that its mask head accepts
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 16], depths=[1, 1, 1, 1],
        out_features=["stage4"] if detector else ["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = transformers.DetrConfig(
        use_timm_backbone=False, backbone_config=backbone, num_queries=6, d_model=width, encoder_layers=1,
        encoder_ffn_dim=16, encoder_attention_heads=heads, decoder_layers=1, decoder_ffn_dim=16,
        decoder_attention_heads=heads, **options,
    )  # fmt: skip
    processor = transformers.DetrImageProcessor(size={"shortest_edge": 64, "longest_edge": 128})
    return save(getattr(transformers, kind)(config), folder, processor)


def save_rt_detr(folder: Path, **options: Any) -> Path:
    backbone = transformers.RTDetrResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], layer_type="basic", out_indices=[2, 3, 4]
    )
    config = transformers.RTDetrConfig(
        backbone_config=backbone, encoder_hidden_dim=16, encoder_in_channels=[16, 16, 16], encoder_ffn_dim=16,
        encoder_attention_heads=2, d_model=16, num_queries=6, decoder_in_channels=[16, 16, 16], decoder_ffn_dim=16,
        decoder_attention_heads=2, decoder_layers=1, hidden_expansion=0.5, **options,
    )  # fmt: skip
    processor = transformers.RTDetrImageProcessor(size={"height": 64, "width": 64})
    return save(transformers.RTDetrForObjectDetection(config), folder, processor)


def save_dpt(folder: Path) -> Path:
    config = transformers.DPTConfig(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=16, image_size=SIDE,
        patch_size=8, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8,
    )  # fmt: skip
    processor = transformers.DPTImageProcessor(size={"height": SIDE, "width": SIDE})
    return save(transformers.DPTForDepthEstimation(config), folder, processor)


def save_depth_anything(folder: Path) -> Path:
    """Save a model whose processor keeps the proportions of a picture."""
    backbone = transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=16, image_size=SIDE, patch_size=8,
        out_indices=[1, 2, 3, 4], apply_layernorm=True, reshape_hidden_states=False,
    )  # fmt: skip
    config = transformers.DepthAnythingConfig(
        backbone_config=backbone, patch_size=8, reassemble_hidden_size=16, neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8, head_hidden_size=8,
    )  # fmt: skip
    processor = transformers.DPTImageProcessor(
        size={"height": SIDE, "width": SIDE}, keep_aspect_ratio=True, ensure_multiple_of=8
    )
    return save(transformers.DepthAnythingForDepthEstimation(config), folder, processor)


def save_segformer(folder: Path, **options: Any) -> Path:
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, **options,
    )  # fmt: skip
    processor = transformers.SegformerImageProcessor(size={"height": SIDE, "width": SIDE})
    return save(transformers.SegformerForSemanticSegmentation(config), folder, processor)


def _swin() -> Any:
    """Return a backbone whose four stages halve a picture."""
    return transformers.SwinConfig(
        image_size=2 * SIDE, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip


def save_mask2former(folder: Path, **options: Any) -> Path:
    config = transformers.Mask2FormerConfig(
        backbone_config=_swin(), feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=16,
        encoder_layers=1, decoder_layers=2, num_attention_heads=2, dim_feedforward=16, num_queries=8, **options,
    )  # fmt: skip
    processor = transformers.Mask2FormerImageProcessor(size={"height": 2 * SIDE, "width": 2 * SIDE})
    return save(transformers.Mask2FormerForUniversalSegmentation(config), folder, processor)


def save_maskformer(folder: Path, **options: Any) -> Path:
    decoder = transformers.DetrConfig(
        num_queries=8, d_model=32, encoder_layers=1, encoder_ffn_dim=16, encoder_attention_heads=2, decoder_layers=1,
        decoder_ffn_dim=16, decoder_attention_heads=2,
    )  # fmt: skip
    config = transformers.MaskFormerConfig(
        backbone_config=_swin(), decoder_config=decoder, fpn_feature_size=32, mask_feature_size=32, **options
    )
    processor = transformers.MaskFormerImageProcessor(size={"height": 2 * SIDE, "width": 2 * SIDE})
    return save(transformers.MaskFormerForInstanceSegmentation(config), folder, processor)


def save_vitpose(folder: Path, *points: str, simple: bool = True, experts: int = 1) -> Path:
    backbone = transformers.VitPoseBackboneConfig(
        image_size=[32, 24], patch_size=[8, 8], hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        mlp_ratio=2, out_indices=[2], num_experts=experts, part_features=8 if experts > 1 else 0,
    )  # fmt: skip
    config = transformers.VitPoseConfig(backbone_config=backbone, use_simple_decoder=simple, **names(*points))
    processor = transformers.VitPoseImageProcessor(size={"height": 32, "width": 24})
    return save(transformers.VitPoseForPoseEstimation(config), folder, processor)


def save_clip(folder: Path) -> Path:
    shared = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.CLIPConfig(
        text_config={
            **shared, "vocab_size": 4 + len(WORDS), "max_position_embeddings": 16, "eos_token_id": 3,
            "bos_token_id": 2, "pad_token_id": 0,
        },
        vision_config={**shared, "image_size": SIDE, "patch_size": 8},
        projection_dim=8,
    )  # fmt: skip
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    tokenizer = bert_tokenizer()
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return save(transformers.CLIPModel(config), folder, processor, tokenizer)


def save_ast(folder: Path, **options: Any) -> Path:
    config = transformers.ASTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, max_length=64,
        num_mel_bins=32, **options,
    )  # fmt: skip
    extractor = transformers.ASTFeatureExtractor(num_mel_bins=32, max_length=64)
    return save(transformers.ASTForAudioClassification(config), folder, extractor)


def save_wav2vec2(kind: str, folder: Path, norm: str, **options: Any) -> Path:
    """Save a model of a class such as 'Wav2Vec2ForCTC'; norm: 'layer' for one trained with masks, 'group' without."""
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, conv_dim=[8, 8, 8],
        conv_kernel=[10, 8, 4], conv_stride=[5, 4, 4], num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        vocab_size=8, classifier_proj_size=8, feat_extract_norm=norm, do_stable_layer_norm=norm == "layer",
        pad_token_id=0, **options,
    )  # fmt: skip
    extractor = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=norm == "layer")
    if kind != "Wav2Vec2ForCTC":
        return save(getattr(transformers, kind)(config), folder, extractor)
    folder.mkdir(parents=True)
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", "A", "B", "C"]
    (folder / "vocab.json").write_text(json.dumps({letter: place for place, letter in enumerate(letters)}))
    tokenizer = transformers.Wav2Vec2CTCTokenizer(folder / "vocab.json")
    return save(transformers.Wav2Vec2ForCTC(config), folder, extractor, tokenizer)


def save_vits(folder: Path, speakers: int = 1, rate_hz: int = 16_000, **tokenizer: Any) -> Path:
    """Save a VITS model that reads a few letters, as MMS does, and gives 16 samples for a frame."""
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    letters = ["<pad>", " ", *"abcdefghilnorstuwy", "<unk>"]
    (folder / "vocab.json").write_text(json.dumps({letter: place for place, letter in enumerate(letters)}))
    config = transformers.VitsConfig(
        vocab_size=len(letters), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16, flow_size=16,
        spectrogram_bins=9, duration_predictor_filter_channels=16, prior_encoder_num_flows=2,
        prior_encoder_num_wavenet_layers=1, posterior_encoder_num_wavenet_layers=1, upsample_initial_channel=16,
        upsample_rates=[4, 4], upsample_kernel_sizes=[8, 8], resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]], sampling_rate=rate_hz, num_speakers=speakers,
        speaker_embedding_size=8 if speakers > 1 else 0,
    )  # fmt: skip
    transformers.VitsModel(config).save_pretrained(folder)
    options = {"phonemize": False, **tokenizer}
    transformers.VitsTokenizer(folder / "vocab.json", **options).save_pretrained(folder)
    return folder


def recordings() -> list[np.ndarray]:
    """Return recordings float32[samples] of different lengths, two of them of one length."""
    rng = np.random.default_rng(0)
    return [rng.normal(0, 0.1, samples).astype(np.float32) for samples in (8000, 3000, 8000, 5001)]


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
