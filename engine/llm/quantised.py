"""Weight quantisation at load, and pre-quantised checkpoints: choice of method and conversion.

    plan = plan_weights("int8", "auto", "cpu", config, "models/shapes-chat")
    model = AutoModelForCausalLM.from_pretrained(..., config=config, dtype=plan.dtype or ...)
    fuse(model)
    report = quantise(model, plan.form, "cpu")

Products are torchao's. Quantising comes after fusing: a merged layer's rows keep the scales that they would have had
apart, so that merging changes no number, and fused layers do not know what their weights are made of. Layers are
changed one at a time, each on the device where it will be, and what was there before is freed. A `Quantiser` takes
parts of a model, so that one decoder layer can be read, fused and quantised before the next one is (`loading`).
Embeddings, the output layer, norms and routers of experts stay as they are.

    form   a weight takes            scales                 products
    fp8    8 bits, e4m3              one for each output    in fp8, inputs scaled by row when they come (GPU 8.9 up)
    int8   8 bits, symmetric         one for each output    in the model's dtype
    int4   4 bits, with zero point   one for each group     in bfloat16

fp8's inputs are scaled and rounded by one Triton kernel where it can be used, and by torchao otherwise. int8 saves
memory and no time: torchao converts the whole weight to the model's dtype before each product, so that a product reads
it as int8, writes it, and reads it again.

A pre-quantised checkpoint has a `quantization_config` (`checkpoint_format`). awq and gptq are unpacked by
`packed_weights`; transformers and the package of its format load another one. A format whose package would download
code, or that cannot run on the device, is loaded as plain weights where transformers can do that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from weftline.engine.llm.checkpoint_format import METHODS, PackedFormat, find_format, is_fp8, set_options
from weftline.errors import MissingPackage, ModelError

FORMS = ("fp8", "int8", "int4")
FP8_CAPABILITY = (8, 9)
INT4_CAPABILITY = (8, 0)
GROUPS = (128, 64, 32)
"""Sizes of int4's groups, the largest first that divides a layer's inputs."""
FP8_MULTIPLE = 16
"""Matrix products in fp8 want sizes that are multiples of this (torch._scaled_mm)."""
_WHOLE = (torch.float32, torch.bfloat16, torch.float16)
_ROUTERS = ("gate", "router", "shared_expert_gate")


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Storage format of a model's weights.

    form:     fp8, int8 or int4 to quantise to once loaded; None: as loaded.
    dtype:    name of the dtype that the form computes in; None: any.
    packed:   layout of weights that are unpacked here, None for those that transformers reads.
    by_layer: the checkpoint can be read layer by layer: it is plain, or unpacked tensor by tensor.
    """

    form: str | None = None
    dtype: str | None = None
    packed: PackedFormat | None = None
    by_layer: bool = True


@dataclass(frozen=True, slots=True)
class WeightReport:
    """Result of quantisation: layers quantised, (path, reason) of linear layers left, bytes of all weights."""

    layers: int
    left: tuple[tuple[str, str], ...]
    before_bytes: int
    after_bytes: int

    def __str__(self) -> str:
        mib = f"{self.before_bytes / 2**20:.1f} MiB to {self.after_bytes / 2**20:.1f} MiB"
        return f"{self.layers} layers quantised, {len(self.left)} left; weights from {mib}"


def plan_weights(weights: str, dtype: str, device: str, config: Any, shown: str) -> WeightPlan:
    """Return how to load and keep the weights of a model with transformers' `config`; `shown` is its name in errors.

    weights: auto (as the checkpoint has them), or a form.   dtype: auto or a torch dtype's name.
    `config` is changed where a checkpoint must be unpacked while it is loaded.
    ModelError says what does not go together, MissingPackage what to install.
    """
    capability = _capability(device)
    found, form = find_format(config, shown), (None if weights == "auto" else weights)
    if found is not None:
        method = found.method
        fast = capability is not None and capability >= FP8_CAPABILITY
        if form is not None and not METHODS[method].unpacked:
            raise ModelError(f"weights: found {form}, expected auto: model {shown} already is quantised, by {method}")
        if found.packed is not None:
            del config.quantization_config  # to transformers its weights are plain
        elif method == "compressed-tensors" and form is None and fast and is_fp8(config):
            set_options(config, use_optimized_inference=True)
        elif METHODS[method].unpacked:
            set_options(config, dequantize=True)
        if method == "fp8" and form is None and fast:
            form = "fp8"
    packed = None if found is None else found.packed
    by_layer = found is None or packed is not None or found.method == "fp8"
    dtype_name = None if form is None else check_form(form, dtype, device)
    return WeightPlan(form, dtype_name, packed, by_layer)


def check_form(form: str, dtype: str, device: str) -> str | None:
    """Return the dtype that `form` computes in on `device`, None for any; ModelError when it cannot be."""
    capability = _capability(device)
    least = {"fp8": FP8_CAPABILITY, "int4": INT4_CAPABILITY}.get(form)
    if form not in FORMS:
        raise ModelError(f"weights: found {form!r:.40}, expected auto, {', '.join(FORMS)}")
    if least is not None and (capability is None or capability < least) and (capability is not None or form == "fp8"):
        found = "cpu" if capability is None else f"a GPU of {capability[0]}.{capability[1]}"
        raise ModelError(
            f"weights: {form} needs a GPU of compute capability {least[0]}.{least[1]} or newer, found {found}\n"
            "    fix: use int8, or auto"
        )
    if find_spec("torchao") is None:
        raise MissingPackage("torchao", "quantised")
    if form == "int8":
        return None
    if dtype not in ("auto", "bfloat16"):
        raise ModelError(f"weights: {form} computes in bfloat16, but dtype is {dtype}\n    fix: leave dtype out")
    return "bfloat16"


def quantise(model: nn.Module, form: str, device: str) -> WeightReport:
    """Keep the weights of `model`'s linear layers as `form` says, in place; each layer moves to `device` first.

    What is not quantised stays where it is. ModelError when no layer can be quantised.
    """
    quantiser = Quantiser(model, form, device)
    quantiser.take(model)
    return quantiser.report()


class Quantiser:
    """Keeps the weights of a model's linear layers as `form` says, part by part; see `quantise`."""

    def __init__(self, model: Any, form: str, device: str) -> None:
        self._model = model
        self._form = form
        self._device = device
        self._before = weight_bytes(model)
        self._seen: set[nn.Module] = set()
        self._left: list[tuple[str, str]] = []
        self._layers = 0

    @torch.no_grad()
    def take(self, part: nn.Module) -> None:
        """Quantise what is in `part`, a module of the model; what was taken before stays as it is."""
        for path, linear, reason in _linears(self._model, part):
            if linear in self._seen:
                continue
            self._seen.add(linear)
            reason = reason or misfit(linear, self._form)
            if reason is not None:
                self._left.append((path, reason))
                continue
            quantise_linear(linear, self._form, self._device)
            self._layers += 1

    def report(self) -> WeightReport:
        """Return what became of the parts; ModelError when no layer could be quantised."""
        if not self._layers:
            why = self._left[0][1] if self._left else "it has no linear layers"
            name = type(self._model).__name__
            raise ModelError(f"weights: no layer of {name} can be {self._form}: {why}\n    fix: use auto")
        return WeightReport(self._layers, tuple(self._left), self._before, weight_bytes(self._model))


@torch.no_grad()
def quantise_linear(linear: nn.Linear, form: str, device: str) -> None:
    """Move one layer to `device` and quantise its weight in place; `misfit` must have said None."""
    from weftline.engine.llm.kernels.availability import available

    _torchao().quantize_(linear.to(device), _torchao_config(linear, form, device))
    if form == "fp8" and available(device) is None:
        linear.forward = partial(_scaled_product, linear)  # type: ignore[method-assign]


def _scaled_product(linear: nn.Linear, given: Tensor) -> Tensor:
    """Return what torchao's layer does, from the same weight, with one kernel before the product."""
    from weftline.engine.llm.kernels.float8 import quantise_rows

    weight: Any = linear.weight
    rows, scales = quantise_rows(given.reshape(-1, given.shape[-1]))
    out = torch._scaled_mm(
        rows, weight.qdata.t(), scale_a=scales, scale_b=weight.scale.t(), bias=linear.bias, out_dtype=given.dtype,
        use_fast_accum=weight.mm_config.use_fast_accum,
    )  # fmt: skip
    return out.view(*given.shape[:-1], out.shape[-1])


def misfit(linear: nn.Linear, form: str) -> str | None:
    """Return why a layer cannot be of `form`, None when it can."""
    if type(linear.weight.data) is not Tensor or linear.weight.dtype not in _WHOLE:
        return "its weight is quantised already"
    if form == "int4" and linear.in_features % GROUPS[-1]:
        return f"{linear.in_features} inputs are no multiple of {GROUPS[-1]}"
    if form == "int4" and linear.out_features % 8:
        return f"{linear.out_features} outputs are no multiple of 8"
    if form == "fp8" and (linear.in_features % FP8_MULTIPLE or linear.out_features % FP8_MULTIPLE):
        return f"{linear.in_features} inputs and {linear.out_features} outputs are no multiples of {FP8_MULTIPLE}"
    return None


def weight_bytes(model: nn.Module) -> int:
    """Return what the model's weights take, quantised ones with their scales; each is counted once."""
    return sum(map(_tensor_bytes, model.parameters()))


def _tensor_bytes(tensor: Tensor) -> int:
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(_tensor_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.element_size()


def _linears(model: Any, part: nn.Module) -> Iterator[tuple[str, nn.Linear, str | None]]:
    """Yield the linear layers of a part of `model`, and why those whose sizes do not decide it are kept."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    kept = {id(module.weight) for module in (head, embedding) if module is not None}
    above = next((path for path, module in model.named_modules() if module is part), "")
    for path, module in list(part.named_modules(prefix=above)):
        if not isinstance(module, nn.Linear):
            continue
        name = path.rpartition(".")[2]
        reason = "it is the output layer" if id(module.weight) in kept else None
        yield path, module, "it chooses experts" if name in _ROUTERS else reason


def _torchao_config(linear: nn.Linear, form: str, device: str) -> Any:
    quantization = _torchao()
    if form == "fp8":
        rows = quantization.PerRow()
        return quantization.Float8DynamicActivationFloat8WeightConfig(granularity=rows, set_inductor_config=False)
    if form == "int8":
        return quantization.Int8WeightOnlyConfig(set_inductor_config=False)
    group = next(size for size in GROUPS if linear.in_features % size == 0)
    if torch.device(device).type == "cpu":
        from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig

        return PrototypeInt4WeightOnlyConfig(group_size=group, set_inductor_config=False)
    # the packing that torch's own kernel reads; others need more packages
    packing = "tile_packed_to_4d"
    return quantization.Int4WeightOnlyConfig(group, set_inductor_config=False, int4_packing_format=packing)


def _torchao() -> Any:
    """Return torchao's quantization, imported without what torch has to say about torchao's own code."""
    log = logging.getLogger("torch.utils._pytree")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        from torchao import quantization
    finally:
        log.setLevel(level)
    return quantization


def _capability(device: str) -> tuple[int, int] | None:
    """Return a GPU's compute capability, None for a CPU."""
    return None if torch.device(device).type == "cpu" else torch.cuda.get_device_capability(device)
