"""Throughput of node `transformers` and `whisper` beside a loop by hand and Hugging Face's way per request.

    python -m benchmarks.models              # ViT-base and Whisper-tiny shapes, 32 callers, five rounds
    python -m benchmarks.models --rounds 1 --requests 32
    python -m benchmarks.models --only whisper

Weights are random, in the published sizes. Contenders answer the same requests in every round, one after the other:

- weftline: a pipeline of one step; 32 callers with one request each at a time, batches of at most 8 pictures or 16
            recordings.
- loop:     a loop by hand with the same library over batches of the same size in this process, without requests.
- request:  one call for each request: transformers' image-classification pipeline, and for Whisper what transformers'
            pipeline computes (feature extractor and generate; its tokenizer's files are not on this machine).

Each contender computes with as many threads as the machine has cores.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read once, when torch is imported

import faster_whisper
import numpy as np
import torch
import transformers
import whisper
from PIL import Image

from benchmarks.conditions import conditions, spread
from benchmarks.whisper_conversion import convert
from weftline.engine.session import Session, load
from weftline.pipelines.spec.builder import Builder

CALLERS = 32
PICTURES_BATCH, RECORDINGS_BATCH = 8, 16
TOKENS = 32
"""Tokens of a transcript: random weights hardly ever end one before."""

RECORDING_S, HZ = 5, 16_000


@dataclass(frozen=True, slots=True)
class Contest:
    """The same work by three contenders.

    requests: inputs, one for each request.
    loop, request: compute all requests, in batches and one by one.
    """

    name: str
    pipeline: Builder
    port: str
    requests: Sequence[np.ndarray]
    loop: Callable[[Sequence[np.ndarray]], Any]
    request: Callable[[Sequence[np.ndarray]], Any]


def batches(requests: Sequence[np.ndarray], items: int) -> list[Sequence[np.ndarray]]:
    return [requests[start : start + items] for start in range(0, len(requests), items)]


def builder(
    folder: Path, name: str, node: str, port: str, kind: str, output: str, items: int, **options: Any
) -> Builder:
    made = Builder(name, base_dir=folder)
    value = made.input(port, kind)
    wired: dict[str, Any] = {port: value}
    step = made.step(
        "model", node, batch={"items_max": items, "wait_max_ms": 5}, threads=os.cpu_count(), **wired, **options
    )
    made.output(output, getattr(step, output))
    return made


def vit(folder: Path, count: int) -> Contest:
    """Return the contest of ViT-base (86 M parameters, 224 x 224) on pictures of 320 x 240."""
    torch.manual_seed(0)
    network = transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000)).eval()
    network.save_pretrained(folder / "vit")
    processor = transformers.ViTImageProcessor()
    processor.save_pretrained(folder / "vit")
    one_by_one = transformers.pipeline("image-classification", model=network, image_processor=processor, device="cpu")
    random = np.random.default_rng(0)
    pictures = [random.integers(0, 255, (240, 320, 3), np.uint8) for _ in range(count)]

    def loop(requests: Sequence[np.ndarray]) -> None:
        for batch in batches(requests, PICTURES_BATCH):
            with torch.inference_mode():
                network(**processor(images=list(batch), return_tensors="pt")).logits.softmax(-1).topk(5)

    def request(requests: Sequence[np.ndarray]) -> None:
        for picture in requests:
            one_by_one(Image.fromarray(picture))

    task = {"task": "image-classification", "model": "vit"}
    made = builder(folder, "vit", "transformers", "image", "image", "label", PICTURES_BATCH, **task)
    return Contest("ViT-base, pictures/s", made, "image", pictures, loop, request)


def whisper_tiny(folder: Path, count: int) -> Contest:
    """Return the contest of Whisper-tiny (39 M parameters) on recordings of 5 s, transcripts of 32 tokens."""
    network = tiny(folder)
    options = whisper.DecodingOptions(language="en", without_timestamps=True, sample_len=TOKENS, fp16=False)

    def loop(requests: Sequence[np.ndarray]) -> None:
        for batch in batches(requests, RECORDINGS_BATCH):
            mels = [whisper.log_mel_spectrogram(whisper.pad_or_trim(one)) for one in batch]
            whisper.decode(network, torch.stack(mels), options)

    return speech(folder, count, "Whisper-tiny, recordings/s", "tiny.pt", loop)


def whisper_ctranslate2(folder: Path, count: int) -> Contest:
    """Return the same contest for a model of CTranslate2, float32; its loop calls faster-whisper and CTranslate2."""
    convert(tiny(folder), folder / "ct2")
    model = faster_whisper.WhisperModel(str(folder / "ct2"), "cpu", cpu_threads=os.cpu_count() or 1)
    words = faster_whisper.tokenizer.Tokenizer(model.hf_tokenizer, True, "transcribe", "en")
    prompt = model.get_prompt(words, [], without_timestamps=True)

    def loop(requests: Sequence[np.ndarray]) -> None:
        for batch in batches(requests, RECORDINGS_BATCH):
            mels = [faster_whisper.audio.pad_or_trim(model.feature_extractor(one)) for one in batch]
            states = model.encode(np.stack(mels))
            model.model.generate(states, [prompt] * len(batch), beam_size=1, max_length=2 * TOKENS)

    return speech(folder, count, "Whisper-tiny in CTranslate2, recordings/s", "ct2", loop)


def tiny(folder: Path) -> Any:
    """Return a network of openai-whisper with random weights, in the sizes of `tiny`; also written to tiny.pt."""
    torch.manual_seed(0)
    dims = whisper.model.ModelDimensions(80, 1500, 384, 6, 4, 51865, 448, 384, 6, 4)
    network = whisper.model.Whisper(dims).eval()
    with torch.no_grad():
        network.decoder.positional_embedding.normal_(0, 0.02)  # otherwise whatever lay in memory
    torch.save({"dims": asdict(dims), "model_state_dict": network.state_dict()}, folder / "tiny.pt")
    return network


def speech(folder: Path, count: int, name: str, model: str, loop: Callable[[Sequence[np.ndarray]], Any]) -> Contest:
    """Return a contest of node whisper with a model in the sizes of `tiny`."""
    config = transformers.WhisperConfig(
        vocab_size=51865, d_model=384, encoder_layers=4, decoder_layers=4, encoder_attention_heads=6,
        decoder_attention_heads=6, encoder_ffn_dim=1536, decoder_ffn_dim=1536,
    )  # fmt: skip
    other, extractor = (
        transformers.WhisperForConditionalGeneration(config).eval(),
        transformers.WhisperFeatureExtractor(),
    )
    random = np.random.default_rng(0)
    recordings = [random.normal(0, 0.1, RECORDING_S * HZ).astype(np.float32) for _ in range(count)]

    def request(requests: Sequence[np.ndarray]) -> None:
        for recording in requests:
            features = extractor(recording, sampling_rate=HZ, return_tensors="pt").input_features
            with torch.inference_mode():
                other.generate(features, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)

    options = {"model": model, "language": "en", "tokens_max": TOKENS}
    made = builder(folder, "tiny", "whisper", "audio", "audio", "text", RECORDINGS_BATCH, **options)
    return Contest(name, made, "audio", recordings, loop, request)


CONTESTS = {"vit": vit, "whisper": whisper_tiny, "ctranslate2": whisper_ctranslate2}


async def answer(session: Session, port: str, requests: Sequence[np.ndarray]) -> None:
    """Answer all requests from CALLERS tasks, each with one at a time."""
    remaining = iter(requests)

    async def call() -> None:
        for one in remaining:
            await session.arun(**{port: one})

    await asyncio.gather(*(call() for _ in range(CALLERS)))


def measure(contest: Contest, rounds: int) -> dict[str, list[float]]:
    """Return the requests per second of each contender in every round."""
    found: dict[str, list[float]] = {"weftline": [], "loop": [], "request": []}
    with load(contest.pipeline).open() as session:
        work = {
            "weftline": lambda few: asyncio.run(answer(session, contest.port, few)),
            "loop": contest.loop,
            "request": contest.request,
        }
        for run in work.values():
            run(contest.requests[:CALLERS])
        for number in range(rounds):
            for name in [*work][:: -1 if number % 2 else 1]:  # alternating order
                started = time.perf_counter()
                work[name](contest.requests)
                found[name].append(len(contest.requests) / (time.perf_counter() - started))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64, help="requests of a round (64)")
    parser.add_argument("--only", choices=[*CONTESTS], help="one of the models")
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(os.cpu_count() or 1)
    print(conditions())
    print("| | weftline | loop by hand | call per request | to the loop | to calls |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        for make in [CONTESTS[options.only]] if options.only else CONTESTS.values():
            contest = make(Path(name), options.requests)
            found = measure(contest, options.rounds)
            ratios = [
                statistics.median(ours / theirs for ours, theirs in zip(found["weftline"], found[peer], strict=True))
                for peer in ("loop", "request")
            ]
            cells = [spread(values, 2) for values in found.values()] + [f"{ratio:.2f}x" for ratio in ratios]
            print(f"| {contest.name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
