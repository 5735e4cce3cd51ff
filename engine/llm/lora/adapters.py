"""LoRA adapter registry of a loaded model, with several adapters in one round.

    adapters = Adapters(model, slots_max=8)
    slot = adapters.load("poems", Path("adapters/poems"))
    adapters.choose([(0, 5, slot), (5, 6, 0)])   # before a pass: rows 0 to 4 with the adapter, row 5 without

It works on a model as transformers made it and on one whose linear layers were merged: a merged layer says by `parts`
which columns were which layer. The weights below may be of any format, also quantised. Layers get their place for
adapters when the first adapter that needs it is loaded, and a round in which no row has an adapter computes what the
bare model computes. `load` and `drop` belong between rounds, and to the thread that runs them.

`find_adapter_layers` maps the names that layers had in training to the model's linear layers: the `parts` of a merged
layer are the output columns of each trained layer (`weftline.engine.llm.fusion.fuse`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weftline.engine.llm.lora.file import RANK_MAX, Adapter, read_adapter
from weftline.engine.llm.lora.linear import AdapterRows, LoraLinear, OutputSlice
from weftline.engine.llm.options import ADAPTERS_MAX
from weftline.errors import InputError, LimitReached, ModelError

NAME_MAX = 128
_NAME = re.compile(r"[A-Za-z0-9][\w.:/-]*")


@dataclass(slots=True)
class _Loaded:
    """A loaded adapter. serial: number of its load. users: requests that hold it."""

    slot: int
    serial: int
    users: int = 0
    leaving: bool = False


class Adapters:
    """Up to `slots_max` LoRA adapters of `model`; slots count from 1, slot 0 is the base model.

    version: rises when a layer is wrapped or its memory moved; a CUDA graph of an older version must not be replayed.
    """

    def __init__(self, model: nn.Module, slots_max: int = ADAPTERS_MAX) -> None:
        if slots_max < 1:
            raise ValueError(f"slots_max: found {slots_max}, expected at least 1")
        self.slots_max = slots_max
        self.version = 0
        self._model = model
        self._like = like_computed(model)
        self._choice = AdapterRows()
        self._layers: dict[str, LoraLinear] = {}
        self._loaded: dict[str, _Loaded] = {}
        self._serial = 0

    def names(self) -> list[str]:
        """Return the names available to requests, oldest first."""
        return [name for name, loaded in self._loaded.items() if not loaded.leaving]

    def slot(self, name: str) -> int:
        """Return the slot of a loaded adapter; InputError for an unknown name."""
        return self._known(name).slot

    def salt(self, name: str) -> bytes:
        """Return the prefix cache salt of this load of `name`: loads do not share keys and values."""
        return f"\0adapter {self._known(name).serial}".encode()

    @property
    def tensors(self) -> list[Tensor]:
        """Return the tensors of all adapters."""
        return [tensor for layer in self._layers.values() for tensor in (layer.down, *layer.up)]

    def load(self, name: str, folder: Path, shown: str = "") -> int:
        """Read the adapter in `folder` (`shown` in errors), put it in a free slot and return the slot's number.

        InputError: the name is taken or no name. LimitReached: all slots are taken, or the last adapter of that name
        is still in use. ModelError: the adapter cannot be read, or does not fit the model. Nothing changes then.
        """
        self._check_name(name)
        return self.add(name, read_adapter(folder, shown or folder.name))

    @torch.inference_mode(mode=False)  # what is made inside that mode could not be written outside of it
    def add(self, name: str, adapter: Adapter) -> int:
        """Load an adapter that was already read, for example in another thread; see `load`."""
        self._check_name(name)
        places = self._fit(name, adapter)
        taken = {loaded.slot for loaded in self._loaded.values()}
        slot = next(slot for slot in range(1, self.slots_max + 1) if slot not in taken)
        try:
            for module, (a, b) in adapter.pairs.items():
                place = places[module]
                self._layer(place, adapter.rank).write(slot, place.part, a, b, adapter.scale)
        except BaseException:  # out of memory, most likely: the slot must be empty for the next one
            self._clear(slot)
            raise
        self._serial += 1
        self._loaded[name] = _Loaded(slot, self._serial)
        return slot

    def drop(self, name: str) -> bool:
        """Unload an adapter; return True if its slot is free at once.

        While requests hold it, it accepts no new ones; its slot becomes free when the last of them ends.
        """
        loaded = self._known(name)
        loaded.leaving = True
        return self._free(name, loaded)

    def hold(self, name: str) -> None:
        """Acquire `name` for one request."""
        self._known(name).users += 1

    def release(self, name: str) -> None:
        """Release `name` for one request; the last release of a dropped adapter frees its slot."""
        loaded = self._loaded.get(name)
        if loaded is None or loaded.users < 1:
            raise RuntimeError(f"adapter {name} was released more often than held")
        loaded.users -= 1
        if loaded.leaving:
            self._free(name, loaded)

    def choose(self, rows: Sequence[tuple[int, int, int]] | Tensor) -> None:
        """Set the adapter of each row of the next pass.

        As a list: (first row, row after the last, slot) for all rows of the pass, in order, those of slot 0 too.
        As a tensor, int64 [rows] of slots on the model's device: nothing looks at its values on the host. A CUDA graph
        must be captured with this call inside, since it compares the slots; a replay follows what the tensor holds.
        """
        chosen = AdapterRows.by_slots(rows, self.slots_max) if isinstance(rows, Tensor) else self._segments(rows)
        choice = self._choice
        choice.rows, choice.segments, choice.slots, choice.owned = (
            chosen.rows, chosen.segments, chosen.slots, chosen.owned,
        )  # fmt: skip

    def _segments(self, rows: Sequence[tuple[int, int, int]]) -> AdapterRows:
        spans: dict[int, list[tuple[int, int]]] = {}
        for start, stop, slot in rows:
            if slot and stop > start:
                ours = spans.setdefault(slot, [])
                if ours and ours[-1][1] == start:
                    ours[-1] = (ours[-1][0], stop)
                else:
                    ours.append((start, stop))
        segments = [(_where(ours, self._like.device), slot) for slot, ours in spans.items()]
        return AdapterRows(rows[-1][1] if rows else 0, segments)

    def _check_name(self, name: str) -> None:
        if len(name) > NAME_MAX or not _NAME.fullmatch(name):
            raise InputError(f"adapter: found {name!r:.140}, expected a name of letters, digits and . _ : / -")
        before = self._loaded.get(name)
        if before is not None and before.leaving:
            raise LimitReached(f"adapter {name}: {before.users} requests still run with the one that was dropped")
        if before is not None:
            raise InputError(f"adapter {name} is loaded already\n    fix: drop it first, or use another name")
        if len(self._loaded) >= self.slots_max:
            raise LimitReached(f"adapter {name}: all {self.slots_max} slots are taken; drop an adapter first")

    def _known(self, name: str) -> _Loaded:
        loaded = self._loaded.get(name)
        if loaded is None or loaded.leaving:
            known = ", ".join(self.names()) or "none is loaded"
            raise InputError(f"adapter: found {name!r:.140}, expected one of: {known:.300}")
        return loaded

    def _free(self, name: str, loaded: _Loaded) -> bool:
        if loaded.users:
            return False
        self._clear(loaded.slot)
        del self._loaded[name]
        return True

    @torch.inference_mode(mode=False)
    def _clear(self, slot: int) -> None:
        for layer in self._layers.values():
            layer.clear(slot)

    def _fit(self, name: str, adapter: Adapter) -> dict[str, AdapterLayer]:
        """Map the adapter's layers to the model's; ModelError for a missing layer or another size."""
        places = dict(find_adapter_layers(self._model))
        for module, (a, b) in adapter.pairs.items():
            place = places.get(module)
            if place is None:
                raise ModelError(
                    f"adapter {name}: {module:.120} is no linear layer of this model that adapters can change\n"
                    "    fix: use an adapter that was trained on this very model"
                )
            part = place.parts[place.part]
            found, expected = (a.shape[1], b.shape[0]), (place.width, part.stop - part.start)
            if found != expected:
                raise ModelError(
                    f"adapter {name}: {module:.120}: found {found[0]} inputs and {found[1]} outputs, "
                    f"expected {expected[0]} and {expected[1]}"
                )
        return places

    def _layer(self, place: AdapterLayer, rank: int) -> LoraLinear:
        layer = self._layers.get(place.path)
        if layer is None:
            layer = LoraLinear.make(
                place.path, place.module.forward, place.parts, self._choice, place.width, self.slots_max, rank,
                self._like,
            )  # fmt: skip
            self._layers[place.path] = layer
            place.module.forward = layer.forward
            self.version += 1
        elif rank > layer.rank_max:
            layer.grow(min(RANK_MAX, rank))
            self.version += 1
        return layer


def _where(spans: Sequence[tuple[int, int]], device: torch.device) -> slice | Tensor:
    if len(spans) == 1:
        return slice(*spans[0])
    return torch.tensor([row for start, stop in spans for row in range(start, stop)], device=device)


@dataclass(frozen=True, slots=True)
class AdapterLayer:
    """A layer for adapters: output columns `parts[part]` of `module` at `path`, input width `width`."""

    path: str
    module: nn.Module
    parts: tuple[OutputSlice, ...]
    part: int
    width: int


def find_adapter_layers(model: nn.Module) -> Iterator[tuple[str, AdapterLayer]]:
    """Yield the linear layers that adapters can change, by their names in the trained model.

    A merged layer comes after the ones it was made of, should these still be there. The output layer is left out: it
    sees only the rows whose logits are wanted.
    """
    whole: Any = model
    head = whole.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    merged: list[tuple[str, AdapterLayer]] = []
    for path, module in model.named_modules():
        if module is head:
            continue
        parts = getattr(module, "parts", None)
        sizes = _sizes(module)
        if sizes is None:
            continue
        if not parts:
            yield path, AdapterLayer(path, module, (OutputSlice(path, 0, sizes[1]),), 0, sizes[0])
            continue
        above = path.rpartition(".")[0]
        named = tuple(OutputSlice(_whole(above, name), start, stop) for name, start, stop in parts)
        merged += [(part.name, AdapterLayer(path, module, named, at, sizes[0])) for at, part in enumerate(named)]
    yield from merged


def _whole(above: str, name: str) -> str:
    """Return the full path of a part, given as a path or as the layer's own name."""
    return name if "." in name or not above else f"{above}.{name}"


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Return (inputs, outputs) of a linear layer of any class or format; None for other modules."""
    found = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if type(found[0]) is int and type(found[1]) is int:
        return found[0], found[1]
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.ndim == 2:  # GPT-2's, transposed
        return int(weight.shape[0]), int(weight.shape[1])
    return None


def like_computed(model: Any) -> Tensor:
    """Return an empty tensor of the model's compute dtype and device, those of its embeddings."""
    weight: Tensor = model.get_input_embeddings().weight
    return torch.empty(0, dtype=weight.dtype, device=weight.device)
