"""Expansion of shorthand in a pipeline: templates, constants, fallbacks and sub-pipelines.

Templates are wired to what they read and prompts become template steps, constants to fall back on become steps that
pass them on, and a pipeline file that is run as a step is replaced by that file's own steps. What comes out has steps
and inputs that nobody wrote; their names have a `/`, or end with `_prompt`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weftline.nodes.catalog import CATALOG
from weftline.pipelines.check.problem_collector import Origin, Report
from weftline.pipelines.check.prompts import write_out_prompts
from weftline.pipelines.spec.fallbacks import write_out_fallbacks
from weftline.pipelines.spec.graph import Pipeline
from weftline.pipelines.spec.inlining import Constraint
from weftline.pipelines.spec.subpipelines import write_out_subpipelines

__all__ = ["Constraint", "Expansion", "expand"]


@dataclass(frozen=True, slots=True)
class Expansion:
    """A pipeline written out.

    pipeline:    a step that still names a pipeline file could not be written out, and the report says why.
    origins:     where the steps and inputs that nobody wrote come from.
    constraints: what wires must carry beside what their ports say: the declared inputs of sub-pipelines. Such a wire is
                 read, whether or not a step is left that reads it.
    """

    pipeline: Pipeline
    origins: Mapping[str, Origin] = field(default_factory=dict)
    constraints: tuple[Constraint, ...] = ()


def expand(pipeline: Pipeline, report: Report, catalog: Mapping[str, Any] = CATALOG) -> Expansion:
    """Return the expanded pipeline; problems and origins go to `report`."""
    pipeline, origins = write_out_prompts(pipeline, report, catalog)
    pipeline, more = write_out_fallbacks(pipeline)
    report.origins = {**origins, **more}
    pipeline, constraints = write_out_subpipelines(pipeline, report, catalog)
    return Expansion(pipeline, report.origins, constraints)
