"""One model for several pipelines: memory, tokens a second, and a reload under load.

    python -m benchmarks.sharing [--rounds 5] [--only memory rounds reload]

memory   proportional size (PSS) of a process tree with one language model in one step, in two steps, and in two steps
         of which one is exposed. Random weights, float32, 184 M parameters.
rounds   30 requests with prompts of equal length over three pipelines with prompts of their own, and the same 30
         requests in one pipeline, in alternating rounds; answers are compared with those of each pipeline alone. More
         than 10 sequences in a round are of several pipelines.
reload   64 callers send requests while the prompt is changed: time until the first new answer, requests that failed,
         and answers in which the prompt and the version differ.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from weftline import Pipeline, Repository
from weftline.pipelines.spec.graph import Pipeline as Graph
from weftline.pipelines.spec.single_step import exposed, exposing

CHAT = Path("examples/models/shapes-chat").absolute()
CALLERS, RELOAD_S = 64, 6.0


def write_model(folder: Path) -> None:
    """Write a Llama of 184 M parameters with random weights, with the tokenizer of the bundled chat model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=1024, intermediate_size=2816, num_hidden_layers=14, num_attention_heads=16,
        num_key_value_heads=16, max_position_embeddings=1024, bos_token_id=1, eos_token_id=5, pad_token_id=0,
        initializer_range=0.05,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    print(f"model: {sum(one.numel() for one in model.parameters()) / 1e6:.0f} M parameters")
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(CHAT / name, folder / name)


def asking(name: str, model: Path, prompts: Sequence[str], tokens: int = 48) -> Pipeline:
    """Return a pipeline with an llm step for each prompt over one text."""
    p = Pipeline(name)
    text = p.input("text", "text")
    for number, prompt in enumerate(prompts):
        said = p.step(f"say{number}", "template", template=prompt, text=text)
        step = p.step(
            f"answer{number}", "llm", model=str(model), prompt=said.text, kv_bytes=64 << 20,
            sampling={"tokens_max": tokens, "temperature": 0, "ignore_eos": True},
        )  # fmt: skip
        p.output(f"answer{number}", step.text)
        p.output(f"prompt{number}", said.text)
    return p


def pss_bytes() -> int:
    """Return the proportional size of this process and its children."""
    here = psutil.Process()
    return sum(one.memory_full_info().pss for one in (here, *here.children(recursive=True)))


def hold(kind: str, model: Path) -> None:
    """Open a case, answer a request with each step, and print the memory that it takes."""
    two = asking("two", model, ["A: {{ text }}", "B: {{ text }}"]).build()
    alone = exposed(two, "answer0")
    cases: dict[str, dict[str, Pipeline | Graph]] = {
        "one step": {"one": asking("one", model, ["A: {{ text }}"])},
        "two steps": {"two": two},
        "two steps, one exposed": {"two": exposing(two, ["answer0", "answer1"]), "two.answer0": alone},
    }
    with Repository() as pipelines:
        for name, done in pipelines.load_together(cases[kind]):
            if not isinstance(done, int):
                raise done
            pipelines.get(name).run(**{"prompt" if "." in name else "text": "what is on the left?"})
        print(json.dumps({"pss": pss_bytes(), "workers": sorted(pipelines.get(next(iter(cases[kind]))).pids())}))


def memory(model: Path) -> None:
    found = {}
    for kind in ("one step", "two steps", "two steps, one exposed"):
        command = [sys.executable, "-m", "benchmarks.sharing", "--hold", kind, str(model)]
        found[kind] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines()[-1])
        ratio = found[kind]["pss"] / found["one step"]["pss"]
        print(f"  {kind:24} {found[kind]['pss'] / 1e9:.2f} GB  {ratio:.2f}x  processes {found[kind]['workers']}")


def rounds(model: Path, count: int) -> None:
    prompts = {"one": "first: {{ text }}", "two": "other: {{ text }}", "six": "third: {{ text }}"}
    texts = [f"what is in picture {number:02}?" for number in range(10)]
    with Repository() as pipelines:
        for _, done in pipelines.load_together({name: asking(name, model, [of]) for name, of in prompts.items()}):
            if not isinstance(done, int):
                raise done

        def ask(at: tuple[str, str]) -> str:
            return str(pipelines.get(at[0]).run(text=at[1])["answer0"])

        expected = {(name, text): ask((name, text)) for name in prompts for text in texts}
        three = [(name, text) for text in texts for name in prompts]
        one = [("one", text) for text in texts] * 3
        times: dict[str, list[float]] = {"three": [], "one": []}
        wrong, running = 0, 0.0
        with ThreadPoolExecutor(30) as callers:
            for _ in range(count):
                for kind, asked in (("three", three), ("one", one)):
                    began = time.perf_counter()
                    asking_now = [callers.submit(ask, at) for at in asked]
                    time.sleep(1.0)
                    figures = pipelines.get("six").stats()["figures"]["answer0"].values()
                    running = max(running, *(one["running"] for one in figures)) if kind == "three" else running
                    answers = [one.result() for one in asking_now]
                    times[kind].append(time.perf_counter() - began)
                    wrong += sum(answer != expected[at] for at, answer in zip(asked, answers, strict=True))
        rates = {kind: 30 * 48 / statistics.median(of) for kind, of in times.items()}
        ratios = [one_s / three_s for one_s, three_s in zip(times["one"], times["three"], strict=True)]
        print(
            f"  three pipelines {rates['three']:.0f} tokens/s, one {rates['one']:.0f}: "
            f"{statistics.median(ratios):.3f}x [{min(ratios):.3f}-{max(ratios):.3f}], "
            f"{wrong} of {60 * count} answers differ; sequences in a round of the three: {running:.0f}; "
            f"processes {sorted(pipelines.get('one').pids())}"
        )


class Load:
    """Callers that ask a pipeline again and again. seen: when an answer came, and the prompt that it was made from."""

    def __init__(self, pipelines: Repository) -> None:
        self.seen: list[tuple[float, str]] = []
        self.failed: list[str] = []
        self.over = threading.Event()
        self._pipelines = pipelines

    def call(self, caller: int) -> None:
        while not self.over.is_set():
            try:
                answer = self._pipelines.get("chat").run(text=f"caller {caller}")
                self.seen.append((time.perf_counter(), answer["prompt0"]))
            except Exception as error:
                self.failed.append(f"{type(error).__name__}: {error}")


def reload(count: int) -> None:
    with Repository() as pipelines:
        pipelines.load("chat", asking("chat", CHAT, ["version 1: {{ text }}"], tokens=4))
        pids = pipelines.get("chat").pids()
        for number in range(2, count + 2):
            load = Load(pipelines)
            with ThreadPoolExecutor(CALLERS) as callers:
                calls = [callers.submit(load.call, caller) for caller in range(CALLERS)]
                time.sleep(RELOAD_S / 2)
                began = time.perf_counter()
                pipelines.load("chat", asking("chat", CHAT, [f"version {number}: {{{{ text }}}}"], tokens=4))
                took = time.perf_counter() - began
                time.sleep(RELOAD_S / 2)
                load.over.set()
                for one in calls:
                    one.result()
            own = tuple(f"version {one}:" for one in (number, number - 1))
            first = min(at for at, prompt in load.seen if prompt.startswith(own[0])) - began
            others = sum(not prompt.startswith(own) for _, prompt in load.seen)
            kept = "kept" if pipelines.get("chat").pids() == pids else "REPLACED"
            print(
                f"  first new answer after {first * 1000:.0f} ms, reload returned after {took * 1000:.0f} ms; "
                f"{len(load.seen)} answers, {len(load.failed)} failed {load.failed[:1]}, {others} of another version; "
                f"processes {kept}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=["memory", "rounds", "reload"])
    parser.add_argument("--hold", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hold:
        hold(options.hold[0], Path(options.hold[1]))
        return
    wanted = options.only or ["memory", "rounds", "reload"]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        if {*wanted} & {"memory", "rounds"}:
            write_model(model)
        if "memory" in wanted:
            memory(model)
        if "rounds" in wanted:
            rounds(model, options.rounds)
        if "reload" in wanted:
            reload(options.rounds)


if __name__ == "__main__":
    main()
