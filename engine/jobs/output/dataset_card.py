"""Dataset card `.huggingface.yaml`: lets `datasets.load_dataset` read a result folder.

It names the parts, so that error rows, records and media beside them are no data. JSON lines have no types: there the
card has them, so that a part whose values are all null has the same columns as the others.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import yaml

from weftline.engine.jobs.output.arrow import pa
from weftline.engine.jobs.output.columns import TYPE_KEY
from weftline.engine.jobs.output.json_lines import JSON_TYPES, shown_as
from weftline.engine.jobs.output.layout import CARD, SUFFIXES


def dataset_card(format: str, schema: pa.Schema, texts: Collection[str] = ()) -> dict[str, bytes]:
    """Return the card of a folder of parts, by name: layout.EXTRAS of parquet, jsonl and arrow.

    texts: JSON columns whose values are texts; as JSON, datasets would read the text "12" as the number 12.
    """
    card: dict[str, Any] = {"configs": [{"config_name": "default", "data_files": f"part-*{SUFFIXES[format]}"}]}
    if format == "jsonl":
        card["dataset_info"] = {
            "features": [
                {"name": field.name, "dtype": "string"} if field.name in texts else _named(field) for field in schema
            ]
        }
    return {CARD: yaml.safe_dump(card, sort_keys=False, allow_unicode=True).encode()}


def _named(field: pa.Field) -> dict[str, Any]:
    """Return name and feature of a column as it is written in JSON lines."""
    found = _feature(field)
    return {"name": field.name, **(found if isinstance(found, dict) else {"dtype": found})}


def _feature(field: pa.Field) -> str | dict[str, Any]:
    """Return a feature in the notation of dataset cards: a dtype, {list: ...} or {struct: [...]}."""
    type, is_ = shown_as(field.type), pa.types
    if (field.metadata or {}).get(TYPE_KEY) in JSON_TYPES:
        return "json"
    if is_.is_list(type) or is_.is_large_list(type) or is_.is_fixed_size_list(type):
        inner = _feature(field.type.value_field)
        return {"list": inner["struct"] if isinstance(inner, dict) and "struct" in inner else inner}
    if is_.is_struct(type):
        return {"struct": [_named(one) for one in field.type]}
    if is_.is_boolean(type):
        return "bool"
    if is_.is_integer(type):
        return str(type)
    if is_.is_floating(type):
        return "float64" if is_.is_float64(type) else "float32"
    return "json" if is_.is_map(type) or is_.is_null(type) else "string"
