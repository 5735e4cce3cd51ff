"""Tokenizer: text to tokens and back.

Into tokens: the chat template is the one in the model's folder, rendered with limits (`chat_template.py`);
requests cannot supply one. What a user writes is text and stays text: a control token's name inside it, such as
'<|im_end|>', is encoded as the characters it is made of. Each such name is replaced by a private-use
character before the template is rendered, and the rendered text is encoded in pieces around these marks:

    user       "ignore this <|im_end|> and"
    rendered   "<|im_start|>user ignore this \\ue000 and<|im_end|>"
    encoded    [<|im_start|>, user, ignore, this] + [<, |, im, _, end, |, >] + [and, <|im_end|>]

Out of tokens: see `weftline.engine.llm.detokenizer`.

Messages follow OpenAI's chat completions: a role and content, and optionally `tool_calls`, `tool_call_id`, `name` and
`reasoning_content`. Of tools only size and JSON types are checked; their schema depends on the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weftline.engine.llm.detokenizer import (
    BytesDecoder,
    Decoder,
    TextStream,
    TokenName,
    TokenTexts,
    WindowDecoder,
    token_texts,
)
from weftline.engine.llm.gguf import NAME, alone, is_gguf
from weftline.engine.llm.history import fitted
from weftline.engine.llm.template_options import DEFAULT_TEMPLATE, TemplateOptions
from weftline.engine.llm.vision.messages import NO_MARKS, Marks, with_parts
from weftline.errors import ContextOverflow, InputError, ModelError, first_line
from weftline.nodes.hugging_face import reason_without_path
from weftline.nodes.json_value import NotJson
from weftline.nodes.strict_json import FILES, parse
from weftline.nodes.tokenizer_trial import try_tokenizer

if TYPE_CHECKING:
    from weftline.engine.llm.chat_template import ChatTemplate

CHARS_PER_TOKEN_MAX = 64
"""Characters per token above which a text cannot fit the context; such texts are refused before encoding."""
_MARKS = range(0xE000, 0xF8FF)
"""Unicode's private use area: marks are taken from characters that occur in no message."""
_BRACKETED = re.compile(r"^[<\[{(｜|].*[>\]})｜|]$", re.DOTALL)
"""How control tokens are written; some tokenizers do not flag theirs (`<think>`) as special."""

_CLEAN_UP_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
"""transformers ignores `clean_up_tokenization_spaces` for BPE without this attribute; Llama 3's files ask for it."""


class Tokens:
    """A model's tokenizer and chat template."""

    def __init__(self, tokenizer: Any, context_max: int) -> None:
        self.tokenizer = tokenizer
        self.chars_max = context_max * CHARS_PER_TOKEN_MAX
        added = tokenizer.added_tokens_decoder
        control = {id: token.content for id, token in added.items() if token.special or _BRACKETED.match(token.content)}
        self._added = {token.content: id for id, token in added.items()}
        self._control_ids = frozenset(control)
        names = sorted(control.values(), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, names))) if names else None
        self._spelled: dict[str, list[int]] = {}
        self._templates: dict[str, ChatTemplate] = {}  # by source; a model has a handful
        self._folds = any(added[id].normalized for id in control)
        self._special_ids = frozenset(id for id, token in added.items() if token.special)
        self._texts: dict[bool, TokenTexts | None] = {}  # of single tokens, without control tokens and with them
        self._names: dict[tuple[int, bool], TokenName] = {}
        self._alone: dict[bool, dict[int, str]] = {}  # the same, where a token's text depends on its neighbours
        self.image_token = ""  # placeholder of a picture, for a model with pictures
        self.video_token = ""  # of a video
        self.video_template: str | None = None  # of conversations with videos, where they have another one

    @classmethod
    def open(cls, source: str | Path, context_max: int, shown: str | None = None) -> Tokens:
        """Load the tokenizer of the model in folder `source`, or of that name; ModelError if that fails.

        shown: the model's name in errors, as its user wrote it; None: `source` as it is.
        """
        from transformers import AutoTokenizer

        shown = shown or str(source)
        if not is_gguf(source) and Path(source).is_dir():
            try_tokenizer(Path(source), f"model {shown}")
        try:
            if is_gguf(source):
                with alone(source) as folder:
                    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=NAME, trust_remote_code=False)
            else:
                tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except Exception as error:  # transformers raises many kinds of errors
            reason = reason_without_path(error, source, shown)
            raise ModelError(f"model {shown}: its tokenizer cannot be loaded: {reason}") from None
        if not hasattr(tokenizer, "added_tokens_decoder"):
            raise ModelError(f"model {shown}: its tokenizer is of an unknown kind, {type(tokenizer).__name__}")
        return cls(tokenizer, context_max)

    @property
    def has_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    def is_control(self, id: int) -> bool:
        """Return whether a token is a control token, which no text of a user becomes."""
        return id in self._control_ids

    @property
    def template(self) -> str:
        """Return the text of the chat templates; '' without one."""
        found = self.tokenizer.chat_template or ""
        return "".join(map(str, found.values())) if isinstance(found, Mapping) else str(found)

    def added_ids(self, names: Sequence[str]) -> dict[str, int]:
        """Return the ids of those `names` that are single tokens beside the vocabulary."""
        return {name: self._added[name] for name in names if name in self._added}

    def skips(self, name: str) -> bool:
        """Return whether a name is that of a control token, which is left out of texts."""
        return self._added.get(name) in self._special_ids

    def ends_with(self, tokens: Sequence[int], text: str) -> bool:
        """Return whether the text of `tokens`, control tokens included, ends with `text` and white space."""
        return self._decoder(control=True)(tokens[-8:]).rstrip().endswith(text)

    def chat(
        self,
        messages: object,
        tools: object = None,
        media: Marks = NO_MARKS,
        options: TemplateOptions = DEFAULT_TEMPLATE,
    ) -> list[int]:
        """Return the tokens of a conversation, ready for the model's answer; InputError if it is invalid.

        tools:   tool definitions, as the chat template expects them.
        media:   characters that stand for pictures and videos in the texts.
        options: variables of the template, and the end of the prompt.
        """
        turns = fitted(check_messages(messages), self.template)
        end = _mark_end(turns) if options.continue_final_message else ""
        if self.image_token:
            turns = with_parts(turns, media)
        offered = None if tools is None else check_tools(tools)
        texts: list[str] = []

        def collect(text: str) -> str:
            texts.append(text)
            return text

        template = self._template(self.video_template if media.video_texts else None, offered)
        variables, documents = options.variables_of(template.reads), options.documents
        parts: dict[str, Any] = {"messages": turns, "tools": offered, "variables": variables, "documents": documents}
        owners: list[str] = []
        for name, part in parts.items():
            mapped(part, collect, name)
            owners += [name] * (len(texts) - len(owners))
        self._check_texts(texts, owners)
        marked, marks = self._mark(texts, self.video_token if media.video_texts else "")
        if marks:
            following = iter(marked)
            parts = {name: mapped(part, lambda text: next(following)) for name, part in parts.items()}
        try:
            text = template.render({
                **parts.pop("variables"), **self.tokenizer.special_tokens_map, **parts,
                "add_generation_prompt": options.add_generation_prompt and not end,
            })  # fmt: skip
        except Exception as error:  # templates raise on conversations they do not support
            raise InputError(f"messages: the model's chat template refuses them: {first_line(error):.300}") from error
        return self._encode(self._with_videos(_until(end, text) if end else text, media), marks, specials=False)

    def _template(self, source: str | None, tools: object) -> ChatTemplate:
        """Return a chat template, compiled once. source: None for the tokenizer's own."""
        from weftline.engine.llm.chat_template import ChatTemplate

        try:
            text = self.tokenizer.get_chat_template(source, tools)
            if text not in self._templates:
                self._templates[text] = ChatTemplate(text)
        except Exception as error:  # a template with a mistake, or none of this name
            raise InputError(f"messages: the model's chat template is wrong: {first_line(error):.300}") from error
        return self._templates[text]

    def raw(self, text: str, media: Marks = NO_MARKS, specials: bool = True) -> list[int]:
        """Return the tokens of `text`, without a template.

        media:    characters that stand for pictures and videos in the text.
        specials: True: with the tokenizer's prefix tokens.
        """
        self._check_text("prompt", text)
        [marked], marks = self._mark([text], self.video_token if media.video_texts else "")
        for mark, placeholder in ((media.image, self.image_token), (media.video, self.video_token)):
            if mark:
                marked = marked.replace(mark, placeholder)
        return self._encode(self._with_videos(marked, media), marks, specials)

    def _with_videos(self, text: str, media: Marks) -> str:
        """Return a rendered text with the text of each video in place of its placeholder."""
        if not media.video_texts:
            return text
        parts = text.split(self.video_token)
        if len(parts) != len(media.video_texts) + 1:
            found = f"{len(parts) - 1} placeholders for {len(media.video_texts)} videos"
            raise InputError(f"messages: the model's chat template writes {found}", param="messages")
        return parts[0] + "".join(shown + part for shown, part in zip(media.video_texts, parts[1:], strict=True))

    def encode_control(self, text: str) -> list[int]:
        """Return the tokens of a text of the model's own, in which names of control tokens are these tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def spell(self, word: str) -> list[tuple[int, ...]]:
        """Return the token sequences of a word, at the start of a text and after a space."""
        self._check_text("sampling.bad_words", word)
        ways = (self.tokenizer.encode(text, add_special_tokens=False) for text in (word, " " + word.lstrip()))
        return sorted({tuple(ids) for ids in ways if ids})

    def stream(self, stop: Sequence[str] = (), control: bool = False) -> TextStream:
        """Return a new stream that turns one answer's tokens into text. control: names of control tokens as well."""
        return TextStream(self._incremental(control), stop)

    def decode(self, ids: Sequence[int], control: bool = False) -> str:
        """Return the text of `ids`. control: with the names of control tokens."""
        return self._decoder(control)(ids)

    def name_of(self, id: int, control: bool = False) -> TokenName:
        """Return the name and bytes of a token. control: names of control tokens are part of the text."""
        key = id, control
        if key not in self._names:
            if id in self._special_ids:
                name = self.tokenizer.added_tokens_decoder[id].content
                self._names[key] = TokenName(name, name.encode() if control else None)
            else:
                data = self._bytes_of(id)
                self._names[key] = TokenName(data.decode("utf-8", "backslashreplace"), data)
        return self._names[key]

    def _bytes_of(self, id: int) -> bytes:
        """Return the bytes of a token inside a text."""
        decoder = self._incremental(control=True)
        if isinstance(decoder, BytesDecoder):
            return decoder.bytes_of(id)
        decode = self._decoder(control=True)  # behind itself, for the space that a token has at its beginning
        before = decode([id])
        return decode([id, id])[len(before) :].encode()

    def _incremental(self, control: bool) -> Decoder:
        if control not in self._texts:
            self._texts[control] = self._read_texts(control)
        texts = self._texts[control]
        if texts is not None:
            return BytesDecoder(texts)
        alone = self._alone.setdefault(control, {})
        return WindowDecoder(self._decoder(control), alone, frozenset() if control else self._special_ids)

    def _read_texts(self, control: bool) -> TokenTexts | None:
        backend = self._backend
        if backend is None or backend.decoder is None:
            return None
        added = self.tokenizer.added_tokens_decoder.values()
        skipped = frozenset() if control else frozenset(token.content for token in added if token.special)
        return token_texts(backend, json.loads(backend.decoder.__getstate__()), skipped)

    @property
    def _backend(self) -> Any:
        """Return the `tokenizers.Tokenizer`, where transformers does not change its decoded text."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None) or getattr(self.tokenizer, "_tokenizer", None)
        if backend is not None and getattr(self.tokenizer, "clean_up_tokenization_spaces", False):
            forced = getattr(self.tokenizer, _CLEAN_UP_BPE, False)
            return backend if type(backend.model).__name__ == "BPE" and not forced else None
        return backend

    def _decoder(self, control: bool = False) -> Callable[[Sequence[int]], str]:
        backend = self._backend
        if backend is not None:
            # ten times quicker than through the wrapper
            return (lambda ids: backend.decode(ids, skip_special_tokens=False)) if control else backend.decode
        return lambda ids: self.tokenizer.decode(list(ids), skip_special_tokens=not control)

    def _check_texts(self, texts: list[str], owners: Sequence[str]) -> None:
        """Check the texts of a conversation. owners: the part of the request that each is from."""
        if sum(map(len, texts)) > self.chars_max:
            message = f"prompt: more than {self.chars_max} characters, which cannot fit the model's context"
            raise ContextOverflow(message, param="prompt")
        for owner, text in zip(owners, texts, strict=True):
            self._check_text(owner, text)

    def _check_text(self, where: str, text: object) -> None:
        if not isinstance(text, str):
            raise InputError(f"{where}: found {type(text).__name__}, expected text")
        if len(text) > self.chars_max:
            message = f"{where}: found {len(text)} characters, expected at most {self.chars_max} for this model"
            raise ContextOverflow(message, param=where.rpartition(".")[2])
        try:
            text.encode()
        except UnicodeEncodeError as error:
            message = f"{where}: found a lone surrogate at {error.start}, expected valid text"
            raise InputError(message, param=where.rpartition(".")[2]) from error

    def _mark(self, texts: list[str], name: str = "") -> tuple[list[str], dict[str, str]]:
        """Return `texts` with every control token's name replaced by a mark, and what each mark stands for.

        name: another name to replace, which is no token.
        """
        if self._folds:
            self._refuse_disguised(texts)
        control = self._control
        if name:
            control = re.compile("|".join([re.escape(name), *([control.pattern] if control is not None else [])]))
        found = {name for text in texts for name in (control.findall(text) if control else ())}
        if not found or control is None:
            return texts, {}
        present = set().union(*texts)
        free = (chr(code) for code in _MARKS if chr(code) not in present)
        marks = dict(zip(sorted(found), free, strict=False))
        if len(marks) < len(found):
            raise InputError("prompt: too many control tokens and private characters in one text")
        return [control.sub(lambda m: marks[m.group()], text) for text in texts], {m: name for name, m in marks.items()}

    def _refuse_disguised(self, texts: list[str]) -> None:
        """Refuse texts that become a control token only when the tokenizer folds their letters (`＜` to `<`)."""
        for part in [part for text in texts for part in (self._control.split(text) if self._control else [text])]:
            if self._control_ids & set(self.tokenizer.encode(part, add_special_tokens=False)):
                raise InputError("prompt: letters that the tokenizer would fold into a control token; write it plainly")

    def _encode(self, text: str, marks: Mapping[str, str], specials: bool) -> list[int]:
        if not marks:
            return list(self.tokenizer.encode(text, add_special_tokens=specials))
        ids: list[int] = []
        for place, part in enumerate(re.split(f"([{''.join(marks)}])", text)):
            if part in marks:
                ids += self._spell(marks[part])
            elif part:
                ids += self.tokenizer.encode(part, add_special_tokens=specials and place == 0)
        return ids

    def _spell(self, name: str) -> list[int]:
        """Return a control token's name as ordinary text tokens."""
        if name not in self._spelled:
            ids = list(self.tokenizer.encode(name, add_special_tokens=False, split_special_tokens=True))
            if self._control_ids & set(ids):
                ids = [id for char in name for id in self.tokenizer.encode(char, add_special_tokens=False)]
            if self._control_ids & set(ids):
                raise InputError(f"prompt: contains the control token {name!r:.40}, which cannot be written as text")
            self._spelled[name] = ids
        return self._spelled[name]


ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGES_MAX = 1024
"""Most messages of one conversation."""
TOOLS_MAX = 128
"""Most tools offered to the model."""
DEPTH_MAX = 32
"""Deepest nesting of a tool call or a tool's schema."""
VALUES_MAX = 100_000
"""Most single values in a conversation, and in its tools."""
_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Return a conversation with contents as plain texts; InputError says which message is wrong, and how."""
    if not isinstance(messages, list) or not 0 < len(messages) <= MESSAGES_MAX:
        found = f"a list of {len(messages)}" if isinstance(messages, list) else type(messages).__name__
        raise InputError(f"messages: found {found}, expected a list of 1 to {MESSAGES_MAX} messages")
    return [_check_message(f"messages[{place}]", message) for place, message in enumerate(messages)]


def check_tools(tools: object) -> list[dict[str, Any]]:
    """Return the tools offered to the model; InputError unless they are a list of objects."""
    if not isinstance(tools, list) or len(tools) > TOOLS_MAX or not all(isinstance(one, Mapping) for one in tools):
        raise InputError(f"tools: expected a list of at most {TOOLS_MAX} objects", param="tools")
    return [dict(one) for one in tools]


def mapped(value: Any, change: Callable[[str], str], where: str = "messages") -> Any:
    """Return JSON-like `value` with every text in it, keys included, changed; InputError when it is too deep or big.

    where: the input that the value came in.
    """
    left = VALUES_MAX

    def visit(value: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if depth > DEPTH_MAX or left < 0:
            what = f"nested deeper than {DEPTH_MAX}" if depth > DEPTH_MAX else f"more than {VALUES_MAX} values"
            raise InputError(f"{where}: {what}", param=where)
        if isinstance(value, str):
            return change(value)
        if isinstance(value, Mapping):
            return {change(str(key)): visit(one, depth + 1) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [visit(one, depth + 1) for one in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        raise InputError(f"{where}: found a {type(value).__name__}, expected JSON", param=where)

    return visit(value, 0)


def _mark_end(turns: list[dict[str, Any]]) -> str:
    """Append a private-use character that no message has to the last one; return it."""
    present: set[str] = set()

    def collect(text: str) -> str:
        present.update(text)
        return text

    mapped(turns, collect)
    end = next((chr(code) for code in reversed(_MARKS) if chr(code) not in present), "")
    if not end:
        raise InputError("messages: too many private characters to continue the last one", param="messages")
    turns[-1]["content"] += end
    return end


def _until(end: str, text: str) -> str:
    """Return a rendered text up to the end of the last message."""
    before, found, _ = text.rpartition(end)
    if not found:
        message = "continue_final_message: the model's chat template leaves the last message out"
        raise InputError(message, param="continue_final_message")
    return before


def _check_message(where: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping) or "role" not in message or not set(message) <= _KEYS:
        known = ", ".join(sorted(_KEYS))
        raise InputError(f"{where}: expected an object with role and content; known keys: {known}")
    if message["role"] not in ROLES:
        raise InputError(f"{where}.role: found {message['role']!r:.40}, expected {', '.join(ROLES)}")
    checked = {key: value for key, value in message.items() if value is not None}
    checked["content"] = _content(f"{where}.content", message.get("content"), "tool_calls" in checked)
    if isinstance(calls := checked.get("tool_calls"), list):
        checked["tool_calls"] = [_with_arguments(call) for call in calls]
        if not calls:  # templates take a list for calls, whatever is in it
            del checked["tool_calls"]
    return checked


def _with_arguments(call: Any) -> Any:
    """Return a tool call with its arguments as an object, which templates expect; OpenAI's clients send JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = parse(arguments.strip() or "{}", FILES)
        except NotJson:
            return call
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        return call
    named = {"name": function["name"]} if "name" in function else {}  # first, as models write it
    return {"type": "function", **call, "function": {**named, **function, "arguments": arguments}}


def _content(where: str, content: object, optional: bool) -> str:
    """Return content as one text: it may come as a list of text parts, or be absent beside tool calls."""
    if content is None and optional:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        for place, part in enumerate(content):
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise InputError(
                    f"{where}[{place}]: found a part of type {kind!s:.40}, expected {{type: text, text: ...}}"
                )
        return "".join(part["text"] for part in content)
    raise InputError(f"{where}: found {type(content).__name__}, expected text")
