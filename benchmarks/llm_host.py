"""Host time of a decode round: everything but the model and the drawing of tokens.

    python -m benchmarks.llm_host                 # 128 sequences that decode, then 256 that are streamed
    python -m benchmarks.llm_host --sequences 32 --streams 64

A runner without a model takes its place: it does all that the real one does for a round on the host (collecting tokens,
places and slots, telling the attention what to read) and returns what was made before.

    decoding   the engine alone, by the path that a CPU takes, without text; the drawing of tokens is printed beside it
    streaming  what a worker does in a round, by the path that a GPU takes: rounds that draw for themselves are launched
               ahead, tokens become text, text becomes pieces, pieces are encoded and sent on a socket. A GPU computes
               the next round meanwhile, so that this time is hidden as long as it is shorter than the model's
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import platform
import pstats
import random
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from weftline.engine.llm.attention import Span
from weftline.engine.llm.cpu.attention import CpuAttention
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.gpu.attention import GpuAttention
from weftline.engine.llm.gpu.graphs import DecodeGraphs
from weftline.engine.llm.node import Llm
from weftline.engine.llm.options import LlmConfig
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.schedule import RoundLimits, ScheduledChunk
from weftline.engine.llm.tokens import Tokens
from weftline.engine.protocol import messages as msg
from weftline.engine.protocol.channel import Channel
from weftline.engine.protocol.values import pack
from weftline.engine.worker.memory import Memory
from weftline.engine.worker.stream import HostedStream
from weftline.nodes.ports import PortType

VOCABULARY = 4096
PAGES, PAGE_TOKENS, CONTEXT_MAX = 16_384, 16, 4096
STREAMED_TOKENS_MAX = 2000


class NoModel:
    """Stands in for a runner: prepares rounds as the real one does and computes nothing."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        self.pages, self.page_tokens, self.page_bytes = pages, page_tokens, 1
        self.context_max, self.vocabulary = CONTEXT_MAX, VOCABULARY
        self.ends: frozenset[int] = frozenset()
        self.head = self.graphs = self.vision = None
        self.asleep = False
        self.device = torch.device("cpu")
        self.drawing_s = 0.0
        self._backend = CpuAttention(page_tokens)
        self._logits = torch.randn(256, VOCABULARY)

    def adapter_slot_and_salt(self, name: str) -> tuple[int, bytes]:
        return 0, b""

    def hold_adapter(self, name: str) -> None: ...

    def release_adapter(self, name: str) -> None: ...

    def hold_images(self, id: int, salt: bytes, images: Sequence[Any]) -> None: ...

    def release_images(self, id: int, images: Sequence[Any]) -> None: ...

    def run(self, chunks: Sequence[ScheduledChunk], copies: Sequence[tuple[int, int]] = ()) -> Any:
        tokens: list[int] = []
        places: list[int] = []
        spans: list[Span] = []
        keep: list[int] = []
        for chunk in chunks:
            row, start, count = len(tokens), chunk.start, chunk.count
            spans.append(Span(row, start, count, chunk.sequence.table))
            tokens += chunk.tokens if count > 1 else chunk.sequence.tokens[start : start + 1]
            places += range(start, start + count)
            keep += range(row + count - chunk.rows, row + count)
        self._backend.fill(spans)
        torch.tensor([tokens, places])
        torch.tensor(keep)
        return self._logits[: len(keep)]


class NoModelAhead(NoModel):
    """The same on the path of a GPU: rounds are launched ahead, by buffers that lie in the host's memory here."""

    def __init__(self, sequences: int) -> None:
        super().__init__(PAGES, PAGE_TOKENS)
        form = GpuAttention.make(PAGE_TOKENS, CONTEXT_MAX, max(512, sequences), torch.device("cpu"))
        self._drawn = torch.randint(3, VOCABULARY, (64, sequences + 8), generator=torch.Generator().manual_seed(1))
        self._logits = torch.zeros(512, 2)
        self._round = 0
        self.graphs = DecodeGraphs(form, lambda tokens, places, view: self._logits[: len(tokens)], self._draw)
        self.adapters = None
        self._flying: dict[int, int] = {}

    def launch(self, chunks: Sequence[ScheduledChunk], copies: Sequence[tuple[int, int]] = ()) -> Any:
        return Runner.launch(self, chunks, copies)  # type: ignore[arg-type]

    def _check_adapters(self, graphs: DecodeGraphs) -> None: ...

    def _draw(self, logits: Any, kind: str, settings: Any) -> Any:
        self._round += 1
        return self._drawn[self._round % len(self._drawn), : len(logits)]


@functools.cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of VOCABULARY tokens, trained on this project's documentation.

    kind: bytes, as GPT-2, Llama 3 and Qwen have it; sentencepiece, as Llama 2 and Gemma have it; metaspace, whose
    tokens have to be decoded with their neighbours.
    """
    texts = [path.read_text("utf-8") for path in sorted(Path("docs").glob("*.md"))]
    special = ["<unk>", "<s>", "</s>"]
    if kind == "bytes":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=kind == "sentencepiece", fuse_unk=True))
        made.pre_tokenizer, made.decoder, alphabet = pre_tokenizers.Metaspace(), decoders.Metaspace(), []
        if kind == "sentencepiece":
            special += [f"<0x{byte:02X}>" for byte in range(256)]
            parts = [decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "), decoders.ByteFallback(), decoders.Fuse()]
            made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


class Streams:
    """A worker's streaming step, with `count` requests that stream."""

    def __init__(self, count: int, kind: str, stop: Sequence[str] = ()) -> None:
        engine = Engine(NoModelAhead(count), Tokens(tokenizer(kind), CONTEXT_MAX), RoundLimits(4 * PAGES, count))  # type: ignore[arg-type]
        node = Llm(LlmConfig(model="none"))
        node._engine, node._tokens = engine, engine.tokens
        outputs = tuple((name, type) for name, type in (("text", "text"), ("usage", "json"), ("answers", "json")))
        inputs = (("prompt", "text"), ("sampling", "json"))
        step = msg.StepToOpen(0, "llm", "llm", {}, inputs, outputs, "cpu", 1, False, streams=True)
        self.hosted = HostedStream(step, node, Memory({}, -1, lambda sizes, near: ((), ())))
        here, there = socket.socketpair()
        self._channel, self._there = Channel(here, blocking=True), there
        there.setblocking(False)
        draws = random.Random(2)
        options = {"tokens_max": STREAMED_TOKENS_MAX, "ignore_eos": True, "stop": list(stop)}
        sampling = pack(options, PortType("json"), "sampling").inline()
        for item in range(count):
            prompt = " ".join(draws.choices(("models", "steps", "pipelines", "tokens"), k=60 + item % 100))
            self.hosted.submit(msg.Item(item, (pack(prompt, PortType("text"), "prompt").inline(), sampling)))
        self.engine = engine

    def round(self) -> int:
        """Do what a worker's loop does for a round; return how many pieces were sent."""
        pieces = self.hosted.round()
        if pieces:
            self._channel.send(msg.encode(msg.OutputChunks(0, tuple(pieces), 0.0)))
        return len(pieces)

    def drain(self) -> None:
        """Read what was sent; the runtime does that in a process of its own."""
        try:
            while self._there.recv(1 << 20):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        self._channel.close()
        self._there.close()


def time_streams(streams: Streams, rounds: int) -> tuple[list[float], list[float], float]:
    """Return processor milliseconds of each round, those of launching among them, and pieces a round."""
    launching: list[float] = []
    runner: Any = streams.engine.runner
    launch = runner.launch
    runner.launch = _timed(launch, launching)
    whole, pieces = [], 0
    for _ in range(rounds):
        started = time.thread_time()
        pieces += streams.round()
        whole.append((time.thread_time() - started) * 1e3)
        streams.drain()
    runner.launch = launch
    return whole, launching, pieces / rounds


def _timed(call: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        started = time.thread_time()
        try:
            return call(*args)
        finally:
            into.append((time.thread_time() - started) * 1e3)

    return timed


def time_rounds(engine: Engine, sampler: Any, rounds: int) -> tuple[list[float], list[float]]:
    """Return milliseconds of each round without drawing, and of the drawing."""
    drawing: list[float] = []
    pick = sampler.pick

    def timed(*args: Any) -> Any:
        started = time.perf_counter()
        picked = pick(*args)
        drawing.append((time.perf_counter() - started) * 1e3)
        return picked

    sampler.pick = timed
    whole = []
    for _ in range(rounds):
        started = time.perf_counter()
        engine.step(started * 1e3)
        whole.append((time.perf_counter() - started) * 1e3)
    sampler.pick = pick
    return [a - b for a, b in zip(whole, drawing, strict=True)], drawing


def _spread(times_ms: Sequence[float], scale: float, unit: str) -> str:
    times = sorted(times_ms)
    quarter = len(times) // 4
    low, middle, high = (value * scale for value in (times[quarter], statistics.median(times), times[-1 - quarter]))
    return f"{middle:.2f} {unit} [{low:.2f}-{high:.2f}], least {times[0] * scale:.2f}"


def decode(options: argparse.Namespace) -> None:
    """Time and print rounds of the engine alone."""
    engine = Engine(NoModel(PAGES, PAGE_TOKENS), None, RoundLimits(16_384, options.sequences))  # type: ignore[arg-type]
    for at in range(options.sequences):
        engine.add(at, [at] * (100 + at), SamplingParams(tokens_max=2000, ignore_eos=True))
    for _ in range(50):
        engine.step()
    sampler = engine._executor._sampler
    if options.profile:
        _profile(time_rounds, engine, sampler, options.rounds)
        return
    host, drawing = time_rounds(engine, sampler, options.rounds)
    print(f"{options.sequences} sequences decode")
    print(f"  host, a round    {_spread(host, 1, 'ms')}")
    print(f"  drawing, on CPU  {_spread(drawing, 1, 'ms')} (greedy; on a GPU it runs there)")


def stream(options: argparse.Namespace, kind: str) -> None:
    """Time and print rounds of a worker whose requests all stream."""
    streams = Streams(options.streams, kind, options.stop)
    for _ in range(50):
        streams.round()
        streams.drain()
    if options.profile:
        _profile(time_streams, streams, options.rounds)
    else:
        whole, launching, pieces = time_streams(streams, options.rounds)
        rest = [a - b for a, b in zip(whole, launching, strict=True)]
        print(f"{options.streams} streams, tokenizer of kind {kind}, {pieces:.0f} pieces a round")
        for name, times in (("host, a sequence", whole), ("  launching", launching), ("  the rest", rest)):
            print(f"  {name:<17}{_spread(times, 1e3 / options.streams, 'us')}")
    streams.close()


def _profile(call: Callable[..., Any], *args: Any) -> None:
    profiler = cProfile.Profile()
    profiler.runcall(call, *args)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=128, help="those that decode; 0 leaves this part out")
    parser.add_argument("--streams", type=int, default=256, help="those that stream; 0 leaves this part out")
    parser.add_argument("--kinds", nargs="+", default=["bytes", "sentencepiece", "metaspace"])
    parser.add_argument("--stop", nargs="*", default=[], help="stop strings of the streamed requests")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}; median [quartiles] of {options.rounds} rounds"
    )
    if options.sequences:
        decode(options)
    for kind in options.kinds if options.streams else ():
        stream(options, kind)


if __name__ == "__main__":
    main()
