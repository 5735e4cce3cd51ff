"""The demo: one spoken question, one picture, four models, and what each of them said.

python examples/demo.py [--question FILE.wav] [--photo FILE.png] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from PIL import Image, ImageDraw

import weftline
from weftline import Detections

HERE = Path(__file__).parent
COLOURS = {"red": "#c62828", "green": "#2e7d32", "blue": "#1565c0", "yellow": "#b28900"}


def annotate(photo: Path, found: Detections, out: Path) -> None:
    """Write `photo` with every detection's box, name and score drawn on it."""
    picture = Image.open(photo).convert("RGB")
    draw = ImageDraw.Draw(picture)
    for label, score, box in zip(found.labels, found.scores, found.boxes, strict=True):
        colour = COLOURS.get(label.split()[0], "#37474f")
        x1, y1, x2, y2 = map(float, box)
        draw.rectangle((x1, y1, x2, y2), outline=colour, width=3)
        text = f"{label} {score:.2f}"
        left, top, right, bottom = draw.textbbox((x1, y1), text, font_size=14)
        height = bottom - top + 6
        above = y1 - height if y1 >= height else y1
        draw.rectangle((x1, above, x1 + right - left + 8, above + height), fill=colour)
        draw.text((x1 + 4, above + 1), text, fill="white", font_size=14)
    out.parent.mkdir(parents=True, exist_ok=True)
    picture.save(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--question", type=Path, default=HERE / "data/question.wav", help="a recording, wav or flac")
    parser.add_argument("--photo", type=Path, default=HERE / "data/photo.png", help="a picture, png or jpeg")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where the annotated picture goes")
    options = parser.parse_args()
    started = time.perf_counter()
    pipeline = weftline.load(HERE / "voice_photo_assistant.yaml")
    print("loading four models into worker processes ...", file=sys.stderr)
    with pipeline.open() as session:
        print(f"ready after {time.perf_counter() - started:.1f} s", file=sys.stderr)
        result = session.run(question=options.question, photo=options.photo)
        annotated = options.out / "annotated.png"
        annotate(options.photo, result["detections"], annotated)
    print(f"transcript   {result['transcript']}")
    print(f"detections   {result['detections'].describe()}")
    print(f"answer       {result['answer']}")
    reasons = "; ".join(map(str, result["verdict"]["reasons"])) or "nothing found"
    print(f"verdict      {result['verdict']['action']} ({reasons})")
    for timing in result.timings:
        print(f"             {timing.step:14} {timing.run_ms:7.1f} ms")
    print(f"             {'in all':14} {result.total_ms:7.1f} ms   (hear and see run side by side)")
    print(f"picture      {annotated}")


if __name__ == "__main__":
    try:
        main()
    except weftline.WeftlineError as error:
        sys.exit(f"{error}")
