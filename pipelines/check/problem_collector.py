"""Problem collector that adds file and line to each problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from weftline.errors import Problem
from weftline.pipelines.spec.graph import Pipeline
from weftline.pipelines.spec.variables import hide_secrets


@dataclass(frozen=True, slots=True)
class Origin:
    """Source location of a generated step or wire.

    path:     where it was written, such as 'steps.answer.prompt'.
    pipeline: the pipeline it was written in, when that is another one: a sub-pipeline with a file and lines of its own.
    whole:    what is wrong anywhere in it is told at `path` itself; otherwise at the same place below `path`.
    """

    path: str
    pipeline: Pipeline | None = None
    whole: bool = True


@dataclass(slots=True)
class Report:
    """Collects problems of `pipeline`.

    origins: of steps and inputs that nobody wrote: 'steps.answer_prompt' was written as 'steps.answer.prompt'.
    """

    pipeline: Pipeline
    origins: Mapping[str, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add(self, path: str, found: str, expected: str = "", fix: str = "", line: int = 0) -> None:
        self.take([Problem(path, found, expected, fix, line)])

    def take(self, problems: Iterable[Problem]) -> None:
        """Add problems, completing file and line and generated names; drop duplicates.

        A problem that names its file already is complete: it was found in that file.
        """
        for one in problems:
            placed = one if one.file else self._placed(one)
            if placed not in self.problems:
                self.problems.append(placed)

    def holds(self, path: str) -> bool:
        """Return whether something is already known to be wrong at `path`."""
        path, pipeline = self._written(path)
        return any(one.path == path and one.file == pipeline.file for one in self.problems)

    def _placed(self, problem: Problem) -> Problem:
        path, pipeline = self._written(problem.path)
        placed = dataclasses.replace(problem, path=path, file=pipeline.file, line=problem.line or pipeline.line(path))
        return hide_secrets(placed, pipeline.secrets)

    def _written(self, path: str) -> tuple[str, Pipeline]:
        """Return where the thing at `path` was written, and in which pipeline."""
        kind, _, rest = path.partition(".")
        name, dot, inside = rest.partition(".")
        origin = self.origins.get(f"{kind}.{name}")
        if origin is None:
            return path, self.pipeline
        return origin.path if origin.whole else f"{origin.path}{dot}{inside}", origin.pipeline or self.pipeline
