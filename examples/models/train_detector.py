"""Train the bundled detector from nothing on rendered scenes, judge it, and write it as a weftline-yolo folder.

    python -m examples.models.train_detector train --minutes 71   # checkpoints go to .cache/shapes-detector
    python -m examples.models.train_detector export               # choose thresholds, score, write the folder
    python -m examples.models.train_detector demo-picture         # write examples/data/photo.png

Training is a plain loop over ultralytics' YOLO11n and its own detection loss: bfloat16 autocast, channels-last, AdamW
under a cosine, an average of the weights (EMA) that is what gets judged and kept. Pictures are rendered as training
goes; each is seen about three times, turned and mirrored, as rendering sixteen would take half as long as a step.
"""

import argparse
import json
import math
import random
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file
from ultralytics.nn.tasks import DetectionModel, yaml_model_load
from ultralytics.utils.torch_utils import ModelEMA

from examples.models.detector_scores import choose_thresholds, score
from examples.models.detector_weights import Detector, letterbox, load_detector, save_detector, to_input
from examples.models.language import COLOURS, SHAPES
from examples.models.scenes import SEEDS, demo_picture, picture, render

NAMES = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)
HERE = Path(__file__).resolve().parent
SHIPPED = HERE / "shapes-detector"
CACHE = HERE.parents[1] / ".cache" / "shapes-detector"

IMAGE_SIZE = 320
BATCH = 16
FRESH = 5
"""Newly rendered pictures in each batch; the rest are drawn again from the pool."""
POOL = 3000
"""Pictures kept for a second look: 0.9 GB as uint8 320 x 320."""
EMPTY_EVERY = 50
"""One rendered picture in this many holds no object at all."""
LEARNING_RATE = 2e-3
WARM_UP_STEPS = 200
WEIGHT_DECAY = 0.01
EMA_DECAY = 0.9985
CHECKPOINT_MINUTES = 5.0
CHECKPOINT_SCENES = 150
GAINS = SimpleNamespace(box=7.5, cls=0.5, dfl=1.5)
"""Weights of the three parts of the loss: ultralytics' defaults."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a training: the first has the defaults, a later one starts from the weights of the one before.

    minutes:       wall clock to train for.
    learning_rate: its peak; it falls to a hundredth by a cosine.
    first:         first training seed; a later part wants fresh ones.
    overlap:       True lets the objects of every picture cover each other in part, None of half of them.
    start:         checkpoint folder to start from; None for random weights.
    """

    minutes: float
    learning_rate: float = LEARNING_RATE
    first: int = 0
    overlap: bool | None = None
    start: Path | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """A picture ready to train on: uint8 [S, S, 3], class indices [N], boxes float32 [N, 4] x0 y0 x1 y1 in 0..1."""

    square: NDArray[np.uint8]
    classes: NDArray[np.int64]
    boxes: NDArray[np.float32]


def architecture() -> dict[str, Any]:
    """Return ultralytics' YOLO11n as a dictionary, with our 16 classes."""
    config = dict(yaml_model_load("yolo11n.yaml"))
    config.pop("yaml_file")
    return {**config, "nc": len(NAMES)}


def sample(index: int, overlap: bool | None) -> Sample:
    """Render training picture `index` and fit it into the input square."""
    drawn = render([], random.Random(index)) if index % EMPTY_EVERY == 0 else picture("train", index, overlap)
    square, scale, offset = letterbox(drawn.image, IMAGE_SIZE)
    boxes = (drawn.boxes * scale + np.asarray([*offset, *offset], np.float32)) / IMAGE_SIZE
    return Sample(square, np.asarray([NAMES.index(t.name) for t in drawn.things], np.int64), boxes.astype(np.float32))


def turned(one: Sample, rng: random.Random) -> Sample:
    """Mirror and transpose at random: no name of a shape depends on how it is turned."""
    square, boxes = one.square, one.boxes
    if rng.random() < 0.5:
        square, boxes = square[:, ::-1], np.stack([1 - boxes[:, 2], boxes[:, 1], 1 - boxes[:, 0], boxes[:, 3]], 1)
    if rng.random() < 0.5:
        square, boxes = square[::-1], np.stack([boxes[:, 0], 1 - boxes[:, 3], boxes[:, 2], 1 - boxes[:, 1]], 1)
    if rng.random() < 0.5:
        square, boxes = square.transpose(1, 0, 2), boxes[:, [1, 0, 3, 2]]
    return Sample(np.ascontiguousarray(square), one.classes, boxes)


def batches(first: int, overlap: bool | None, rng: random.Random) -> Iterator[list[Sample]]:
    """Yield batches for ever: `FRESH` new pictures each, the rest from the pool of recent ones."""
    pool: deque[Sample] = deque(maxlen=POOL)
    indices = iter(SEEDS["train"][first:])
    while True:
        fresh = [sample(index, overlap) for _, index in zip(range(FRESH if len(pool) >= BATCH else BATCH), indices)]
        seen = [turned(rng.choice(pool), rng) for _ in range(BATCH - len(fresh))]
        pool.extend(fresh)
        yield fresh + seen


def targets(samples: list[Sample]) -> dict[str, torch.Tensor]:
    """Return ultralytics' batch of labels: image index [N], class [N], boxes [N, 4] as centre and size in 0..1."""
    corners = torch.from_numpy(np.concatenate([s.boxes for s in samples]))
    return {
        "batch_idx": torch.cat([torch.full((len(s.classes),), float(k)) for k, s in enumerate(samples)]),
        "cls": torch.from_numpy(np.concatenate([s.classes for s in samples])).float(),
        "bboxes": torch.cat([(corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]], 1),
    }


def side_at(progress: float, part: Part, rng: random.Random) -> int:
    """Input side in pixels: small and cheap at first, the size of use at the end and in a later part."""
    if part.start is not None:
        return IMAGE_SIZE
    if progress < 0.4:
        return rng.choice((192, 224, 256))
    return rng.choice((256, 288, 320)) if progress < 0.7 else IMAGE_SIZE


def learning_rate_at(step: int, progress: float, peak: float) -> float:
    warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
    return peak * warm_up * (0.01 + 0.99 * (1 + math.cos(math.pi * min(1.0, progress))) / 2)


def train(part: Part, cache: Path) -> None:
    """Train one part; every few minutes print scores and write the averaged weights to `cache`."""
    torch.manual_seed(0)
    rng = random.Random(part.first)
    model = DetectionModel(architecture(), ch=3, nc=len(NAMES), verbose=False)
    model.args = GAINS
    if part.start is not None:
        model.load_state_dict(load_file(part.start / "average.safetensors"), strict=True)
    model = model.to(memory_format=torch.channels_last).train()
    loss_of = model.init_criterion()
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    plain = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.99))
    average = ModelEMA(model, decay=EMA_DECAY, tau=300)
    began, saved, recent = time.monotonic(), time.monotonic(), deque[list[float]](maxlen=50)
    for step, samples in enumerate(batches(part.first, part.overlap, rng)):
        progress = (time.monotonic() - began) / 60 / part.minutes
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, progress, part.learning_rate)
        side = side_at(progress, part, rng)
        squares = [
            s.square if side == IMAGE_SIZE else cv2.resize(s.square, (side, side), interpolation=cv2.INTER_AREA)
            for s in samples
        ]
        with torch.autocast("cpu", torch.bfloat16):
            predicted = model(to_input(squares).contiguous(memory_format=torch.channels_last))
        as_float = {k: [f.float() for f in v] if isinstance(v, list) else v.float() for k, v in predicted.items()}
        parts, _ = loss_of(as_float, targets(samples))
        optimizer.zero_grad(set_to_none=True)
        parts.sum().div(BATCH).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        average.update(model)
        recent.append((parts.detach() / BATCH).tolist())
        if step % 50 == 0:
            box, kind, edge = np.mean(recent, axis=0)
            print(f"step {step} at {progress:.1%}: box {box:.3f} class {kind:.3f} edge {edge:.3f}", flush=True)
        if time.monotonic() - saved > CHECKPOINT_MINUTES * 60:
            _checkpoint(average, cache, step, part)
            saved = time.monotonic()
    _checkpoint(average, cache, step, part)


def export(cache: Path, folder: Path, choose: int, held_out: int) -> None:
    """Choose thresholds on one split, write the folder, read it back, and score it on scenes no step has seen."""
    state = load_file(cache / "average.safetensors")
    made = json.loads((cache / "made.json").read_text(encoding="utf-8"))
    model = DetectionModel(architecture(), ch=3, nc=len(NAMES), verbose=False)
    model.load_state_dict(state, strict=True)
    confidence, iou = choose_thresholds(Detector(model.eval(), NAMES, IMAGE_SIZE, 0.25, 0.7), choose)
    config = {
        "architecture": architecture(),
        "names": {str(k): name for k, name in enumerate(NAMES)},
        "image_size": IMAGE_SIZE,
        "confidence": confidence,
        "iou": iou,
        "training": made,
    }
    save_detector(folder, state, config)
    scores = score(load_detector(folder), "held_out", held_out)
    save_detector(folder, state, {**config, "training": {**made, "held_out": scores}})
    print(json.dumps(scores, indent=2))


def _checkpoint(average: ModelEMA, cache: Path, step: int, part: Part) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in average.ema.state_dict().items()}, cache / "average.safetensors")
    origin = "random weights" if part.start is None else json.loads((part.start / "made.json").read_text("utf-8"))
    made = {
        "by": "examples/models/train_detector.py",
        "steps": step + 1,
        "batch": BATCH,
        "fresh_per_batch": FRESH,
        "first_seed": part.first,
        "learning_rate": part.learning_rate,
        "overlap": part.overlap,
        "torch": torch.__version__,
        "from": origin,
    }
    (cache / "made.json").write_text(json.dumps(made), encoding="utf-8")
    detector = Detector(average.ema.eval(), NAMES, IMAGE_SIZE, 0.4, 0.6)
    print("checkpoint", step, score(detector, "choose", CHECKPOINT_SCENES), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "export", "demo-picture"))
    parser.add_argument("--minutes", type=float, default=71.0, help="wall clock to train for")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of checkpoints")
    parser.add_argument("--start", type=Path, help="checkpoint folder to start from instead of random weights")
    parser.add_argument("--first", type=int, default=0, help="first training seed; a later part wants fresh ones")
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE, help="peak learning rate")
    parser.add_argument("--crowded", action="store_true", help="let the objects of every picture overlap")
    parser.add_argument("--folder", type=Path, default=SHIPPED, help="where export writes")
    parser.add_argument("--choose", type=int, default=600, help="scenes to choose thresholds on")
    parser.add_argument("--held-out", type=int, default=1000, help="scenes to report scores of")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    if options.what == "train":
        overlap = True if options.crowded else None
        train(Part(options.minutes, options.learning_rate, options.first, overlap, options.start), options.cache)
    elif options.what == "export":
        export(options.cache, options.folder, options.choose, options.held_out)
    else:
        Image.fromarray(demo_picture().image).save(HERE.parent / "data" / "photo.png")


if __name__ == "__main__":
    main()
