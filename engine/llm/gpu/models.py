"""Randomly initialised models for GPU checks and benchmarks.

Nothing is downloaded: shapes are those of published models, weights are noise. A model in fp8 is made layer by layer,
so that one whose weights would not fit in bfloat16 can be timed as well. On a fake every shape is made tiny.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weftline.engine.llm import attention
from weftline.engine.llm.attention import LayerPages, Span
from weftline.engine.llm.fusion import linear as fuse_linear
from weftline.engine.llm.fusion.fuse import GROUPS, fuse
from weftline.engine.llm.gpu.attention import GpuAttention, PagedOps, PlainOps
from weftline.engine.llm.gpu.buffers import Draw
from weftline.engine.llm.gpu.fake_capture import FakeCapture
from weftline.engine.llm.gpu.graphs import DecodeGraphs, Handle, model_forward
from weftline.engine.llm.kv_cache import PageTable
from weftline.engine.llm.kv_memory import torch_allocator
from weftline.nodes.cuda_capture import Capture, CudaCapture
from weftline.shm.device.names import is_fake

PAGE_TOKENS = 16
PROMPT_ROWS = 2048
"""Most rows of a round that reads prompts."""
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "small": ("Llama", {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
                        "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 4096}),
    "small-qwen3": ("Qwen3", {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 64,
                              "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 4096}),
    "small-gemma2": ("Gemma2", {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 64,
                                "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 4096,
                                "sliding_window": 64}),
    "small-mistral": ("Mistral", {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
                                  "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 4096,
                                  "head_dim": 64, "sliding_window": 48}),
    "llama-3-8b": ("Llama", {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                             "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}),
    "llama-3.3-70b": ("Llama", {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                                "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256}),
}  # fmt: skip


TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 2, "vocab_size": 512}  # fmt: skip
"""Sizes of every shape on a fake."""
PROMPT_TOKENS = (3, 500)
"""Prompts are made of tokens from the first to below the last: every shape's vocabulary has them."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Device and size of a GPU check.

    device: of torch. A fake's is the CPU.
    fake:   models are tiny, pages are handled by torch's operations, and graphs are recorded by a fake.
    quick:  smaller counts.   full: the largest.
    """

    device: torch.device
    fake: bool = False
    quick: bool = False
    full: bool = False

    @classmethod
    def of(cls, device: str, quick: bool = False, full: bool = False) -> Setup:
        """Return the setup for a Weftline device name: 'cuda:0', 'fake:0'."""
        fake = is_fake(device)
        return cls(torch.device("cpu" if fake else device), fake, quick, full)

    @property
    def ops(self) -> PagedOps | None:
        """Return the operations on pages; None: the device's default."""
        return PlainOps() if self.fake else None

    def capture(self) -> Capture:
        return FakeCapture() if self.fake else CudaCapture(self.device)

    def build(self, shape: str, dtype: torch.dtype, implementation: str = attention.NAME) -> Any:
        """Build a model of one of SHAPES on the device; see `build`."""
        return build(shape, self.device, dtype, implementation, self.fake)

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def config_of(shape: str, tiny: bool = False) -> Any:
    """Return the config of one of SHAPES; tiny: of its family, in the sizes of TINY."""
    import transformers

    family, sizes = SHAPES[shape]
    if tiny:
        sizes = {**sizes, **TINY, **({"head_dim": 16} if "head_dim" in sizes else {})}
    if tiny or shape.startswith("small"):  # with less, attention is all but even, and what turns queries hardly shows
        sizes = {"initializer_range": 0.1, **sizes}
    ends = {"eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0}
    return getattr(transformers, f"{family}Config")(max_position_embeddings=8192, **ends, **sizes)


def token_bytes(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values."""
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim) * dtype.itemsize


def made_prompts(count: int, shortest: int, longest: int, seed: int = 9) -> list[list[int]]:
    """Return `count` prompts of random lengths and tokens; the same for the same seed."""
    rng = random.Random(seed)
    return [[rng.randrange(*PROMPT_TOKENS) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]


def build(
    shape: str, device: torch.device, dtype: torch.dtype, implementation: str = attention.NAME, tiny: bool = False
) -> Any:
    """Build a model of one of SHAPES in eval mode, with the same random weights each time."""
    from transformers import AutoModelForCausalLM

    attention.register()
    torch.manual_seed(7)
    config = config_of(shape, tiny)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=implementation)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def build_fp8(shape: str, device: torch.device, tiny: bool = False) -> Any:
    """Build a model of merged fp8 layers; at most one layer is in bfloat16 at a time."""
    from transformers import AutoModelForCausalLM

    from weftline.engine.llm.quantised import quantise_linear

    attention.register()
    torch.manual_seed(7)
    config = config_of(shape, tiny)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention.NAME)
    for layer in model.model.layers:
        _fill(layer, device)
        for owner in (layer.self_attn, layer.mlp):
            for _, names, merged in GROUPS:
                if all(name in owner._modules for name in names):
                    fuse_linear.merge(owner, names, merged)
            for linear in list(owner.modules()):
                if isinstance(linear, nn.Linear):
                    quantise_linear(linear, "fp8", str(device))
    for rest in (model.model.embed_tokens, model.model.norm, model.lm_head):
        _fill(rest, device)
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    return model.eval().requires_grad_(False)


def _fill(module: nn.Module, device: torch.device) -> None:
    module.to_empty(device=device)
    for weight in module.parameters():
        if weight.dim() > 1:
            weight.normal_(0.0, 0.02)
        else:
            weight.fill_(1.0)


@dataclass(slots=True)
class Decoding:
    """A model with pages, and `batch` sequences that decode greedily.

    lengths: known tokens of each sequence.   newest: the last of them, whose keys and values are not yet written.
    """

    model: Any
    device: torch.device
    batch: int
    tokens_max: int
    capture: Capture | None = None
    ops: PagedOps | None = None
    fused: bool = True
    report: str = ""
    lengths: list[int] = field(default_factory=list)
    newest: list[int] = field(default_factory=list)
    tables: list[PageTable] = field(default_factory=list)
    graphs: Any = None
    _layers: list[LayerPages] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.fused:
            self.report = str(fuse(self.model))
        each = -(-self.tokens_max // PAGE_TOKENS)
        rows = max(PROMPT_ROWS, self.batch)
        form = GpuAttention.make(PAGE_TOKENS, each * PAGE_TOKENS, rows, self.device, self.ops)
        self.graphs = DecodeGraphs(form, model_forward(self.model), capture=self.capture)
        self._seat(each * self.batch * PAGE_TOKENS)
        pages = random.Random(3).sample(range(each * self.batch), each * self.batch)
        self.tables = [PageTable(pages[at * each : (at + 1) * each], run=each) for at in range(self.batch)]

    @torch.inference_mode()
    def _seat(self, slots: int) -> None:
        form = self.graphs.form
        seats = attention.attach_pages(self.model, form)
        ids = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        self.model(input_ids=ids, position_ids=ids, use_cache=False)
        self._layers = [layer for layer in seats if layer.seen]
        attention.detach_others(self.model, self._layers)
        like = torch.empty(0, dtype=self.model.dtype, device=self.device)
        for layer in self._layers:
            layer.bind(slots, torch_allocator(like))

    @torch.inference_mode()
    def pretend(self, length: int) -> None:
        """Set every sequence to `length` known tokens with random keys and values, for timings."""
        for layer in self._layers:
            for memory in (layer.keys, layer.values):
                if memory is not None:
                    memory.normal_(0.0, 0.3)
        self.lengths, self.newest = [length] * self.batch, [5 + at for at in range(self.batch)]

    @torch.inference_mode()
    def read(self, prompts: list[list[int]]) -> None:
        """Prefill the prompts in rounds of at most PROMPT_ROWS rows, and sample their first tokens."""
        self.lengths, self.newest = [len(prompt) for prompt in prompts], []
        round_: list[int] = []
        for at, prompt in enumerate(prompts):
            if sum(len(prompts[one]) for one in round_) + len(prompt) > PROMPT_ROWS:
                self._read_round(prompts, round_)
                round_ = []
            round_.append(at)
        self._read_round(prompts, round_)
        self.lengths = [length + 1 for length in self.lengths]

    def _read_round(self, prompts: list[list[int]], chosen: list[int]) -> None:
        spans: list[Span] = []
        tokens: list[int] = []
        places: list[int] = []
        last: list[int] = []
        for at in chosen:
            spans.append(Span(len(tokens), 0, len(prompts[at]), self.tables[at]))
            tokens += prompts[at]
            places += range(len(prompts[at]))
            last.append(len(tokens) - 1)
        logits = self.graphs.logits(spans, tokens, last)
        if logits is None:  # no graph holds it
            self.graphs.form.fill(spans)
            ids = torch.tensor([tokens, places], device=self.device)
            keep = torch.tensor(last, device=self.device)
            out = self.model(input_ids=ids[:1], position_ids=ids[1:], use_cache=False, logits_to_keep=keep)
            logits = out.logits[0]
        self.newest += logits.argmax(-1).tolist()

    def launch(self, chained: bool = False) -> Handle:
        """Launch the next round. chained: its input tokens are still on the device."""
        spans = [Span(row, length - 1, 1, table) for row, (length, table) in enumerate(zip(self.lengths, self.tables))]
        self.lengths = [length + 1 for length in self.lengths]
        places = range(self.batch) if chained else ()
        handle: Handle = self.graphs.launch(spans, self.newest, [Draw()] * self.batch, places)
        return handle

    def decode(self, steps: int) -> list[list[int]]:
        """Return the tokens of `steps` rounds, [batch][steps], each round's read before the next is launched."""
        said: list[list[int]] = [[] for _ in range(self.batch)]
        for _ in range(steps):
            self.newest = self.launch().tokens()
            for one, token in zip(said, self.newest, strict=True):
                one.append(token)
        return said

    def chain(self, steps: int) -> None:
        """Compute `steps` rounds, each launched while the one before still runs."""
        handle = self.launch()
        for _ in range(steps - 1):
            following = self.launch(chained=True)
            handle.tokens()
            handle = following
        self.newest = handle.tokens()
