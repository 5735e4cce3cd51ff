"""Fusion pass over a loaded decoder.

`fuse` processes a transformers model one layer at a time and replaces these patterns:

    norm       RMS norm in one fused operation
    qkv        the three projections merged into one linear layer (`fusion.linear`)
    gate_up    the MLP's gate and up projections merged
    attention  projections, head norms, rotary embedding and paged attention
    mlp        merged projection, gated activation, down projection
    layer      the whole layer, each residual addition fused with the norm that follows
    model      the stack of layers, without masks, with a rotary embedding table

The model keeps transformers' classes. A replacement is a new `forward`, or a slice of a merged linear layer. A small
probe pass records the calls of the original modules; each replacement is called with the same arguments, and its result
is compared (`fusion.probe`). A replacement that disagrees is undone. A module that does not match runs unfused, and the
report has the reason.

Layers are fused during the probe pass: each after its call, before the next layer's call. The weights of a layer may
therefore be loaded just before (`ready`) and changed just after (`done`).

The fused stack is compared with the model's own forward over the fused layers, in a second pass. Each layer has been
compared with the original before, so this checks the order of layers, positions and residual sums. Both sides use the
same operations in the same rounding order, so the difference does not grow with depth. Against the original layers it
would: rounding differences of half a unit in each of n layers add up to about sqrt(n) units, which for 32 layers in
bfloat16 (8 bits) is as large as a real error.

Quantised weights are not fused; quantise after fusing. A fused model cannot be copied by `deepcopy`, because its new
forwards refer to its modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weftline.engine.llm import attention
from weftline.engine.llm.fusion import layer as fuse_layer
from weftline.engine.llm.fusion import linear as fuse_linear
from weftline.engine.llm.fusion import match as fuse_match
from weftline.engine.llm.fusion.probe import (
    AttentionFacts,
    Call,
    ProbeForm,
    mismatch,
    probe_inputs,
    probing,
    record_calls,
)
from weftline.engine.llm.fusion.rows import NormForm
from weftline.errors import first_line

GROUPS = (("qkv", ("q_proj", "k_proj", "v_proj"), "qkv_proj"), ("gate_up", ("gate_proj", "up_proj"), "gate_up_proj"))
"""(pattern, names of the linear layers to merge, name of the merged layer)."""


@dataclass(frozen=True, slots=True)
class Unfused:
    """A module that runs unfused: path in the model, the pattern that did not match, and the reason."""

    path: str
    pattern: str
    reason: str


@dataclass(frozen=True, slots=True)
class FusionReport:
    """Result of fusing a model.

    counts: number of fused modules by pattern.   left: modules that resembled a pattern and run unfused.
    """

    counts: dict[str, int]
    left: tuple[Unfused, ...]

    def __str__(self) -> str:
        done = ", ".join(f"{count} {pattern}" for pattern, count in self.counts.items()) or "nothing"
        reasons = Counter((left.pattern, left.reason) for left in self.left)
        return "\n".join([f"fused: {done}", *(f"left: {n} {p}: {reason}" for (p, reason), n in reasons.items())])


@dataclass(slots=True)
class _Work:
    """State of one fusion pass."""

    model: Any
    form: ProbeForm
    norms: dict[nn.Module, NormForm] = field(default_factory=dict)
    steps: list[fuse_layer.Step] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    left: list[Unfused] = field(default_factory=list)

    def leave(self, module: nn.Module, pattern: str, reason: str) -> None:
        path = next((path for path, found in self.model.named_modules() if found is module), "")
        self.left.append(Unfused(path, pattern, reason))

    def try_forward(self, module: Any, pattern: str, forward: Any, call: Call) -> bool:
        """Replace the forward of `module`; undo it unless the result agrees with `call`."""
        module.forward = forward
        reason = mismatch(module, call)
        if reason is None:
            self.counts[pattern] += 1
            return True
        del module.forward
        self.leave(module, pattern, reason)
        return False


def _nothing(layer: nn.Module) -> None:
    pass


@torch.inference_mode()
def fuse(model: Any, ready: Callable[[Any], None] = _nothing, done: Callable[[Any], None] = _nothing) -> FusionReport:
    """Fuse a loaded decoder in place; afterwards it is in eval mode without gradients.

    Without `weftline_paged` attention only linears, norms and MLPs are fused. A second call changes nothing.

    ready: called with each decoder layer before its first use, to load its weights.
    done:  called with each decoder layer after its fusion, to quantise it.
    Both are called in layer order; their exceptions propagate.
    """
    model.eval().requires_grad_(False)
    work = _Work(model, ProbeForm())
    base, layers = find_stack(model)
    if base is None:
        work.leave(model, "layer", "no list of decoder layers was found")
        return FusionReport({}, tuple(work.left))
    layer_fusion = _LayerFusion(work, ready, done)
    with probing(model, work.form):
        norm = base._modules.get("norm")
        failed = None
        with layer_fusion.hooked(layers):
            try:
                calls = record_calls([norm or base], lambda: model(**probe_inputs(model)))
            except Exception as error:  # a model can fail in any way
                if layer_fusion.raised is not None:
                    raise layer_fusion.raised from None
                failed = f"the probe failed: {type(error).__name__}: {first_line(error):.300}"
        for layer in layers:
            if layer not in layer_fusion.taken:
                ready(layer)
                done(layer)
                if failed is None:
                    work.leave(layer, "layer", "the probe did not reach it")
        if failed is not None:
            work.leave(model, "model", failed)
        else:
            _fuse_stack(work, base, layers, calls.get(norm) if norm is not None else None)
    return FusionReport(dict(work.counts), tuple(work.left))


def find_stack(model: Any) -> tuple[Any, list[Any]]:
    """Return the module that holds the list of decoder layers, and the layers; (None, []) where there is no list."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    # a vision encoder may have as many layers
    decoder = model.get_decoder() if getattr(model.config, "vision_config", None) is not None else model
    for module in decoder.modules():
        for child in module._modules.values():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, list(child)
    return None, []


class _LayerFusion:
    """Forward hooks that load, fuse and finish each layer during the probe pass.

    taken:  layers that were processed.
    raised: exception of `ready` or `done`, as opposed to one of the model's code.
    """

    def __init__(self, work: _Work, ready: Callable[[Any], None], done: Callable[[Any], None]) -> None:
        self.taken: set[nn.Module] = set()
        self.raised: Exception | None = None
        self._work = work
        self._ready = ready
        self._done = done
        self._readied: set[nn.Module] = set()

    @contextmanager
    def hooked(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """Install the hooks on `layers` for the duration of the context."""
        hooks = [layer.register_forward_pre_hook(self._before) for layer in layers]
        hooks += [layer.register_forward_hook(self._after, with_kwargs=True) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, layer: nn.Module, args: Any) -> None:
        if layer not in self._readied:
            self._readied.add(layer)
            self._call(self._ready, layer)

    def _after(self, layer: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if layer in self.taken:
            return  # a repeated call, by the fusion itself
        self.taken.add(layer)
        _fuse_layer(self._work, layer, Call(args, kwargs, result))
        self._call(self._done, layer)

    def _call(self, what: Callable[[Any], None], layer: nn.Module) -> None:
        try:
            what(layer)
        except Exception as error:
            self.raised = error
            raise


def _fuse_layer(work: _Work, layer: Any, call: Call) -> None:
    # linear layers are not held on to, so that each is freed as soon as it is merged
    inside = [module for module in layer.modules() if module is not layer and not isinstance(module, nn.Linear)]
    calls = record_calls(inside, lambda: layer(*call.args, **call.kwargs))
    for module in inside:
        if fuse_match.is_candidate(module):
            _fuse_norm(work, module, calls.get(module))
    for module in inside:
        for pattern, names, merged in GROUPS:
            if all(name in module._modules for name in names) and merged not in module._modules:
                _merge(work, module, pattern, names, merged, calls.get(module))
    norms = fuse_layer.Norms(work.norms)
    attend = _fuse_attention(work, layer._modules.get("self_attn"), norms, calls)
    feed = _fuse_mlp(work, layer._modules.get("mlp"), calls)
    reason = _unlike_layer(layer)
    if reason is not None:
        work.leave(layer, "layer", reason)
        return
    # what is not fused itself can still be called by a fused layer, as it is
    attend = attend or fuse_layer.unfused_attention(layer._modules["self_attn"])
    step = fuse_layer.layer(
        fuse_match.NORM_SETS[_norm_names(layer)], layer, attend, feed or layer._modules["mlp"], norms
    )
    if work.try_forward(layer, "layer", fuse_layer.layer_forward(step), call):
        work.steps.append(step)


def _fuse_norm(work: _Work, module: Any, call: Call | None) -> None:
    try:
        form = "the probe did not reach it" if call is None else fuse_match.recognise(module, call)
    except Exception as error:  # a kernel that does not compile here must not keep the model from running
        form = f"fused it fails: {type(error).__name__}"
    if isinstance(form, str):
        work.leave(module, "norm", form)
        return
    work.norms[module] = form
    work.counts["norm"] += 1
    fuse_match.install(module, form)


def _merge(work: _Work, owner: Any, pattern: str, names: tuple[str, ...], merged: str, call: Call | None) -> None:
    reason = "the probe did not reach it" if call is None else fuse_linear.unmergeable(owner, names)
    if reason is None and _shared(work.model, [owner._modules[name] for name in names]):
        reason = "its weights are also used elsewhere"
    if reason is None and call is not None:
        fuse_linear.merge(owner, names, merged)
        reason = mismatch(owner, call)
        if reason is None:
            work.counts[pattern] += 1
            return
        fuse_linear.split(owner, merged)
    work.leave(owner, pattern, reason or "")


def _shared(model: Any, linears: list[Any]) -> bool:
    own = {id(linear.weight) for linear in linears}
    every = [id(found) for module in model.modules() for found in module._parameters.values() if id(found) in own]
    return len(every) != len(own)


def _fuse_attention(work: _Work, module: Any, norms: fuse_layer.Norms, calls: dict[Any, Call]) -> Any:
    if module is None or module not in calls:
        return None
    facts: AttentionFacts | None = work.form.facts.get(id(module.__dict__["weftline_pages"]))
    reason = fuse_match.unknown_names(module, fuse_match.ATTENTION) or fuse_match.unknown_children(
        module, fuse_match.ATTENTION
    )
    if reason is None and not {"qkv_proj", "o_proj"} <= set(module._modules):
        reason = "it has no merged qkv_proj and o_proj"
    if reason is None and facts is None:
        reason = f"it does not attend through {attention.NAME}"
    if reason is not None or facts is None:
        work.leave(module, "attention", reason or "")
        return None
    attend = fuse_layer.attention(module, facts, norms)
    agrees = work.try_forward(module, "attention", fuse_layer.attention_forward(attend), calls[module])
    return attend if agrees else None


def _fuse_mlp(work: _Work, module: Any, calls: dict[Any, Call]) -> Any:
    if module is None or module not in calls:
        return None
    reason = fuse_match.unknown_names(module, fuse_match.MLP) or fuse_match.unknown_children(module, fuse_match.MLP)
    if reason is None and not {"gate_up_proj", "down_proj"} <= set(module._modules):
        reason = "it has no merged gate_up_proj and down_proj"
    if reason is not None:
        work.leave(module, "mlp", reason)
        return None
    forward = fuse_layer.mlp(module)
    return forward if work.try_forward(module, "mlp", forward, calls[module]) else None


def _norm_names(layer: Any) -> tuple[str, ...]:
    return tuple(sorted(name for name in layer._modules if name.endswith("layernorm")))


def _unlike_layer(layer: Any) -> str | None:
    if not {"self_attn", "mlp"} <= set(layer._modules):
        return "it has no self_attn and mlp"
    if _norm_names(layer) not in fuse_match.NORM_SETS:
        return f"its norms are {', '.join(_norm_names(layer)) or 'none'}"
    return fuse_match.unknown_names(layer, fuse_match.LAYER) or fuse_match.unknown_children(layer, fuse_match.LAYER)


def _fuse_stack(work: _Work, base: Any, layers: list[Any], normed: Call | None) -> None:
    """Fuse the final norm (recorded call: `normed`) and, if every layer is fused, the stack."""
    norm = base._modules.get("norm")
    if norm is not None and fuse_match.is_candidate(norm):
        _fuse_norm(work, norm, normed)
    children = frozenset({"embed_tokens", "layers", "norm", "rotary_emb"})
    reason = None if len(work.steps) == len(layers) else "not all of its layers are fused"
    reason = reason or fuse_match.unknown_names(base, fuse_match.MODEL) or fuse_match.unknown_children(base, children)
    if reason is None and not children <= set(base._modules):
        reason = f"it has no {', '.join(sorted(children - set(base._modules)))}"
    call = None
    if reason is None:
        try:  # by the model's own code, over the layers as they are now
            call = record_calls([base], lambda: work.model(**probe_inputs(work.model))).get(base)
        except Exception as error:
            reason = f"the probe failed: {type(error).__name__}: {first_line(error):.300}"
    if reason is not None or call is None:
        work.leave(base, "model", reason or "the probe did not reach it")
        return
    forward = fuse_layer.stack_forward(base, work.steps, fuse_layer.Norms(work.norms), type(call.result))
    work.try_forward(base, "model", forward, call)
