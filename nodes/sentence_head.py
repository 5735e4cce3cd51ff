"""Heads of sentence-transformers models: pooling and normalisation of embeddings, activation of cross-encoders.

Read from the files that the library sentence-transformers writes beside a network, without any framework:

    modules.json                        the modules in order: Transformer, Pooling, then Dense and Normalize where used
    sentence_bert_config.json           max_seq_length, do_lower_case
    1_Pooling/config.json               how tokens become one vector
    2_Dense/config.json                 a linear layer on that vector, its weights beside it as safetensors
    config_sentence_transformers.json   prompts, and the name of the one that is used by default; a cross-encoder's
                                        activation, which older versions of the library wrote into config.json

Whatever of these would change the result and is not known here is refused with its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from weftline.nodes.contract import ConfigError
from weftline.nodes.hugging_face import OWN_NODE, read_json

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
_POOLINGS = {
    "cls": "first", "mean": "mean", "max": "max", "lasttoken": "last", "mean_sqrt_len_tokens": "mean_sqrt",
    "weightedmean": "weighted_mean",
}  # fmt: skip
_OLD_KEYS = {
    "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken", "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}  # fmt: skip
POOLINGS = tuple(_POOLINGS.values())
"""Poolings by the names of node embed."""

ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid")
"""Classes of torch.nn that may follow a dense layer."""

PAIR_ACTIVATIONS = {"Sigmoid": "sigmoid", "Identity": "none"}
"""Activations of node rerank by classes of torch.nn."""

MODULES_MAX = 16
SIZE_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer on an embedding. weights: its safetensors file, with linear.weight and perhaps linear.bias."""

    weights: str
    inputs: int
    outputs: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class SentenceHead:
    """Pooling of token states. Paths are relative to the model's folder.

    network:    the folder of the network itself; '' for the model's own.
    pooling:    one of POOLINGS.
    dense:      layers after pooling, in order.
    normalise:  embeddings are scaled to length 1 in the end.
    prompt:     the name of the prompt that is used, `prefix` its text; both '' without one.
    lower:      texts are put into lower case.
    tokens_max: most tokens of a text; None: what the network and its tokenizer read.
    """

    network: str = ""
    pooling: str = "mean"
    dense: tuple[Dense, ...] = ()
    normalise: bool = False
    prompt: str = ""
    prefix: str = ""
    lower: bool = False
    tokens_max: int | None = None


def read_head(folder: Path, shown: str, prompt: str | None = None) -> SentenceHead | None:
    """Return the head of a model's folder, None where it has no modules.json; ConfigError names what is not known.

    prompt: name of the prompt to use; None: the folder's default.
    """
    modules = read_json(folder / MODULES, f"{shown}/{MODULES}")
    if modules is None:
        if prompt is not None:
            found = f"{prompt!r:.60}, and {shown} has no {MODULES}, so no prompts"
            raise ConfigError("prompt", found, fix="write the text as `prefix`")
        return None
    settings = _settings(folder, shown, "SentenceTransformer")
    kinds = [*_modules(modules, f"{shown}/{MODULES}")]
    names = [kind for kind, _ in kinds]
    order = ["Transformer", "Pooling", *["Dense"] * names.count("Dense"), *["Normalize"] * names.count("Normalize")]
    if names != order or names.count("Normalize") > 1:
        found = f"{shown}/{MODULES} has {', '.join(names)}"
        raise ConfigError("model", found, "Transformer, Pooling, then perhaps Dense and Normalize", OWN_NODE)
    (_, network), (_, pooling), *rest = kinds
    reads = _transformer(folder / network, _under(shown, network))
    used, prefix = _prompt(settings, shown, prompt)
    mode, whole = _pooling(folder / pooling, _under(shown, pooling))
    if prefix and not whole:
        found = f"{_under(shown, pooling)}/config.json leaves the prompt out of pooling (include_prompt: false)"
        raise ConfigError("model", found, "include_prompt: true, or no prompt", OWN_NODE)
    dense = tuple(_dense(folder, path, _under(shown, path)) for kind, path in rest if kind == "Dense")
    return SentenceHead(network, mode, dense, "Normalize" in names, used, prefix, *reads)


@dataclass(frozen=True, slots=True)
class PairHead:
    """Settings of a cross-encoder. activation: of its score, 'sigmoid' or 'none'.

    lower, tokens_max: as in SentenceHead; tokens_max of both texts together.
    """

    activation: str = "sigmoid"
    lower: bool = False
    tokens_max: int | None = None


def read_pair_head(folder: Path, shown: str, config: Mapping[str, Any], activation: str | None = None) -> PairHead:
    """Return the settings of a cross-encoder's folder; ConfigError names what is not known.

    config:     its config.json.
    activation: the step's own; None: the folder's, else 'sigmoid'.
    """
    modules = read_json(folder / MODULES, f"{shown}/{MODULES}")
    kinds = [] if modules is None else [*_modules(modules, f"{shown}/{MODULES}")]
    if kinds not in ([], [("Transformer", "")]):
        names = ", ".join(f"{kind} in {path}" if path else kind for kind, path in kinds)
        fix = "use node embed for it" if any(kind == "Pooling" for kind, _ in kinds) else OWN_NODE
        raise ConfigError("model", f"{shown}/{MODULES} has {names}", "a Transformer alone", fix)
    settings = _settings(folder, shown, "CrossEncoder")
    if _prompt(settings, shown)[1]:
        found = f"{shown}/{SETTINGS} has a default prompt, {settings.get('default_prompt_name')!r:.60}"
        raise ConfigError("model", found, "a cross-encoder without a default prompt", OWN_NODE)
    reads = _transformer(folder, shown, "sequence-classification")
    return PairHead(activation or _activation(settings, config, shown), *reads)


def _activation(settings: Mapping[str, Any], config: Mapping[str, Any], shown: str) -> str:
    """Return a cross-encoder's activation by the first file that names it, in the order of sentence-transformers."""
    section = config.get("sentence_transformers")
    if settings.get("activation_fn") is not None:
        where, named = f"activation_fn in {shown}/{SETTINGS}", settings["activation_fn"]
    elif isinstance(section, Mapping) and "activation_fn" in section:
        where, named = f"sentence_transformers.activation_fn in {shown}/config.json", section["activation_fn"]
    else:
        name = "sbert_ce_default_activation_function"
        where, named = f"{name} in {shown}/config.json", config.get(name)
    if named is None:
        return PAIR_ACTIVATIONS["Sigmoid"]
    known = isinstance(named, str) and named.startswith("torch.nn.")
    found = PAIR_ACTIVATIONS.get(named.rpartition(".")[2]) if known else None
    if found is None:
        expected = f"one of torch's {', '.join(PAIR_ACTIVATIONS)}"
        fix = f"write `activation: sigmoid` or `activation: none` if that is meant, or {OWN_NODE}"
        raise ConfigError("model", f"{where} is {named!r:.100}", expected, fix)
    return found


def _modules(written: Any, shown: str) -> Iterator[tuple[str, str]]:
    """Yield each module's class without its package, and its folder."""
    if not isinstance(written, list) or not 0 < len(written) <= MODULES_MAX:
        raise ConfigError("model", f"{shown} is no list of modules", "a list of objects with type and path")
    for one in written:
        kind, path = (one.get("type"), one.get("path", "")) if isinstance(one, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(path, str):
            raise ConfigError("model", f"{shown} is no list of modules", "a list of objects with type and path")
        package, _, name = kind.rpartition(".")
        if package.partition(".")[0] != "sentence_transformers":
            raise ConfigError(
                "model", f"{shown} names {kind:.100}, which is code of its own", "known modules", OWN_NODE
            )
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\0" in path:
            raise ConfigError("model", f"{shown} names the path {path!r:.100}", "a folder inside the model's")
        yield name, path


def _transformer(folder: Path, shown: str, wanted: str = "feature-extraction") -> tuple[bool, int | None]:
    """Return whether texts are put into lower case, and the most tokens of one."""
    names = sorted(path.name for path in folder.glob("sentence_*_config.json"))
    written = _object(folder, shown, names[0]) if names else {}
    task = written.get("transformer_task", wanted)
    if task != wanted:
        found = f"transformer_task in {shown}/{names[0]} is {task!r:.60}"
        raise ConfigError("model", found, wanted, OWN_NODE)
    for key in ("processing_kwargs", "query_expansion"):
        if written.get(key):
            found = f"{key} in {shown}/{names[0]} is {written[key]!r:.60}"
            raise ConfigError("model", found, f"no {key}", OWN_NODE)
    tokens_max = written.get("max_seq_length")
    if tokens_max is None:
        tokens_max = _object(folder, shown, "tokenizer_config.json").get("model_max_length")
        tokens_max = tokens_max if _is_size(tokens_max) else None  # transformers writes 1e30 for no limit
    elif not _is_size(tokens_max):
        raise ConfigError("model", f"max_seq_length in {shown}/{names[0]} is {tokens_max!r:.40}", "a count of tokens")
    return bool(written.get("do_lower_case")), tokens_max


def _pooling(folder: Path, shown: str) -> tuple[str, bool]:
    """Return the pooling, and whether the tokens of a prompt are pooled too."""
    written = _object(folder, shown, "config.json")
    old = [mode for key, mode in _OLD_KEYS.items() if written.get(key)]
    mode = written.get("pooling_mode", (old or ["mean"])[0] if len(old) < 2 else old)
    modes = mode if isinstance(mode, list) else [mode]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        found = f"{shown}/config.json pools by {' and '.join(map(str, modes)):.100}"
        raise ConfigError("model", found, f"one of {', '.join(_POOLINGS)}", OWN_NODE)
    return _POOLINGS[modes[0]], bool(written.get("include_prompt", True))


def _dense(folder: Path, path: str, shown: str) -> Dense:
    written = _object(folder / path, shown, "config.json")
    sizes = {key: written.get(key, 0) for key in ("in_features", "out_features")}
    if not all(map(_is_size, sizes.values())):
        raise ConfigError("model", f"{shown}/config.json has {sizes!r:.80}", "counts of features")
    activation = str(written.get("activation_function", "torch.nn.modules.activation.Tanh"))
    name = activation.rpartition(".")[2]
    if not activation.startswith("torch.nn.modules.") or name not in ACTIVATIONS:
        found = f"activation_function in {shown}/config.json is {activation:.100}"
        raise ConfigError("model", found, f"one of torch's {', '.join(ACTIVATIONS)}", OWN_NODE)
    ends = {str(written.get(key) or "sentence_embedding") for key in ("module_input_name", "module_output_name")}
    if ends != {"sentence_embedding"} or written.get("use_residual"):
        what = "use_residual" if written.get("use_residual") else f"reads or gives {', '.join(sorted(ends)):.100}"
        raise ConfigError("model", f"{shown}/config.json: {what}", "a layer on sentence_embedding alone", OWN_NODE)
    if not (folder / path / "model.safetensors").is_file():
        found = f"{shown} has no model.safetensors; pickled weights are not loaded"
        fix = "load the model with sentence-transformers where you trust it, and save it again"
        raise ConfigError("model", found, "weights as safetensors", fix)
    weights, bias = f"{path}/model.safetensors", bool(written.get("bias", True))
    return Dense(weights, sizes["in_features"], sizes["out_features"], bias, name)


def _settings(folder: Path, shown: str, wanted: str) -> Mapping[str, Any]:
    """Return the settings of a folder that the library's class `wanted` wrote."""
    written = _object(folder, shown, SETTINGS)
    kind = written.get("model_type", wanted)
    if kind != wanted:
        node = {"CrossEncoder": "rerank", "SentenceTransformer": "embed"}.get(str(kind))
        fix = f"use node {node} for it" if node else OWN_NODE
        raise ConfigError("model", f"{shown} is a {kind!s:.60}", f"a {wanted}", fix)
    return written


def _prompt(written: Mapping[str, Any], shown: str, chosen: str | None = None) -> tuple[str, str]:
    """Return the name and the text of the prompt `chosen`, else of the default prompt."""
    if written.get("truncate_dim") is not None:
        raise ConfigError("model", f"{shown}/{SETTINGS} cuts embeddings (truncate_dim)", "whole embeddings", OWN_NODE)
    name, prompts = written.get("default_prompt_name"), written.get("prompts")
    if chosen is not None:
        known = prompts if isinstance(prompts, dict) else {}
        texts = {key: text for key, text in known.items() if isinstance(text, str)}
        if chosen not in texts:
            expected = f"one of {', '.join(texts)}" if texts else "a model with prompts"
            found = f"{chosen!r:.60} is no prompt in {shown}/{SETTINGS}"
            raise ConfigError("prompt", found, expected, "write the text as `prefix`")
        return chosen, texts[chosen]
    if name is None:
        return "", ""
    text = prompts.get(name) if isinstance(prompts, dict) else None
    if not isinstance(text, str):
        found = f"default_prompt_name in {shown}/{SETTINGS} is {name!r:.60}"
        raise ConfigError("model", found, "a name under prompts", "write the text as `prefix` of the step")
    return str(name), text


def _object(folder: Path, shown: str, name: str) -> Mapping[str, Any]:
    """Return the JSON object in a file; {} where there is no file."""
    written = read_json(folder / name, f"{shown}/{name}")
    if written is not None and not isinstance(written, dict):
        raise ConfigError("model", f"{shown}/{name} is no JSON object")
    return written or {}


def _under(shown: str, path: str) -> str:
    return f"{shown}/{path}" if path else shown


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value <= SIZE_MAX
