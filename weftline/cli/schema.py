"""Command `weftline schema`: the JSON Schema of pipeline files."""

from __future__ import annotations

import json
from dataclasses import dataclass

from weftline.cli.options import OutputFile, write_text
from weftline.pipelines.spec.json_schema import json_schema


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaOptions:
    """Options of `weftline schema`."""

    output: OutputFile = None


def schema(options: SchemaOptions) -> None:
    """Print the JSON Schema of pipeline files, for completion and checks in editors.

    \b
    Examples:
      weftline schema --output pipeline.schema.json
      # then, as the first line of a pipeline file:
      # yaml-language-server: $schema=pipeline.schema.json
    """
    write_text(json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n", options.output)
