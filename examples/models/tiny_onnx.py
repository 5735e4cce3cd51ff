"""Train the two tiny ONNX models of the small examples, or score the shipped ones with onnxruntime.

Run from the repository root; training takes a few minutes on one core and needs the package onnxscript:

    python -m examples.models.tiny_onnx train --out build/tiny
    python -m examples.models.tiny_onnx score --models examples/models/tiny

shape-classifier.onnx  image float32 [N, 3, 32, 32], 0 to 1, RGB -> scores float32 [N, 4], probabilities of SHAPES.
    Learns from objects cut out of rendered scenes (see scenes.py), up to a third of each hidden by others.
    Shipped: 99.2 % right on 1977 objects of 400 held-out scenes.

tabular.onnx  measures float32 [N, 4] in cm, habitat int64 [N] -> species int64 [N], probabilities float32 [N, 3].
    Learns from `flowers`. Shipped: 98.8 % right on 10000 unseen flowers, as is the rule that knows how they were drawn.
"""

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.functions import SHAPES, SIDE_PX, shrink
from examples.models.onnx_clean import without_notes
from examples.models.scenes import Picture, picture

SHIPPED = Path(__file__).parent / "tiny"
SPECIES = ("sunbell", "reedstar", "fenrose")
HABITATS = ("meadow", "marsh")

# Mean of petal length, petal width, sepal length and sepal width, in cm, for each habitat and species. A sunbell of the
# marsh measures what a reedstar of the meadow does: the measures alone do not tell them apart, the habitat does.
_MEANS = np.array(
    [[[2.0, 0.6, 4.8, 3.2], [4.0, 1.2, 5.8, 2.8], [5.4, 2.0, 6.6, 3.0]],
     [[4.0, 1.2, 5.8, 2.8], [5.4, 2.0, 6.6, 3.0], [2.6, 1.6, 5.0, 2.4]]], np.float32,
)  # fmt: skip
_SPREAD = np.array([0.45, 0.25, 0.45, 0.3], np.float32)
"""Standard deviation of each measure, in cm, the same for every species; measures of one species are independent."""


@dataclass(frozen=True, slots=True)
class Flowers:
    """Made-up flowers: measures float32 [N, 4] in cm, habitat int64 [N] into HABITATS, species int64 [N]."""

    measures: np.ndarray
    habitat: np.ndarray
    species: np.ndarray


def flowers(count: int, seed: int) -> Flowers:
    """Draw flowers, every habitat and species equally likely; equal seeds give equal flowers."""
    rng = np.random.default_rng(seed)
    habitat, species = rng.integers(len(HABITATS), size=count), rng.integers(len(SPECIES), size=count)
    noise = rng.standard_normal((count, 4), dtype=np.float32) * _SPREAD
    return Flowers(_MEANS[habitat, species] + noise, habitat, species)


def likeliest(seen: Flowers) -> np.ndarray:
    """Return int64 [N], the likeliest species by the distributions drawn from; in the long run no rule does better."""
    offsets = (seen.measures[:, None] - _MEANS[seen.habitat]) / _SPREAD
    return (offsets**2).sum(-1).argmin(1)


class FlowerNet(nn.Module):
    """Species and their probabilities from measures and habitat."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.register_buffer("middle", torch.from_numpy(_MEANS.mean((0, 1))))
        self.measured = nn.Linear(4, width)
        self.grown = nn.Embedding(len(HABITATS), width)
        self.mixed, self.named = nn.Linear(width, width), nn.Linear(width, len(SPECIES))

    def logits(self, measures: Tensor, habitat: Tensor) -> Tensor:
        hidden = torch.relu(self.measured(measures - self.middle) + self.grown(habitat))
        found: Tensor = self.named(torch.relu(self.mixed(hidden)))
        return found

    def forward(self, measures: Tensor, habitat: Tensor) -> tuple[Tensor, Tensor]:
        found = self.logits(measures, habitat)
        return found.argmax(-1), found.softmax(-1)


class ShapeNet(nn.Module):
    """Probabilities of SHAPES from float32 [N, 3, 32, 32]."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in zip((3, *widths), widths):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        self.seen, self.named = nn.Sequential(*layers), nn.Linear(widths[-1] * (SIDE_PX // 8) ** 2, len(SHAPES))

    def logits(self, image: Tensor) -> Tensor:
        found: Tensor = self.named(F.dropout(self.seen(image * 2 - 1).flatten(1), 0.2, self.training))
        return found

    def forward(self, image: Tensor) -> Tensor:
        return self.logits(image).softmax(-1)


def cut_out(shown: Picture, rng: random.Random | None = None) -> Iterator[tuple[np.ndarray, str]]:
    """Yield every object of a picture, uint8 [h, w, 3] with a little around it, and its shape's name.

    rng: draws how much is around each and how far off the middle it is; without one, a tenth and not at all.
    """
    height, width = shown.image.shape[:2]
    for thing, (x0, y0, x1, y1) in zip(shown.things, shown.boxes.tolist(), strict=True):
        side = max(x1 - x0, y1 - y0)
        half = side * (rng.uniform(0.5, 0.7) if rng else 0.55)
        off_x, off_y = (rng.uniform(-0.1, 0.1) * side if rng else 0.0 for _ in range(2))
        x, y = (x0 + x1) / 2 + off_x, (y0 + y1) / 2 + off_y
        rows = slice(max(0, round(y - half)), min(height, round(y + half)))
        yield shown.image[rows, max(0, round(x - half)) : min(width, round(x + half))], thing.shape


def objects(split: str, pictures: int) -> tuple[Tensor, Tensor]:
    """Return the objects of a split's first pictures: float32 [N, 3, 32, 32] and their places in SHAPES, int64 [N]."""
    found = [one for index in range(pictures) for one in cut_out(picture(split, index), random.Random(index))]
    images = np.stack([shrink(image) for image, _ in found])
    return torch.from_numpy(images), torch.tensor([SHAPES.index(shape) for _, shape in found])


def fit(net: ShapeNet | FlowerNet, inputs: tuple[Tensor, ...], truth: Tensor, epochs: int, turn: bool = False) -> None:
    """Train in place with AdamW and one cycle of the learning rate. turn: flip and turn pictures at random."""
    rows = 128
    optimiser = torch.optim.AdamW(net.parameters(), weight_decay=0.01)
    steps = epochs * -(-len(truth) // rows)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=steps)
    for epoch in range(epochs):
        total = 0.0
        for chosen in torch.randperm(len(truth)).split(rows):
            given = [values[chosen] for values in inputs]
            if turn:
                given[0] = torch.rot90(given[0], int(torch.randint(4, ())), (2, 3))
                given[0] = given[0].flip(3) if torch.rand(()) < 0.5 else given[0]
            loss = F.cross_entropy(net.logits(*given), truth[chosen])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            total += float(loss.detach()) * len(chosen)
        print(f"epoch {epoch + 1}: loss {total / len(truth):.4f}", flush=True)


def export(net: nn.Module, example: tuple[Tensor, ...], inputs: list[str], outputs: list[str], path: Path) -> None:
    """Write the net with a first dimension of free size, called `items`, on every input and output."""
    items = torch.export.Dim("items", min=1)
    torch.onnx.export(
        net.eval(), example, str(path), dynamo=True, input_names=inputs, output_names=outputs, external_data=False,
        dynamic_shapes=[{0: items} for _ in example], verbose=False,
    )  # fmt: skip
    without_notes(path)


def train(out: Path, pictures: int, epochs: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    images, shapes = objects("train", pictures)
    print(f"{len(shapes)} objects", flush=True)
    shape_net = ShapeNet()
    fit(shape_net, (images,), shapes, epochs, turn=True)
    export(shape_net, (images[:2],), ["image"], ["scores"], out / "shape-classifier.onnx")
    grown = flowers(20_000, seed=0)
    flower_net = FlowerNet()
    given = torch.from_numpy(grown.measures), torch.from_numpy(grown.habitat)
    fit(flower_net, given, torch.from_numpy(grown.species), epochs=6)
    export(flower_net, (given[0][:2], given[1][:2]), ["measures", "habitat"], ["species", "probabilities"],
           out / "tabular.onnx")  # fmt: skip


def score(models: Path, pictures: int) -> None:
    """Print the share of right answers on held-out objects and unseen flowers."""
    images, shapes = objects("held_out", pictures)
    found = onnxruntime.InferenceSession(models / "shape-classifier.onnx").run(["scores"], {"image": images.numpy()})
    print(f"shapes: {np.mean(found[0].argmax(1) == shapes.numpy()):.4f} of {len(shapes)}")
    unseen = flowers(10_000, seed=1)
    given = {"measures": unseen.measures, "habitat": unseen.habitat}
    named = onnxruntime.InferenceSession(models / "tabular.onnx").run(["species"], given)[0]
    best = np.mean(likeliest(unseen) == unseen.species)
    print(f"flowers: {np.mean(named == unseen.species):.4f} of {len(named)}; by the distributions {best:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train both models and write them")
    training.add_argument("--out", type=Path, required=True, help="folder for the two .onnx files")
    training.add_argument("--pictures", type=int, default=2000, help="scenes to cut objects out of")
    training.add_argument("--epochs", type=int, default=15)
    scoring = commands.add_parser("score", help="score both models on unseen data")
    scoring.add_argument("--models", type=Path, default=SHIPPED)
    scoring.add_argument("--pictures", type=int, default=400, help="held-out scenes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.command == "train":
        train(options.out, options.pictures, options.epochs)
    else:
        score(options.models, options.pictures)


if __name__ == "__main__":
    main()
