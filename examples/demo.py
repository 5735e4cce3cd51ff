"""The demo: one spoken question, one picture, four models, and what each of them said.

python examples/demo.py [--question FILE.wav] [--photo FILE.png] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import weftline
from weftline.cli.save import annotated

HERE = Path(__file__).parent


def annotate(photo: Path, results: Iterable[Any], out: Path) -> None:
    """Write `photo` with the results drawn on it: detections, masks, keypoints and oriented boxes."""
    out.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(annotated(np.asarray(Image.open(photo).convert("RGB")), *results)).save(out)


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
        drawn = options.out / "annotated.png"
        annotate(options.photo, result.values(), drawn)
    print(f"transcript   {result['transcript']}")
    print(f"detections   {result['detections'].describe()}")
    print(f"answer       {result['answer']}")
    reasons = "; ".join(map(str, result["verdict"]["reasons"])) or "nothing found"
    print(f"verdict      {result['verdict']['action']} ({reasons})")
    for timing in result.timings:
        print(f"             {timing.step:14} {timing.run_ms:7.1f} ms")
    print(f"             {'in all':14} {result.total_ms:7.1f} ms   (hear and see run side by side)")
    print(f"picture      {drawn}")


if __name__ == "__main__":
    try:
        main()
    except weftline.WeftlineError as error:
        sys.exit(f"{error}")
