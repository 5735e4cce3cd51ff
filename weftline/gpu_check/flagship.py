"""Pipeline results on a device against the CPU, in a process of its own.

    python -m weftline.gpu_check.flagship FILE --device cuda:0 --json OUT [--quick]
    python -m weftline.gpu_check.flagship --shared --device cuda:0 --json OUT [--quick]

FILE is the flagship; it needs everything that its steps need. `--shared` stands for a language model and an embedding
model that share the device, which need no more than `weftline serve` does. Workers are hardened, memory is budgeted,
and the KV memory takes what the budget leaves, as in service. The same inputs are given to the CPU first; answers of
the device are compared with the CPU's, and differences are reported: other rounding may lead to
other words.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weftline.engine.machine import this_machine
from weftline.engine.session import Session, load
from weftline.gpu_check.context import source_file
from weftline.gpu_check.outcomes import RIGHT, CheckOutcome, Skipped, Wrong, as_json, outcome_of, spread
from weftline.pipelines.placement.place import Device, Machine
from weftline.shm.device.names import is_fake

FAKE_BYTES = 8 << 30
REQUESTS, QUICK_REQUESTS = 20, 3
MODEL = "examples/models/shapes-chat"
COMPARED = ("transcript", "answer", "verdict", "embedding")
"""Outputs that are compared as they are (embeddings within COSINE_MIN); detections are compared by what was found."""
COSINE_MIN = 0.999
SHARED = """
weftline: 1
name: shared
about: Answers a text and embeds it, by two models on one device.
inputs: {text: text}
steps:
  answer: {node: llm, model: MODEL, prompt: "{{ text }}", sampling: {tokens_max: 24, temperature: 0}, dtype: float32}
  embed: {node: embed, model: MODEL, pooling: mean, inputs: {text: text}}
outputs: {answer: answer.text, embedding: embed.embedding}
"""
TEXT = "The photo shows: 1 red circle, 2 blue squares.\nQuestion: how many squares are there?"


def check(name: str, file: Path, inputs: dict[str, Any], device: str, requests: int) -> CheckOutcome:
    """Return what the pipeline answers on the device, beside the CPU, and how long it took."""
    here = this_machine()
    plain = Machine(here.cores, here.memory_bytes, ())
    found_here = tuple(one for one in here.devices if one.name == device)
    devices = (Device(device, FAKE_BYTES),) if is_fake(device) else found_here
    with load(file, plain).open() as session:
        wanted, cpu_ms = _asked(session, inputs, 3)
    pipeline = load(file, Machine(here.cores, here.memory_bytes, devices))
    placed = [step.name for step in pipeline.plan.steps if device in step.devices]
    if not placed:
        raise Wrong(f"the plan has no step on {device}")
    started = time.monotonic()
    with pipeline.open() as session:
        opened_s = time.monotonic() - started
        found, device_ms = _asked(session, inputs, requests)
        memory = session.stats()["device_memory"]
    differ = [output for output in wanted if not _same(wanted[output], found[output])]
    figures: dict[str, Any] = {
        "steps on the device": ", ".join(placed),
        "opened_s": round(opened_s, 1),
        "a request on the device": spread(device_ms, "ms"),
        "a request on the CPU": spread(cpu_ms, "ms"),
        "answers": "the same as the CPU's" if not differ else f"other than the CPU's: {', '.join(differ)}",
    }
    for where, one in memory.items():
        figures |= {f"{where}, worker {worker}: device_mib": taken >> 20 for worker, taken in one["workers"].items()}
        figures[f"{where}: left_mib"] = one["left_bytes"] >> 20
    figures |= {f"{one}: CPU, device": f"{wanted[one]!s:.200} | {found[one]!s:.200}" for one in differ}
    return CheckOutcome(name, RIGHT, figures=figures)


def check_flagship(file: Path, device: str, requests: int) -> CheckOutcome:
    """Ask the flagship about the recording and the photo that lie beside it."""
    data = file.parent / "data"
    inputs = {"question": data / "question.wav", "photo": data / "photo.png"}
    return check("pipeline", file, inputs, device, requests)


def check_shared(device: str, requests: int) -> CheckOutcome:
    """Ask two models that share the device; in float32 a device's answer is the CPU's."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = source_file(MODEL)
        except Skipped:
            model = random_model(Path(folder) / "model")
        file = Path(folder) / "shared.yaml"
        file.write_text(SHARED.replace("MODEL", json.dumps(str(model))), encoding="utf-8")
        outcome = check("llm step", file, {"text": TEXT}, device, requests)
    if outcome.figures["answers"] != "the same as the CPU's":
        raise Wrong(f"its answers are {outcome.figures['answers']}")
    return outcome


def random_model(folder: Path) -> Path:
    """Write a small Llama with random weights and a tokenizer of bytes; returns the folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _same(wanted: Any, found: Any) -> bool:
    if not hasattr(wanted, "shape"):
        return bool(wanted == found)
    one, other = (value.ravel().astype("float64") for value in (wanted, found))
    lengths: float = float(one @ one) ** 0.5 * float(other @ other) ** 0.5
    return float(one @ other) >= COSINE_MIN * lengths


def _asked(session: Session, inputs: dict[str, Any], requests: int) -> tuple[dict[str, Any], list[float]]:
    """Ask one request after the other; the answer of the last, comparable, and the time of all but the first."""
    times = []
    for _ in range(requests + 1):
        result = session.run(**inputs)
        times.append(result.total_ms)
    said = {name: result[name] for name in COMPARED if name in result}
    if "detections" in result:
        said["detections"] = result["detections"].describe()
    return said, times[1:]


def main(arguments: Sequence[str]) -> int:
    """Run the part and write its outcome; returns what the process ends with."""
    parser = argparse.ArgumentParser(prog="python -m weftline.gpu_check.flagship")
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--device", required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args(arguments)
    if given.shared == (given.file is not None):
        parser.error("expected FILE or --shared")
    requests = QUICK_REQUESTS if given.quick else REQUESTS
    if given.shared:
        outcome = outcome_of("llm step", lambda: check_shared(given.device, requests))
    else:
        outcome = outcome_of("pipeline", lambda: check_flagship(given.file, given.device, requests))
    given.json.write_text(json.dumps(as_json(outcome)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
