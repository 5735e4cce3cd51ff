"""How long people wait for the paged engine's tokens: what they ask, each answered by measuring.

    python -m benchmarks.llm_latency                 # all of it
    python -m benchmarks.llm_latency prefix stall    # some: start, table, prefix, stall, waste, long

    start    seconds from weights in memory to the first token
    table    time to the first token (p50, p95) and tokens a second with 1, 10, 50 and 100 requests at once
    prefix   32 requests that begin with the same 1 024 tokens: time to the first token with and without the cache
    stall    8 requests decode while a prompt of 8 192 tokens is read: how long they wait between tokens, against how
             long they do alone, and how long the prompt takes, against alone
    waste    32 requests: slots of their pages that hold nothing, as a share of the tokens they hold
    long     a prompt of 100 000 tokens (one layer, 2 heads of 16), and a follow-up of 50 tokens on top of it

The model is that of `benchmarks.llm`, a Llama of 4 layers and width 256 in float32, made for 16 384 tokens.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read once, when torch is imported

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.llm import VOCABULARY, build_asks, build_model, machine
from weftline.engine.llm import attention
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.model_loader import RunnerOptions
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.schedule import RoundLimits

KV_BYTES = 1 << 30
LONG = 8192


def make_engine(sequences: int, prefix_cache: bool = True) -> Engine:
    options = RunnerOptions(kv_bytes=KV_BYTES, fuse=True)
    runner = Runner(build_model(attention.NAME, 16_384), options)
    return Engine(runner, None, RoundLimits(512, sequences), prefix_cache)


def now_ms() -> float:
    return time.perf_counter() * 1e3


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def answer(engine: Engine, prompts: list[list[int]], tokens: list[int]) -> tuple[list[float], float]:
    """Answer all prompts at once; return milliseconds to each first token, and seconds in all."""
    started, first = now_ms(), {}
    for at, (prompt, count) in enumerate(zip(prompts, tokens, strict=True)):
        engine.add(at, prompt, SamplingParams(tokens_max=count, ignore_eos=True), now_ms=started)
    while engine.busy:
        for update in engine.step(now_ms()):
            first.setdefault(update.id, now_ms() - started)
    return list(first.values()), (now_ms() - started) / 1e3


def measure_start(rounds: int) -> None:
    took = []
    for _ in range(rounds):
        model = build_model(attention.NAME, 16_384)
        started = now_ms()
        engine = Engine(Runner(model, RunnerOptions(kv_bytes=KV_BYTES, fuse=True)), None, RoundLimits())
        engine.generate([[1, 2, 3]], SamplingParams(tokens_max=2, ignore_eos=True))
        took.append((now_ms() - started) / 1e3)
    print(f"start   from weights in memory to a token: {statistics.median(took):.2f} s, the first time {took[0]:.2f} s")


def measure_table(rounds: int) -> None:
    engine = make_engine(128)
    print("table   at once   first token p50 / p95      tokens/s")
    for count in (1, 10, 50, 100):
        asks = build_asks(count, 512, 256, seed=7)
        firsts, rates = [], []
        for _ in range(rounds):
            engine.clear_prefixes()
            first, seconds = answer(engine, [a.prompt for a in asks], [a.tokens for a in asks])
            firsts += first
            rates.append(sum(a.tokens for a in asks) / seconds)
        p50, p95 = percentile(firsts, 0.5), percentile(firsts, 0.95)
        spread = f"[{min(rates):.0f}-{max(rates):.0f}]"
        print(f"        {count:7}   {p50:8.0f} / {p95:.0f} ms      {statistics.median(rates):.0f} {spread}")


def measure_prefix(rounds: int) -> None:
    rng = random.Random(1)
    shared = [rng.randrange(VOCABULARY) for _ in range(1024)]
    prompts = [shared + [rng.randrange(VOCABULARY) for _ in range(32)] for _ in range(32)]
    took: dict[bool, list[float]] = {True: [], False: []}
    engines = {cached: make_engine(32, cached) for cached in took}
    for _ in range(rounds):
        for cached, engine in engines.items():
            engine.clear_prefixes()
            if cached:
                answer(engine, [[*shared, 5]], [1])
            first, _ = answer(engine, prompts, [4] * 32)
            took[cached].append(statistics.median(first))
    with_cache, without = (statistics.median(took[cached]) for cached in (True, False))
    ratio = sorted(b / a for a, b in zip(took[True], took[False], strict=True))
    print(
        f"prefix  first token, p50: {with_cache:.0f} ms with the cache, {without:.0f} ms without: "
        f"{statistics.median(ratio):.1f}x [{ratio[0]:.1f}-{ratio[-1]:.1f}] (bar 5)"
    )


def decode_beside(engine: Engine, prompt: list[int] | None, rounds: int) -> tuple[list[float], float]:
    """Let 8 requests decode, and a prompt be read once they do; return ms between tokens, and ms for the prompt."""
    for at in range(8):
        engine.add(at, [at + 2] * 64, SamplingParams(tokens_max=4000, ignore_eos=True), now_ms=now_ms())
    for _ in range(40):
        engine.step(now_ms())
    started = now_ms()
    if prompt is not None:
        engine.add(99, prompt, SamplingParams(tokens_max=1, ignore_eos=True), now_ms=started)
    gaps: list[float] = []
    last = dict.fromkeys(range(8), now_ms())
    while True:
        updates, at_ms = engine.step(now_ms()), now_ms()
        for update in updates:
            if update.id in last:
                gaps.append(at_ms - last[update.id])
                last[update.id] = at_ms
        if any(update.id == 99 for update in updates) or (prompt is None and len(gaps) >= 8 * rounds):
            break
    took = now_ms() - started
    for at in range(8):
        engine.cancel(at)
    engine.clear_prefixes()
    return gaps, took


def measure_stall(rounds: int) -> None:
    engine = make_engine(32)
    rng = random.Random(2)
    ratios, slower, shown = [], [], []
    for _ in range(rounds):
        prompt = [rng.randrange(VOCABULARY) for _ in range(LONG)]
        alone, seconds = answer(engine, [prompt], [1])
        engine.clear_prefixes()
        quiet, _ = decode_beside(engine, None, 200)
        beside, took = decode_beside(engine, prompt, 0)
        ratios.append(percentile(beside, 0.99) / percentile(quiet, 0.99))
        slower.append(took / 1e3 / seconds)
        shown.append((percentile(quiet, 0.99), percentile(beside, 0.99), alone[0] / 1e3, took / 1e3))
    quiet_ms, beside_ms, alone_s, beside_s = (statistics.median(column) for column in zip(*shown, strict=True))
    print(
        f"stall   between tokens, p99: {quiet_ms:.1f} ms quiet, {beside_ms:.1f} ms beside a prompt of {LONG}: "
        f"{statistics.median(ratios):.2f}x [{min(ratios):.2f}-{max(ratios):.2f}] (bar 2)\n"
        f"        the prompt: {alone_s:.1f} s alone, {beside_s:.1f} s beside 8 that decode: "
        f"{statistics.median(slower):.2f}x [{min(slower):.2f}-{max(slower):.2f}] (bar 4)"
    )


def measure_waste(rounds: int) -> None:
    engine = make_engine(32)
    asks = build_asks(32, 512, 256, seed=7)
    held = empty = 0
    for at, ask in enumerate(asks):
        engine.add(at, ask.prompt, SamplingParams(tokens_max=ask.tokens, ignore_eos=True))
    while engine.busy:
        engine.step(now_ms())
        for sequence in engine._schedule.running:
            held += sequence.computed
            empty += len(sequence.table.pages) * engine.runner.page_tokens - sequence.computed
    print(f"waste   {100 * empty / held:.2f} % of the tokens held, pages of {engine.runner.page_tokens} (bar 4)")


def measure_long(rounds: int) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=512, num_key_value_heads=1, max_position_embeddings=131_072, **sizes)
    config.eos_token_id = None
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    engine = Engine(Runner(model, RunnerOptions(kv_bytes=32 << 20)), None, RoundLimits(512, 8))
    rng = random.Random(3)
    prompt = [rng.randrange(512) for _ in range(100_000)]
    first, _ = answer(engine, [prompt], [1])
    follow, _ = answer(engine, [[*prompt, *(rng.randrange(512) for _ in range(50))]], [1])
    print(f"long    100 000 tokens: {first[0] / 1e3:.1f} s to the first token; 50 more on top: {follow[0]:.0f} ms")


def main() -> None:
    questions: dict[str, Callable[[int], None]] = {
        "start": measure_start,
        "table": measure_table,
        "prefix": measure_prefix,
        "stall": measure_stall,
        "waste": measure_waste,
        "long": measure_long,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", help="some of start, table, prefix, stall, waste, long")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    attention.register()
    print(f"{machine()}, {options.threads} threads, {options.rounds} rounds")
    for name, measure in questions.items():
        if not options.questions or name in options.questions:
            measure(options.rounds)


if __name__ == "__main__":
    main()
