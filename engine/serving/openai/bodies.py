"""Bodies of OpenAI requests, one Struct for each, and the sampling options that they set.

No answer silently differs from the one requested: a field is

- *mapped*: checked here, or passed to the inputs `sampling` and `template` of an llm step, which checks them; a model
  without that input refuses them unless the value is what would happen anyway;
- *without effect* or *refused*: both are listed in `fields.py`;
- or unknown, and refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self

from msgspec import Meta, Struct
from msgspec.structs import fields as fields_of

from weftline.engine.llm.params import CONSTRAINTS, Answers, Logprobs, SamplingParams
from weftline.engine.llm.template_options import TOKENS_MAX
from weftline.engine.serving.http.errors import HttpError, unsupported
from weftline.engine.serving.openai.constraints import CONSTRAINT_FIELDS, RESPONSE_FORMATS, constraint_of
from weftline.engine.serving.openai.fields import (
    AUDIO_WITHOUT_EFFECT,
    CHAT_REFUSED,
    COMPLETION_REFUSED,
    EMBEDDING_REFUSED,
    GENERATION_WITHOUT_EFFECT,
    POOLING_WITHOUT_EFFECT,
    RERANK_REFUSED,
    TRANSCRIPTION_REFUSED,
    Refusals,
    why_refused,
)
from weftline.errors import InputError
from weftline.fields import worded
from weftline.nodes.field_checks import field_names, read_fields
from weftline.nodes.urgency import PRIORITY_MAX

RENAMED = {"max_tokens": "tokens_max", "max_completion_tokens": "tokens_max", "min_tokens": "tokens_min"}
"""Fields that are keys of `sampling` under another name."""

WRONG_FIELDS_MAX, FIELD_CHARS_MAX = 8, 60
"""Most fields that the error of unknown fields lists, and characters of each."""

EMBEDDING_TEXTS_MAX = 2048
"""Most texts of a call to /v1/embeddings, as at OpenAI."""

_BATCH_MAX = "limits.batch_max is"
_APART = {*CONSTRAINTS, *RENAMED.values(), "echo", "logprobs", "prompt_logprobs"}
"""Keys of `sampling` that no field has under the same name and in the same form."""

SAMPLING_FIELDS = {name: name for name in field_names(SamplingParams) if name not in _APART} | RENAMED
"""Fields with the value of a key of `sampling`: OpenAI's, then extensions that other servers accept too."""

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

TEMPLATE_FIELDS: Mapping[str, str] = {
    "chat_template_kwargs": "variables",
    "reasoning_effort": "reasoning_effort",
    "documents": "documents",
    "add_generation_prompt": "add_generation_prompt",
    "continue_final_message": "continue_final_message",
    "add_special_tokens": "add_special_tokens",
}
"""Fields with the value of a key of `template`."""

TEMPLATE_NO_CHANGE: dict[str, tuple[Any, ...]] = {
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (True,),
}
"""Values of TEMPLATE_FIELDS that change nothing."""


def _object_of(**required: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": required}


RESPONSE_FORMAT = _object_of(type={"enum": [*RESPONSE_FORMATS]})
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_PARTS = {"type": "array", "items": _object_of(type={"const": "text"}, text={"type": "string"})}
_MESSAGE = _object_of(
    role={"enum": [*ROLES]},
    content={"oneOf": [{"type": "string"}, _PARTS]},
)
MESSAGES: dict[str, Any] = {"type": "array", "minItems": 1, "items": _MESSAGE}
"""Published schemas of fields that are read elsewhere: `constraints.py`, `messages.py`."""


Flag = bool | None
_TEXTS = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPTS = {
    "oneOf": [*_TEXTS["oneOf"], _IDS, {"type": "array", "items": {"oneOf": [{"type": "string"}, _IDS]}, "minItems": 1}]
}
_DOCUMENT = {"oneOf": [{"type": "string"}, _object_of(text={"type": "string"})]}
Prompts = Annotated[Any, Meta(extra_json_schema=_PROMPTS)]
Documents = Annotated[Any, Meta(extra_json_schema={"type": "array", "items": _DOCUMENT, "minItems": 1})]
"""Values as `_prompts` and `_texts` return them, and the schema of their forms in a request."""


class OpenAiBody(Struct, frozen=True, kw_only=True):
    """Fields of every body; null is an absent value.

    texts:          names of the fields with texts.
    texts_limit:    words of an error before the most texts of a field.
    refused:        fields that are refused, with the values that change nothing.
    without_effect: fields that change no answer, with the reason.
    """

    texts: ClassVar[tuple[str, ...]] = ()
    texts_limit: ClassVar[str] = _BATCH_MAX
    refused: ClassVar[Refusals] = {}
    without_effect: ClassVar[Mapping[str, str]] = {}

    model: Annotated[str, worded("the name of a model, as the list of models has it", min_length=1)]
    priority: (
        Annotated[int, worded("a whole number from -100 (first) to 100", ge=-PRIORITY_MAX, le=PRIORITY_MAX)] | None
    ) = None

    @classmethod
    def parse(cls, fields: Mapping[str, Any], *, texts_max: int | None = None) -> Self:
        """Validate a body; HttpError names the first wrong field in `param` and lists all wrong fields.

        texts_max: most texts of a `prompt`, `input` or `documents`.
        """
        if not cls.mapped().keys() >= fields.keys():
            cls._check_other(fields)
        try:
            return read_fields(cls, fields, **cls._derived(fields, texts_max))
        except HttpError:
            raise
        except InputError as error:
            raise HttpError(str(error), param=error.param) from None

    @classmethod
    @cache
    def mapped(cls) -> Mapping[str, str]:
        """Return the fields that have an effect, and the input of the model that each becomes; '' for other effects."""
        return dict.fromkeys((one.encode_name for one in fields_of(cls) if one.name != "given"), "")

    @classmethod
    def _check_other(cls, fields: Mapping[str, Any]) -> None:
        """Refuse fields that have no effect here and would change the answer, and those that are unknown."""
        mapped, wrong = cls.mapped(), dict[str, str]()
        for field, value in fields.items():
            name = field.removesuffix("[]")
            if value is None or field in mapped or name in cls.without_effect or len(wrong) == WRONG_FIELDS_MAX:
                continue
            if name not in cls.refused:
                known = [*mapped, *cls.refused, *cls.without_effect]
                wrong[field[:FIELD_CHARS_MAX]] = unknown_field(field[:FIELD_CHARS_MAX], known)
            elif not any(_same(value, one) for one in cls.refused[name]):
                wrong[field] = why_refused(name)
        if wrong:
            first = next(iter(wrong))
            name = "unknown_parameter" if wrong[first].startswith(UNKNOWN) else "unsupported_parameter"
            raise HttpError("; ".join(f"{one}: {why}" for one, why in wrong.items()), param=first, name=name)

    @classmethod
    def _derived(cls, fields: Mapping[str, Any], texts_max: int | None) -> dict[str, Any]:
        """Return the values of fields that have another form in the request."""
        return {name: _texts(name, fields.get(name), texts_max, cls.texts_limit) for name in cls.texts}


def _prompts(field: str, value: Any, texts_max: int | None, limit: str = _BATCH_MAX) -> list[str | list[int]]:
    """Return the prompts of a field: a text, token ids, or a list of either. limit: as OpenAiBody.texts_limit."""
    if isinstance(value, list) and value and all(type(one) is int for one in value):
        return [value]
    if not isinstance(value, list) or not any(isinstance(one, list) for one in value):
        return [*_texts(field, value, texts_max, limit)]
    if len(value) > (texts_max or len(value)):
        raise HttpError(f"{field}: found {len(value)} prompts, {limit} {texts_max}", param=field)
    if not all(isinstance(one, str) or (one and all(type(id) is int for id in one)) for one in value):
        raise HttpError(f"{field}: expected texts, or lists of token ids", param=field)
    return value


def _texts(field: str, value: Any, texts_max: int | None, limit: str = _BATCH_MAX, single: bool = False) -> list[str]:
    """Return the texts of a field: a text, or a list of texts, or of documents, which are texts or have one.

    limit:  as OpenAiBody.texts_limit.
    single: documents may be one text.
    """
    texts = [value] if isinstance(value, str) and (field != "documents" or single) else value
    if isinstance(texts, list) and any(isinstance(one, int | list) for one in texts):
        raise HttpError(f"{field}: found token ids; expected text", param=field)
    if isinstance(texts, list) and field == "documents":
        texts = [one.get("text") if isinstance(one, dict) else one for one in texts]
    if not isinstance(texts, list) or not texts or not all(isinstance(one, str) for one in texts):
        objects = 'a list of texts, or of objects {"text": ...}'
        expected = objects if field == "documents" else "a text, or a list of texts"
        raise HttpError(f"{field}: expected {expected}", param=field)
    if texts_max is not None and len(texts) > texts_max:
        raise HttpError(f"{field}: found {len(texts)} texts, {limit} {texts_max}", param=field)
    return texts


class StreamOptions(Struct, frozen=True):
    """Options of a streamed answer. include_obfuscation, of OpenAI, is ignored: it changes no text."""

    include_usage: Flag = None
    continuous_usage_stats: Annotated[Literal[False], worded("false: usage comes at the end")] | None = None


class GenerationBody(OpenAiBody, frozen=True, kw_only=True):
    """Fields of chat and completion requests.

    given: those of SAMPLING_FIELDS, CONSTRAINT_FIELDS and `template_fields` that the request has.
    template_fields: those of TEMPLATE_FIELDS that the route has.
    template_base:   keys of `template` that the route sets, where the model has that input.
    """

    without_effect = GENERATION_WITHOUT_EFFECT
    template_fields: ClassVar[tuple[str, ...]] = ()
    template_base: ClassVar[Mapping[str, Any]] = {}

    stream: Flag = None
    stream_options: StreamOptions | None = None
    n: Answers = 1
    response_format: Annotated[Any, Meta(extra_json_schema=RESPONSE_FORMAT)] = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    given: dict[str, Any]

    @classmethod
    @cache
    def mapped(cls) -> Mapping[str, str]:
        sampling = {**SAMPLING_FIELDS, **CONSTRAINT_FIELDS}
        template = {field: f"template.{TEMPLATE_FIELDS[field]}" for field in cls.template_fields}
        return {**super().mapped(), **{field: f"sampling.{key}" for field, key in sampling.items()}, **template}

    @classmethod
    def _derived(cls, fields: Mapping[str, Any], texts_max: int | None) -> dict[str, Any]:
        kept = {*SAMPLING_FIELDS, *CONSTRAINT_FIELDS, *cls.template_fields}
        given = {field: one for field, one in fields.items() if field in kept and one is not None}
        return super()._derived(fields, texts_max) | {"given": given}

    @property
    def usage_in_stream(self) -> bool:
        """True if the last chunk of a stream must count tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_tools(self) -> bool:
        """True if the model may call tools."""
        return False

    @property
    def echoed(self) -> bool:
        """True if the text begins with the prompt."""
        return False

    @property
    def top_logprobs_count(self) -> int | None:
        """Number of likeliest tokens listed with each token; None: no log-probabilities."""
        raise NotImplementedError

    def sampling(self) -> dict[str, Any]:
        """Return the options for the llm step's `sampling`."""
        options = {SAMPLING_FIELDS[field]: one for field, one in self.given.items() if field in SAMPLING_FIELDS}
        if "max_completion_tokens" in self.given:
            options["tokens_max"] = self.given["max_completion_tokens"]
        if isinstance(options.get("stop"), str):
            options["stop"] = [options["stop"]]
        if self.top_logprobs_count is not None:
            options["logprobs"] = self.top_logprobs_count
        if options.get("top_k") == -1 and type(options["top_k"]) is int:  # off, as in vLLM and SGLang
            options["top_k"] = 0
        return options | constraint_of(self.given)[1]

    def template(self) -> dict[str, Any]:
        """Return the keys of the llm step's `template` that the request changes."""
        given = {field: self.given[field] for field in self.template_fields if field in self.given}
        if given.get("continue_final_message") and given.get("add_generation_prompt"):
            message = "continue_final_message: excludes add_generation_prompt"
            raise HttpError(message, param="continue_final_message")
        return {
            TEMPLATE_FIELDS[field]: one
            for field, one in given.items()
            if not any(_same(one, harmless) for harmless in TEMPLATE_NO_CHANGE.get(field, ()))
        }

    def field_of(self, key: str) -> str:
        """Return the field that set a key of `sampling` or `template`; any other name unchanged."""
        if key in CONSTRAINTS:
            return constraint_of(self.given)[0] or key
        if key == "variables":
            return "chat_template_kwargs"
        fields = [field for field, renamed in RENAMED.items() if renamed == key] or [key]
        return next((field for field in reversed(fields) if field in self.given), fields[0])

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


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """Body of /v1/chat/completions. `messages.py` reads the messages, `tools.py` the tools."""

    refused = CHAT_REFUSED
    template_fields = tuple(field for field in TEMPLATE_FIELDS if field != "add_special_tokens")

    messages: Annotated[Any, worded("a list of messages", extra_json_schema=MESSAGES)]
    tools: Annotated[Any, Meta(extra_json_schema={"type": "array", "items": {"type": "object"}})] = None
    tool_choice: Annotated[Any, Meta(extra_json_schema={"type": ["string", "object"]})] = None
    parallel_tool_calls: Flag = None
    logprobs: Flag = None
    top_logprobs: Logprobs | None = None

    def __post_init__(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise HttpError("top_logprobs: requires logprobs: true", param="top_logprobs")

    @property
    def has_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def top_logprobs_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def field_of(self, key: str) -> str:
        return "messages" if key == "prompt" else super().field_of(key)


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """Body of /v1/completions."""

    refused = COMPLETION_REFUSED
    template_fields = ("add_special_tokens",)
    template_base: ClassVar[Mapping[str, Any]] = {"apply": False}

    prompt: Annotated[Any, Meta(extra_json_schema=_PROMPTS)]
    echo: Flag = None
    logprobs: Logprobs | None = None

    @classmethod
    def _derived(cls, fields: Mapping[str, Any], texts_max: int | None) -> dict[str, Any]:
        return super()._derived(fields, texts_max) | {"prompt": _prompts("prompt", fields.get("prompt"), texts_max)}

    @property
    def echoed(self) -> bool:
        return bool(self.echo)

    @property
    def top_logprobs_count(self) -> int | None:
        return self.logprobs

    def sampling(self) -> dict[str, Any]:
        scored = {} if self.logprobs is None else {"prompt_logprobs": self.logprobs}
        return super().sampling() | ({"echo": True, **scored} if self.echo else {})


CUTS: Mapping[Any, str] = {True: "end", False: "error", "END": "end", "START": "start", "NONE": "error"}
"""Values of `truncate` and `truncation`, as TEI, Cohere, Jina and Voyage have them, in terms of an input `overflow`."""

DIRECTIONS: Mapping[Any, str] = {"right": "end", "left": "start"}


class DetokenizeBody(OpenAiBody, frozen=True, kw_only=True):
    """Body of /detokenize, as vLLM and SGLang have it."""

    tokens: Annotated[list[int], Meta(min_length=1, max_length=TOKENS_MAX)]
    skip_special_tokens: Annotated[Literal[False], worded("false: control tokens have their names")] | None = None


class TruncatingBody(OpenAiBody, frozen=True, kw_only=True):
    """Fields of a request whose texts may be longer than the model reads.

    truncate, truncation:     whether they are cut, see CUTS.
    truncate_prompt_tokens:   as in vLLM: they are cut to that many tokens; -1: to those that the model reads.
    truncation_side, truncation_direction: the end that is cut, right or left, as in vLLM and TEI.
    fields_of_inputs: inputs of the model, and the fields that they have their values from.
    """

    fields_of_inputs: ClassVar[Mapping[str, str]] = {}

    truncate: Any = None
    truncation: Any = None
    truncate_prompt_tokens: Annotated[int, worded("a count from 1, or -1", ge=-1)] | None = None
    truncation_side: Any = None
    truncation_direction: Any = None

    def __post_init__(self) -> None:
        for field in ("truncate", "truncation"):
            value = getattr(self, field)
            if value is not None and _cut_of(value) is None:
                raise HttpError(f"{field}: expected true, false, NONE, START or END", param=field)
        for field in ("truncation_side", "truncation_direction"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, str) or value.lower() not in DIRECTIONS):
                raise HttpError(f"{field}: expected left or right", param=field)
        if self.truncate_prompt_tokens == 0:
            raise HttpError(
                "truncate_prompt_tokens: found 0, expected a count from 1, or -1", param="truncate_prompt_tokens"
            )

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
    def naming_fields(self) -> Iterator[None]:
        """Change `param` of an InputError from an input of the model to the field that set it."""
        try:
            yield
        except InputError as error:
            if error.param == "overflow" and self.truncation_field is not None:
                error.param = self.truncation_field
            error.param = self.fields_of_inputs.get(error.param or "", error.param)
            raise


def _cut_of(value: Any) -> str | None:
    """Return the side of CUTS that a value means, in any case; None: it means none."""
    known = value if isinstance(value, bool) else value.upper() if isinstance(value, str) else None
    return CUTS.get(known)


class EmbeddingBody(TruncatingBody, frozen=True, kw_only=True):
    """Body of /v1/embeddings."""

    texts_limit = "expected at most"
    refused = EMBEDDING_REFUSED
    without_effect = POOLING_WITHOUT_EFFECT
    fields_of_inputs = {"tokens": "input", "prompt": "input"}

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, worded("the length of the model's vectors", ge=1)] | None = None

    @classmethod
    def _derived(cls, fields: Mapping[str, Any], texts_max: int | None) -> dict[str, Any]:
        return {"input": _prompts("input", fields.get("input"), texts_max, cls.texts_limit)}

    def check_dimensions(self, found: int) -> None:
        """Refuse `dimensions` other than the length of the model's vectors."""
        if self.dimensions not in (None, found):
            why = f"model {self.model} returns vectors of {found} numbers, not {self.dimensions}"
            raise unsupported("dimensions", f"{why}; leave it out, or set `dimensions` of its embed step")


class RerankBody(TruncatingBody, frozen=True, kw_only=True):
    """Body of /v1/rerank, with the fields that Jina, Cohere and vLLM have in common."""

    texts = ("documents",)
    refused = RERANK_REFUSED
    without_effect = POOLING_WITHOUT_EFFECT

    query: str
    documents: Documents
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: Flag = None


class ScoreBody(TruncatingBody, frozen=True, kw_only=True):
    """Body of /v1/score, as vLLM has it: a text and others, or as many of both. Each pair has names in four forms."""

    refused = RERANK_REFUSED
    without_effect = POOLING_WITHOUT_EFFECT

    text_1: Any = None
    text_2: Any = None
    queries: Any = None
    documents: Any = None
    items: Any = None
    data_1: Any = None
    data_2: Any = None

    def pairs(self, texts_max: int) -> list[tuple[str, list[str]]]:
        """Return each first text with the texts that it is paired with."""
        forms = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
        form = next((one for one in forms if None not in (getattr(self, one[0]), getattr(self, one[1]))), None)
        if form is None:
            raise HttpError("text_1, text_2: expected both, a text or a list of texts each", param="text_1")
        firsts, seconds = (_texts(name, getattr(self, name), texts_max, single=True) for name in form)
        if len(firsts) == 1:
            return [(firsts[0], seconds)]
        if len(firsts) != len(seconds):
            found = f"found {len(firsts)} and {len(seconds)} texts"
            raise HttpError(f"{form[0]}: {found}, expected one, or as many of both", param=form[0])
        return [(first, [second]) for first, second in zip(firsts, seconds, strict=True)]


class SpeechBody(OpenAiBody, frozen=True, kw_only=True):
    """Body of /v1/audio/speech. Its `voice` counts where the model has an input `voice`."""

    without_effect = AUDIO_WITHOUT_EFFECT

    input: Annotated[str, Meta(min_length=1, max_length=4096)]
    voice: str | None = None
    response_format: Literal["mp3", "opus", "flac", "wav", "pcm"] = "mp3"
    speed: Annotated[float, Meta(ge=0.25, le=4)] = 1.0
    stream_format: Annotated[Literal["audio"], worded("audio; the recording is sent whole")] | None = None
    instructions: Annotated[Literal[""], worded("nothing: not supported by this server; leave it out")] | None = None


GRANULARITIES = "timestamp_granularities[]"
"""Field with a value for each kind of times."""


class TranscriptionBody(OpenAiBody, frozen=True, kw_only=True, rename={"granularities": GRANULARITIES}):
    """Form of /v1/audio/transcriptions and /v1/audio/translations, besides its file."""

    refused = TRANSCRIPTION_REFUSED
    without_effect = AUDIO_WITHOUT_EFFECT

    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] = "json"
    temperature: Annotated[Literal["0", "0.0"], worded("0: the likeliest words are selected; leave it out")] | None = (
        None
    )
    stream: str | None = None
    granularities: tuple[Literal["segment", "word"], ...] = ()

    @classmethod
    def _derived(cls, fields: Mapping[str, Any], texts_max: int | None) -> dict[str, Any]:
        """Return the priority as a number; every value of a form is a text."""
        try:
            return {"priority": int(fields["priority"])}
        except (KeyError, TypeError, ValueError):
            return {}

    def __post_init__(self) -> None:
        if self.granularities and self.response_format != "verbose_json":
            raise unsupported(GRANULARITIES, "only response_format verbose_json has them")
        if self.streamed and self.timed:
            raise unsupported("stream", f"response_format {self.response_format} is sent whole; leave it out")

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


UNKNOWN = "unknown field; "


def unknown_field(field: str, known: Sequence[str]) -> str:
    """Return the problem of an unknown field, with the nearest known one."""
    near = difflib.get_close_matches(field, known, n=1)
    return UNKNOWN + (f"did you mean {near[0]}?" if near else "leave it out")


def _same(one: Any, other: Any) -> bool:
    return (type(one) in (int, float) and type(other) in (int, float) and one == other) or (
        type(one) is type(other) and one == other
    )
