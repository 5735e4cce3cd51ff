"""Pattern matching of fusible modules in a decoder.

A pattern matches the names of a module's children, its parameters, and the names that its class's `forward` uses. A
model that does more (clips queries, scales residuals, has attention sinks) uses a name that is not listed and is not
fused. Properties without a name, such as the pairing of the rotary embedding, are checked numerically (`fusion.probe`).

An RMS norm is recognised by its results: a module with a one-dimensional weight, an epsilon and nothing else, whose
output equals one of four forms: weight or 1 + weight, rounded before or after the multiplication. Module and weight
stay; only `forward` is replaced.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from weftline.engine.llm.fusion.probe import SMALL, Call, difference
from weftline.engine.llm.fusion.rows import NormForm, rms_norm

ATTENTION = frozenset(
    {
        "apply_rotary_pos_emb",
        "attention_interface",
        "getattr",
        "get_interface",
        "update",
        "q_proj",
        "k_proj",
        "v_proj",
        "qkv_proj",
        "o_proj",
        "q_norm",
        "k_norm",
        "config",
        "_attn_implementation",
        "attention_dropout",
        "training",
        "layer_idx",
        "head_dim",
        "scaling",
        "sliding_window",
        "is_sliding",
        "use_rope",
        "attn_logit_softcapping",
        "num_attention_heads",
        "num_key_value_heads",
        "shape",
        "view",
        "reshape",
        "transpose",
        "contiguous",
    }
)
"""Names that the forward of a fusible attention module may use."""
MLP = frozenset({"gate_proj", "up_proj", "gate_up_proj", "down_proj", "act_fn", "activation_fn", "chunk"})
NORM_SETS = {
    ("input_layernorm", "post_attention_layernorm"): ("input_layernorm", None, "post_attention_layernorm", None),
    ("input_layernorm", "post_attention_layernorm", "post_feedforward_layernorm", "pre_feedforward_layernorm"): (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
    ("post_attention_layernorm", "post_feedforward_layernorm"): (
        None, "post_attention_layernorm", None, "post_feedforward_layernorm",
    ),
}  # fmt: skip
"""Sorted norm names of a layer to (before attention, after attention, before MLP, after MLP)."""
LAYER = frozenset({"self_attn", "mlp", "resid_attn_dropout", "resid_mlp_dropout"}.union(*NORM_SETS))
MODEL = frozenset(
    {
        "embed_tokens",
        "layers",
        "norm",
        "rotary_emb",
        "decoder_layer",
        "enumerate",
        "isinstance",
        "BaseModelOutputWithPast",
        "MoeModelOutputWithPast",
        "DynamicCache",
        "ValueError",
        "Tensor",
        "arange",
        "create_causal_mask",
        "create_sliding_window_causal_mask",
        "mask_function",
        "has_sliding_layers",
        "sliding_window",
        "layer_types",
        "config",
        "device",
        "shape",
        "unsqueeze",
        "get_seq_length",
        "num_hidden_layers",
    }
)


@cache
def names_used(forward: Callable[..., Any]) -> frozenset[str]:
    """Return the attributes and functions that `forward` uses; empty if its source is unavailable."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    found: set[str] = set()
    for statement in getattr(tree.body[0], "body", []):  # the signature's annotations do not count
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                found.add(node.func.id)
                if node.func.id == "getattr":
                    found |= {str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)} - {"None"}
    return frozenset(found)


def unknown_names(module: Any, known: frozenset[str]) -> str | None:
    """Return the reason if the forward of `module` uses names other than `known`, else None."""
    if "forward" in module.__dict__:
        return "its forward has been replaced"
    used = names_used(type(module).forward)
    if not used:
        return "its code cannot be read"
    more = sorted(used - known)
    return f"its code also uses {', '.join(more[:4])}" if more else None


def unknown_children(module: Any, known: frozenset[str]) -> str | None:
    """Return the reason if `module` has children or parameters other than `known`, else None."""
    more = sorted({*module._modules, *module._parameters} - known)
    return f"it also has {', '.join(more[:4])}" if more else None


_EPSILONS = ("variance_epsilon", "eps", "norm_eps")


def is_candidate(module: nn.Module) -> bool:
    """Return whether `module` has the parameters and attributes of an RMS norm."""
    weight = module._parameters.get("weight")
    alone = set(module._parameters) <= {"weight", "bias"} and module._parameters.get("bias") is None
    return weight is not None and weight.dim() == 1 and alone and not module._modules and _epsilon(module) is not None


def recognise(module: Any, call: Call) -> NormForm | str:
    """Return the RMS norm form whose results equal those of `module`, or the reason why there is none."""
    if "forward" in module.__dict__:
        return "its forward has been replaced"
    given = call.args[0] if call.args else next(iter(call.kwargs.values()), None)
    eps = _epsilon(module)
    if not isinstance(given, Tensor) or not isinstance(call.result, Tensor) or eps is None:
        return "it takes or gives no tensor"
    if given.shape[-1] != module.weight.numel():
        return f"its weight has {module.weight.numel()} numbers, its input {given.shape[-1]}"
    small = given * SMALL
    tries = ((given, call.result), (small, module(small)))
    close: list[tuple[float, NormForm]] = []
    reason: str | None = None
    for one_plus, cast_first in ((False, True), (False, False), (True, False), (True, True)):
        weight = module.weight.data.float() + 1.0 if one_plus else module.weight.data
        form = NormForm(weight, module.weight.data, eps, cast_first, one_plus)
        pairs = [(rms_norm(asked, form), gave) for asked, gave in tries]
        why = next((text for pair in pairs if (text := difference(*pair)) is not None), None)
        if why is None:
            close.append((max(float((found - gave).abs().max()) for found, gave in pairs), form))
        elif reason is None or "differs" in why:
            reason = why
    # in float32 the rounding order hardly matters: the first of equally close forms is chosen
    return min(close, key=lambda pair: pair[0])[1] if close else (reason or "no form of an RMS norm fits")


def install(module: Any, form: NormForm) -> None:
    """Replace the forward of `module` by `form`."""
    if form.one_plus:  # registered beside the module's own weight, so that it is among the model's tensors
        module.register_buffer("weight_and_one", form.weight, persistent=False)

    def forward(values: Tensor) -> Tensor:
        return rms_norm(values, form)

    module.forward = forward


def _epsilon(module: Any) -> float | None:
    found = next((getattr(module, name) for name in _EPSILONS if name in module.__dict__), None)
    return float(found) if isinstance(found, float) and not isinstance(found, torch.Tensor) else None
