"""OpenAI request fields: mapped to sampling options, ignored or refused.

Three sorts of fields, so that no answer is quietly another than the one asked for:

- *understood*: they become keys of the llm step's `sampling`; a model without that input refuses them, unless they say
  what would happen anyway;
- *harmless*: they are about billing, storage or caching, and are left alone;
- *refused*: they would change the answer and nothing here understands them; the error names the field.

A field that OpenAI does not document is ignored, as other servers do, but for those named here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weftline.engine.serving.http.refusal import HttpError, unsupported

SAME_NAME = ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "n")
"""OpenAI's fields that are keys of `sampling` under the same name."""

EXTENSIONS = (
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
)
"""Keys of `sampling` beyond OpenAI's, accepted as other servers accept them (`extra_body` of the stock client)."""

RENAMED = {"max_tokens": "tokens_max", "max_completion_tokens": "tokens_max", "min_tokens": "tokens_min"}

NO_CHANGE: dict[str, tuple[Any, ...]] = {
    "temperature": (1,),
    "top_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "n": (1,),
    "stop": ([],),
}
"""Values that a model without sampling options may be sent: they ask for nothing."""

REFUSED: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "parallel_tool_calls": (True,),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "suffix": ("",),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "prompt_logprobs": (),
    "moderation": (),
}
"""Fields that would change the answer, with the values that would not."""

OF_SAMPLING = {"tokens_max": "max_tokens", "tokens_min": "min_tokens", "json_schema": "response_format"} | {
    "json_object": "response_format",
    "logprobs": "logprobs",
}
"""Where a key of `sampling` came from, for errors; the others have the same name."""


def check_refused(body: Mapping[str, Any]) -> None:
    """Refusal names the first field that would change the answer and is not understood."""
    for field, harmless in REFUSED.items():
        value = body.get(field)
        if value is not None and not any(_same(value, one) for one in harmless):
            raise unsupported(field, "not supported by this server; leave it out")


def sampling_of(body: Mapping[str, Any], logprobs: int | None) -> dict[str, Any]:
    """Return the `sampling` value that the fields ask for; {} when they ask for nothing.

    logprobs: how many likeliest tokens are told beside the chosen one; None: no log-probabilities.
    """
    asked = {name: body[name] for name in (*SAME_NAME, *EXTENSIONS) if body.get(name) is not None}
    for field, key in RENAMED.items():
        if body.get(field) is not None:
            asked[key] = body[field]
    stop = body.get("stop")
    if stop is not None:
        asked["stop"] = [stop] if isinstance(stop, str) else stop
    if logprobs is not None:
        asked["logprobs"] = logprobs
    return asked | constraint_of(body.get("response_format"))


def constraint_of(format: Any) -> dict[str, Any]:
    """Return the sampling key for a `response_format`; {} for plain text."""
    if format is None:
        return {}
    kind = format.get("type") if isinstance(format, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        inner = format.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if not isinstance(schema, dict):
            raise HttpError(
                "response_format.json_schema.schema: expected an object, a JSON schema", param="response_format"
            )
        return {"json_schema": schema}
    raise HttpError("response_format.type: expected text, json_object or json_schema", param="response_format")


def check_no_sampling(body: Mapping[str, Any], sampling: Mapping[str, Any], model: str) -> None:
    """Refusal unless all that is asked for is what a model without a `sampling` input does anyway."""
    for key, value in sampling.items():
        if any(_same(value, one) for one in NO_CHANGE.get(key, ())):
            continue
        field = field_of(key, body)
        raise unsupported(
            field, f"model {model} takes no sampling options; leave {field} out, or give it an input `sampling: json`"
        )


def field_of(key: str, body: Mapping[str, Any]) -> str:
    """Return the request's field that became `sampling.<key>`."""
    if key == "tokens_max" and body.get("max_completion_tokens") is not None:
        return "max_completion_tokens"
    return OF_SAMPLING.get(key, key)


def chat_logprobs(body: Mapping[str, Any]) -> int | None:
    """Return how many likeliest tokens a chat request asks for; None: no log-probabilities."""
    wanted, top = body.get("logprobs"), body.get("top_logprobs")
    if wanted is not None and not isinstance(wanted, bool):
        raise HttpError("logprobs: expected true or false", param="logprobs")
    if top is not None and (type(top) is not int or not 0 <= top <= 20):
        raise HttpError("top_logprobs: expected a whole number from 0 to 20", param="top_logprobs")
    if top and not wanted:
        raise HttpError("top_logprobs: wants logprobs to be true", param="top_logprobs")
    return (top or 0) if wanted else None


def flag(body: Mapping[str, Any], field: str) -> bool:
    """Return a field that is true or false; false when it is absent."""
    value = body.get(field)
    if value is not None and not isinstance(value, bool):
        raise HttpError(f"{field}: expected true or false", param=field)
    return bool(value)


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Whether a stream's last chunk is to count tokens."""
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise HttpError("stream_options: expected an object", param="stream_options")
    return flag(options, "include_usage")


def count_of(body: Mapping[str, Any]) -> int:
    """Return how many answers are asked for."""
    n = body.get("n")
    if n is None:
        return 1
    if type(n) is not int or not 1 <= n <= 64:
        raise HttpError("n: expected a whole number from 1 to 64", param="n")
    return n


def model_of(body: Mapping[str, Any]) -> str:
    """Return the model's name as the request has it."""
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise HttpError("model: expected the name of a model, as the list of models has it", param="model")
    return model


def _same(one: Any, other: Any) -> bool:
    return (type(one) in (int, float) and type(other) in (int, float) and one == other) or (
        type(one) is type(other) and one == other
    )
