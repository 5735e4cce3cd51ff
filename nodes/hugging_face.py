"""Loading of Hugging Face models: local folder or hub name, safetensors only, no remote code; and their tokenisers."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weftline.errors import MissingPackage, ModelError, first_line
from weftline.nodes.contract import ConfigError, OpenContext, model_error
from weftline.nodes.model_file import check_safetensors, find_model, folder_bytes
from weftline.nodes.model_limits import (
    JSON_BYTES_MAX,
    PARSED_BYTES_MAX,
    check_entries,
    check_json_files,
    check_sizes,
    open_file,
    parse_json,
    read_bytes,
)
from weftline.nodes.model_size import least_weights, size_mismatch
from weftline.nodes.text_tokens import TextTokens
from weftline.nodes.tokenizer_trial import try_tokenizer


def load_tokenizer(folder: Path, shown: str) -> Any:
    """Return the tokenizer in `folder`/tokenizer.json; ModelError when it is missing or corrupt."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingPackage("tokenizers", "onnx") from None
    path = folder / "tokenizer.json"
    if not path.is_file() or path.stat().st_size > JSON_BYTES_MAX:
        raise ModelError(f"{shown} has no tokenizer.json of at most {JSON_BYTES_MAX} bytes")
    try_tokenizer(folder, shown)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{shown}/tokenizer.json is corrupt: {first_line(error):.200}") from None


REVISION_BYTES_MAX = 256
TOKENS_MAX = 512
"""Default maximum of tokens of one text."""

HUB_FILES = (
    "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.spm", "model*.safetensors", "*/model.safetensors"
)  # fmt: skip
"""Patterns of the files of a hub model that are fetched; never pickled ones."""

INDEX = "model.safetensors.index.json"
"""Names the safetensors file of each tensor, where weights are in several files."""

_LFS_POINTER = b"version https://git-lfs"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_OTHER_WEIGHTS = (*_PICKLED, ".gguf", ".onnx", ".h5", ".msgpack")
_TOKENIZERS = ("tokenizer.json", "vocab.*", "*.model", "*.spm", "*.tiktoken", "tekken.json")
"""Names of tokenizer vocabulary files."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Task of a model, by the transformers class that its config.json names.

    heads: ends of the class's name, such as 'ForCausalLM'.
    about: what such a model does, as a phrase.
    node:  the node that runs it; '' where there is none.
    task:  that node's option `task`; '' for a node without tasks.
    """

    heads: tuple[str, ...]
    about: str
    node: str = ""
    task: str = ""


SEQUENCE_CLASSIFICATION = Kind(("ForSequenceClassification",), "gives a label to a whole text", "classify")
LANGUAGE_MODEL = Kind(("ForCausalLM", "LMHeadModel"), "is a language model, which generates text", "llm")
MASKED_LM = Kind(("ForMaskedLM", "ForPreTraining"), "guesses masked words", "embed")
GENERATION = Kind(("ForConditionalGeneration",), "generates an answer from other inputs")
NO_HEAD = Kind(("Model",), "has no head and gives states of tokens", "embed")
TOKEN_CLASSIFICATION = Kind(
    ("ForTokenClassification",), "labels single tokens, as in named-entity recognition", "transformers",
    "token-classification",
)  # fmt: skip
QUESTION_ANSWERING = Kind(
    ("ForQuestionAnswering",), "marks an answer inside a text", "transformers", "question-answering"
)
IMAGE_CLASSIFICATION = Kind(
    ("ForImageClassification", "ForImageClassificationWithTeacher"), "labels pictures", "transformers",
    "image-classification",
)  # fmt: skip
OBJECT_DETECTION = Kind(("ForObjectDetection",), "finds objects in pictures", "transformers", "object-detection")
DEPTH_ESTIMATION = Kind(("ForDepthEstimation",), "measures depth in pictures", "transformers", "depth-estimation")
SEMANTIC_SEGMENTATION = Kind(
    ("ForSemanticSegmentation",), "gives every pixel of a picture a class", "transformers", "image-segmentation"
)
OBJECT_SEGMENTATION = Kind(
    ("Mask2FormerForUniversalSegmentation", "MaskFormerForInstanceSegmentation", "DetrForSegmentation"),
    "marks the pixels of objects", "transformers", "image-segmentation",
)  # fmt: skip
PICTURES_AND_TEXTS = Kind(
    ("CLIPModel",), "compares pictures with texts", "transformers", "zero-shot-image-classification"
)
POSE = Kind(("VitPoseForPoseEstimation",), "marks keypoints of objects", "transformers", "keypoint-detection")
_LISTENERS = (
    "Data2VecAudio", "Hubert", "SEW", "SEWD", "UniSpeech", "UniSpeechSat", "Wav2Vec2", "Wav2Vec2Bert",
    "Wav2Vec2Conformer", "WavLM",
)  # fmt: skip
"""Models of recordings whose class for labels is called ...ForSequenceClassification, as those of texts are."""

AUDIO_CLASSIFICATION = Kind(
    ("ForAudioClassification", *(f"{name}ForSequenceClassification" for name in _LISTENERS)), "labels recordings",
    "transformers", "audio-classification",
)  # fmt: skip
CTC = Kind(("ForCTC",), "transcribes recordings", "transformers", "automatic-speech-recognition")
SPEECH = Kind(("VitsModel",), "speaks texts", "transformers", "text-to-speech")
TEXT_TO_TEXT = Kind(("T5ForConditionalGeneration",), "turns a text into another", "transformers", "summarization")
_KINDS = (
    AUDIO_CLASSIFICATION,  # before those whose heads end the same
    SEQUENCE_CLASSIFICATION,
    LANGUAGE_MODEL,
    MASKED_LM,
    TEXT_TO_TEXT,
    GENERATION,
    TOKEN_CLASSIFICATION,
    QUESTION_ANSWERING,
    Kind(("ForMultipleChoice",), "chooses among texts"),
    Kind(("ForSpeechSeq2Seq",), "transcribes recordings"),
    CTC,
    IMAGE_CLASSIFICATION,
    Kind(
        tuple(f"{name}ForObjectDetection" for name in ("OwlViT", "Owlv2", "GroundingDino", "OmDetTurbo")),
        "finds objects that a text names",
    ),
    OBJECT_DETECTION,
    DEPTH_ESTIMATION,
    SEMANTIC_SEGMENTATION,
    OBJECT_SEGMENTATION,
    Kind(("ForUniversalSegmentation", "ForInstanceSegmentation", "ForSegmentation"), "marks the pixels of objects"),
    POSE,
    Kind(("ForPoseEstimation", "ForKeypointDetection", "ForKeypointMatching"), "marks points in pictures"),
    PICTURES_AND_TEXTS,
    SPEECH,
    NO_HEAD,  # last: other heads end so, too
)
OWN_NODE = "run it in a node of your own, `node: file.py:Class`"
"""Fix for a model that no built-in node runs."""


def kind_of(config: Mapping[str, Any]) -> tuple[str, Kind | None]:
    """Return the class that a config.json names first, '' for none, and its kind; None for one that is not known."""
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    return name, next((kind for kind in _KINDS if name.endswith(kind.heads)), None)


def check_kind(config: Mapping[str, Any], shown: str, wanted: Sequence[Kind], expected: str, fix: str = "") -> None:
    """Raise ConfigError about option `model` when config.json names a model of another kind than `wanted`.

    expected: the model that the node runs.
    fix:      what to do; '': to use the node that runs the model found.
    """
    if config.get("format") == "weftline-yolo":
        raise ConfigError("model", f"{shown} is a YOLO model", expected, fix or "use node yolo for it")
    name, kind = kind_of(config)
    if kind is None or kind in wanted:
        return
    node, task = kind.node, kind.task
    labels = config.get("id2label")
    if config.get("model_type") == "whisper" and not task:
        node = "whisper"
    elif kind is SEQUENCE_CLASSIFICATION and isinstance(labels, dict) and len(labels) == 1:
        node = "rerank"
    run = f"node {node} with `task: {task}`" if task else f"node {node}"
    other = f"use {run} for it, or name another model" if node else f"name another model, or {OWN_NODE}"
    raise ConfigError("model", f"{shown} is a {name:.80}, which {kind.about}", expected, fix or other)


def find_config(model: str, base_dir: Path) -> dict[str, Any] | None:
    """Return config.json of a local folder or of a hub model that is in the cache; None when it is not here.

    ConfigError when `model` is neither a folder nor could be a hub name, or its config.json is not JSON.
    """
    folder = find_folder(model, base_dir)
    return None if folder is None else read_config(folder, model)


def find_folder(model: str, base_dir: Path) -> Path | None:
    """Return a local folder, or the folder of a hub model that is in the cache; None when it is not here.

    ConfigError when `model` is a file, or neither a folder nor could be a hub name.
    """
    path = find_model(model, base_dir)
    if path is not None:
        if not path.is_dir():
            raise ConfigError("model", f"{model} is a file", "a folder with config.json", _fix_of_file(path, model))
        return path
    if is_path(model, base_dir):
        fix = "paths are relative to the pipeline file"
        raise ConfigError("model", f"there is no folder {model}", "a folder with config.json, or a hub name", fix)
    folder = cached_snapshot(model) if "\0" not in model else None
    if folder is not None:
        check_entries(folder, model)
    return folder


def cached_snapshot(model: str) -> Path | None:
    """Return the folder of a hub model in huggingface_hub's cache: the revision that was fetched last as `main`."""
    cached = _hub_cache() / f"models--{model.replace('/', '--')}"
    try:
        revision = read_bytes(cached / "refs" / "main", REVISION_BYTES_MAX).decode("ascii").strip()
    except (OSError, ValueError):
        revision = ""
    found = sorted(cached.glob("snapshots/*/config.json"))
    return next((one.parent for one in found if one.parent.name == revision), found[-1].parent if found else None)


def hub_notes(model: str, base_dir: Path) -> tuple[str, ...]:
    """Return a line for `weftline plan` about a hub model that is not on this machine."""
    if find_model(model, base_dir) is not None or find_folder(model, base_dir) is not None:
        return ()
    pinned = f"hf://{model}@REVISION and `weftline fetch` fetch and pin it before"
    return (f"{model} is not on this machine: it is downloaded from the hub when the step opens; {pinned}",)


def _fix_of_file(path: Path, model: str) -> str:
    if path.suffix == ".gguf":
        return "GGUF files run in node llm alone; name the folder of the model's safetensors version"
    folder = model.rpartition("/")[0] or "."
    return f"name its folder, {folder}" if (path.parent / "config.json").is_file() else ""


def read_template(model: str, base_dir: Path) -> str:
    """Return the text of a model's chat templates; '' without one, or where the model is not on this machine."""
    folder = find_folder(model, base_dir)
    if folder is None:
        return ""
    file = folder / "chat_template.jinja"
    try:
        return read_bytes(file, PARSED_BYTES_MAX).decode("utf-8", "replace")
    except (OSError, ValueError):
        pass
    config = read_json(folder / "tokenizer_config.json", f"{model}/tokenizer_config.json")
    found = config.get("chat_template") if isinstance(config, dict) else None
    several = found if isinstance(found, list) else [{"template": found}]
    return "".join(str(one.get("template") or "") for one in several if isinstance(one, dict))


def check_folder(model: str, base_dir: Path, auto_class: str) -> None:
    """Raise ConfigError about option `model` when a local folder lacks sound weights or a tokenizer.

    Of a hub model, the files in the cache are checked; missing ones are downloaded when the node opens.

    auto_class: transformers' class that loads the model, for the fix.
    """
    folder = find_model(model, base_dir)
    if folder is not None:
        find_weights(folder, model, auto_class)
        check_tokenizer(folder, model)
    elif (cached := find_folder(model, base_dir)) is not None:
        check_cached(cached, model)


def check_cached(folder: Path, shown: str) -> None:
    """Raise ConfigError about option `model` for unsound files of a hub model, of which some may be missing."""
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        _check_weights_file(path, shown)
    check_json_files(folder, shown)
    if files and not _shards(folder, shown) - {path.name for path in files}:
        _check_described(folder, shown)


def check_tokenizer(folder: Path, shown: str) -> None:
    """Raise ConfigError about option `model` when a folder has no vocabulary of a tokenizer."""
    if not any(path.is_file() for pattern in _TOKENIZERS for path in folder.glob(pattern)):
        fix = f"save it there: transformers.AutoTokenizer.from_pretrained(...).save_pretrained({shown!r})"
        raise ConfigError("model", f"{shown} has no tokenizer", f"one of {', '.join(_TOKENIZERS)}", fix)


def find_weights(folder: Path, shown: str, auto_class: str = "AutoModel") -> list[Path]:
    """Return the safetensors files of a folder; ConfigError about option `model` when they are missing or broken."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = sorted(path.name for path in folder.iterdir() if path.suffix in _OTHER_WEIGHTS)
        found = f"{shown} has no *.safetensors" + (f", but {', '.join(others[:3])}" if others else "")
        fix = "fetch the model's *.safetensors"
        if any(name.endswith(_PICKLED) for name in others):
            found += "; pickled weights are not loaded"
            save = f"transformers.{auto_class}.from_pretrained({shown!r}).save_pretrained({shown!r})"
            fix += f", or where you trust its makers convert it once: {save}"
        raise ConfigError("model", found, "weights as safetensors", fix)
    shards = _shards(folder, shown)
    if missing := sorted(shards - {path.name for path in files}):
        found = f"{shown} lacks {', '.join(missing[:3])}" + (
            f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        )
        whole = f"the {len(shards)} files that its {INDEX} names"
        raise ConfigError("model", found, whole, "fetch what is missing; the download was not finished")
    for path in files:
        _check_weights_file(path, shown)
    check_json_files(folder, shown)
    _check_described(folder, shown)
    return files


def _shards(folder: Path, shown: str) -> set[str]:
    """Return the files that a folder's index of weights names, none without an index."""
    index = read_json(folder / INDEX, f"{shown}/{INDEX}")
    named = index.get("weight_map") if isinstance(index, dict) else None
    return {str(name) for name in named.values()} if isinstance(named, dict) else set()


def _check_weights_file(path: Path, shown: str) -> None:
    try:
        with open_file(path) as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                found, fix = f"{shown}/{path.name} is a Git LFS pointer", f"run `git lfs pull` in {shown}"
                raise ConfigError("model", found, "the weights themselves", fix)
        check_safetensors(path, f"{shown}/{path.name}")
    except OSError as error:
        raise ConfigError("model", f"{shown}/{path.name} cannot be read: {error.strerror}") from None
    except ModelError as error:
        raise ConfigError("model", str(error)) from None


def _check_described(folder: Path, shown: str) -> None:
    """Raise ConfigError about option `model` for a config.json of a network that is larger than the stored weights."""
    config = read_json(folder / "config.json", f"{shown}/config.json")
    if isinstance(config, dict):
        check_sizes(config, f"{shown}/config.json")
        wrong = size_mismatch(least_weights(config), folder_bytes(folder), "quantization_config" in config)
        if wrong:
            fix = "fetch config.json and the weights of one model"
            raise ConfigError("model", f"{shown}/config.json {wrong}", "a config.json of the stored weights", fix)


def network_bytes(model: str, base_dir: Path, weight_bytes: float = 4.0, stored_share: float = 1.0) -> int:
    """Return the memory that a model takes at least, by its config.json and its weights; 0 where it is not here.

    weight_bytes: bytes of a weight in the smallest form in which the node holds it, float32 by default.
    stored_share: bytes in that form for each stored byte.
    """
    try:
        folder = find_folder(model, base_dir)
        config = read_json(folder / "config.json", f"{model}/config.json") if folder is not None else None
    except ConfigError:
        return 0  # reported by `ports`
    if folder is None:
        return 0
    return int(max(least_weights(config) * weight_bytes, folder_bytes(folder) * stored_share))


def check_network(auto: Any, config: Any, folder: Path, shown: str) -> None:
    """Raise ModelError when the network of a config has more weights than `folder` stores. It is built without memory.

    transformers would allocate and initialise what is missing. auto: its class that chooses the network's class.
    """
    import torch

    if getattr(config, "use_timm_backbone", False) or getattr(config, "use_pretrained_backbone", False):
        return  # building it would fetch weights
    try:
        with torch.device("meta"):
            network = auto.from_config(config)
    except Exception:  # loading reports it
        return
    held = {id(one): one.numel() for one in (*network.parameters(), *network.buffers())}
    wrong = size_mismatch(sum(held.values()), folder_bytes(folder), hasattr(config, "quantization_config"))
    if wrong:
        fix = "fetch config.json and the weights of one model"
        raise ModelError(f"{shown}/config.json {wrong}\n    fix: {fix}")


def _hub_cache() -> Path:
    """Return the model cache folder of huggingface_hub."""
    base = os.environ.get("XDG_CACHE_HOME") or posixpath.expanduser("~/.cache")
    home = os.environ.get("HF_HOME") or Path(base) / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")


def read_config(folder: Path, shown: str) -> dict[str, Any]:
    """Return `folder`/config.json as a dict; ConfigError about option `model` when there is none or it is corrupt."""
    config = read_json(folder / "config.json", f"{shown}/config.json")
    if config is None:
        raise ConfigError("model", f"{shown} has no config.json", "a folder with config.json", _nearby(folder, shown))
    if not isinstance(config, dict):
        raise ConfigError("model", f"{shown}/config.json is no JSON object")
    check_sizes(config, f"{shown}/config.json")
    return config


def read_json(path: Path, shown: str, bytes_max: int = PARSED_BYTES_MAX) -> Any | None:
    """Return what is in the JSON file at `path`, None when there is no file; ConfigError when it is no JSON."""
    try:
        return parse_json(read_bytes(path, JSON_BYTES_MAX if path.name == INDEX else bytes_max))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError("model", f"{shown} cannot be read: {error.strerror}", "a JSON file") from None
    except ValueError as error:
        raise ConfigError("model", f"{shown} {error}") from None


def _nearby(folder: Path, shown: str) -> str:
    """Return the fix for a folder without config.json, by its other files."""
    if (folder / "adapter_config.json").is_file():
        return (
            "it is a LoRA adapter: name the model that it was trained from, and the adapter in `adapters` of node llm"
        )
    inside = sorted(path.parent for path in (*folder.glob("*/config.json"), *folder.glob("snapshots/*/config.json")))
    return f"name the folder inside, {shown}/{inside[-1].relative_to(folder).as_posix()}" if len(inside) == 1 else ""


def load_network(auto_class: str, model: str, context: OpenContext, unused: tuple[str, ...] = ()) -> Any:
    """Return the network of `model` by transformers' `auto_class`: float32, in eval mode, on the context's device.

    unused: name prefixes of tensors that the caller does not use, which may be missing.
    """
    try:
        import torch
        import transformers
    except ImportError:
        raise MissingPackage("transformers", "llm") from None
    torch.set_num_threads(max(context.threads, 1))
    source = local_or_hub(model, context.base_dir)
    check_weights(source, model)
    context.progress("reading weights", 0.2)
    auto = getattr(transformers, auto_class)
    try:
        with no_progress_bars():
            config = transformers.AutoConfig.from_pretrained(str(source), trust_remote_code=False)
            check_network(auto, config, source, model)
            found = auto.from_pretrained(
                str(source), use_safetensors=True, trust_remote_code=False, dtype=torch.float32,
                output_loading_info=True,
            )  # fmt: skip
    except ModelError:
        raise
    except Exception as error:
        reason = reason_without_path(error, source, model)
        raise ModelError(f"{model} cannot be opened by transformers: {reason}") from None
    network, report = found
    missing = sorted(name for name in map(str, report.get("missing_keys") or ()) if not name.startswith(unused))
    if missing:  # transformers would initialise them randomly and only warn
        raise ModelError(f"{model}: its weights lack {', '.join(missing[:3])} ({len(missing)} tensors in all)")
    return network.to(context.framework_device).eval()


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Hide transformers' own bars while a model loads: the step reports its progress."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def check_weights(folder: Path, shown: str) -> None:
    """Raise ModelError unless `folder`, called `shown` in errors, has safetensors files, and all of them are sound."""
    try:
        find_weights(folder, shown)
    except ConfigError as error:
        raise model_error(error) from None


def load_tokens(model: str, context: OpenContext, tokens_max: int, pad: int | None = None) -> TextTokens:
    """Return the model's tokenizer; ModelError when it has none of the fast kind.

    pad: the network's padding token; None: the tokenizer's.
    """
    import transformers

    source = local_or_hub(model, context.base_dir)
    try_tokenizer(source, model)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"{model} has no usable tokenizer: {reason_without_path(error, source, model)}") from None
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        raise ModelError(f"{model} has no tokenizer.json")
    types = "token_type_ids" in tokenizer.model_input_names
    pad = (tokenizer.pad_token_id or 0) if pad is None else pad
    return TextTokens(fast, tokens_max, pad, types)


def tokens_limit(config: dict[str, Any], tokens_max: int = TOKENS_MAX) -> int:
    """Return how many tokens of one text a model of this config reads, at most `tokens_max`.

    Position tables of RoBERTa hold two extra rows.
    """
    positions = config.get("max_position_embeddings")
    if type(positions) is not int or positions < 8:
        return tokens_max
    extra = 2 if config.get("model_type") in ("roberta", "xlm-roberta", "camembert", "mpnet") else 0
    return min(positions - extra, tokens_max)


def is_path(model: str, base_dir: Path) -> bool:
    """Return True when `model` can only be a path: hub names are one or two words."""
    parts = model.split("/")
    return (
        model.startswith((".", "/", "~"))
        or model.endswith((*_OTHER_WEIGHTS, ".safetensors"))
        or len(parts) > 2
        or (len(parts) == 2 and (base_dir / parts[0]).is_dir())
    )


def local_or_hub(model: str, base_dir: Path) -> Path:
    """Return the file or folder that `model` names, else the folder of the hub's model of that name, fetched.

    ModelError for a model that cannot be fetched, and for files that are no files of a model.
    """
    try:
        found = find_model(model, base_dir)
        if found is None and is_path(model, base_dir):
            raise ModelError(f"model {model}: no such folder\n    fix: paths are relative to the pipeline file")
        return found or fetch_from_hub(model)
    except ConfigError as error:
        raise model_error(error) from None


def fetch_folder(model: str, base_dir: Path) -> Path:
    """Return the folder with a model: local, or of the hub, fetched; ConfigError or ModelError where there is none."""
    local = find_model(model, base_dir) is not None or is_path(model, base_dir)
    return (find_folder(model, base_dir) if local else None) or fetch_from_hub(model)


def fetch_from_hub(name: str) -> Path:
    """Return the folder of the hub's model of that name, in huggingface_hub's cache; ModelError if it is unreachable.

    Nodes give transformers this folder in place of the name, so that its files are checked before they are loaded.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingPackage("transformers", "llm") from None
    try:
        folder = Path(snapshot_download(name, allow_patterns=[*HUB_FILES]))
    except Exception as error:  # of the hub, of the network, of the cache's folder
        fix = "name the model's folder, relative to the pipeline file, or a hub name that this machine can fetch"
        raise ModelError(f"{name} cannot be fetched from the hub: {first_line(error):.300}\n    fix: {fix}") from None
    check_entries(folder, name)
    return folder


def reason_without_path(error: BaseException, source: Path | str, shown: str) -> str:
    """Return the first line of an error's message, at most 300 characters, with `shown` for the private `source`."""
    return f"{first_line(error).replace(str(source), shown):.300}"
