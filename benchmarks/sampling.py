"""What choosing a round's tokens costs: 128 rows, a small and a large vocabulary, one row of options after the other.

    python -m benchmarks.sampling                 # one thread, on the CPU
    python -m benchmarks.sampling --device cuda

Logits are made so that probabilities fall as in a language model's answers: a few tokens have nearly everything. Every
row has a text of 500 tokens before it, of which 200 are answer, and every round adds one.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from benchmarks.conditions import conditions, peak_memory, spread
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.sampling.sampler import Row, Sampler
from weftline.engine.llm.sequence import Sequence

PROMPT, TEXT = 300, 500
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, logprobs 5": {"logprobs": 5},
    "greedy, penalties": PENALTIES,
    "temperature": {"temperature": 0.8},
    "temperature, top_p": {"temperature": 0.8, "top_p": 0.95},
    "temperature, top_k, top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "everything": {
        "temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.95, "tokens_min": 10_000,
        "tokens_max": 20_000, "logit_bias": {"17": 1.0, "18": -100.0}, "logprobs": 5, **PENALTIES,
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[4096, 128_256])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{conditions()}, torch {torch.__version__}, {args.threads} threads, on {args.device}")
    print(f"{args.rows} rows, {args.rounds} rounds, milliseconds a round: median [least-most]")
    for vocabulary in args.vocabularies:
        print(f"vocabulary {vocabulary}")
        logits = _logits(args.rows, vocabulary, args.device)
        for name, options in KINDS.items():
            print(f"  {name:<28}{spread(_rounds(logits, SamplingParams(**options), args.rounds), 1):>24}")
    if args.device == "cpu":
        print(peak_memory())
    else:
        print(f"peak memory of the device: {torch.cuda.max_memory_allocated() / 2**20:.0f} MB")


def _rounds(logits: torch.Tensor, params: SamplingParams, rounds: int) -> list[float]:
    rows, vocabulary = logits.shape
    sampler = Sampler(frozenset({2}), vocabulary)
    known = torch.randint(0, vocabulary, (rows, TEXT), generator=torch.Generator().manual_seed(1)).tolist()
    sequences = [Sequence(at, known[at], PROMPT, 1 << 20, params, at, seed=at) for at in range(rows)]
    took_ms = []
    for _ in range(rounds + 1):
        fresh = logits.clone()
        if logits.device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        choices = sampler.pick(fresh, [Row(sequence) for sequence in sequences])
        took_ms.append((time.perf_counter() - started) * 1e3)
        for sequence, choice in zip(sequences, choices, strict=True):
            sequence.tokens.append(choice.token)
    return took_ms[1:]  # the first makes options ready and counts the text


def _logits(rows: int, vocabulary: int, device: str) -> torch.Tensor:
    """Return logits that fall with a token's rank as 2 * log(rank), Zipf's law squared, with some noise."""
    generator = torch.Generator().manual_seed(0)
    ranks = torch.rand(rows, vocabulary, generator=generator).argsort(-1) + 1.0
    return (torch.randn(rows, vocabulary, generator=generator) - 2 * ranks.log()).to(device)


if __name__ == "__main__":
    main()
