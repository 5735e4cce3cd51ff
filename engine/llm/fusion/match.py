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
