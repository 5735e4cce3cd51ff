"""Bodies of OpenAI requests, one pydantic model for each, and the sampling options that they set.

Three kinds of fields, so that no answer silently differs from the one requested:

- *supported*: checked here, or passed to the llm step's `sampling`, which checks them; a model without that input
  refuses them unless the value is what would happen anyway;
- *harmless*: billing, storage, caching, and every undocumented field; ignored;
- *refused*: they would change the answer and are not implemented; the error names the field.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from weftline.engine.serving.http.errors import HttpError, unsupported
from weftline.errors import InputError

PASSED = (
    *("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "n"),
    *("top_k", "min_p", "typical_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "allowed_token_ids"),
    *("bad_words", "skip_special_tokens"),
)
"""Fields that are keys of `sampling` under the same name: OpenAI's, then extensions that other servers accept too."""

RENAMED = {"max_tokens": "tokens_max", "min_tokens": "tokens_min", "stop": "stop"}
"""Fields that are keys of `sampling` under another name, or in another form."""

NO_CHANGE: dict[str, tuple[Any, ...]] = {
    "temperature": (1,),
    "top_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "n": (1,),
    "stop": ([],),
}
"""Values of `sampling` that change nothing, and are accepted for a model without sampling options."""

REFUSED: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
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

RERANK_REFUSED = (
    *("max_chunks_per_doc", "max_tokens_per_doc", "rank_fields"),
    *("activation", "use_activation", "softmax", "instruction"),
)
"""Fields of /v1/rerank that would change the scores."""

Flag = Annotated[bool, Field(strict=True, description="true or false")]
LikeliestCount = Annotated[int, Field(strict=True, ge=0, le=20, description="a whole number from 0 to 20")]
Body = TypeVar("Body", bound="OpenAiBody")


def _to_texts(value: Any, info: ValidationInfo) -> list[str]:
    field, texts_max = info.field_name or "", (info.context or {}).get("texts_max")
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and any(isinstance(one, int | list) for one in texts):
        raise HttpError(f"{field}: found token ids; expected text", param=field)
    if not isinstance(texts, list) or not texts or not all(isinstance(one, str) for one in texts):
        raise HttpError(f"{field}: expected a text, or a list of texts", param=field)
    if texts_max is not None and len(texts) > texts_max:
        raise HttpError(f"{field}: found {len(texts)} texts, limits.batch_max is {texts_max}", param=field)
    return texts


def _to_documents(value: Any, info: ValidationInfo) -> list[str]:
    """Return documents as texts; each is a text, or an object with a text."""
    if not isinstance(value, list):
        return _to_texts(None, info)
    texts = [one.get("text") if isinstance(one, dict) else one for one in value]
    if not texts or not all(isinstance(one, str) for one in texts):
        raise HttpError('documents: expected a list of texts, or of objects {"text": ...}', param="documents")
    return _to_texts(texts, info)


Documents = Annotated[list[str], BeforeValidator(_to_documents), Field(description="a list of texts")]
Texts = Annotated[list[str], BeforeValidator(_to_texts), Field(description="a text, or a list of texts")]


class OpenAiBody(BaseModel):
    """Fields of every body. A field's description completes "expected ..." in its error."""

    model_config = ConfigDict(frozen=True)

    model: str = Field(strict=True, min_length=1, description="the name of a model, as the list of models has it")
    priority: int | None = Field(
        None, strict=True, ge=-100, le=100, description="a whole number from -100 (first) to 100"
    )

    @classmethod
    def parse(cls: type[Body], fields: Mapping[str, Any], *, texts_max: int | None = None) -> Body:
        """Validate a body; HttpError names the first wrong field in `param` and lists all wrong fields.

        texts_max: most texts of a `prompt`, `input` or `documents`.
        """
        try:
            return cls.model_validate(fields, context={"texts_max": texts_max})
        except ValidationError as error:
            wrong = list(dict.fromkeys(_path(one["loc"]) for one in error.errors(include_url=False)))
            text = "; ".join(f"{path}: expected {_expected(cls, path)}" for path in wrong)
            raise HttpError(text, param=wrong[0].partition(".")[0]) from None


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    include_usage: Flag | None = None


class GenerationBody(OpenAiBody):
    """Fields of chat and completion requests."""

    stream: Flag | None = None
    stream_options: StreamOptions | None = Field(None, description="an object")
    n: int = Field(1, strict=True, ge=1, le=64, description="a whole number from 1 to 64")
    stop: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    min_tokens: Any = None
    temperature: Any = None
    top_p: Any = None
    seed: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    response_format: Any = None
    top_k: Any = None
    min_p: Any = None
    typical_p: Any = None
    repetition_penalty: Any = None
    stop_token_ids: Any = None
    ignore_eos: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    skip_special_tokens: Any = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, fields: Any) -> Any:
        for field, harmless in REFUSED.items():
            value = fields.get(field)
            if value is not None and not any(_same(value, one) for one in harmless):
                raise unsupported(field, "not supported by this server; leave it out")
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def usage_in_stream(self) -> bool:
        """True if the last chunk of a stream must count tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_tools(self) -> bool:
        """True if the model may call tools."""
        return False

    @property
    def top_logprobs_count(self) -> int | None:
        """Number of likeliest tokens listed with each token; None: no log-probabilities."""
        raise NotImplementedError

    def sampling(self) -> dict[str, Any]:
        """Return the options for the llm step's `sampling`."""
        options = {name: getattr(self, name) for name in PASSED if name in self.model_fields_set}
        for field, key in RENAMED.items():
            if field in self.model_fields_set:
                options[key] = getattr(self, field)
        if self.max_completion_tokens is not None:
            options["tokens_max"] = self.max_completion_tokens
        if isinstance(self.stop, str):
            options["stop"] = [self.stop]
        if self.top_logprobs_count is not None:
            options["logprobs"] = self.top_logprobs_count
        return options | constraint_of(self.response_format)

    def field_of(self, key: str) -> str:
        """Return the field that set a key of `sampling`; any other name unchanged."""
        if key == "tokens_max" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        if key in ("json_schema", "json_object"):
            return "response_format"
        return next((field for field, renamed in RENAMED.items() if renamed == key), key)

    @contextmanager
    def naming_fields(self) -> Iterator[None]:
        """Change `param` of an InputError from the key of `sampling` to the field that set it."""
        try:
            yield
        except InputError as error:
            error.param = self.field_of(error.param)
            raise

    def check_no_sampling(self, sampling: Mapping[str, Any]) -> None:
        """Refuse options that would change the answer, for a model without a `sampling` input."""
        for key, value in sampling.items():
            if any(_same(value, one) for one in NO_CHANGE.get(key, ())):
                continue
            field = self.field_of(key)
            why = f"model {self.model} has no sampling options; leave {field} out, or add an input `sampling: json`"
            raise unsupported(field, why)


class ChatBody(GenerationBody):
    """Body of /v1/chat/completions. `messages.py` reads the messages, `tools.py` the tools."""

    messages: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Flag | None = None
    logprobs: Flag | None = None
    top_logprobs: LikeliestCount | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise HttpError("top_logprobs: requires logprobs: true", param="top_logprobs")
        return self

    @property
    def has_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def top_logprobs_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def field_of(self, key: str) -> str:
        return "messages" if key == "prompt" else super().field_of(key)


class CompletionBody(GenerationBody):
    """Body of /v1/completions."""

    prompt: Texts
    echo: Flag | None = None
    logprobs: LikeliestCount | None = None

    @property
    def top_logprobs_count(self) -> int | None:
        return self.logprobs

    def sampling(self) -> dict[str, Any]:
        return super().sampling() | ({"echo": True} if self.echo else {})


CUTS: Mapping[Any, str] = {True: "end", False: "error", "END": "end", "START": "start", "NONE": "error"}
"""Values of `truncate` and `truncation`, as TEI, Cohere, Jina and Voyage have them, in terms of an input `overflow`."""

DIRECTIONS: Mapping[Any, str] = {"right": "end", "left": "start"}


class TruncatingBody(OpenAiBody):
    """Fields of a request whose texts may be longer than the model reads.

    truncate, truncation:     whether they are cut, see CUTS.
    truncate_prompt_tokens:   as in vLLM: they are cut to that many tokens; -1: to those that the model reads.
    truncation_side, truncation_direction: the end that is cut, right or left, as in vLLM and TEI.
    """

    truncate: Any = None
    truncation: Any = None
    truncate_prompt_tokens: int | None = Field(None, strict=True, ge=-1, description="a count from 1, or -1")
    truncation_side: Any = None
    truncation_direction: Any = None

    @model_validator(mode="after")
    def _check_truncation(self) -> Self:
        for field in ("truncate", "truncation"):
            value = getattr(self, field)
            if value is not None and _cut_of(value) is None:
                raise HttpError(f"{field}: expected true, false, NONE, START or END", param=field)
        for field in ("truncation_side", "truncation_direction"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, str) or value.lower() not in DIRECTIONS):
                raise HttpError(f"{field}: expected left or right", param=field)
        if self.truncate_prompt_tokens == 0:
            raise HttpError("truncate_prompt_tokens: expected a count from 1, or -1", param="truncate_prompt_tokens")
        return self

    @property
    def truncation_field(self) -> str | None:
        """Return the field that states what becomes of longer texts; None: none does."""
        fields = ("truncate", "truncation", "truncate_prompt_tokens")
        return next((field for field in fields if getattr(self, field) is not None), None)

    def overflow(self) -> str | dict[str, Any] | None:
        """Return the value of an input `overflow`; None: the model's own rule."""
        field = self.truncation_field
        if field is None:
            return None
        side = self.truncation_side or self.truncation_direction
        stated = [_cut_of(value) for value in (self.truncate, self.truncation) if value is not None]
        if "error" in stated:
            return "error"
        cut = DIRECTIONS[side.lower()] if side is not None else (stated or ["end"])[0]
        tokens = self.truncate_prompt_tokens
        return cut if tokens in (None, -1) else {"side": cut, "tokens": tokens}

    @contextmanager
    def naming_truncation(self) -> Iterator[None]:
        """Change `param` of an InputError from the input `overflow` to the field that set it."""
        try:
            yield
        except InputError as error:
            if error.param == "overflow" and self.truncation_field is not None:
                error.param = self.truncation_field
            raise


def _cut_of(value: Any) -> str | None:
    """Return the side of CUTS that a value means, in any case; None: it means none."""
    known = value if isinstance(value, bool) else value.upper() if isinstance(value, str) else None
    return CUTS.get(known)


class EmbeddingBody(TruncatingBody):
    """Body of /v1/embeddings."""

    input: Texts
    encoding_format: Literal["float", "base64"] | None = Field(None, description="float or base64")
    dimensions: int | None = Field(None, strict=True, ge=1, description="the length of the model's vectors")

    def check_dimensions(self, found: int) -> None:
        """Refuse `dimensions` other than the length of the model's vectors."""
        if self.dimensions not in (None, found):
            why = f"model {self.model} returns vectors of {found} numbers, not {self.dimensions}"
            raise unsupported("dimensions", f"{why}; leave it out, or set `dimensions` of its embed step")


class RerankBody(TruncatingBody):
    """Body of /v1/rerank, with the fields that Jina, Cohere and vLLM have in common."""

    query: str = Field(strict=True, description="a text")
    documents: Documents
    top_n: int | None = Field(None, strict=True, ge=1, description="a whole number from 1")
    return_documents: Flag | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, fields: Any) -> Any:
        for field in RERANK_REFUSED:
            if fields.get(field) is not None:
                raise unsupported(field, "not supported by this server; leave it out")
        return fields


class SpeechBody(OpenAiBody):
    """Body of /v1/audio/speech. Its `voice` counts where the model has an input `voice`."""

    input: str = Field(strict=True, min_length=1, max_length=4096, description="a text of 1 to 4096 characters")
    voice: str | None = Field(None, strict=True, description="a text")
    response_format: Literal["mp3", "opus", "flac", "wav", "pcm"] = Field(
        "mp3", description="mp3, opus, flac, wav or pcm"
    )
    speed: float = Field(1.0, strict=True, ge=0.25, le=4, description="a number from 0.25 to 4")
    stream_format: Literal["audio"] | None = Field(None, description="audio; the recording is sent whole")
    instructions: Literal[""] | None = Field(None, description="nothing: not supported by this server; leave it out")


GRANULARITIES = "timestamp_granularities[]"
"""Field with a value for each kind of times."""


class TranscriptionBody(OpenAiBody):
    """Form of /v1/audio/transcriptions and /v1/audio/translations, besides its file.

    granularities: values of the field `timestamp_granularities[]`.
    """

    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] = Field(
        "json", description="json, text, verbose_json, srt or vtt"
    )
    temperature: Literal["0", "0.0"] | None = Field(
        None, description="0: the likeliest words are selected; leave it out"
    )
    stream: str | None = None
    granularities: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        if not set(self.granularities) <= {"segment", "word"}:
            raise HttpError(f"{GRANULARITIES}: expected segment or word", param=GRANULARITIES)
        if self.granularities and self.response_format != "verbose_json":
            raise unsupported(GRANULARITIES, "only response_format verbose_json has them")
        if self.streamed and self.timed:
            raise unsupported("stream", f"response_format {self.response_format} is sent whole; leave it out")
        return self

    @property
    def streamed(self) -> bool:
        return self.stream in ("true", "True", "1")

    @property
    def timed(self) -> bool:
        """Return True if the response contains times."""
        return self.response_format not in ("json", "text")


def answers_output(body: GenerationBody, output: str | None) -> str | None:
    """Return the output with several answers or log-probabilities, if the body requests either."""
    if body.n == 1 and body.top_logprobs_count is None:
        return None
    if output is None:
        field = "n" if body.n > 1 else "logprobs"
        raise unsupported(field, "not supported by the model; it has no output `answers: json`")
    return output


def constraint_of(format: Any) -> dict[str, Any]:
    """Return the sampling option of a `response_format`; {} for plain text."""
    kind = format.get("type") if isinstance(format, dict) else None
    if format is None or kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        expected = "expected text, json_object or json_schema"
        raise HttpError(f"response_format.type: {expected}", param="response_format")
    inner = format.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        expected = "expected an object, a JSON schema"
        raise HttpError(f"response_format.json_schema.schema: {expected}", param="response_format")
    return {"json_schema": schema}


def _path(loc: tuple[str | int, ...]) -> str:
    return ".".join(str(part) for part in loc)


def _expected(kind: type[BaseModel], path: str) -> str:
    """Return the description of a field; of one in a nested object, `stream_options.include_usage`, its own."""
    name, _, rest = path.partition(".")
    if rest:
        return _expected(StreamOptions, rest)
    field = kind.model_fields[name]
    nested = [mark for one in get_args(field.annotation) for mark in getattr(one, "__metadata__", ())]
    return next((one.description for one in (field, *nested) if getattr(one, "description", None)), "another value")


def _same(one: Any, other: Any) -> bool:
    return (type(one) in (int, float) and type(other) in (int, float) and one == other) or (
        type(one) is type(other) and one == other
    )
