"""Sentence embedding node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from weftline.errors import InputError
from weftline.fields import REQUEST
from weftline.node import (
    Batch,
    BatchNode,
    ConfigError,
    ModelError,
    OpenContext,
    Outputs,
    Ports,
    StepContext,
    placed,
    port,
)
from weftline.nodes.contract import model_error
from weftline.nodes.device_tensors import as_array, offload
from weftline.nodes.hugging_face import (
    LANGUAGE_MODEL,
    MASKED_LM,
    NO_HEAD,
    check_folder,
    check_kind,
    fetch_folder,
    find_folder,
    hub_notes,
    kind_of,
    load_network,
    load_tokens,
    network_bytes,
    read_config,
    tokens_limit,
)
from weftline.nodes.model_file import find_model, load_weights
from weftline.nodes.precision import check_precision, computing_in, round_weights
from weftline.nodes.sentence_head import MODULES, POOLINGS, SETTINGS, Dense, SentenceHead, read_head
from weftline.nodes.text_tokens import (
    OVERFLOW_ABOUT,
    TOKENS_ABOUT,
    USAGE_ABOUT,
    Encoded,
    Overflow,
    TextTokens,
    check_overflow,
    of_fitting,
    read_overflow,
    usage_of,
)
from weftline.shm.device.names import is_gpu

if TYPE_CHECKING:
    import torch

PREFIXES_KEPT = 256
"""Most texts before inputs, of steps that share the node."""

_WIDTH_KEYS = ("hidden_size", "dim", "d_model", "n_embd")
_ENCODERS = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}
"""Encoder-only classes of transformers for encoder-decoder models, by model_type."""

_UNUSED = ("pooler.",)
"""Tensors that no pooling uses: a layer on the first token, which many checkpoints lack."""


@dataclass(frozen=True, slots=True)
class EmbedConfig:
    """Options of `embed`.

    model:     a model of transformers or sentence-transformers as a folder or hub name: safetensors only, no code from
               the model.
    pooling:   pooling of the token states: 'mean', 'first' (the model's own summary token), 'last', 'max', 'mean_sqrt'
               or 'weighted_mean'. Default: that of the model's modules.json, else 'mean'.
    normalise: scale every embedding to length 1, so that a dot product is a cosine. Default: that of
               the model's modules.json, else true.
    dimensions: numbers of an embedding that are kept, the first ones, before it is scaled: for models that were
               trained so that the first numbers suffice (Matryoshka). Default: all.
    prompt:    name of one of the model's prompts, in its config_sentence_transformers.json ('query'): the text before
               every input. Default: the model's own default prompt, if it has one.
    prefix:    text before every input, as some models were trained with ('query: '), instead of a prompt of the model.
    overflow:  a text with more tokens than the model reads: 'error' fails its item, 'end' and 'start' cut it there. The
               optional input `overflow` overrides it.
    precision: number format of the network: 'float32', 'tf32' (GPUs only), 'bfloat16' or 'float16'; embeddings
               are float32 in all. Compared with float32 on the CPU, with random weights of BERT, MPNet, RoBERTa and T5,
               embeddings moved by a cosine distance of at most 2e-5 in bfloat16 and 4e-7 in float16, where texts are
               0.08 and more apart. TF32 was not measured.
    """

    model: str
    pooling: str | None = None
    normalise: bool | None = None
    dimensions: int | None = None
    prompt: Annotated[str | None, REQUEST] = None
    prefix: Annotated[str | None, REQUEST] = None
    precision: str = "float32"
    overflow: str = "error"


class Embed(BatchNode):
    """Computes float32[D] embeddings of texts, with D of the model's config.json, or `dimensions`.

    A sentence-transformers folder has the results of that library: its pooling, dense layers, normalisation, default
    prompt and maximum length apply. Options of the step override them; `weftline plan` shows both.
    """

    Config: ClassVar[type[Any]] = EmbedConfig
    extra: ClassVar[str] = "llm"
    heavy: ClassVar[bool] = True
    batch_default: ClassVar[tuple[int, float]] = (32, 2.0)
    mixed_options: ClassVar[bool] = True

    _network: Any = None
    _layers: Any = None  # the head's dense layers, as torch modules
    _head: SentenceHead
    _prefix: Callable[[str | None, str | None], str]
    _device: str  # as torch calls it
    _on_device: bool  # embeddings stay on the device
    _tokens: TextTokens

    @classmethod
    def ports(cls, config: EmbedConfig, step: StepContext) -> Ports:
        if config.pooling is not None and config.pooling not in POOLINGS:
            raise ConfigError("pooling", f"{config.pooling!r:.40}", f"one of {', '.join(POOLINGS)}")
        check_precision(config.precision)
        check_overflow(config.overflow)
        if config.dimensions is not None and config.dimensions < 1:
            raise ConfigError("dimensions", f"{config.dimensions}", "a number from 1")
        if config.prompt is not None and config.prefix is not None:
            raise ConfigError("prompt", "prompt and prefix", "one of them", "leave one out")
        folder = find_folder(config.model, step.base_dir)
        width = "D" if folder is None else _checked_width(config, folder, step.base_dir)
        _check_dimensions(config, width)
        type = f"float32[{config.dimensions or width}]"
        return Ports(
            inputs=(
                port("text", "text"),
                port("tokens", "json", optional=True, about=TOKENS_ABOUT),
                port("overflow", "json", optional=True, about=OVERFLOW_ABOUT),
            ),
            outputs=(port("embedding", type), port("usage", "json", about=USAGE_ABOUT)),
        )

    @classmethod
    def model_bytes(cls, config: EmbedConfig, step: StepContext) -> int:
        return network_bytes(config.model, step.base_dir)

    @classmethod
    def plan_notes(cls, config: EmbedConfig, step: StepContext) -> Sequence[str]:
        folder = find_folder(config.model, step.base_dir)
        written = None if folder is None else read_head(folder, config.model, config.prompt)
        return hub_notes(config.model, step.base_dir) if written is None else tuple(_plan_lines(config, written))

    @classmethod
    def device_ports(cls, config: EmbedConfig, ports: Ports) -> frozenset[str]:
        return frozenset({"embedding"})

    def open(self, context: OpenContext) -> None:
        self._device, self._on_device = context.framework_device, is_gpu(context.device)
        model = self.config.model
        try:
            folder = fetch_folder(model, context.base_dir)
            written = read_head(folder, model, self.config.prompt)
            self._head = _chosen(self.config, written)
            self._prefix = lru_cache(PREFIXES_KEPT)(partial(_prefix, folder, model))
            network = f"{model}/{written.network}" if written is not None and written.network else model
            if network != model and find_model(model, context.base_dir) is None:
                fix = "download the model and name its folder"
                raise ConfigError("model", f"the network of {model} is in its folder {self._head.network}", fix=fix)
            known = read_config(folder / self._head.network, network)
        except ConfigError as error:
            raise model_error(error) from None
        kind = _ENCODERS.get(str(known.get("model_type")), "AutoModel")
        self._network = load_network(kind, network, context, _UNUSED)
        round_weights(self._network, self.config.precision)
        found = self._network.config.to_dict()
        try:
            if self.config.dimensions is not None:
                dense = self._head.dense
                _check_dimensions(self.config, dense[-1].outputs if dense else embedding_width(found, model))
        except ConfigError as error:
            raise model_error(error) from None
        if written is None:
            limit = tokens_limit(found)
        else:
            limit = tokens_limit(found, *([self._head.tokens_max] if self._head.tokens_max else []))
        self._tokens = load_tokens(network, context, limit)
        self._layers = [_layer(one, folder, model, self._device) for one in self._head.dense]

    def warm_up(self) -> None:
        of_fitting(self._tokens.encode(["warm-up"], [Overflow("end")]), lambda fitting: [*self._embed(fitting)])

    def run(self, batch: Batch) -> Outputs:
        prefixes = [self._prefix(one.prompt, one.prefix) for one in self.configs(batch)]
        texts = [prefix + text for prefix, text in zip(prefixes, batch["text"], strict=True)]
        rules = [read_overflow(one, Overflow(self.config.overflow)) for one in batch.get("overflow")]
        encoded = self._tokens.encode([text.lower() for text in texts] if self._head.lower else texts, rules)
        for place, ids in enumerate(batch.get("tokens")):
            if ids is not None:
                encoded[place] = self._tokens.from_ids(ids, rules[place])
        return {
            "embedding": self._embeddings(batch, encoded),
            "usage": of_fitting(encoded, lambda fitting: [usage_of([one]) for one in fitting]),
        }

    def sleep(self, keep: str) -> bool:
        if keep != "host":
            return False
        for module in (self._network, *self._layers):
            offload(module)
        return True

    def wake(self) -> None:
        for module in (self._network, *self._layers):
            module.to(self._device)

    def close(self) -> None:
        self._network = self._layers = None

    def _embeddings(self, batch: Batch, encoded: Sequence[Encoded | InputError]) -> Any:
        """Return the values of output `embedding`: one tensor, or a list where items have failed."""
        fitting = [one for one in encoded if isinstance(one, Encoded)]
        if len(fitting) == len(encoded):
            return placed(batch, "embedding", self._embed(fitting), self._on_device)
        found = of_fitting(encoded, lambda fitting: [*self._embed(fitting)])
        return [one if isinstance(one, InputError) or self._on_device else as_array(one) for one in found]

    def _embed(self, texts: Sequence[Encoded]) -> torch.Tensor:
        """Return float32 [texts, D] on the network's device."""
        import torch

        rows, device = self._tokens.rows(texts), self._device
        with torch.inference_mode():
            ids, mask = torch.from_numpy(rows.ids).to(device), torch.from_numpy(rows.mask).to(device)
            with computing_in(self.config.precision, device):
                states = self._network(input_ids=ids, attention_mask=mask).last_hidden_state.float()
            pooled = _pooled(self._head.pooling, states, mask.unsqueeze(-1).float())
            for layer in self._layers:
                pooled = layer(pooled)
            pooled = pooled[:, : self.config.dimensions].contiguous()
            if self._head.normalise:
                pooled = torch.nn.functional.normalize(pooled, dim=-1)
            found: torch.Tensor = pooled
            return found


def _pooled(pooling: str, states: Any, mask: Any) -> Any:
    """Return [texts, D] of states [texts, tokens, D] and mask [texts, tokens, 1] (1 at tokens, then padding)."""
    import torch

    if pooling == "first":
        return states[:, 0]
    if pooling == "last":
        last = mask.sum(dim=1, keepdim=True).long().clamp(min=1) - 1
        return states.gather(1, last.expand(-1, 1, states.shape[2])).squeeze(1)
    if pooling == "max":
        return states.masked_fill(mask == 0, float("-inf")).max(dim=1).values
    if pooling == "weighted_mean":
        mask = mask * torch.arange(1, mask.shape[1] + 1, device=mask.device).view(1, -1, 1)
    count = mask.sum(dim=1).clamp(min=1)
    return (states * mask).sum(dim=1) / (count.sqrt() if pooling == "mean_sqrt" else count)


def _layer(dense: Dense, folder: Path, shown: str, device: str) -> Any:
    """Return a dense layer with its weights on a device; ModelError when they do not fit it."""
    import torch

    state, shown = load_weights(folder / dense.weights, f"{shown}/{dense.weights}"), f"{shown}/{dense.weights}"
    linear = torch.nn.Linear(dense.inputs, dense.outputs, bias=dense.bias)
    wanted = {f"linear.{name}": tuple(tensor.shape) for name, tensor in linear.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if found != wanted:
        raise ModelError(f"{shown} has {found}, its config.json means {wanted}")
    linear.load_state_dict({name.removeprefix("linear."): tensor.float() for name, tensor in state.items()})
    return torch.nn.Sequential(linear, getattr(torch.nn, dense.activation)()).to(device).eval()


def _chosen(config: EmbedConfig, written: SentenceHead | None) -> SentenceHead:
    """Return the effective head: the step's options, else the folder's settings, else the defaults."""
    head = written or SentenceHead(normalise=True)
    return replace(
        head,
        pooling=head.pooling if config.pooling is None else config.pooling,
        normalise=head.normalise if config.normalise is None else config.normalise,
        prefix=head.prefix if config.prefix is None else config.prefix,
    )


def _prefix(folder: Path, model: str, prompt: str | None, prefix: str | None) -> str:
    """Return the text before a step's inputs; ModelError: the model has no such prompt."""
    if prefix is not None:
        return prefix
    try:
        written = read_head(folder, model, prompt)
    except ConfigError as error:
        raise model_error(error) from None
    return "" if written is None else written.prefix


def _check_dimensions(config: EmbedConfig, width: int | str) -> None:
    """Check `dimensions` against the model's width; a name: not known yet."""
    if config.dimensions is not None and isinstance(width, int) and config.dimensions > width:
        found = f"{config.dimensions}, and {config.model} gives embeddings of {width} numbers"
        raise ConfigError("dimensions", found, f"a number from 1 to {width}")


def _plan_lines(config: EmbedConfig, written: SentenceHead) -> Sequence[str]:
    """Return lines for the plan: settings of a sentence-transformers folder, and the step's overrides."""
    head, model = _chosen(config, written), config.model
    parts = [f"pooling {head.pooling}"]
    parts += [f"dense {one.inputs} to {one.outputs} ({one.activation})" for one in head.dense]
    parts += [
        *([f"the first {config.dimensions} numbers"] if config.dimensions else []),
        "length 1" if head.normalise else "not normalised",
        f"prefix {head.prefix!r:.60}" if head.prefix else "no prefix",
    ]
    parts += [f"at most {head.tokens_max} tokens"] if head.tokens_max else []
    lines = [f"settings of {model}/{MODULES}: {', '.join(parts)}"]
    for option, own in (("pooling", written.pooling), ("normalise", written.normalise), ("prefix", written.prefix)):
        value = getattr(config, option)
        if value is not None and value != own:
            where = SETTINGS if option == "prefix" else MODULES
            lines.append(f"option {option}: {value!r:.60} overrides {own!r:.60} of {model}/{where}")
    return lines


def _checked_width(config: EmbedConfig, folder: Path, base_dir: Path) -> int:
    """Return the size of an embedding. ConfigError: the model in `folder` is no embedding model."""
    model = config.model
    written = read_head(folder, model, config.prompt)
    network = f"{model}/{written.network}" if written is not None and written.network else model
    network_config = read_config(folder / (written.network if written else ""), network)
    encoder = str(network_config.get("model_type")) in _ENCODERS
    if written is None and config.pooling is None and not encoder:
        decoder = "write `pooling` to pool its token states anyway, or use node llm with task: embed"
        fix = decoder if kind_of(network_config)[1] is LANGUAGE_MODEL else ""
        check_kind(network_config, model, (NO_HEAD, MASKED_LM), "a model for embeddings", fix)
    if network_config.get("is_encoder_decoder") and not encoder:
        found = f"{model} has an encoder and a decoder ({network_config.get('model_type')!s:.40})"
        raise ConfigError("model", found, "an encoder, or a decoder, alone")
    check_folder(network, base_dir, "AutoModel")
    width = embedding_width(network_config, network)
    for one in () if written is None else written.dense:
        if one.inputs != width:
            module = f"{model}/{one.weights.rpartition('/')[0]}"
            found = f"{module} has {one.inputs} inputs, and the module before it has {width} outputs"
            raise ConfigError("model", found, "modules that fit each other")
        width = one.outputs
    return int(width)


def embedding_width(config: dict[str, Any] | None, model: str) -> int | str:
    """Return the embedding's size, or the name D while the model's config.json is not on this machine."""
    if config is None:
        return "D"
    for key in _WIDTH_KEYS:
        if type(config.get(key)) is int and config[key] > 0:
            width: int = config[key]
            return width
    raise ConfigError("model", f"{model}/config.json has none of {', '.join(_WIDTH_KEYS)}", "a model's config.json")
