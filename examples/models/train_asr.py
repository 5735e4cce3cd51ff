"""Train the bundled speech recogniser on one CPU core, and say how well it hears.

    python -m examples.models.train_asr record                # 29 100 recordings, 10 minutes or more
    python -m examples.models.train_asr train --minutes 65    # writes the model every few minutes
    python -m examples.models.train_asr score                 # the table of the model card
    python -m examples.models.train_asr demo                  # examples/data/question.wav

The learning rate follows the clock, not a step count, so a run ends at its set time on any machine.
"""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import whisper
from whisper.model import MultiHeadAttention

from examples.models.asr import corpus, score
from examples.models.asr.augment import GENTLE, Conditions, augment, noise_bank, nothing_said
from examples.models.asr.network import (
    LONGEST,
    SAMPLES_PER_POSITION,
    Batch,
    Recogniser,
    Vocabulary,
    english_tokenizer,
    letter_classes,
    log_mel,
)
from examples.models.asr.report import NOISY, held_out_table, imagined
from examples.models.speech import Audio, Voice, synthesise, write_wav

MODELS = Path(__file__).parent
MODEL = MODELS / "spoken-questions" / "model.pt"
DEMO = MODELS.parent / "data" / "question.wav"
DEMO_TEXT, DEMO_VOICE = "How many red circles are there?", Voice("en-us", "f4", 165)
CACHE = MODELS.parent.parent / ".cache" / "asr"
TRAIN_COUNT, ALTERED_COUNT, HELD_OUT_COUNT, DEFAULT_COUNT = 24_000, 4_000, 900, 200
BATCH, POOL = 16, 16 * 32


def record(folder: Path) -> None:
    """Synthesise the three corpora."""
    corpus.build(folder, "held_out", HELD_OUT_COUNT, seed=2, draw=corpus.draw_held_out)
    corpus.build(folder, "default", DEFAULT_COUNT, seed=3, draw=corpus.draw_default)
    corpus.build(folder, "train", TRAIN_COUNT, seed=1, draw=corpus.draw_training)
    corpus.build(folder, "altered", ALTERED_COUNT, seed=4, draw=corpus.draw_altered)


class Feeder:
    """Endless training batches: recordings in shuffled order, imagined anew each time, grouped by length."""

    def __init__(self, parts: Sequence[corpus.Corpus], vocabulary: Vocabulary, seed: int) -> None:
        self._parts = parts
        self._items = [(part, index) for part, held in enumerate(parts) for index in range(len(held.clips))]
        self._rng = np.random.default_rng(seed)
        sample = self._rng.choice(len(parts[0].clips), 400)
        self._bank = noise_bank([parts[0].audio(int(i)) for i in sample], seed)
        tokenizer = english_tokenizer()
        special = [tokenizer.sot, tokenizer.no_timestamps, tokenizer.eot, tokenizer.no_speech]
        self._start, self._plain, self._end, self._silent = vocabulary.compact(special)
        self._ids = {c.text: vocabulary.compact(tokenizer.encode(" " + c.text)) for held in parts for c in held.clips}
        self.conditions = Conditions()
        self.full_share = 0.1
        self.wrong_share = 0.0
        self._count = len(vocabulary.used)

    def batches(self) -> Iterator[Batch]:
        """Yield batches for ever; set `conditions` and `full_share` between them to change what comes next."""
        order: list[int] = []
        while True:
            if len(order) < POOL:
                order += self._rng.permutation(len(self._items)).tolist()
            pool = [self._imagine(index) for index in order[:POOL]]
            del order[:POOL]
            pool.sort(key=lambda item: len(item[0]))
            for start in self._rng.permutation(len(range(0, POOL, BATCH))) * BATCH:
                yield self._batch(pool[start : start + BATCH])

    def _imagine(self, index: int) -> tuple[Audio, str | None]:
        if self._rng.random() < 0.015:
            return nothing_said(self._rng, self._bank, LONGEST), None
        part, place = self._items[index]
        signal = augment(self._parts[part].audio(place), self._rng, self._bank, LONGEST, self.conditions)
        return signal, self._parts[part].clips[place].text

    def _batch(self, items: list[tuple[Audio, str | None]]) -> Batch:
        longest = max(len(audio) for audio, _ in items)
        full = self._rng.random() < self.full_share
        # A little more than the longest item, so that some padding is always there to be ignored.
        positions = math.ceil(longest / SAMPLES_PER_POSITION) + int(self._rng.integers(1, 8))
        length = LONGEST if full else min(positions * SAMPLES_PER_POSITION, LONGEST)
        padded = np.zeros((len(items), length), dtype=np.float32)
        for row, (audio, _) in zip(padded, items, strict=True):
            row[: len(audio)] = audio
        rows = [self._tokens(text) for _, text in items]
        widest = max(len(given) for given, _ in rows)
        return Batch(
            mel=self._mask(log_mel(torch.from_numpy(padded))),
            positions=torch.tensor([max(1, len(audio) // SAMPLES_PER_POSITION) for audio, _ in items]),
            given=torch.tensor([given + [0] * (widest - len(given)) for given, _ in rows]),
            wanted=torch.tensor([wanted + [-1] * (widest - len(wanted)) for _, wanted in rows]),
            letters=[letter_classes(text or "") for _, text in items],
        )

    def _tokens(self, text: str | None) -> tuple[list[int], list[int]]:
        if text is None:
            return [self._start, self._plain], [self._silent, self._end]
        ids = self._ids[text]
        # A decoder that is sometimes given a wrong word has to listen for the next one instead of guessing it.
        wrong = self._rng.integers(0, self._count, len(ids)).tolist()
        given = [w if self._rng.random() < self.wrong_share else i for i, w in zip(ids, wrong, strict=True)]
        return [self._start, self._plain, *given], [self._plain, *ids, self._end]

    def _mask(self, mel: torch.Tensor) -> torch.Tensor:
        """Blank out bands and moments (SpecAugment, Park et al. 2019), in place."""
        for item in mel:
            if self._rng.random() < 0.5:
                mean = item.mean()
                for _ in range(2):
                    low, width = int(self._rng.integers(0, 70)), int(self._rng.integers(0, 10))
                    item[low : low + width] = mean
                    at, width = int(self._rng.integers(0, item.shape[1])), int(self._rng.integers(0, 14))
                    item[:, at : at + width] = mean
        return mel


def train(folder: Path, minutes: float, peak_rate: float, seed: int, out: Path, start: Path | None) -> None:
    """Train for `minutes` and write `out` every 6 minutes and at the end.

    start: an exported model to go on from, with altered sentences twice as often and without the CTC head's loss.
    """
    torch.manual_seed(seed)
    parts = [corpus.load(folder, "train"), corpus.load(folder, "altered")]
    vocabulary = Vocabulary.of([clip.text for part in parts for clip in part.clips])
    model = Recogniser(vocabulary)
    if start is not None:
        model.adopt(start)
    feeder = Feeder(parts if start is None else [parts[0], parts[1], parts[1]], vocabulary, seed)
    feeder.wrong_share = 0.1
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
    checks = _checks(folder)
    count = sum(len(part.clips) for part in parts)
    weights = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{count} recordings, {len(vocabulary.used)} tokens, {weights / 1e6:.2f} M weights",
        flush=True,
    )
    began, saved, shown = time.monotonic(), time.monotonic(), [0.0, 0.0, 0]
    for step, batch in enumerate(feeder.batches(), start=1):
        done = (time.monotonic() - began) / 60 / minutes
        if done >= 1:
            break
        feeder.conditions = GENTLE if done < 0.12 and start is None else Conditions()
        feeder.full_share = 0.05 if done < 0.7 and start is None else 0.15
        rate = peak_rate * min(step / (300 if start is None else 60), 0.5 + 0.5 * math.cos(math.pi * done) + 0.002)
        for group in optimizer.param_groups:
            group["lr"] = rate
        MultiHeadAttention.use_sdpa = False  # torch's fused attention is slow backwards in bfloat16 on a CPU
        with torch.autocast("cpu", torch.bfloat16):
            said, spelled = model.losses(batch)
        optimizer.zero_grad(set_to_none=True)
        (said + (0.4 if start is None else 0.0) * spelled).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        shown = [shown[0] + said.item(), shown[1] + spelled.item(), shown[2] + 1]
        if step % 100 == 0:
            spent = (time.monotonic() - began) / 60
            print(f"{spent:5.1f} min  step {step:5d}  lr {rate:.1e}  said {shown[0] / 100:.3f}"
                  f"  spelled {shown[1] / 100:.3f}", flush=True)  # fmt: skip
            shown = [0.0, 0.0, 0]
        if time.monotonic() - saved > 360:
            _save(model, out, checks)
            saved = time.monotonic()
    _save(model, out, checks)


def demo(model: Path) -> None:
    """Write the demo recording, spoken by a voice outside training, and print the transcript of `model`."""
    audio = synthesise(DEMO_TEXT, DEMO_VOICE)
    DEMO.parent.mkdir(parents=True, exist_ok=True)
    write_wav(DEMO, audio)
    stock = whisper.load_model(str(model), device="cpu")
    print(f"{DEMO.name}: {DEMO_VOICE.name} says {DEMO_TEXT!r}, recognised {score.transcribe(stock, [audio])[0]!r}")


def _checks(folder: Path) -> dict[str, tuple[list[Audio], list[str]]]:
    """A small fixed part of the held-out recordings, clean and noisy, to watch a run by."""
    held_out = corpus.load(folder, "held_out")
    clean = [held_out.audio(i) for i in range(100)]
    said = [clip.text for clip in held_out.clips[:100]]
    return {"clean": (clean, said), "noisy": (imagined(clean, NOISY, seed=11), said)}


def _save(model: Recogniser, out: Path, checks: dict[str, tuple[list[Audio], list[str]]]) -> None:
    model.export(out.with_suffix(".new"))
    out.with_suffix(".new").replace(out)
    MultiHeadAttention.use_sdpa = True
    stock = whisper.load_model(str(out), device="cpu")
    for label, (audio, said) in checks.items():
        print("   ", score.total(score.score(stock, audio, said)).row(label), flush=True)


def main() -> None:
    """Read the command line and do the one thing it asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "train", "score", "demo"))
    parser.add_argument("--minutes", type=float, default=65.0, help="how long to train")
    parser.add_argument("--peak-rate", type=float, default=1.5e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=Path, help="go on from this exported model; letters are no longer taught")
    parser.add_argument("--every", type=int, default=1, help="score one recording in so many")
    parser.add_argument("--model", type=Path, default=MODEL, help="where the model is written and read")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where the recordings are")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.what == "record":
        record(asked.cache)
    elif asked.what == "train":
        train(asked.cache, asked.minutes, asked.peak_rate, asked.seed, asked.model, asked.start)
    elif asked.what == "score":
        print(held_out_table(asked.model, asked.cache, asked.every))
    else:
        demo(asked.model)


if __name__ == "__main__":
    main()
