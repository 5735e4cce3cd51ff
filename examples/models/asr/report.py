"""The table of the model card: word error rate per condition and per voice, on data outside training.

Every recording here is a held-out phrasing; the voices are held out too, except in the rows of the default voices,
which training has with other sentences. All noise is drawn from a fixed seed.
"""

import time
from pathlib import Path

import numpy as np
import whisper

from examples.models.asr import corpus
from examples.models.asr.augment import Conditions, augment, noise_bank
from examples.models.asr.network import LONGEST
from examples.models.asr.score import Score, score, total
from examples.models.speech import HELD_OUT_VARIANTS, Audio

NOISY = Conditions(untouched=0.0, noise=1.0)
"""Noise of a drawn kind at 5 to 40 dB; speed, room, band and silence as in training."""

HARD = Conditions(untouched=0.0, noise=1.0, snr_db_min=5.0, snr_db_max=10.0)
TELEPHONE = Conditions(untouched=0.0, noise=1.0, snr_db_min=15.0, band=1.0)


def held_out_table(model_path: Path, folder: Path, every: int = 1) -> str:
    """Score the model at `model_path` on the corpora in `folder` and return a Markdown table; blocks for minutes.

    every: take only one recording in so many, for a quick look.
    """
    model = whisper.load_model(str(model_path), device="cpu")
    held_out, default = corpus.load(folder, "held_out"), corpus.load(folder, "default")
    voices = [held_out.audio(i) for i in range(0, len(held_out.clips), every)]
    clips = held_out.clips[::every]
    said = [clip.text for clip in clips]
    defaults = [default.audio(i) for i in range(0, len(default.clips), every)]
    default_said = [clip.text for clip in default.clips[::every]]
    began = time.monotonic()
    clean = score(model, voices, said)
    seconds = time.monotonic() - began
    noisy = score(model, imagined(voices, NOISY, seed=21), said)
    rows = {
        "default voices, clean": total(score(model, defaults, default_said)),
        "default voices, noisy": total(score(model, imagined(defaults, NOISY, seed=22), default_said)),
        "unseen voices, clean": total(clean),
        "unseen voices, noisy (5 to 40 dB)": total(noisy),
        "unseen voices, very noisy (5 to 10 dB)": total(score(model, imagined(voices[::3], HARD, seed=23), said[::3])),
        "unseen voices, narrow band": total(score(model, imagined(voices[::3], TELEPHONE, seed=24), said[::3])),
    }
    both: dict[str, Score] = {}
    for clip, quiet, loud in zip(clips, clean, noisy, strict=True):
        known = clip.voice.variant not in HELD_OUT_VARIANTS
        label = "known speaker, new accent" if known else f"unseen speaker {clip.voice.variant}"
        both[label] = both.get(label, Score(0, 0, 0, 0)) + quiet + loud
    head = "| recordings | sentences | word error rate | exact sentences |\n|---|---|---|---|"
    lines = [head, *(value.row(label) for label, value in rows.items())]
    lines += [value.row(f"{label}, clean and noisy") for label, value in sorted(both.items())]
    return (
        "\n".join(lines) + f"\n\n{seconds / len(voices) * 1000:.0f} ms per sentence in batches of 25, one CPU thread."
    )


def imagined(recordings: list[Audio], conditions: Conditions, seed: int) -> list[Audio]:
    """Return one imagined recording of each of `recordings`, the same for the same seed."""
    rng = np.random.default_rng(seed)
    bank = noise_bank(recordings, seed)
    return [augment(audio, rng, bank, LONGEST, conditions) for audio in recordings]
