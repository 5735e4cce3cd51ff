"""The step of stateful.yaml, and three sensors that use it: `python examples/stateful.py`.

A class as a function step: made once for each instance, called for each reading and at the end of a sequence.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np

import weftline
from weftline import SequencePart

READINGS_MIN = 4
"""Readings that must be known before one is called unusual."""

SPREADS_MAX = 4.0
"""A reading further from the mean than this many usual distances is unusual."""


@dataclass
class Sensor:
    """What is remembered of one sensor, by Welford's method: the mean, and the sum of squared distances from it."""

    readings: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, reading: float) -> bool:
        """Take a reading in and return whether it is unlike those before."""
        spread = (self.squares / self.readings) ** 0.5 if self.readings else 0.0
        unusual = self.readings >= READINGS_MIN and abs(reading - self.mean) > SPREADS_MAX * max(spread, 1e-6)
        self.readings += 1
        before, self.mean = self.mean, self.mean + (reading - self.mean) / self.readings
        self.squares += (reading - before) * (reading - self.mean)
        return unusual


@dataclass
class Watch:
    """Judges each reading by the earlier ones of its sensor."""

    sensors: dict[str, Sensor] = field(default_factory=dict)

    def __call__(self, reading: Annotated[np.ndarray, "float32[]"]) -> dict[str, float | bool]:
        """Return `mean`, of all readings so far, and `unusual`."""
        part = weftline.current().sequence
        if part is None:
            raise ValueError(
                "say which sensor the reading is from: session.run(RequestOptions(sequence=...), reading=...)"
            )
        if part.start:
            self.sensors[part.id] = Sensor()
        sensor = self.sensors[part.id]
        unusual = sensor.add(float(reading))
        return {"mean": round(sensor.mean, 3), "unusual": unusual}

    def end_sequence(self, id: str) -> None:
        self.sensors.pop(id, None)


def main() -> None:
    """Send the readings of three sensors in turn, and print the unusual ones."""
    sensors = {
        "cellar": [4.0, 4.2, 3.9, 4.1, 4.0, 9.5],
        "roof": [20.5, 24.0, 18.0, 22.0, 25.0, 19.0],
        "hall": [18.0, 18.1, 18.0, 17.9, 18.0, 18.1],
    }
    with weftline.load(Path(__file__).with_name("stateful.yaml")).open() as session:
        for turn in range(6):
            for name, readings in sensors.items():
                part = SequencePart(name, start=turn == 0, end=turn == 5)
                judged = session.run(weftline.RequestOptions(sequence=part), reading=readings[turn])["judged"]
                if judged["unusual"]:
                    print(f"{name}: {readings[turn]} is unusual; the mean is now {judged['mean']}")


if __name__ == "__main__":
    main()
