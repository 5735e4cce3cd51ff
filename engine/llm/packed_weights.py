"""Packed weights of AWQ and GPTQ checkpoints: unpacking into plain weights, one layer when it is read.

    tensors = unpacked(tensors, PackedFormat("awq", 4, 0), torch.float16)
    tensors["model.layers.0.mlp.up_proj.weight"][...]      # reads and unpacks that weight

A linear layer has these tensors in place of `weight`. I inputs, O outputs, G groups of inputs; P = 32 / bits values are
packed into each int32, the first in its lowest bits:

    awq   qweight int32 [I, O/P]   qzeros int32 [G, O/P]   scales [G, O]
    gptq  qweight int32 [I/P, O]   qzeros int32 [G, O/P]   scales [G, O]   g_idx int32 [I], an input's group

    weight[o, i] = scales[g, o] * (q[i, o] - z[g, o])      g = g_idx[i], or i * G / I

awq:  the values of an int32 are those of outputs 0 2 4 6 1 3 5 7 of its eight. (AutoAWQ, `WQLinear_GEMM` and
      `packing_utils`, https://github.com/casper-hansen/AutoAWQ; Lin et al., https://arxiv.org/abs/2306.00978.)
gptq: a stored zero point is one less than z, modulo 2 ** bits; in format gptq_v2 it is z. (AutoGPTQ, `QuantLinear`,
      https://github.com/AutoGPTQ/AutoGPTQ, and GPTQModel for v2; Frantar et al., https://arxiv.org/abs/2210.17323.)

Products are exact in float32 and rounded once, to the model's dtype. Checkpoints are read on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from weftline.engine.llm.checkpoint_format import PARTS, PackedFormat, packed_layers
from weftline.errors import ModelError

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output of each value of an int32, from its lowest bits on."""
_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""Names of dtypes in safetensors."""
ROWS = 256
"""Outputs that are computed at a time, so that little memory is needed beside the weight."""


def unpacked(tensors: Mapping[str, Any], packed: PackedFormat, dtype: torch.dtype) -> dict[str, Any]:
    """Return the tensors of a checkpoint with plain weights in place of packed ones, unpacked when they are read.

    tensors: slices of safetensors by name. dtype: of the weights. ModelError where sizes do not fit each other.
    """
    try:
        layers = packed_layers(tensors, packed)
    except ValueError as error:
        raise ModelError(str(error)) from None
    own = {f"{layer}.{part}" for layer in layers for part in PARTS}
    found = {name: tensor for name, tensor in tensors.items() if name not in own}
    for layer in layers:
        parts = {part: tensors[f"{layer}.{part}"] for part in PARTS if f"{layer}.{part}" in tensors}
        found[f"{layer}.weight"] = PackedWeight(layer, parts, packed, dtype)
    return found


class PackedWeight:
    """One packed weight, as a slice of safetensors that unpacks when it is indexed."""

    def __init__(self, layer: str, parts: Mapping[str, Any], packed: PackedFormat, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._layer, self._parts, self._packed = layer, parts, packed
        self._per_word = 32 // packed.bits
        self._inputs, self._outputs, self._groups = self._sizes()

    def get_shape(self) -> list[int]:
        return [self._outputs, self._inputs]

    def get_dtype(self) -> str:
        return _NAMES[self.dtype]

    def __getitem__(self, index: Any) -> Tensor:
        codes, zeros = self._codes(), self._zeros()
        scales = self._parts["scales"][...].to(torch.float32).t().contiguous()
        groups = self._group_of_inputs()
        weight = torch.empty((self._outputs, self._inputs), dtype=self.dtype)
        for start in range(0, self._outputs, ROWS):
            rows = slice(start, start + ROWS)
            if groups is None:
                found = codes[rows].view(-1, self._groups, self._inputs // self._groups).float()
                found.sub_(zeros[rows, :, None]).mul_(scales[rows, :, None])
            else:
                found = codes[rows].float().sub_(zeros[rows, groups]).mul_(scales[rows, groups])
            weight[rows] = found.view(-1, self._inputs)
        return weight[index]

    def _codes(self) -> Tensor:
        """Return the weight as it is stored: uint8 [outputs, inputs]."""
        words: Tensor = self._parts["qweight"][...].t().contiguous()
        return self._spread(words, _AWQ_ORDER) if self._packed.method == "awq" else self._split(words)

    def _zeros(self) -> Tensor:
        """Return the zero points: float32 [outputs, groups]."""
        words: Tensor = self._parts["qzeros"][...].t().contiguous()
        order = _AWQ_ORDER if self._packed.method == "awq" else tuple(range(self._per_word))
        stored = self._spread(words, order).to(torch.int32)
        zeros: Tensor = (stored + self._packed.zero_offset) & (2**self._packed.bits - 1)
        return zeros.float()

    def _spread(self, words: Tensor, order: tuple[int, ...]) -> Tensor:
        """Return the values in `words`, int32 [rows, columns], each a row of its own: uint8 [rows * values, columns].

        order: row of each value of a word, from the lowest bits on.
        """
        rows, columns = words.shape
        values = torch.empty((rows, self._per_word, columns), dtype=torch.uint8)
        for place, row in enumerate(order):
            shifted = words.bitwise_right_shift(place * self._packed.bits)
            values[:, row] = shifted.bitwise_and_(2**self._packed.bits - 1)
        return values.flatten(0, 1)

    def _split(self, words: Tensor) -> Tensor:
        """Return the values in `words`, int32 [rows, columns], beside each other: uint8 [rows, columns * values]."""
        octets = words.view(torch.uint8)  # little-endian: the first has the lowest bits
        if self._packed.bits == 8:
            return octets
        return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)

    def _group_of_inputs(self) -> Tensor | None:
        """Return each input's group; None where they follow each other in order."""
        if "g_idx" not in self._parts:
            return None
        groups: Tensor = self._parts["g_idx"][...].long()
        if int(groups.min()) < 0 or int(groups.max()) >= self._groups:
            raise ModelError(f"{self._layer}.g_idx: an input's group is not one of the {self._groups}")
        if self._inputs % self._groups:
            return groups
        in_order = torch.arange(self._inputs) // (self._inputs // self._groups)
        unset = not groups.any()  # older writers leave zeros, which kernels read as in order
        return None if unset or torch.equal(groups, in_order) else groups

    def _sizes(self) -> tuple[int, int, int]:
        """Return the numbers of inputs, outputs and groups; ModelError where the tensors' sizes disagree."""
        shapes = {part: list(tensor.get_shape()) for part, tensor in self._parts.items()}
        if any(len(shapes[part]) != 2 for part in PARTS[:3]):
            raise ModelError(f"{self._layer}: its packed tensors are no matrices")
        rows = shapes["qweight"][0]
        groups, outputs = shapes["scales"]
        packs_outputs = self._packed.method == "awq"
        inputs = rows if packs_outputs else rows * self._per_word
        expected = {
            "qweight": [inputs, outputs // self._per_word] if packs_outputs else [rows, outputs],
            "qzeros": [groups, outputs // self._per_word],
            "g_idx": [inputs],
        }
        wrong = next((part for part, shape in expected.items() if shapes.get(part, shape) != shape), None)
        if wrong:
            found, wanted = shapes[wrong], f"expected {expected[wrong]}, beside scales {shapes['scales']}"
            raise ModelError(f"{self._layer}.{wrong} is {found}, {wanted}")
        even = "g_idx" in shapes or (groups and inputs % groups == 0)
        if not (even and groups and outputs) or outputs % self._per_word:
            raise ModelError(f"{self._layer}: {inputs} inputs and {outputs} outputs do not divide into {groups} groups")
        types = {part: str(tensor.get_dtype()) for part, tensor in self._parts.items()}
        scales = types.pop("scales")
        if scales not in _NAMES.values() or set(types.values()) != {"I32"}:
            raise ModelError(f"{self._layer}: its packed tensors are {', '.join(sorted(types.values()))}, expected I32")
        return inputs, outputs, groups
