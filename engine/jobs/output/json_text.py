"""JSON serialisation of values: always valid JSON in valid UTF-8.

NaN and the infinities become null, as JSON has none; half of a surrogate pair becomes U+FFFD, as UTF-8 has none;
whole numbers of any size stay exact. Where nodes give more than JSON (ports of type `any`), arrays become lists,
detections what they are in JSON, bytes base64. Keys keep their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from weftline.nodes.detections import Detections


def json_text(value: Any) -> str:
    """Return a value as JSON text; TypeError or RecursionError when it is nothing that JSON can say."""
    try:
        return _ENCODER.encode(_plain(value)).decode()
    except UnicodeEncodeError:
        return _ENCODER.encode(whole(_plain(value))).decode()


def whole_text(text: str) -> str:
    """Return a text in which every half of a surrogate pair is U+FFFD; two halves that belong together are joined."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def whole(value: Any) -> Any:
    """Return a JSON value whose texts and keys are all valid."""
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, Mapping):
        return {whole(key): whole(one) for key, one in value.items()}
    return [whole(one) for one in value] if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    """Return detections as JSON values: msgspec would write them field by field."""
    if isinstance(value, Detections):
        return value.to_json()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _other(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, complex):
        return [value.real, value.imag]
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a value of type {type(value).__name__} has no JSON")


_ENCODER = msgspec.json.Encoder(enc_hook=_other)
