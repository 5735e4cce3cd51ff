"""Fusion pass over a loaded decoder.

`fuse` goes through a transformers model, one layer at a time, and replaces what it recognises:

    norm       an RMS norm in few operations
    qkv        three linear layers with one input merged into one (`fuse_linear`)
    gate_up    the MLP's two as well
    attention  projections, norms of heads, rotary embedding and paged attention in a row
    mlp        merged product, activation times the other half, projection
    layer      all of it, with each residual added together with the norm that follows
    model      the stack of layers, without masks; rotary embeddings looked up

The model's classes stay transformers' own; what is replaced is a `forward`, or a linear layer by a part of a merged
one. Every replacement is called with what the original was called with in a small pass, and compared with what it gave
(`fuse_probe`); one that disagrees is taken back. What does not match runs as it is, and the report says why.

The layers are fused one at a time, in that pass: each when it has been called, before the next one is. So the weights
of a layer need not be there before its turn (`ready`), and may be changed after it (`done`).

The stack is compared with the model's own code over the fused layers, in a second pass. Each layer has been compared
with the original by then, and what is left are the stack's own doings: which layers, in which order, at which places,
and the sums between them. They are computed by the same operations in the same rounding order either way, so that the
difference does not grow with the depth. Compared with the original layers it would: roundings that differ by half a
unit in each of n layers come to about sqrt(n) units, and to more where layers amplify. With the 8 bits of bfloat16 and
32 layers that is as large as a mistake.

Weights that already are quantised are left alone; quantise after fusing. A fused model cannot be copied by `deepcopy`:
its new forwards belong to its modules.
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
from weftline.engine.llm.fusion.probe import Call, Facts, ProbeForm, ask, differs, seated, watch
from weftline.engine.llm.fusion.rows import NormForm
from weftline.errors import first_line

GROUPS = (("qkv", ("q_proj", "k_proj", "v_proj"), "qkv_proj"), ("gate_up", ("gate_proj", "up_proj"), "gate_up_proj"))
"""Pattern, the linear layers that are merged, and the name of the merged one."""


@dataclass(frozen=True, slots=True)
class Left:
    """A module that runs unfused: its path in the model, the pattern that did not fit, and why."""

    path: str
    pattern: str
    reason: str


@dataclass(frozen=True, slots=True)
class FusionReport:
    """Result of fusing a model.

    counts: how often each pattern was fused.   left: what looked like a pattern and runs as it was.
    """

    counts: dict[str, int]
    left: tuple[Left, ...]

    def __str__(self) -> str:
        done = ", ".join(f"{count} {pattern}" for pattern, count in self.counts.items()) or "nothing"
        reasons = Counter((left.pattern, left.reason) for left in self.left)
        return "\n".join([f"fused: {done}", *(f"left: {n} {p}: {reason}" for (p, reason), n in reasons.items())])


@dataclass(slots=True)
class _Work:
    """A model being fused."""

    model: Any
    form: ProbeForm
    norms: dict[nn.Module, NormForm] = field(default_factory=dict)
    steps: list[fuse_layer.Step] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    left: list[Left] = field(default_factory=list)

    def leave(self, module: nn.Module, pattern: str, reason: str) -> None:
        path = next((path for path, found in self.model.named_modules() if found is module), "")
        self.left.append(Left(path, pattern, reason))

    def try_forward(self, module: Any, pattern: str, forward: Any, call: Call) -> bool:
        """Give `module` a new forward; keep it if it agrees with `call`."""
        module.forward = forward
        reason = differs(module, call)
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
    """Fuse what can be fused in a loaded decoder, in place; it is in eval mode and wants no gradients afterwards.

    A model whose attention is not `weftline_paged` gets merged linears, norms and MLPs only. Calling it again finds
    nothing more to do.

    ready: called with each decoder layer before anything of it is used, to bring its weights.
    done:  called with each decoder layer after it was fused, to quantise it. Both are called in the layers' order; what
           they raise is raised.
    """
    model.eval().requires_grad_(False)
    work = _Work(model, ProbeForm())
    base, layers = find_stack(model)
    if base is None:
        work.leave(model, "layer", "no list of decoder layers was found")
        return FusionReport({}, tuple(work.left))
    turns = _Turns(work, ready, done)
    with seated(model, work.form):
        norm = base._modules.get("norm")
        failed = None
        with turns.hooked(layers):
            try:
                calls = watch([norm or base], lambda: model(**ask(model)))
            except Exception as error:  # a model can fail in any way
                if turns.raised is not None:
                    raise turns.raised from None
                failed = f"the probe failed: {type(error).__name__}: {first_line(error):.300}"
        for layer in layers:
            if layer not in turns.taken:
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
    for module in model.modules():
        for child in module._modules.values():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, list(child)
    return None, []


class _Turns:
    """Takes each layer when the probe comes to it: brings it, lets it run, fuses it, hands it on.

    taken:  the layers that had their turn.
    raised: what `ready` or `done` raised: no fault of the model's code.
    """

    def __init__(self, work: _Work, ready: Callable[[Any], None], done: Callable[[Any], None]) -> None:
        self.taken: set[nn.Module] = set()
        self.raised: Exception | None = None
        self._work = work
        self._ready = ready
        self._done = done
        self._brought: set[nn.Module] = set()

    @contextmanager
    def hooked(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """Have the layers take their turns in calls made meanwhile."""
        hooks = [layer.register_forward_pre_hook(self._before) for layer in layers]
        hooks += [layer.register_forward_hook(self._after, with_kwargs=True) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, layer: nn.Module, args: Any) -> None:
        if layer not in self._brought:
            self._brought.add(layer)
            self._call(self._ready, layer)

    def _after(self, layer: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if layer in self.taken:
            return  # it is called again, to be fused
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
    calls = watch(inside, lambda: layer(*call.args, **call.kwargs))
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
    attend = attend or fuse_layer.attention_as_it_is(layer._modules["self_attn"])
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
    reason = "the probe did not reach it" if call is None else fuse_linear.unlike(owner, names)
    if reason is None and _shared(work.model, [owner._modules[name] for name in names]):
        reason = "its weights are also used elsewhere"
    if reason is None and call is not None:
        fuse_linear.merge(owner, names, merged)
        reason = differs(owner, call)
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
    facts: Facts | None = work.form.facts.get(id(module.__dict__["weftline_pages"]))
    reason = fuse_match.beyond(module, fuse_match.ATTENTION) or fuse_match.strangers(module, fuse_match.ATTENTION)
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
    reason = fuse_match.beyond(module, fuse_match.MLP) or fuse_match.strangers(module, fuse_match.MLP)
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
    return fuse_match.beyond(layer, fuse_match.LAYER) or fuse_match.strangers(layer, fuse_match.LAYER)


def _fuse_stack(work: _Work, base: Any, layers: list[Any], normed: Call | None) -> None:
    """Fuse the last norm, which was called as `normed` says, and, where every layer is fused, the stack itself."""
    norm = base._modules.get("norm")
    if norm is not None and fuse_match.is_candidate(norm):
        _fuse_norm(work, norm, normed)
    children = frozenset({"embed_tokens", "layers", "norm", "rotary_emb"})
    reason = None if len(work.steps) == len(layers) else "not all of its layers are fused"
    reason = reason or fuse_match.beyond(base, fuse_match.MODEL) or fuse_match.strangers(base, children)
    if reason is None and not children <= set(base._modules):
        reason = f"it has no {', '.join(sorted(children - set(base._modules)))}"
    call = None
    if reason is None:
        try:  # by the model's own code, over the layers as they are now
            call = watch([base], lambda: work.model(**ask(work.model))).get(base)
        except Exception as error:
            reason = f"the probe failed: {type(error).__name__}: {first_line(error):.300}"
    if reason is not None or call is None:
        work.leave(base, "model", reason or "the probe did not reach it")
        return
    forward = fuse_layer.stack_forward(base, work.steps, fuse_layer.Norms(work.norms), type(call.result))
    work.try_forward(base, "model", forward, call)
