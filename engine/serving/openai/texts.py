"""Fields `prompt` and `input`: one text or several; token ids are refused."""

from __future__ import annotations

from weftline.engine.serving.http.refusal import HttpError


def texts_of(value: object, field: str, texts_max: int) -> list[str]:
    """Return the texts that a field holds; Refusal when it holds something else, none, or more than `texts_max`."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        raise HttpError(f"{field}: expected a text, or a list of texts", param=field)
    if any(isinstance(one, int | list) for one in texts):
        raise HttpError(f"{field}: found token ids; expected text", param=field)
    if not all(isinstance(one, str) for one in texts):
        raise HttpError(f"{field}: expected a text, or a list of texts", param=field)
    if len(texts) > texts_max:
        raise HttpError(f"{field}: found {len(texts)} texts, limits.batch_max is {texts_max}", param=field)
    return texts
