"""The problems of one pipeline as they are found: each gets its file and line when it is added."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from weftline.errors import Problem
from weftline.pipelines.graph import Pipeline


@dataclass(slots=True)
class Report:
    """Collects problems of `pipeline`.

    origins: where a step that nobody wrote comes from: 'steps.answer_prompt' was written as 'steps.answer.prompt'.
    """

    pipeline: Pipeline
    origins: Mapping[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add(self, path: str, found: str, expected: str = "", fix: str = "", line: int = 0) -> None:
        self.take([Problem(path, found, expected, fix, line)])

    def take(self, problems: Iterable[Problem]) -> None:
        """Add problems that may lack file and line, or name a step that nobody wrote; a repetition is dropped."""
        for one in problems:
            path = self._written(one.path)
            placed = dataclasses.replace(
                one, path=path, file=one.file or self.pipeline.file, line=one.line or self.pipeline.line(path)
            )
            if placed not in self.problems:
                self.problems.append(placed)

    def holds(self, path: str) -> bool:
        """Return whether something is already known to be wrong at `path`."""
        return any(one.path == self._written(path) for one in self.problems)

    def _written(self, path: str) -> str:
        for made, written in self.origins.items():
            if path == made or path.startswith(f"{made}."):
                return written
        return path
