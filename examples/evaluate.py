"""Score the flagship on data outside training: unseen voices, phrasings and scenes, compared word for word.

Each pair is a recording (a held-out voice asks a held-out phrasing, a third of them with noise) and a picture of a
held-out scene. The whole pipeline answers; the answer is right when it is exactly the one right answer. The table says
where wrong answers went wrong. `--report docs/evaluation.md` writes it down.

    python -m examples.evaluate [--pairs 200] [--seed 20261121] [--report FILE]
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import weftline
from examples.models import language, scenes, speech

HERE = Path(__file__).parent
CALLERS = 8
"""Requests open at a time: enough for every step to batch."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One question about one picture, spoken, and the truth."""

    question: language.Question
    recording: np.ndarray
    noisy: bool
    picture: scenes.Picture

    @property
    def truth(self) -> str:
        return language.answer(self.question, self.picture.things)


def draw_pair(seed: int, index: int) -> Pair:
    """Draw pair `index`: everything in it is held out."""
    rng = random.Random(seed * 1_000_003 + index)
    asked = language.question(rng, "held_out")
    recording = speech.synthesise(asked.text, speech.draw_voice(rng, "held_out"))
    noisy = rng.random() < 1 / 3
    if noisy:
        draws = np.random.default_rng(rng.getrandbits(32))
        power = float(np.mean(recording**2)) / 10 ** (rng.uniform(15, 30) / 10)
        recording = np.clip(recording + draws.normal(0, power**0.5, recording.shape), -1, 1).astype(np.float32)
    return Pair(asked, recording, noisy, scenes.picture("held_out", rng.randrange(100_000)))


def words(text: str) -> str:
    """Fold case, punctuation and spelling, which do not make an answer wrong."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower().replace("color", "colour")))


def judge(pair: Pair, result: weftline.Result) -> dict[str, Any]:
    """Return which stages were right for one pair."""
    return {
        "form": pair.question.form,
        "recognised": words(result["transcript"]) == words(pair.question.text),
        "seen": Counter(result["detections"].labels) == Counter(thing.name for thing in pair.picture.things),
        "right": words(result["answer"]) == words(pair.truth),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the scores by form as a Markdown table."""
    lines = ["| form | pairs | recognised right | seen right | answered right |", "|---|---|---|---|---|"]
    for form in (*language.FORMS, "all"):
        chosen = [row for row in rows if form in (row["form"], "all")]
        if chosen:
            shares = [
                f"{100 * sum(row[key] for row in chosen) / len(chosen):.1f} %"
                for key in ("recognised", "seen", "right")
            ]
            lines.append(f"| {form} | {len(chosen)} | {' | '.join(shares)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--report", type=Path, default=None, help="write the table into this Markdown file")
    options = parser.parse_args()
    if not speech.espeak_available():
        print(
            "espeak-ng is not installed; it speaks the questions (Debian: apt-get install espeak-ng)", file=sys.stderr
        )
        return 69
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    with weftline.load(HERE / "voice_photo_assistant.yaml").open() as session:

        def ask(index: int) -> None:
            pair = draw_pair(options.seed, index)
            result = session.run(question=pair.recording, photo=pair.picture.image)
            rows.append(judge(pair, result))
            if not rows[-1]["right"]:
                seen = result["detections"].describe()
                wrong.append(
                    f"- asked “{pair.question.text}” of {language.describe(pair.picture.things)}: recognised "
                    f"“{result['transcript']}”, saw {seen}, said “{result['answer']}”, right: “{pair.truth}”"
                )
            print(f"\r{len(rows)}/{options.pairs}", end="", file=sys.stderr)

        with ThreadPoolExecutor(CALLERS) as callers:
            list(callers.map(ask, range(options.pairs)))
    print(file=sys.stderr)
    right = 100 * sum(row["right"] for row in rows) / len(rows)
    text = f"{table(rows)}\n\nRight end to end: {right:.1f} % of {len(rows)} unseen pairs (seed {options.seed})."
    print(text)
    if options.report is not None:
        about = (
            "# End to end on unseen recordings and pictures\n\n"
            "Written by `make evaluate`. Voices, phrasings and scenes are held out; a third of the recordings\n"
            "carry white noise at 15 to 30 dB. *Recognised right* compares every word, *seen right* the exact\n"
            "multiset of objects, *answered right* the exact answer.\n\n"
        )
        options.report.write_text(
            about + text + "\n\n## Where it went wrong\n\n" + ("\n".join(sorted(wrong)) or "Nowhere.") + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
