"""Checkpoints of openai-whisper as CTranslate2's, for tests and benchmarks: without a hub's files.

CTranslate2's own converter writes the weights from transformers' network. The tokenizer comes from openai-whisper's
vocabulary, since tokenizer.json of the published models is on the hub only.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import tokenizers
import transformers
import whisper
from ctranslate2.converters.transformers import WhisperLoader
from transformers.convert_slow_tokenizer import TikTokenConverter
from whisper.tokenizer import LANGUAGES, get_encoding

from weftline.nodes.whisper_file import OWN_DIMS, OWN_NAMES

SPLIT = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
"""GPT-2's division of texts into words, which openai-whisper uses too."""


def hugging_face_form(network: Any) -> transformers.WhisperForConditionalGeneration:
    """Return a network of openai-whisper as one of transformers, with the same weights."""
    dims = {theirs: getattr(network.dims, own) for own, theirs in OWN_DIMS.items()}
    sizes = {f"{side}_ffn_dim": 4 * dims["d_model"] for side in ("encoder", "decoder")}
    config = transformers.WhisperConfig(**dims, **sizes)
    made = transformers.WhisperForConditionalGeneration(config).eval()
    state = {}
    for name in made.state_dict():
        own = name
        for pattern, replacement in OWN_NAMES:
            own = pattern.sub(replacement, own)
        state[name] = network.state_dict()["decoder.token_embedding.weight" if name == "proj_out.weight" else own]
    made.load_state_dict(state)
    return made


@functools.cache
def tokenizer(multilingual: bool, languages: int) -> tokenizers.Tokenizer:
    """Return openai-whisper's tokenizer as one of package tokenizers."""
    name = "multilingual" if multilingual else "gpt2"
    special = get_encoding(name, languages)._special_tokens
    file = Path(whisper.__file__).parent / "assets" / f"{name}.tiktoken"
    ordered = sorted(special, key=special.__getitem__)
    made: tokenizers.Tokenizer = TikTokenConverter(str(file), SPLIT, extra_special_tokens=ordered).converted()
    return made


def convert(network: Any, folder: Path, quantization: str | None = None) -> None:
    """Write a network of openai-whisper to `folder` as CTranslate2 reads it, with what faster-whisper needs beside it.

    quantization: of the stored weights, such as int8 or float16; None: float32.
    """
    model, words = hugging_face_form(network), tokenizer(network.is_multilingual, network.num_languages)
    settings: Any = model.generation_config
    settings.alignment_heads = network.alignment_heads.indices().T.tolist()
    codes = [*LANGUAGES][: network.num_languages]
    settings.lang_to_id = {code: words.token_to_id(f"<|{code}|>") for code in codes}
    spec = WhisperLoader()(model, words)
    spec.validate()
    spec.optimize(quantization)
    folder.mkdir(parents=True, exist_ok=True)
    spec.save(str(folder))
    words.save(str(folder / "tokenizer.json"))
    sizes = {"feature_size": network.dims.n_mels, "chunk_length": network.dims.n_audio_ctx // 50}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes))
