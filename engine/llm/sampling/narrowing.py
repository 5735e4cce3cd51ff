"""Sampling filters: top-k, top-p, min-p and typical.

Each leaves out what it does not want of what the ones before it left, in this order, as transformers does; shares are
of what is left at that time. Tokens with the same logit stay or go together, so the outcome does not depend on the
order in which a device sorts them.

    top-k     the k likeliest
    top-p     the likeliest, until their shares reach p          (nucleus sampling; Holtzman et al. 2020)
    min-p     those with at least p times the largest share      (Nguyen et al. 2024)
    typical   those whose surprise -log(share) is nearest the expected surprise, until their shares reach p
                                                                 (Meister et al. 2022)

All of it works on logits in falling order, all of a row or only its largest ones. Nothing waits for a device or has a
shape that depends on data.
"""

from __future__ import annotations

import torch
from torch import Tensor


def keep_likely(
    ordered: Tensor, mass: Tensor | None, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """Return `ordered` with what top-k, top-p and min-p leave out set to -inf.

    ordered: float [rows, count], each row falling; overwritten.
    mass:    float [rows], log of the sum of exp over the whole row, where `ordered` has only its beginning; None where
             it has all of it.
    top_k:   int64 [rows], 0 is off.   top_p: float [rows], 1 is off.   min_p: float [rows], 0 is off. None: all off.

    Of a beginning the outcome is right where the last column is -inf: then nothing beyond it would have been kept.
    """
    lowest = ordered[:, -1].clone()
    if top_k is not None:
        count = ordered.shape[1]
        last = torch.where(top_k > 0, top_k, count).clamp(max=count) - 1
        ordered = _keep(ordered, ordered.gather(1, last[:, None]))
        if mass is not None:  # what top-k leaves is all there is, if it leaves out the last column
            mass = torch.where(ordered[:, -1] < lowest, ordered.logsumexp(-1), mass)
    if top_p is not None:
        shares = ordered.softmax(-1) if mass is None else (ordered - mass[:, None]).exp()
        kept = _reach(shares, top_p)
        floor = ordered.gather(1, kept - 1)
        ordered = _keep(ordered, floor.masked_fill((top_p >= 1)[:, None], -torch.inf))
    if min_p is not None:
        ordered = _keep(ordered, ordered[:, :1] + min_p[:, None].log())
    return ordered


def keep_typical(ordered: Tensor, typical_p: Tensor) -> Tensor:
    """Return `ordered` with what typical sampling leaves out set to -inf.

    ordered: float [rows, count], all that is left of each row, in any order; overwritten.
    typical_p: float [rows], 1 is off.
    """
    logs = ordered.log_softmax(-1)
    shares = logs.exp()
    expected = -(shares * logs.masked_fill(shares == 0, 0)).sum(-1, keepdim=True)
    distance = (-logs - expected).abs_()
    nearest, at = distance.sort(dim=-1)
    kept = _reach(shares.gather(1, at), typical_p)
    beyond = (distance > nearest.gather(1, kept - 1)) & (typical_p < 1)[:, None]
    return ordered.masked_fill_(beyond, -torch.inf)


def _reach(shares: Tensor, goal: Tensor) -> Tensor:
    """Return int64 [rows, 1]: how many of the first shares it takes to reach `goal` [rows], at least 1."""
    before = shares.cumsum(-1).sub_(shares)
    return (before < goal[:, None]).sum(-1, keepdim=True).clamp(min=1)


def _keep(ordered: Tensor, floor: Tensor) -> Tensor:
    return ordered.masked_fill_(ordered < floor, -torch.inf)
