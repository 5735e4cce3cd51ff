"""Tokens a second of the paged engine beside transformers' own ways, on the same model, requests and threads.

    python -m benchmarks.llm                     # 32 requests, prompts 16-512, answers 16-256, three rounds
    python -m benchmarks.llm --requests 128
    python -m benchmarks.llm --model examples/models/shapes-chat
    python -m benchmarks.llm --quick             # 8 short requests, for a look

Three runners answer the same requests greedily, one after the other in every round, so that whatever else the machine
does falls on all of them: (a) `generate`, one request at a time; (b) transformers' continuous batching; (c) ours. The
model is a 4-layer, 256-wide Llama with random weights in float32, or one from a folder. Prompts are random tokens, and
end-of-text tokens do not stop answers. Each engine has memory for all requests at once. Answers are compared token for
token with (a)'s; one that differs counts as equal only if the two best logits there lie within 1e-4 of each other.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read once, when torch is imported

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, LlamaConfig

from weftline.engine.llm import attention
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.model_loader import RunnerOptions
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.schedule import RoundLimits

VOCABULARY = 4096
TIE = 1e-4
TOKEN_BYTES = 4 * 2 * 2 * 64 * 4
"""Keys and values of one token in these models: layers, keys and values, heads, width, bytes."""
BLOCK_TOKENS = 32
"""Tokens in a block of transformers' continuous batching, by default."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its prompt, and how many tokens it wants."""

    prompt: list[int]
    tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """What one runner did: answers by request, seconds in all, seconds to each request's first token (when known)."""

    answers: list[list[int]]
    seconds: float
    first_s: list[float]


def build_model(implementation: str, context_max: int = 1024) -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=context_max, initializer_range=0.08,
    )  # fmt: skip
    config.eos_token_id = None
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


def open_model(folder: str, implementation: str) -> Any:
    """Load the model of a folder as `build_model` makes one: float32, and no token ends an answer."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=implementation, dtype=torch.float32).eval()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model


def build_asks(count: int, prompt_max: int, tokens_max: int, seed: int, vocabulary: int = VOCABULARY) -> list[Ask]:
    """Return `count` requests with lengths spread evenly over 16..prompt_max and 16..tokens_max, in random order."""
    rng = random.Random(seed)
    return [
        Ask([rng.randrange(vocabulary) for _ in range(rng.randint(16, prompt_max))], rng.randint(16, tokens_max))
        for _ in range(count)
    ]


@torch.inference_mode()
def run_generate(model: Any, asks: list[Ask]) -> Run:
    started, answers = time.perf_counter(), []
    for ask in asks:
        ids = torch.tensor([ask.prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=ask.tokens, pad_token_id=0
        )
        answers.append(out[0, len(ask.prompt) :].tolist())
    return Run(answers, time.perf_counter() - started, [])


def run_batching(model: Any, asks: list[Ask], blocks: int, batch_tokens: int) -> Run:
    """Answer with transformers' continuous batching; only the requests are timed, not its set-up and warm-up."""
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=256)
    sizes = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=batch_tokens)
    with model.continuous_batching_context_manager(greedy, continuous_batching_config=sizes) as manager:
        started = time.perf_counter()
        ids = [manager.add_request(a.prompt, max_new_tokens=a.tokens, record_timestamps=True) for a in asks]
        results: dict[str, Any] = {}
        while len(results) < len(asks):
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("transformers' continuous batching stopped before it was done")
            elif result.is_finished():
                results[result.request_id] = result
        seconds = time.perf_counter() - started
    first = [stamps[0] - started for id in ids if (stamps := results[id].timestamps)]
    return Run([list(results[id].generated_tokens) for id in ids], seconds, first)


def run_openvino(python: str, folder: str, asks: list[Ask], threads: int) -> Run:
    """Answer with OpenVINO GenAI's continuous batching, in its own Python; see `benchmarks/peers/openvino_llm.py`."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([[ask.prompt, ask.tokens] for ask in asks], file)
        file.flush()
        script = Path(__file__).parent / "peers" / "openvino_llm.py"
        done = subprocess.run([python, script, folder, file.name, str(threads)], capture_output=True, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    return Run(report["answers"], report["seconds"], report["first_s"])


def run_ours(engine: Engine, asks: list[Ask]) -> Run:
    started = time.perf_counter()
    answers: list[list[int]] = [[] for _ in asks]
    first: list[float] = []
    for at, ask in enumerate(asks):
        engine.add(at, ask.prompt, SamplingParams(tokens_max=ask.tokens, ignore_eos=True))
    while engine.busy:
        for update in engine.step():
            if update.error is not None:
                raise update.error
            if not answers[update.id]:
                first.append(time.perf_counter() - started)
            answers[update.id] += update.tokens
    seconds = time.perf_counter() - started
    engine.clear_prefixes()  # the next round's prompts are the same and must be computed again
    return Run(answers, seconds, first)


@torch.inference_mode()
def compare(model: Any, asks: list[Ask], expected: Run, run: Run) -> tuple[int, int]:
    """Return how many answers are the same token for token, and how many differ from a tie on."""
    same = ties = 0
    for ask, wanted, given in zip(asks, expected.answers, run.answers):
        at = next((i for i, (a, b) in enumerate(zip(wanted, given)) if a != b), None)
        if at is None:
            same += len(wanted) == len(given)
            continue
        logits = model(torch.tensor([ask.prompt + wanted[:at]])).logits[0, -1]
        ties += bool(float(logits[wanted[at]] - logits[given[at]]) < TIE)
    return same, ties


def machine() -> str:
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = model[0].partition(":")[2].strip() if model else platform.processor()
    return f"{name}, {len(model)} cores; Python {platform.python_version()}, torch {torch.__version__}"


def profile(call: Callable[[], Any]) -> None:
    profiler = cProfile.Profile()
    profiler.runcall(call)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(35)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 requests, prompts to 96, answers to 48, two rounds")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", help="a model's folder; by default a Llama with random weights")
    parser.add_argument("--openvino", nargs=2, metavar=("PYTHON", "FOLDER"), help="run OpenVINO GenAI beside")
    parser.add_argument("--round-tokens", type=int, default=512, help="our budget of one round, in tokens")
    parser.add_argument("--skip", action="append", default=[], help="leave a runner out: generate or batching")
    parser.add_argument("--profile", action="store_true", help="where the time of ours goes, and nothing else")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    count, prompt_max, tokens_max = (8, 96, 48) if options.quick else (options.requests, 512, 256)
    rounds = 2 if options.quick else options.rounds
    attention.register()
    make = (lambda form: open_model(options.model, form)) if options.model else build_model
    plain, batching_model, ours = make("sdpa"), make("sdpa"), make(attention.NAME)
    vocabulary = plain.config.vocab_size
    asks = build_asks(count, prompt_max, tokens_max, 7, vocabulary)
    slots = sum(len(ask.prompt) + ask.tokens + 64 for ask in asks)
    runner = Runner(ours, RunnerOptions(kv_bytes=max(64 << 20, slots * TOKEN_BYTES)))
    engine = Engine(runner, None, RoundLimits(options.round_tokens, max(count, 1)))
    if options.profile:
        run_ours(engine, asks[:4])
        profile(lambda: run_ours(engine, asks))
        return
    runners: dict[str, Callable[[], Run]] = {
        "generate": lambda: run_generate(plain, asks),
        "batching": lambda: run_batching(batching_model, asks, max(256, slots // BLOCK_TOKENS + count), 1024),
        "ours": lambda: run_ours(engine, asks),
    }
    if options.openvino:
        runners["openvino"] = lambda: run_openvino(*options.openvino, asks, options.threads)
    runners = {name: run for name, run in runners.items() if name not in options.skip}
    run_ours(engine, asks[:2])
    runs: dict[str, list[Run]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, run in runners.items():
            runs[name].append(run())

    tokens = sum(ask.tokens for ask in asks)
    print(f"{machine()}, {options.threads} threads; transformers {transformers.__version__}")
    print(
        f"{count} requests, {sum(len(a.prompt) for a in asks)} prompt tokens, {tokens} answer tokens, {rounds} rounds"
    )
    expected = runs["generate"][0] if "generate" in runs else runs["ours"][0]
    print("runner      tokens/s (median, spread)    to first token, p50    answers as generate's (+ ties)")
    for name, done in runs.items():
        rates = sorted(tokens / run.seconds for run in done)
        first = statistics.median(t for run in done for t in run.first_s) if done[0].first_s else float("nan")
        same, ties = compare(plain, asks, expected, done[-1])
        rate = f"{statistics.median(rates):7.0f} [{rates[0]:.0f}-{rates[-1]:.0f}]"
        print(f"{name:10}  {rate:27}  {first:8.2f} s               {same} + {ties} of {count}")
    for name in [n for n in runs if n != "ours"]:
        ratio = sorted(r.seconds / o.seconds for r, o in zip(runs[name], runs["ours"]))
        print(f"ours / {name}: {statistics.median(ratio):.2f}x [{ratio[0]:.2f}-{ratio[-1]:.2f}] in the same rounds")


if __name__ == "__main__":
    main()
