"""Pattern matching of fusible modules in a decoder; pure.

A pattern is recognised by the names of a module's children, by its parameters, and by the names that its class's
`forward` uses: a model that does anything else (clips its queries, scales its residual, has sinks) uses a name that is
not on the list, and is left alone. What the names cannot say, such as how the rotary embedding pairs its numbers, is
left to the probe (`fuse_probe`), which compares results.
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

from weftline.engine.llm.fusion.probe import SMALL, Call, unequal
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
"""Names that an attention's forward may use and still be one of: merge, norm, turn, attend, project."""
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
"""A layer's norms by name, sorted: which stands before and after the attention, before and after the MLP."""
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
    """Return the attributes that the function reads and the functions it calls; empty where it has no source."""
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


def beyond(module: Any, known: frozenset[str]) -> str | None:
    """Return what the forward of `module` does beyond `known`, or None."""
    if "forward" in module.__dict__:
        return "its forward has been replaced"
    used = names_used(type(module).forward)
    if not used:
        return "its code cannot be read"
    more = sorted(used - known)
    return f"its code also uses {', '.join(more[:4])}" if more else None


def strangers(module: Any, known: frozenset[str]) -> str | None:
    """Return which children or own parameters of `module` are not among `known`, or None."""
    more = sorted({*module._modules, *module._parameters} - known)
    return f"it also has {', '.join(more[:4])}" if more else None


_EPSILONS = ("variance_epsilon", "eps", "norm_eps")


def is_candidate(module: nn.Module) -> bool:
    """Return whether `module` looks like an RMS norm from outside."""
    weight = module._parameters.get("weight")
    alone = set(module._parameters) <= {"weight", "bias"} and module._parameters.get("bias") is None
    return weight is not None and weight.dim() == 1 and alone and not module._modules and _epsilon(module) is not None


def recognise(module: Any, call: Call) -> NormForm | str:
    """Return the form of an RMS norm that gives what `module` gave, or why there is none."""
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
        why = next((text for pair in pairs if (text := unequal(*pair)) is not None), None)
        if why is None:
            close.append((max(float((found - gave).abs().max()) for found, gave in pairs), form))
        elif reason is None or "differs" in why:
            reason = why
    # in float32 the order of rounding hardly shows, and the first that is as good as any is taken
    return min(close, key=lambda pair: pair[0])[1] if close else (reason or "no form of an RMS norm fits")


def install(module: Any, form: NormForm) -> None:
    """Let `module` compute `form`."""
    if form.one_plus:  # registered beside the module's own weight, so that it is among the model's tensors
        module.register_buffer("weight_and_one", form.weight, persistent=False)

    def forward(values: Tensor) -> Tensor:
        return rms_norm(values, form)

    module.forward = forward


def _epsilon(module: Any) -> float | None:
    found = next((getattr(module, name) for name in _EPSILONS if name in module.__dict__), None)
    return float(found) if isinstance(found, float) and not isinstance(found, torch.Tensor) else None
