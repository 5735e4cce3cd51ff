"""Detection of RMS norms by their behaviour.

A module is one when it has a weight of one dimension, an epsilon, nothing else, and gives what one of the four usual
forms gives. Which form, is read off its results: with its own weight or one more, rounded before or after it is
multiplied. The module and its weight stay; only its forward is replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weftline.engine.llm.fusion.probe import SMALL, Call, unequal
from weftline.engine.llm.fusion.rows import NormForm, rms_norm

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
