"""Tiny random vision-language models of every family, with their real processors, and what transformers says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.video_utils import VideoMetadata

from tests.engine.llm import tiny

SIDE = 16
_TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3, "tie_word_embeddings": False,
    "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
_CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "image_size": SIDE, "patch_size": 4, "projection_dim": 32, "initializer_range": 0.3,
}  # fmt: skip
_SIGLIP = {key: value for key, value in _CLIP.items() if key != "projection_dim"} | {
    "model_type": "siglip_vision_model"
}
_IDEFICS_VISION = {key: value for key, value in _SIGLIP.items() if key != "model_type"}
_PARTS = (
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}IMAGE{% elif part['type'] == 'video' %}VIDEO"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}"
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}" + _PARTS + "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IDEFICS_TOKENS = (
    "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)  # fmt: skip
VIDEO_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "smolvlm")
Clip = tuple[np.ndarray, float]
"""A video uint8 [frames, H, W, 3] and its frames in a second."""
FAMILIES = ("llava", "llava_siglip", "qwen2_vl", "qwen2_5_vl", "idefics3", "smolvlm")


@dataclass(frozen=True)
class TinyVision:
    """A model in a folder with its processor, and transformers' own model."""

    folder: Path
    processor: Any
    reference: Any

    @torch.inference_mode()
    def answer(
        self, messages: list[dict[str, Any]], images: Sequence[np.ndarray], tokens: int, videos: Sequence[Clip] = ()
    ) -> list[int]:
        """Return what transformers' generate answers greedily."""
        given = self.inputs(messages, images, videos)
        out = self.reference.generate(**given, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        return [int(token) for token in out[0, given["input_ids"].shape[1] :]]

    def inputs(self, messages: list[dict[str, Any]], images: Sequence[np.ndarray], videos: Sequence[Clip] = ()) -> Any:
        """Return the processor's inputs for the model."""
        text = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.inputs_of_text(text, images, videos)

    def inputs_of_text(self, text: str, images: Sequence[np.ndarray], videos: Sequence[Clip]) -> Any:
        """Return the processor's inputs for a text with placeholders."""
        given: dict[str, Any] = {}
        if images:
            pictures = [torch.tensor(image) for image in images]
            given |= {"images": pictures, "images_kwargs": {"input_data_format": "channels_last"}}
        if videos:
            metadata = [
                VideoMetadata(total_num_frames=len(frames), fps=fps, frames_indices=list(range(len(frames))))
                for frames, fps in videos
            ]
            more = {"video_metadata": metadata, "do_sample_frames": False, "input_data_format": "channels_last"}
            given |= {"videos": [torch.tensor(frames) for frames, _ in videos], "videos_kwargs": more}
        return self.processor(text=[text], return_tensors="pt", **given)


def picture(height: int = SIDE, width: int = SIDE, seed: int = 0) -> np.ndarray:
    """Return a random picture."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def clip(frames: int = 4, height: int = SIDE, width: int = SIDE, seed: int = 0) -> np.ndarray:
    """Return a random video."""
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


VIDEO = object()
"""Place of a video in `asked`."""


def asked(*parts: object) -> list[dict[str, Any]]:
    """Return a user message of texts, of a picture for each None, and of a video for each VIDEO."""
    kinds = {None: "image", VIDEO: "video"}
    content = [{"type": kinds[part]} if part in kinds else {"type": "text", "text": part} for part in parts]
    return [{"role": "user", "content": content}]


def make(family: str, folder: Path) -> TinyVision:
    """Write a tiny model of a family to `folder`."""
    torch.manual_seed(7)
    words = tiny.tokenizer()
    config, processor = _MAKERS[family](words)
    words.save_pretrained(folder)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = words.eos_token_id
    model.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    if hasattr(processor, "video_processor"):
        processor.video_processor.save_pretrained(folder)
    return TinyVision(folder, processor, model)


def _with_tokens(words: Any, added: Sequence[str], shown: str, video: str = "") -> None:
    words.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *added]})
    words.chat_template = TEMPLATE.replace("IMAGE", shown).replace("VIDEO", video)


def _text(words: Any, model_type: str, **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, **_TEXT, "vocab_size": len(words), "eos_token_id": words.eos_token_id, **more}


def _llava(words: Any, tower: dict[str, Any] = _CLIP, strategy: str = "default") -> tuple[Any, Any]:
    _with_tokens(words, ["<image>"], "<image>\n")
    config = AutoConfig.for_model(
        "llava", text_config=_text(words, "llama"), vision_config=tower, vision_feature_select_strategy=strategy,
        image_token_id=words.convert_tokens_to_ids("<image>"), vision_feature_layer=-2 if tower is _CLIP else -1,
    )  # fmt: skip
    maker = transformers.CLIPImageProcessor if tower is _CLIP else transformers.SiglipImageProcessor
    size = {"height": SIDE, "width": SIDE}
    sizes = {"size": {"shortest_edge": SIDE}, "crop_size": size} if tower is _CLIP else {"size": size}
    processor = transformers.LlavaProcessor(
        maker(**sizes), words, patch_size=4, vision_feature_select_strategy=strategy, chat_template=words.chat_template,
        num_additional_image_tokens=int(tower is _CLIP),
    )  # fmt: skip
    return config, processor


def _qwen(words: Any, model_type: str) -> tuple[Any, Any]:
    shown = "<|vision_start|><|image_pad|><|vision_end|>"
    _with_tokens(words, QWEN_TOKENS, shown, shown.replace("image", "video"))
    vision: dict[str, Any] = {
        "depth": 2,
        "num_heads": 4,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "initializer_range": 0.3,
    }
    if model_type == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48, "window_size": 16,
                   "fullatt_block_indexes": [1]}  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    ids = {name: words.convert_tokens_to_ids(token) for name, token in zip(
        ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"), QWEN_TOKENS, strict=True
    )}  # fmt: skip
    text = _text(words, f"{model_type}_text", rope_parameters=rope)
    config = AutoConfig.for_model(model_type, text_config=text, vision_config=vision, **ids)
    size = {"shortest_edge": 16 * 16, "longest_edge": 40 * 40}
    sizes = {"size": size, "patch_size": 4, "merge_size": 2}
    name = "Qwen2VLProcessor" if model_type == "qwen2_vl" else "Qwen2_5_VLProcessor"
    processor = getattr(transformers, name)(
        transformers.Qwen2VLImageProcessor(**sizes), words, transformers.Qwen2VLVideoProcessor(**sizes),
        chat_template=words.chat_template,
    )  # fmt: skip
    return config, processor


def _idefics(words: Any, model_type: str) -> tuple[Any, Any]:
    _with_tokens(words, IDEFICS_TOKENS, "<image>")
    config = AutoConfig.for_model(
        model_type, text_config=_text(words, "llama"), vision_config=_IDEFICS_VISION, scale_factor=2,
        image_token_id=words.convert_tokens_to_ids("<image>"), pad_token_id=0,
    )  # fmt: skip
    name = "Idefics3ImageProcessor" if model_type == "idefics3" else "SmolVLMImageProcessor"
    images = getattr(transformers, name)(size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE})
    if model_type == "idefics3":
        return config, transformers.Idefics3Processor(images, words, image_seq_len=4, chat_template=words.chat_template)
    videos = transformers.SmolVLMVideoProcessor(size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE})
    return config, transformers.SmolVLMProcessor(
        images, words, videos, image_seq_len=4, chat_template=words.chat_template
    )


_MAKERS: dict[str, Any] = {
    "llava": _llava,
    "llava_siglip": lambda words: _llava(words, _SIGLIP, "full"),
    "qwen2_vl": lambda words: _qwen(words, "qwen2_vl"),
    "qwen2_5_vl": lambda words: _qwen(words, "qwen2_5_vl"),
    "idefics3": lambda words: _idefics(words, "idefics3"),
    "smolvlm": lambda words: _idefics(words, "smolvlm"),
}
