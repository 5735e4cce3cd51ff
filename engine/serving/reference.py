"""Generator of the reference page of serve files: `python -m weftline.engine.serving.reference`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from weftline.engine.serving.config import EXPOSED_MAX, PIPELINES_MAX, ServeConfig
from weftline.pipelines.check.validation import json_schema_of
from weftline.pipelines.render.reference import table
from weftline.pipelines.spec.document import TEXT_BYTES_MAX

PAGE = Path("docs/reference/serve.md")
COMMAND = "python -m weftline.engine.serving.reference"

_INTRO = f"""\
# Serve files

<!-- Written by `{COMMAND}`; do not edit by hand. -->

A serve file lists the pipelines that `weftline serve` serves, its addresses and its limits. Unknown keys are refused,
with file, line and the nearest known key. Options of the command line override it. Environment variables change only
values that name them, as `${{NAME}}` or `${{NAME:-default}}` ([how](yaml.md)).

```yaml
pipelines:
  assistant: {{file: assistant.yaml, expose: [answer]}}
  ocr: ocr.yaml
grpc: {{host: 127.0.0.1, port: 8001}}
http: {{port: 8000}}
```

- A file with `pipelines:` is a serve file; any other file is a pipeline file, served under the pipeline's name.
- Relative paths are relative to the file's folder. Those on the command line are relative to the current one.
- A pipeline's name has 1 to 128 letters, digits, `.`, `_` and `-`, and does not start with a dot. A step that is
  exposed is called `pipeline.step`, which must not be a pipeline's name as well.
- At most {PIPELINES_MAX} pipelines, {EXPOSED_MAX} exposed steps of each, and {TEXT_BYTES_MAX:,} bytes. Anchors,
  aliases, tags and duplicate keys are refused, as in [pipeline files](yaml.md).
- `weftline serve ... --print-config` prints the merged configuration, defaults included, as a serve file.
- Times end in `_s` (seconds), sizes in `_bytes`.
"""

_PARTS = (
    ("The file", ""),
    ("A pipeline, in long form", "ServedPipeline"),
    ("`grpc`", "GrpcConfig"),
    ("`http`", "HttpConfig"),
    ("`tls`", "Tls"),
    ("`limits`", "ServeLimits"),
    ("`logs`", "Logs"),
)


def serve_reference() -> str:
    """Return the page, in Markdown: every key of a serve file."""
    schema = json_schema_of(ServeConfig)
    defs = schema["$defs"]
    parts = [_INTRO]
    for title, name in _PARTS:
        of = defs[name] if name else _without_inner(schema)
        parts += [f"## {title}\n", f"{of['description']}\n" if name else "", table(of, defs if not name else {})]
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def _without_inner(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with nested mappings shown as `mapping`; each has a table of its own."""
    properties = dict(schema["properties"])
    for key, entry in properties.items():
        if "$ref" in entry:
            about = schema["$defs"][entry["$ref"].rpartition("/")[2]]["description"]
            properties[key] = {"type": "object", "description": entry.get("description", about)}
    return {**schema, "properties": properties}


def main() -> None:
    """Write the page under the current folder, the root of the repository."""
    if not PAGE.parent.is_dir():
        sys.exit(f"there is no folder {PAGE.parent} here; run `{COMMAND}` at the root of the repository")
    PAGE.write_text(serve_reference(), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
