"""Bytes of weights and tokens a second of the engine, by the number format in which weights are kept.

    python -m benchmarks.weights            # a 4-layer, 256-wide Llama, 1 and 32 requests, three rounds
    python -m benchmarks.weights --quick    # one round of short answers, for a look
    python -m benchmarks.weights --wide     # 8 layers, 1024 wide: more weights than the caches of most CPUs hold

With --cpu-time, seconds are those that the process computed: a fair figure for one thread where others use the
machine as well. Weights are random; prompts of 32 tokens are read before the clock starts. All formats answer in every
round, one after the other, so that whatever else the machine does falls on all of them. int8 and int4 need torchao.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read once, when torch is imported

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.llm import VOCABULARY, machine
from weftline.engine.llm import attention
from weftline.engine.llm.cpu import attention as attention_cpu
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.model_loader import RunnerOptions
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.quantised import quantise, weight_bytes
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.schedule import RoundLimits

PROMPT = 32
BATCHES = (1, 32)


@dataclass(frozen=True, slots=True)
class Case:
    """A number format to compute in, and one to keep weights in; None: the same."""

    dtype: torch.dtype
    form: str | None = None

    def __str__(self) -> str:
        computed = str(self.dtype).removeprefix("torch.")
        return computed if self.form is None else f"{self.form}, computed in {computed}"


CASES = (
    Case(torch.float32),
    Case(torch.bfloat16),
    Case(torch.float32, "int8"),
    Case(torch.bfloat16, "int8"),
    Case(torch.bfloat16, "int4"),
)


def build(case: Case, wide: bool) -> tuple[Engine, int]:
    """Return an engine with random weights in that format, and what they take in bytes."""
    torch.manual_seed(3)
    size, layers = (1024, 8) if wide else (256, 4)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=size, intermediate_size=size * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=size // 64, num_key_value_heads=size // 128, max_position_embeddings=1024,
        initializer_range=0.08, tie_word_embeddings=True, eos_token_id=None,
    )  # fmt: skip
    attention.register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).to(case.dtype)
    runner = Runner(model, RunnerOptions())
    if case.form is not None:
        quantise(runner.model, case.form, "cpu")
    return Engine(runner, None, RoundLimits(2048, max(BATCHES)), prefix_cache=False), weight_bytes(runner.model)


def tokens_a_second(engine: Engine, batch: int, tokens: int, clock: Callable[[], float]) -> float:
    """Return how many tokens `batch` requests get in a second of `clock` once their prompts are read."""
    prompts = torch.randint(0, VOCABULARY, (batch, PROMPT), generator=torch.Generator().manual_seed(batch)).tolist()
    for at, prompt in enumerate(prompts):
        engine.add(at, prompt, SamplingParams(tokens_max=tokens, ignore_eos=True))
    engine.step()
    started, made = clock(), 0
    while engine.busy:
        for update in engine.step():
            if update.error is not None:
                raise update.error
            made += len(update.tokens)
    return made / (clock() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, answers of 16 tokens")
    parser.add_argument("--wide", action="store_true", help="8 layers, 1024 wide")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="length of an answer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="count seconds of computing; one thread")
    options = parser.parse_args()
    threads, clock = (1, time.process_time) if options.cpu_time else (options.threads, time.perf_counter)
    torch.set_num_threads(threads)
    attention_cpu.set_threads(threads)
    rounds, tokens = (1, 16) if options.quick else (options.rounds, options.tokens)
    built = {case: build(case, options.wide) for case in CASES}
    found: dict[tuple[Case, int], list[float]] = {(case, batch): [] for case in CASES for batch in BATCHES}
    for engine, _ in built.values():
        tokens_a_second(engine, 2, 4, clock)
    gc.freeze()
    for _ in range(rounds):
        for (case, batch), speeds in found.items():
            speeds.append(tokens_a_second(built[case][0], batch, tokens, clock))
    measured = "CPU time" if options.cpu_time else "wall time"
    print(
        f"{machine()}; {threads} threads, {measured}; median of {rounds} rounds (least to most), {tokens} tokens each"
    )
    print("| weights | MiB | " + " | ".join(f"tokens/s, batch {batch}" for batch in BATCHES) + " |")
    print("|---|---|" + "---|" * len(BATCHES))
    for case, (_, size_bytes) in built.items():
        cells = [found[case, batch] for batch in BATCHES]
        speeds = " | ".join(f"{statistics.median(c):.0f} ({min(c):.0f} to {max(c):.0f})" for c in cells)
        print(f"| {case} | {size_bytes / 2**20:.1f} | {speeds} |")


if __name__ == "__main__":
    main()
