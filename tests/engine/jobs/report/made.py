"""Made-up jobs for the tests of their reports: an ordinary one with pictures and sound, and a hostile one."""

import math
import random
from functools import cache
from typing import Any

import numpy as np

from weftline.engine.jobs.progress import ErrorKind, JobResult, RatePoint, Sample, Tally
from weftline.engine.jobs.rows import Unusable
from weftline.nodes.detections import Detections

HOSTILE = (
    "</td><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>\"'&\x00\x1b[2J\u202eevil\ud800$x^{"
)


def tally(rows: int = 2000, seed: int = 0) -> Tally:
    """Return what three steps could have left: a quick one, one in the middle, and a slow one that talks."""
    draw, made = random.Random(seed), Tally()
    for _ in range(rows):
        made.of("see").add(draw.lognormvariate(math.log(22), 0.3), 18.0, 8)
        made.of("template").add(draw.lognormvariate(math.log(0.08), 0.5), 0.05, 1)
        made.of("answer").add(draw.lognormvariate(math.log(430), 0.4), 400.0, 16)
        made.length("answer", int(draw.lognormvariate(math.log(90), 0.8)))
        made.length("caption", draw.choice((0, 11, 24, 25, 40)))
    made.of("answer").failed, made.of("see").skipped = 7, 12
    return made


def photo(width: int = 640, height: int = 400) -> np.ndarray:
    """Return a picture, uint8[H, W, 3], with a gradient and two blocks of colour."""
    y, x = np.mgrid[0:height, 0:width]
    picture = np.stack([x * 255 // width, y * 255 // height, (x + y) % 256], -1).astype(np.uint8)
    picture[80:200, 100:300] = (200, 40, 40)
    picture[220:340, 380:560] = (40, 60, 200)
    return picture


def found() -> Detections:
    boxes = np.array([[100, 80, 300, 200], [380, 220, 560, 340]], np.float32)
    return Detections(
        boxes, np.array([0.97, 0.81], np.float32), np.array([0, 1], np.int32), ("red block", "blue block")
    )


def sound(seconds: float = 1.5) -> np.ndarray:
    times = np.arange(int(16_000 * seconds)) / 16_000
    return (np.sin(times * 2 * np.pi * 3) * np.sin(times * 2 * np.pi * 440) * 0.8).astype(np.float32)


@cache
def samples(count: int = 24) -> tuple[Sample, ...]:
    """Return rows with a picture, every fourth failed, every fifth with sound."""
    made: list[Sample] = []
    for row in range(count):
        inputs: dict[str, Any] = {
            "image": photo(640, 300 + 20 * row),
            "question": f"how many blocks are there in picture {row}?",
        }
        if row % 5 == 2:
            inputs["voice"] = sound()
        if row % 4 == 3:
            inputs["image"] = Unusable(f"pictures/{row:05}.png: the picture is truncated: its header ends early")
            made.append(
                Sample(f"train/{row:05}", inputs, {"answer": None, "things": None}, "image: InputError: truncated")
            )
        else:
            outputs = {"answer": "two: a red one and a blue one. " * (1 + row), "things": found(), "scores": np.eye(3)}
            made.append(Sample(f"train/{row:05}", inputs, outputs))
    return tuple(made)


def job(**changed: object) -> JobResult:
    draw = random.Random(1)
    rates = [RatePoint(second + 0.5, 28 * (1 - math.exp(-second / 3)) + draw.gauss(0, 1.5)) for second in range(71)]
    prompt = "the prompt has N tokens; the context has room for N"
    values = {
        "pipeline": "picture-questions",
        "data": ("pictures/*.parquet",),
        "out": "answers/",
        "files": {"results": "answers/results.parquet", "errors": "answers/_errors.jsonl"},
        "finished": True,
        "why": "",
        "rows": 2000,
        "errors": 10,
        "resumed": 0,
        "elapsed_s": 71.2,
        "tally": tally(),
        "figures": {"tokens": 81234.0, "busy:see": 0.4},
        "instances": {"see": 1, "answer": 1, "template": 1},
        "repeatable": {"answer": "exact", "things": "rounding"},
        "rates": rates,
        "samples": samples(),
        "kinds": [
            ErrorKind("answer", "StepError", prompt, 7, ("train/00017", "b")),
            ErrorKind("", "InputError", "image: the picture is truncated: its header ends early", 3, ("a", "b", "c")),
        ],
        "versions": {"weftline": "0.1.0", "python": "3.11.2", "pyarrow": "26.0.0"},
    }  # fmt: skip
    return JobResult(**{**values, **changed})  # type: ignore[arg-type]
