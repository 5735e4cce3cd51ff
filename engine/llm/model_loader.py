"""Model loading from a folder or hub: safetensors only, no remote code.

    loaded = load_model("models/large", options)
    report = place(*loaded)

Reading is transformers'. A model that is to be quantised as it is loaded would not fit into memory as it is in its
checkpoint, so its decoder layers are left out at first (`LayerWeights`), and `place` then reads, moves, fuses and
quantises them one at a time. At no time is there more than what is finished, and one layer as it is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weftline.engine.llm import attention
from weftline.engine.llm.attention import FIX, check_kind
from weftline.engine.llm.checkpoint_format import PackedFormat, settings_of
from weftline.engine.llm.fusion.fuse import FusionReport, find_stack, fuse
from weftline.engine.llm.gguf import alone, is_gguf, load_gguf, open_header, read_gguf_config, scale_positions
from weftline.engine.llm.packed_weights import unpacked
from weftline.engine.llm.quantised import Quantiser, check_form, plan_weights
from weftline.engine.llm.vision.families import FAMILIES, check_family
from weftline.errors import ModelError
from weftline.nodes.contract import ConfigError, model_error
from weftline.nodes.hugging_face import (
    INDEX,
    check_network,
    check_weights,
    local_or_hub,
    no_progress_bars,
    read_config,
    read_json,
    reason_without_path,
)

_NUMBER = re.compile(r"(?:^|\.)(\d+)\.")


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Options for loading a model.

    device:      'cpu', or 'cuda:0' and so on.
    dtype:       'auto' (float32 on CPU, what the checkpoint says elsewhere), or a torch dtype's name.
    page_tokens: tokens in a page.
    kv_bytes:    KV memory in bytes; None: KV_BYTES_DEFAULT, or less when the model cannot fill it.
    context_max: longest sequence in tokens; None: what the model was made for.
    kv_dtype:    'auto' (that of the weights), or 'fp8'.
    weights:     'auto' (as the checkpoint has them), 'fp8', 'int8' or 'int4'.
    fuse:        merge weights where that gives the same results.
    graphs:      record rounds as CUDA graphs, on a GPU.
    form:        of attention: 'cpu', 'gpu', or 'auto' for the device's own.
    rows_max:    most tokens of a round, where the form needs to know.
    sequences_max: most sequences of a round, likewise.
    """

    device: str = "cpu"
    dtype: str = "auto"
    page_tokens: int = 16
    kv_bytes: int | None = None
    context_max: int | None = None
    kv_dtype: str = "auto"
    weights: str = "auto"
    fuse: bool = True
    graphs: bool = True
    form: str = "auto"
    rows_max: int = 8192
    sequences_max: int = 512


class Loaded(NamedTuple):
    """A model in the host's memory, its attention ours.

    options: how it is to be run; `weights` is what is left to be done with them, 'auto' for nothing.
    layers:  reads its decoder layers, which have no weights yet; None: they are there.
    """

    model: Any
    options: RunnerOptions
    layers: LayerWeights | None = None


class LayerWeights:
    """Weights of a model's decoder layers that are read from its checkpoint when they are wanted.

    The rest of the model is there, and its layers are on the meta device. Names and values are what transformers makes
    of the checkpoint (it renames, merges and unpacks): to read a layer, it loads the model again with that layer's
    tensors alone, all others being `_Absent`. Where the checkpoint has the layer's own names and nothing is converted,
    the tensors are read directly instead, which gives the same.
    """

    def __init__(
        self,
        read: Callable[[dict[str, Any]], Any],
        tensors: dict[str, Any],
        model: Any,
        progress: Callable[[str, float], None] = lambda phrase, fraction: None,
    ) -> None:
        self._read = read
        self._progress = progress
        self._tensors = tensors
        self._layers = find_stack(model)[1]
        self._names = {module: path for path, module in model.named_modules() if module in self._layers}
        # transformers notes what it has converted; in a version that does not, nothing is read directly
        self._converts = getattr(model, "_weight_conversions", None) != [] or bool(settings_of(model.config))

    def fill(self, layer: nn.Module) -> None:
        """Read the weights of a decoder layer; ModelError when they are not all there."""
        index, prefix, count = self._layers.index(layer), f"{self._names[layer]}.", len(self._layers)
        self._progress(f"reading layer {index + 1} of {count}", 0.2 + 0.7 * index / count)
        own = {name: tensor for name, tensor in self._tensors.items() if _layer_of(name) == index}
        weights: Mapping[str, Tensor]
        expected = layer.state_dict()
        if not self._converts and own.keys() == {prefix + name for name in expected}:
            weights = {name: own[prefix + name][...].to(dtype=blank.dtype) for name, blank in expected.items()}
        else:
            absent = {name: _Absent(tensor) for name, tensor in self._tensors.items()}
            weights = find_stack(self._read({**absent, **own}))[1][index].state_dict()
        layer.load_state_dict(weights, assign=True)
        if any(weight.is_meta for weight in (*layer.parameters(), *layer.buffers())):
            raise ModelError(f"weights of layer {index} are not in the checkpoint's tensors of that number")


class _Absent:
    """A slice of a checkpoint that is not to be read now: transformers makes a tensor without memory of it.

    It has what transformers asks of a slice of safetensors: it is indexed, then moved to a device and cast.
    """

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.get_shape())

    def get_dtype(self) -> str:
        return str(self._tensor.get_dtype())

    def __getitem__(self, index: Any) -> _Absent:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        # an index of a file's slice is a view: nothing is read
        dtype = dtype or getattr(self._tensor, "dtype", None) or self._tensor[...].dtype
        return torch.empty(self.get_shape(), dtype=dtype, device="meta")


def place(model: Any, options: RunnerOptions, layers: LayerWeights | None = None) -> FusionReport | None:
    """Bring a loaded model to its device, fused and quantised as `options` say; None when it is not to be fused.

    Its decoder layers go one at a time; see `Loaded` for `layers`. A model that is there already is left there.
    """
    base, stack = find_stack(model)
    with _without(base, stack):
        model.to(options.device)
    quantiser = None if options.weights == "auto" else Quantiser(model, options.weights, options.device)

    def ready(layer: nn.Module) -> None:
        with torch.inference_mode(False):  # as it would be loaded outside of a probe
            if layers is not None:
                layers.fill(layer)
            layer.to(options.device).eval().requires_grad_(False)

    def done(layer: nn.Module) -> None:
        if quantiser is not None:  # after fusing: merged layers keep their scales
            with torch.inference_mode(False):
                quantiser.take(layer)
            if torch.device(options.device).type == "cuda":
                torch.cuda.empty_cache()  # or the next layer's weights lie between what this one's have left

    report = fuse(model, ready, done) if options.fuse else None
    if report is None:
        for layer in stack:
            ready(layer)
            done(layer)
    if quantiser is not None:
        quantiser.take(model)  # what lies outside the layers
        quantiser.report()
    return report


@contextmanager
def _without(base: Any, stack: list[Any]) -> Iterator[None]:
    """Have the model do without its decoder layers meanwhile; they come back where they were."""
    if base is None:
        yield
        return
    lists = [(name, child) for name, child in base.named_children() if isinstance(child, nn.ModuleList)]
    name, held = next((name, child) for name, child in lists if list(child) == stack)
    base._modules[name] = nn.ModuleList()
    try:
        yield
    finally:
        base._modules[name] = held


def load_model(
    source: str | Path,
    options: RunnerOptions,
    progress: Callable[[str, float], None] = lambda phrase, fraction: None,
    shown: str | None = None,
    kind: str = "AutoModelForCausalLM",
    whole: bool = False,
) -> Loaded:
    """Read a model into the host's memory, its attention ours, and say how it is to be run.

    kind:  transformers' class that chooses the model's class by its config.
    whole: with all its layers, also when it is to be quantised.
    """
    import transformers

    shown = shown or str(source)
    attention.register()
    if is_gguf(source):
        return _load_gguf(source, options, progress, shown, kind)
    progress("reading the model's config", 0.0)
    source = _checked_folder(source, shown)
    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its many parts raise
        reason = reason_without_path(error, source, shown)
        raise ModelError(f"model {shown}: its config cannot be read: {reason}") from None
    check_kind(config, shown)
    _check_family(config, shown)
    attend: Any = attention.NAME
    if config.model_type in FAMILIES:
        kind, attend = "AutoModelForImageTextToText", {"text_config": attention.NAME, "vision_config": "sdpa"}
    check_network(getattr(transformers, kind), config, source, f"model {shown}")
    progress("reading weights", 0.2)
    plan = plan_weights(options.weights, options.dtype, options.device, config, shown)
    dtype = getattr(torch, plan.dtype) if plan.dtype else _dtype(options, config)
    layers = None
    try:
        with no_progress_bars():
            found = None
            reader = _Reader(source, config, dtype, getattr(transformers, kind), plan.packed)
            if plan.form is not None and not whole and plan.by_layer:
                found = _load_by_layer(reader, progress)
            if found is not None:
                model, info, layers = found
            elif plan.packed is not None:
                model, info = reader.read(reader.tensors)
            else:
                model, info = getattr(transformers, kind).from_pretrained(
                    source,
                    config=config,
                    dtype=dtype,
                    attn_implementation=attend,
                    trust_remote_code=False,
                    use_safetensors=True,
                    output_loading_info=True,
                )
    except Exception as error:
        reason = reason_without_path(error, source, shown)
        if attention.NAME in reason:
            raise ModelError(f"model {shown}: its attention cannot be replaced by the paged one{FIX}") from None
        raise ModelError(f"model {shown}: its weights cannot be loaded: {reason}") from None
    _check_complete(info, shown)
    return Loaded(model, replace(options, weights=plan.form or "auto"), layers)


def _load_gguf(
    source: str | Path, options: RunnerOptions, progress: Callable[[str, float], None], shown: str, kind: str
) -> Loaded:
    """Read the model in a GGUF file, all layers at once."""
    if kind != "AutoModelForCausalLM":
        raise ModelError(f"model {shown}: a GGUF file is loaded for task generate only")
    header = open_header(source, shown)
    form = None if options.weights == "auto" else options.weights
    dtype_name = None if form is None else check_form(form, options.dtype, options.device)
    progress("reading weights", 0.2)
    with alone(source) as folder:
        try:
            config = read_gguf_config(folder, header)
            check_kind(config, shown)
            dtype = getattr(torch, dtype_name) if dtype_name else _dtype(options, config)
            with no_progress_bars():
                model, info = load_gguf(folder, config, dtype, attention.NAME)
        except Exception as error:
            if isinstance(error, ModelError):
                raise
            raise ModelError(
                f"model {shown}: it cannot be loaded: {reason_without_path(error, folder, shown)}"
            ) from None
    _check_complete(info, shown)
    scale_positions(model, source, header, shown)
    return Loaded(model, replace(options, weights=form or "auto"))


def _check_complete(info: Mapping[str, Any], shown: str) -> None:
    """Raise ModelError unless transformers' report says that all weights were there."""
    missing = sorted(map(str, info.get("missing_keys") or ())) + sorted(map(str, info.get("mismatched_keys") or ()))
    if missing:
        raise ModelError(f"model {shown}: {len(missing)} weights missing or of another shape: {missing[0]} ...")


class _Reader:
    """Reads models from a checkpoint's tensors, some of which may be `_Absent`.

    tensors: slices by name, those of `packed` as plain weights; none where the checkpoint's files have other names.
    """

    def __init__(
        self, source: str | Path, config: Any, dtype: torch.dtype, auto: Any, packed: PackedFormat | None
    ) -> None:
        self._source, self._config, self._dtype, self._auto, self._packed = source, config, dtype, auto, packed

    @cached_property
    def tensors(self) -> dict[str, Any]:
        found = _open_tensors(self._folder)
        return found if self._packed is None else unpacked(found, self._packed, self._dtype)

    def read(self, state: dict[str, Any]) -> tuple[Any, Any]:
        """Return the model with the weights in `state`, and transformers' report."""
        with no_progress_bars():
            model, info = self._class.from_pretrained(
                None,
                config=self._config,
                state_dict=state,
                dtype=self._dtype,
                attn_implementation=attention.NAME,
                generation_config=self._generation,
                output_loading_info=True,
            )
        return model, info

    @cached_property
    def _folder(self) -> Path:
        return Path(self._source)

    @cached_property
    def _class(self) -> Any:
        with torch.device("meta"):
            return type(self._auto.from_config(self._config))

    @cached_property
    def _generation(self) -> Any:
        from transformers import GenerationConfig

        try:
            return GenerationConfig.from_pretrained(self._folder)
        except OSError:  # it has none of its own, and gets one from its config
            return None


def _load_by_layer(reader: _Reader, progress: Callable[[str, float], None]) -> tuple[Any, Any, LayerWeights] | None:
    """Load a model without its decoder layers; None where that cannot be: it has no layers that stand for themselves.

    A layer is what has the same first number in its tensors' names.
    """
    tensors = reader.tensors
    if not tensors:
        return None
    apart = {name: _Absent(t) if _layer_of(name) is not None else t for name, t in tensors.items()}
    model, info = reader.read(apart)
    _, stack = find_stack(model)
    each = [id(weight) for layer in stack for weight in (*layer.parameters(), *layer.buffers())]
    shared = len(set(each)) != len(each)  # a weight of several layers belongs to none of them
    every = (*model.parameters(), *model.buffers())
    strange = any(weight.is_meta and id(weight) not in each for weight in every)  # such as a second stack
    if not stack or shared or strange:
        return None
    return model, info, LayerWeights(lambda state: reader.read(state)[0], tensors, model, progress)


def _layer_of(name: str) -> int | None:
    """Return the first number in a tensor's name: 3 of 'model.layers.3.mlp.experts.7.up_proj.weight'."""
    found = _NUMBER.search(name)
    return None if found is None else int(found[1])


def _open_tensors(folder: Path) -> dict[str, Any]:
    """Return the tensors of a checkpoint, each read when it is indexed; none where its files have other names."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.is_file():
        files = sorted(set((read_json(index, INDEX) or {})["weight_map"].values()))
    elif not (folder / files[0]).is_file():
        return {}
    tensors = {}
    for file in files:
        opened: Any = safe_open(folder / file, framework="pt")  # a view of the file, which ends with its last tensor
        tensors.update({name: opened.get_slice(name) for name in opened.keys()})  # noqa: SIM118  it is no mapping
    return tensors


def _checked_folder(source: str | Path, shown: str) -> Path:
    """Return the folder of a model with sound files; that of a hub name is fetched."""
    folder = Path(source)
    if not folder.is_dir():
        looks_local = isinstance(source, Path) or str(source).startswith((".", "/", "~")) or str(source).count("/") > 1
        if looks_local:
            raise ModelError(
                f"model {shown}: no such folder\n    fix: give a folder with config.json and *.safetensors"
            )
        folder = local_or_hub(str(source), Path())
    if not (folder / "config.json").is_file():
        raise ModelError(f"model {shown}: the folder has no config.json")
    check_weights(folder, shown)
    try:
        read_config(folder, f"model {shown}")
    except ConfigError as error:
        raise model_error(error) from None
    return folder


def _check_family(config: Any, shown: str) -> None:
    """Raise ModelError for a vision-language model that is not supported, such as one just downloaded."""
    try:
        check_family(config.to_dict(), shown)
    except ConfigError as error:
        raise ModelError(f"model {error.found}; expected {error.expected}") from None


def _dtype(options: RunnerOptions, config: Any) -> Any:
    if options.dtype == "auto":
        on_cpu = options.device == "cpu"
        return torch.float32 if on_cpu else (getattr(config, "dtype", None) or torch.bfloat16)
    found = getattr(torch, options.dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ModelError(f"dtype: found {options.dtype!r:.40}, expected auto, float32, bfloat16 or float16")
    return found
