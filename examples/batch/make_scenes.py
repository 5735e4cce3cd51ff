"""The data set of the example job: generated pictures, a question about each, and the one right answer.

    python -m examples.batch.make_scenes --count 2000 OUT

OUT then holds 00000.png and so on, and questions.jsonl, one line for each picture:

    photo     name of its file
    question  what is asked, in words that no model was trained on
    expected  the right answer
    shows     what is in the picture, as '2 red circles, 1 blue star'
    form      what kind of question it is

Pictures are held out: no model was trained on them. Equal seeds give equal files. Some pictures are spoilt so
that the job has rows to report: in turn one whose file ends half-way, one without a file, and one that is no picture.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.progress import track

from examples.models import language, scenes

SEED = 20261122
COUNT_MAX = len(scenes.SEEDS["held_out"])
SPOILT_EVERY = 400
"""Default: one picture of this many is spoilt."""


def row(seed: int, place: int) -> tuple[scenes.Picture, dict[str, str]]:
    """Return picture `place` of a data set and its line."""
    picture = scenes.picture("held_out", (seed + place) % COUNT_MAX)
    asked = language.question(random.Random(seed * 1_000_003 + place), "held_out")
    return picture, {
        "photo": f"{place:05}.png",
        "question": asked.text,
        "expected": language.answer(asked, picture.things),
        "shows": language.describe(picture.things),
        "form": asked.form,
    }


def spoilt_places(seed: int, count: int, spoilt: int) -> Sequence[int]:
    """Return which of `count` pictures are spoilt, in rising order."""
    return sorted(random.Random(seed).sample(range(count), spoilt))


def spoil(file: Path, turn: int) -> None:
    """Cut a picture in half, remove it, or write something else in its place, by `turn`."""
    if turn % 3 == 0:
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
    elif turn % 3 == 1:
        file.unlink()
    else:
        file.write_text("This is no picture.\n", "utf-8")


def make(folder: Path, count: int, seed: int = SEED, spoilt: int | None = None) -> None:
    """Write the data set. Files of the same names are replaced.

    spoilt: how many pictures are; None: one of `SPOILT_EVERY`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for place in track(range(count), "drawing", console=Console(stderr=True)):
        picture, line = row(seed, place)
        Image.fromarray(picture.image).save(folder / line["photo"])
        lines.append(json.dumps(line) + "\n")
    for turn, place in enumerate(spoilt_places(seed, count, count // SPOILT_EVERY if spoilt is None else spoilt)):
        spoil(folder / f"{place:05}.png", turn)
    (folder / "questions.jsonl").write_text("".join(lines), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="OUT", type=Path, help="where pictures and questions go")
    parser.add_argument("--count", type=int, default=2000, help="how many pictures")
    parser.add_argument("--seed", type=int, default=SEED, help="another seed draws others")
    parser.add_argument("--spoilt", type=int, default=None, help=f"spoilt pictures; one of {SPOILT_EVERY} by default")
    options = parser.parse_args()
    if not 1 <= options.count <= COUNT_MAX:
        parser.error(f"--count is {options.count}; there are 1 to {COUNT_MAX} pictures")
    if options.spoilt is not None and not 0 <= options.spoilt <= options.count:
        parser.error(f"--spoilt is {options.spoilt}; it goes from 0 to the {options.count} pictures there are")
    if options.seed < 0:
        parser.error(f"--seed is {options.seed}; it is 0 or more")
    make(options.folder, options.count, options.seed, options.spoilt)
    print(options.folder / "questions.jsonl")


if __name__ == "__main__":
    main()
