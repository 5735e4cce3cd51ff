"""Mapping of model ports to OpenAI endpoints.

    chat           an input `messages` (json), or a text input, or an audio input; and a text output
    completions    a text input and a text output
    embeddings     a text input, and an output that is one float vector
    rerank         a text input `query`, a list of texts, and an output that is one float vector
    transcription  an audio input and a text output; outputs `segments` (json) and `language` (text) are optional
    translation    the same with an input `task` (text), which becomes 'translate'
    speech         a text input and an audio output; inputs `speed` (json) and `voice` (text) are optional

The text input is `prompt`, or the only one. The text output is `text`, or `answer`, or the only one; for transcription
`transcript` counts too. Inputs called `sampling`, `template`, `tools`, `tool_choice`, `parallel_tool_calls` (json),
`tenant`, `adapter`, `language`, `voice` and, where it is optional, `task` (text), and an output `reasoning` (text) have
their own meaning; images and audio of a conversation go to the image and audio inputs in the order they are declared.
Every other input must be one that may be left out. Where a model with `messages` has no input for pictures besides an
optional list `images`, as an llm step has, pictures stay in the messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from weftline.engine.serving.http.errors import HttpError
from weftline.engine.serving.model_info import ModelInfo, PortInfo

OWN_MEANING = ("adapter", "tenant", "language", "voice")
"""Text inputs that are never what the user says."""

TOOL_INPUTS = ("tools", "tool_choice", "parallel_tool_calls")
"""Inputs with the values of the fields of that name."""

COMMON_INPUTS = ("sampling", "template", "tenant")
"""Inputs that do not depend on the form of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPorts:
    """Ports that do not depend on the form of the prompt; None: the model has no such port."""

    output: str
    sampling: str | None
    tenant: str | None
    usage: str | None
    answers: str | None
    tool_calls: str | None = None
    reasoning: str | None = None
    logprobs: str | None = None
    template: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPorts(AnswerPorts):
    """Ports for a conversation.

    images, audio: inputs for pictures and recordings, as declared; of type image or list[image], and likewise.
    pictures_stay: pictures stay in `messages`.
    """

    messages: str | None
    prompt: str | None
    tools: str | None
    tool_choice: str | None
    parallel_tool_calls: str | None
    images: tuple[PortInfo, ...]
    audio: tuple[PortInfo, ...]
    pictures_stay: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPorts(AnswerPorts):
    """Ports of a model that completes, or embeds, a text.

    overflow: input with the rule for longer texts. tokens: input with token ids in place of a text to embed.
    """

    prompt: str
    overflow: str | None = None
    tokens: str | None = None


@dataclass(frozen=True, slots=True)
class RerankPorts:
    """Ports of a model that scores documents against a query."""

    query: str
    documents: str
    output: str
    tenant: str | None
    usage: str | None
    overflow: str | None


@dataclass(frozen=True, slots=True)
class TranscriptionPorts:
    """Ports of a model that turns recordings into text.

    language, task: inputs. segments, detected: outputs for the segments and for the language.
    """

    audio: str
    output: str
    language: str | None
    prompt: str | None
    task: str | None
    segments: str | None
    detected: str | None


@dataclass(frozen=True, slots=True)
class SpeechPorts:
    """Ports of a model that turns texts into recordings."""

    text: str
    output: str
    speed: str | None
    voice: str | None


def chat_ports(info: ModelInfo) -> ChatPorts:
    """Return the ports for a conversation; HttpError if the model cannot chat."""
    task = "chat"
    images, audio = _media(info, "image"), _media(info, "audio")
    messages, prompt = _input(info, "messages", "json"), _text_input(info)
    if messages is None and prompt is None and not audio:
        raise _cannot(info, task, "it has no input `messages` (json), and no text or audio input instead")
    fed = {one.name for one in images + audio} | {messages, prompt, *COMMON_INPUTS, *TOOL_INPUTS}
    _check_rest(info, task, fed)
    stay = messages is not None and all(one.name == "images" and one.optional for one in images)
    return ChatPorts(
        output=_text_output(info, task, ("text", "answer")),
        sampling=_input(info, "sampling", "json"),
        tenant=_input(info, "tenant", "text"),
        usage=_usage(info),
        answers=_output(info, "answers", "json"),
        tool_calls=_output(info, "tool_calls", "json"),
        messages=messages,
        prompt=prompt,
        reasoning=_output(info, "reasoning", "text"),
        logprobs=_output(info, "logprobs", "json"),
        template=_input(info, "template", "json"),
        tools=_input(info, "tools", "json"),
        tool_choice=_input(info, "tool_choice", "json"),
        parallel_tool_calls=_input(info, "parallel_tool_calls", "json"),
        images=() if stay else images,
        audio=audio,
        pictures_stay=stay,
    )


def completion_ports(info: ModelInfo) -> TextPorts:
    """Return the ports for a plain prompt; HttpError if the model cannot complete text."""
    return _text_ports(info, "complete text", _text_output(info, "complete text", ("text", "answer")))


def embedding_ports(info: ModelInfo) -> TextPorts:
    """Return the ports for texts to embed; HttpError if the model has no embedding."""
    ports = _text_ports(info, "embed", _vector_output(info, "embed", "embedding"), "tokens")
    return replace(ports, tokens=_input(info, "tokens", "json"))


def vector_length(info: ModelInfo, output: str) -> int | None:
    """Return the length of an output's vectors; None where the type does not state it."""
    port = info.output(output)
    dims = port.port_type.dims if port is not None else None
    return dims[0] if dims and isinstance(dims[0], int) else None


def rerank_ports(info: ModelInfo) -> RerankPorts:
    """Return the ports for a query and documents; HttpError if the model cannot rerank."""
    task = "rerank"
    query = _input(info, "query", "text")
    lists = [one.name for one in info.inputs if one.type == "list[text]"]
    if query is None or len(lists) != 1:
        raise _cannot(info, task, "it needs an input `query` (text) and one input that is a list of texts")
    tenant, overflow = _input(info, "tenant", "text"), _input(info, "overflow", "json")
    _check_rest(info, task, {query, lists[0], tenant, overflow})
    output = _vector_output(info, task, "scores")
    return RerankPorts(query, lists[0], output, tenant, _usage(info), overflow)


def transcription_ports(info: ModelInfo) -> TranscriptionPorts:
    """Return the ports for a recording; HttpError if the model cannot transcribe."""
    task = "transcribe"
    audio = [one.name for one in info.inputs if one.type == "audio"]
    if len(audio) != 1:
        raise _cannot(info, task, f"it has {len(audio) or 'no'} audio inputs, and one is needed")
    language, prompt, kind = (_input(info, name, "text") for name in ("language", "prompt", "task"))
    _check_rest(info, task, {audio[0], language, prompt, kind})
    return TranscriptionPorts(
        audio=audio[0],
        output=_text_output(info, task, ("text", "transcript", "answer")),
        language=language,
        prompt=prompt,
        task=kind,
        segments=_output(info, "segments", "json"),
        detected=_output(info, "language", "text"),
    )


def translation_ports(info: ModelInfo) -> TranscriptionPorts:
    """Return the ports for a recording to translate; HttpError if the model cannot translate."""
    ports = transcription_ports(info)
    if ports.task is None:
        raise _cannot(info, "translate recordings", "it has no input `task` (text)")
    return ports


def speech_ports(info: ModelInfo) -> SpeechPorts:
    """Return the ports for a text to speak; HttpError if the model cannot speak."""
    task = "speak"
    text, audio = _text_input(info), [one.name for one in info.outputs if one.type == "audio"]
    if text is None or len(audio) != 1:
        raise _cannot(info, task, "it needs one text input and one audio output")
    speed, voice = _input(info, "speed", "json"), _input(info, "voice", "text")
    _check_rest(info, task, {text, speed, voice})
    return SpeechPorts(text, audio[0], speed, voice)


def _text_ports(info: ModelInfo, task: str, output: str, *more: str) -> TextPorts:
    """Return the ports for a text; HttpError if the model has none, or an input beside them and `more` is required."""
    prompt = _text_input(info)
    if prompt is None:
        raise _cannot(info, task, "it has no text input `prompt`, and no other that is its only one")
    _check_rest(info, task, {prompt, *COMMON_INPUTS, "overflow", *more})
    return TextPorts(
        output=output,
        sampling=_input(info, "sampling", "json"),
        tenant=_input(info, "tenant", "text"),
        usage=_usage(info),
        answers=_output(info, "answers", "json"),
        prompt=prompt,
        logprobs=_output(info, "logprobs", "json"),
        template=_input(info, "template", "json"),
        overflow=_input(info, "overflow", "json"),
    )


def _text_input(info: ModelInfo) -> str | None:
    if _input(info, "prompt", "text"):
        return "prompt"
    texts = [one for one in info.inputs if one.type == "text" and one.name not in OWN_MEANING]
    texts = [one for one in texts if not (one.optional and one.name == "task")]
    needed = [one for one in texts if not one.optional]
    for some in (needed, texts):
        if len(some) == 1:
            return some[0].name
    return None


def _text_output(info: ModelInfo, task: str, names: tuple[str, ...]) -> str:
    texts = [one.name for one in info.outputs if one.type == "text" and one.name != "reasoning"]
    for name in names:
        if name in texts:
            return name
    if len(texts) == 1:
        return texts[0]
    found = f"its text outputs are {', '.join(texts)}, and none is called" if texts else "it has no text output called"
    raise _cannot(info, task, f"{found} {' or '.join(names)}")


def _vector_output(info: ModelInfo, task: str, name: str) -> str:
    """Return the output called `name`, or the only one, that is a float vector."""
    vectors = [one.name for one in info.outputs if _is_vector(one)]
    if name in vectors:
        return name
    if len(vectors) != 1:
        found = ", ".join(vectors) or "none"
        raise _cannot(info, task, f"its float vectors are {found}; one is needed, or one called `{name}`")
    return vectors[0]


def _is_vector(port: PortInfo) -> bool:
    type = port.port_type
    if type.kind != "tensor" or not (type.dtype or "").startswith("float"):
        return False
    return type.dims is not None and len(type.dims) == 1


def _media(info: ModelInfo, kind: str) -> tuple[PortInfo, ...]:
    return tuple(one for one in info.inputs if one.type in (kind, f"list[{kind}]"))


def _input(info: ModelInfo, name: str, type: str) -> str | None:
    port = info.input(name)
    return name if port is not None and port.type == type else None


def _output(info: ModelInfo, name: str, type: str) -> str | None:
    port = info.output(name)
    return name if port is not None and port.type == type else None


def _usage(info: ModelInfo) -> str | None:
    """Return the output with the counts of tokens."""
    return _output(info, "usage", "json") or info.usage or None


def _check_rest(info: ModelInfo, task: str, fed: Iterable[str | None]) -> None:
    known = set(fed)
    rest = [one for one in info.inputs if one.name not in known and not one.optional]
    if rest:
        named = ", ".join(f"{one.name} ({one.type})" for one in rest)
        raise _cannot(info, task, f"nothing in such a request could be its input {named}")


def _cannot(info: ModelInfo, task: str, why: str) -> HttpError:
    return HttpError(f"model {info.name} cannot {task}: {why}", param="model")
