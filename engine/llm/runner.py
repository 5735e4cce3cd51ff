"""Model runner: decoder with its KV cache, fusion, sizing and forward passes.

The model code is transformers'. Two parts are ours: the attention function, and the loop that packs a round's tokens
into one row and keeps only the needed logits.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weftline.engine.llm.attention import AttentionBackend, Span, find_layers
from weftline.engine.llm.cpu.attention import CpuAttention
from weftline.engine.llm.gpu.attention import GpuAttention
from weftline.engine.llm.gpu.buffers import NOWHERE, Draw
from weftline.engine.llm.gpu.graphs import DecodeGraphs, Handle, Report, model_forward
from weftline.engine.llm.kv_memory import kv_driver, torch_allocator, virtual_allocator
from weftline.engine.llm.lora.adapters import Adapters
from weftline.engine.llm.model_loader import LayerWeights, RunnerOptions, load_model, place
from weftline.engine.llm.schedule import ScheduledChunk
from weftline.engine.llm.sequence import UNKNOWN
from weftline.engine.llm.sequence import Sequence as SequenceState
from weftline.engine.llm.sleep import OffloadedTensors, has_own_memory
from weftline.engine.llm.vision.prompt import PromptImage
from weftline.errors import InputError, ModelError
from weftline.nodes.cuda_capture import CudaCapture
from weftline.shm.device.driver import DriverError

_log = logging.getLogger(__name__)

KV_BYTES_DEFAULT = 256 << 20
"""Default KV memory: modest, since other models share the machine."""
SEQUENCES_DEFAULT = 16
"""Full-length sequences that the default holds at most; it is smaller for small models."""
_ROPE_BY_LENGTH = {"dynamic", "longrope"}
"""Rotary embeddings that change for all tokens of a pass when one position is beyond the original length."""


class Runner:
    """One loaded model. `pages` of `page_tokens` tokens each; `context_max` is its longest sequence, in tokens.

    ends: the model's end-of-text tokens.
    """

    def __init__(self, model: Any, options: RunnerOptions, unread: LayerWeights | None = None) -> None:
        """Prepare a loaded model with our attention (see `open`): find its attention layers and allocate their pages.

        unread: decoder layers whose weights are still to be read; None where all are loaded.
        """
        self.model = model.eval().requires_grad_(False)
        self.options = options
        self.device = torch.device(options.device)
        self.page_tokens = options.page_tokens
        config = model.config.get_text_config(decoder=True)
        self.vocabulary = int(config.vocab_size)
        self.ends = _ends(model)
        self.context_max = _context(config, options.context_max)
        self._backend = self._choose_backend()
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.graphs: DecodeGraphs | None = None
        self._flying: dict[int, int] = {}  # row of each sequence in the last launched round
        self.fusion = place(self.model, options, unread)
        with torch.inference_mode():
            layers = find_layers(self.model, self._backend, self._forward)
        kv_dtype = torch.float8_e4m3fn if options.kv_dtype == "fp8" else model.dtype
        like = torch.empty(0, dtype=kv_dtype, device=self.device)
        self.token_bytes = sum(layer.kv_heads * sum(layer.widths) for layer in layers) * like.element_size()
        self.pages = self._size(options.kv_bytes)
        self._layers = layers
        self._like = like
        self._kv_driver = kv_driver(self.device)
        self._offloaded: OffloadedTensors | None = None
        self.adapters: Adapters | None = None
        self._adapters_version = 0
        self.head: Any = None
        self.vision: Any = None  # the ImageEncoder of a model with pictures
        self._bind()
        if isinstance(self._backend, GpuAttention) and options.graphs:
            capture = CudaCapture(self.device) if self.device.type == "cuda" else None
            self.graphs = DecodeGraphs(self._backend, model_forward(self.model, self._choose_adapters), capture=capture)

    @classmethod
    def open(
        cls,
        source: str | Path,
        options: RunnerOptions | None = None,
        progress: Callable[[str, float], None] = lambda phrase, fraction: None,
        shown: str | None = None,
    ) -> Runner:
        """Load the model in folder `source`, or of that name on the hub; ModelError if it is unsuitable.

        shown: the model's name in errors, as its user wrote it; None: `source` as it is.
        """
        options = options or RunnerOptions()
        model, options, unread = load_model(source, options, progress, shown)
        if unread is None:  # otherwise the layers are read now and report progress
            progress("making room for keys and values", 0.9)
        return cls(model, options, unread)

    @torch.inference_mode()
    def run(self, chunks: Sequence[ScheduledChunk], copies: Sequence[tuple[int, int]] = ()) -> Tensor:
        """Copy pages, compute the chunks' tokens; return float32 [rows, vocabulary], valid until the next round.

        The rows are each chunk's `rows` last tokens, in the chunks' order, with the logits of the token after each.
        """
        for old, new in copies:
            self._copy(old, new)
        tokens: list[int] = []
        places: list[int] = []
        spans: list[Span] = []
        keep: list[int] = []
        for chunk in chunks:
            row, start, count = len(tokens), chunk.start, chunk.count
            spans.append(Span(row, start, count, chunk.sequence.table))
            if count == 1:
                tokens.append(chunk.sequence.tokens[start])
                places.append(start)
            else:
                tokens += chunk.tokens
                places += range(start, start + count)
            keep += range(row + count - chunk.rows, row + count)
        shown = self.vision is not None and self.vision.shift(chunks, spans)
        if self.graphs is not None and not shown:
            self._check_adapters(self.graphs)
            adapted = chunks if self.adapters is not None else ()
            slots = [chunk.sequence.adapter_slot for chunk in adapted for _ in range(chunk.count)]
            made = self.graphs.logits(spans, tokens, keep, slots)
            if made is not None:
                return made
        self._backend.fill(spans)
        if self.adapters is not None:
            self.adapters.choose(
                [(s.row, s.row + s.count, chunk.sequence.adapter_slot) for s, chunk in zip(spans, chunks)]
            )
        if self.vision is None:
            logits = self._forward(tokens, places, keep or [0])
        else:
            logits = self._pass(self.vision.inputs(chunks, tokens, places), keep or [0])
        return logits[: len(keep)].float()

    @torch.inference_mode()
    def launch(self, chunks: Sequence[ScheduledChunk], copies: Sequence[tuple[int, int]] = ()) -> Handle:
        """Start a round of decoding chunks whose tokens the device samples; return at once.

        Unknown tokens are those that the previously launched round samples.
        """
        if self.graphs is None:
            raise RuntimeError("this device does not sample by itself")
        for old, new in copies:
            self._copy(old, new)
        spans, tokens, origins, draws = [], [], [], []
        for row, chunk in enumerate(chunks):
            sequence = chunk.sequence
            spans.append(Span(row, chunk.start, 1, sequence.table))
            token = sequence.tokens[chunk.start]
            tokens.append(max(token, 0))
            origins.append(self._flying[sequence.order] if token == UNKNOWN else NOWHERE)
            draws.append(_draw(sequence, chunk.start + 1))
        if self.vision is not None:
            self.vision.shift(chunks, spans)
        self._check_adapters(self.graphs)
        handle = self.graphs.launch(spans, tokens, draws, origins, [s.sequence.adapter_slot for s in chunks])
        self._flying = {chunk.sequence.order: row for row, chunk in enumerate(chunks)}
        return handle

    def record(self, report: Report = lambda done, all: None, most: int | None = None) -> bool:
        """Record missing CUDA graphs, or the `most` largest of them; return whether some are left.

        Without this, a graph is recorded when a round needs it, which delays that round.
        """
        if self.graphs is None:
            return False
        self._check_adapters(self.graphs)
        self.graphs.record(report, most)
        return not self.graphs.complete

    @torch.inference_mode()
    def resize(self, pages: int) -> None:
        """Resize the layers to `pages` pages; pages below both sizes keep their content.

        Where memory cannot grow in place, the layers move one after the other, and CUDA graphs, which contain
        addresses, are dropped; see `record`. A growth that fails raises and leaves the pages as they were.
        """
        if self.graphs is not None and self._kv_driver is None:
            self.graphs.drop()
        before = self.pages * self.page_tokens
        slots = pages * self.page_tokens
        for at, layer in enumerate(self._layers):
            try:
                layer.resize(slots)
            except Exception as error:
                if slots > before:
                    for grown in self._layers[:at]:
                        grown.undo(before)
                    raise
                _log.warning("a layer keeps the memory of %d slots, of which %d are used: %s", before, slots, error)
                layer.undo(slots)
            if self._kv_driver is None and self.device.type == "cuda":
                torch.cuda.empty_cache()  # or the next layer finds no place for its smaller memory
        self.pages = pages

    def release_pages(self) -> None:
        """Free all pages; nothing can be computed until `bind_pages`."""
        for layer in self._layers:
            layer.release()
        if self.graphs is not None:
            self.graphs.drop()

    def bind_pages(self, pages: int) -> None:
        """Allocate `pages` empty pages after `release_pages`; ModelError, with none allocated, without memory."""
        self.pages = pages
        self._bind()

    @property
    def kv_rounding_bytes(self) -> int:
        """Return by how much the KV memory can exceed the size of its pages: a chunk of every tensor."""
        return sum(memory.chunk_bytes for layer in self._layers for memory in layer.memories)

    @property
    def layers(self) -> int:
        """Return the number of layers with keys and values."""
        return len(self._layers)

    def run_eagerly(self, chunks: Sequence[ScheduledChunk]) -> Tensor:
        """Compute a round as `run` does, without CUDA graphs."""
        graphs, self.graphs = self.graphs, None
        try:
            return self.run(chunks)
        finally:
            self.graphs = graphs

    def sleep(self, pages: int) -> None:
        """Release the device's memory until `wake`, which allocates `pages` pages.

        Weights move to host memory; on a CPU they stay. Pages, graphs and buffers are dropped. RuntimeError when the
        host has no memory for the weights.
        """
        if has_own_memory(self.device):
            adapters = self.adapters.tensors if self.adapters is not None else ()
            buffers = self._backend.buffers.on_device if isinstance(self._backend, GpuAttention) else ()
            kept = (*self.model.parameters(), *self.model.buffers(), *adapters)
            self._offloaded = OffloadedTensors.offload(self.device, kept, buffers)
            if isinstance(self._backend, GpuAttention):
                self._backend.buffers.forget()
        else:
            self._offloaded = OffloadedTensors()
        if self.graphs is not None:
            self.graphs.drop()
        if self.adapters is not None:
            self.adapters.choose([])
        for part in (self.head, self.vision):
            if part is not None:
                part.forget()
        for layer in self._layers:
            layer.release()
        self._flying.clear()
        self.pages = pages

    def wake(self) -> None:
        """Restore the state before `sleep`, with empty pages; ModelError when the device has too little memory."""
        if self._offloaded is None:
            raise RuntimeError("the runner does not sleep")
        offloaded, self._offloaded = self._offloaded, None
        try:
            offloaded.restore()
        except RuntimeError as error:
            raise ModelError(f"its weights do not fit on {self.device} any more: memory is in use elsewhere") from error
        self._bind()

    @property
    def asleep(self) -> bool:
        """Return whether it sleeps."""
        return self._offloaded is not None

    def adapter_slot_and_salt(self, name: str) -> tuple[int, bytes]:
        """Return the slot of the LoRA adapter `name`, and its salt in the prefix cache."""
        if not name:
            return 0, b""
        if self.adapters is None:
            raise InputError(f"adapter: found {name!r:.60}, but this step has no adapters")
        return self.adapters.slot(name), self.adapters.salt(name)

    def load_adapter(self, name: str, folder: Path, shown: str = "") -> int:
        """Load a LoRA adapter and return its slot; see `Adapters.load`."""
        if self.adapters is None:
            self.adapters = Adapters(self.model)
        return self.adapters.load(name, folder, shown)

    def hold_adapter(self, name: str) -> None:
        """Pin an adapter while a request runs with it."""
        if name and self.adapters is not None:
            self.adapters.hold(name)

    def release_adapter(self, name: str) -> None:
        if name and self.adapters is not None:
            self.adapters.release(name)

    def hold_images(self, id: int, salt: bytes, images: Sequence[PromptImage]) -> None:
        """Announce the pictures of request `id`, which may be encoded together with those of others."""
        if images and self.vision is not None:
            self.vision.hold(id, salt, images)

    def release_images(self, id: int, images: Sequence[PromptImage]) -> None:
        if images and self.vision is not None:
            self.vision.release(id)

    @property
    def page_bytes(self) -> int:
        """Return the bytes of one page, over all layers."""
        return self.token_bytes * self.page_tokens

    def close(self) -> None:
        """Release resources other than memory; there are none here."""

    def _bind(self) -> None:
        """Allocate the pages; ModelError, with none allocated, when there is no memory for them."""
        slots = self.pages * self.page_tokens
        if self._kv_driver is None:
            allocate = torch_allocator(self._like)
        else:
            allocate = virtual_allocator(self._kv_driver, self._like.dtype, self.token_bytes, slots)
        try:
            for layer in self._layers:
                layer.bind(slots, allocate)
        except (RuntimeError, DriverError) as error:  # their messages name neither the option nor a remedy
            self.release_pages()
            found = self.pages * self.page_bytes
            raise ModelError(f"kv_bytes: {found} bytes cannot be reserved on {self.device}; give fewer") from error

    def _choose_backend(self) -> AttentionBackend:
        size = self.options.page_tokens
        if self.options.form == "cpu" or (self.options.form == "auto" and self.device.type == "cpu"):
            return CpuAttention(size)
        most = self.options.sequences_max
        return GpuAttention.make(size, self.context_max, self.options.rows_max, self.device, sequences_max=most)

    def _check_adapters(self, graphs: DecodeGraphs) -> None:
        """Drop graphs recorded before the adapters' memory moved."""
        if self.adapters is not None and self.adapters.version != self._adapters_version:
            self._adapters_version = self.adapters.version
            graphs.drop()

    def _choose_adapters(self, slots: Tensor) -> None:
        if self.adapters is not None:
            self.adapters.choose(slots)

    def _copy(self, old: int, new: int) -> None:
        size = self.page_tokens
        for layer in self._layers:
            layer.copy(slice(old * size, (old + 1) * size), slice(new * size, (new + 1) * size))

    def _forward(self, tokens: list[int], places: list[int], keep: list[int]) -> Tensor:
        packed = torch.tensor([tokens, places], device=self.device)
        return self._pass({"input_ids": packed[:1], "position_ids": packed[1:]}, keep)

    def _pass(self, inputs: Mapping[str, Tensor], keep: list[int]) -> Tensor:
        """Return the model's logits [kept, vocabulary] of the rows to keep."""
        kept = torch.tensor(keep, device=self.device)
        options = {"logits_to_keep": kept} if self._keeps else {}
        out = self.model(**inputs, use_cache=False, **options)
        logits: Tensor = out.logits[0]
        return logits if self._keeps else logits[kept]

    def _size(self, kv_bytes: int | None) -> int:
        page_bytes = self.page_bytes
        if kv_bytes is None:
            longest = -(-self.context_max // self.page_tokens) * page_bytes
            kv_bytes = min(KV_BYTES_DEFAULT, longest * SEQUENCES_DEFAULT)
        if kv_bytes < 2 * page_bytes:
            raise ModelError(f"kv_bytes: found {kv_bytes}, but one page of this model takes {page_bytes}; give two")
        return kv_bytes // page_bytes


def _ends(model: Any) -> frozenset[int]:
    for config in (getattr(model, "generation_config", None), model.config, model.config.get_text_config(decoder=True)):
        ends = getattr(config, "eos_token_id", None)
        if ends is not None:
            return frozenset([ends] if isinstance(ends, int) else ends)
    return frozenset()


def _context(config: Any, configured: int | None) -> int:
    made_for = int(getattr(config, "max_position_embeddings", None) or 4096)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _ROPE_BY_LENGTH:
        # Beyond that length such a model embeds all tokens of a pass differently, and rounds mix sequences.
        made_for = min(made_for, int(rope.get("original_max_position_embeddings") or made_for))
    if configured is not None and not 1 <= configured <= made_for:
        raise ModelError(f"context_max: found {configured}, expected 1 to {made_for}, the model's own limit")
    return configured or made_for


def _draw(sequence: SequenceState, position: int) -> Draw:
    params = sequence.params
    narrowing = (params.top_k, params.top_p, params.min_p, params.typical_p)
    return Draw(params.temperature, *narrowing, sequence.seed, position)
