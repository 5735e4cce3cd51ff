"""Output of a request: text and finish reason of each answer, and the outputs of the whole request.

A round adds one token to an answer, or several when draft tokens were accepted. `SequenceOutput` detokenizes them, ends
the answer at a stop token, a stop string or its length limit, and drops tokens after the end. `RequestOutput` collects
the updates of all answers of one request.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weftline.engine.llm.answer_parser import AnswerParser, AnswerParts
from weftline.engine.llm.answer_syntax import AnswerSyntax
from weftline.engine.llm.detokenizer import TextStream, TokenName
from weftline.engine.llm.request import SampledToken, TokenUpdate
from weftline.engine.llm.sequence import Sequence
from weftline.errors import InputError

if TYPE_CHECKING:
    from weftline.engine.llm.tokens import Tokens

_EMPTY = TokenUpdate(-1)


class SequenceOutput:
    """Text and finish reason of `sequence`.

    ends: the model's end-of-text tokens.   text: detokenizer, which also matches stop strings; None: tokens only.
    """

    def __init__(self, sequence: Sequence, ends: frozenset[int], text: TextStream | None, echo: str = "") -> None:
        params = sequence.params
        self._empty = params.tokens_max == 0
        self._stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else ends)
        self._text = text
        self._echo = echo
        self._known = len(sequence.tokens)
        self._limit = sequence.limit

    def add(self, update: TokenUpdate) -> None:
        """Set text and finish reason of `update`, and cut its tokens after the one that ends the answer.

        `finish` is already 'stop' where a constraint permits nothing after the last token.
        """
        if len(update.tokens) != 1 or update.finish or self._echo or self._empty or update.tokens[0] in self._stops:
            self.add_all(update)
            return
        self._known += 1  # nearly all rounds add one token that ends nothing
        finish = "length" if self._known >= self._limit else None
        stream = self._text
        if stream is not None:
            update.text = stream.push(update.tokens[0])
            if finish is not None and not stream.stopped:
                update.text += stream.finish()  # held-back text may complete a stop string
            if stream.stopped:
                finish, update.stop_string = "stop", stream.matched
        update.finish = finish

    def add_all(self, update: TokenUpdate) -> None:
        """Do the same for any number of tokens, stop tokens and echoed prompts included."""
        text, self._echo = self._echo, ""
        if self._empty:
            update.text, update.finish, update.logprobs = text, "length", ()
            return
        finish = None
        for count, token in enumerate(update.tokens, start=1):
            self._known += 1
            ended = token in self._stops
            complete = update.finish is not None and count == len(update.tokens)
            finish = "stop" if ended or complete else "length" if self._known >= self._limit else None
            if self._text is not None:
                text += "" if ended else self._text.push(token)
                if finish is not None and not self._text.stopped:
                    text += self._text.finish()
                if self._text.stopped:
                    finish, update.stop_string = "stop", self._text.matched
            if finish is not None:
                update.tokens, update.logprobs = update.tokens[:count], update.logprobs[:count]
                break
        update.text, update.finish = text, finish


@dataclass(slots=True)
class _Answer:
    """One answer so far.

    latest:           the newest update, whose counts are those of the whole answer.
    reasoning_tokens: tokens of rounds that added to the reasoning, its end included.
    """

    parser: AnswerParser | None = None
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # as the outputs have them
    latest: TokenUpdate = field(default_factory=lambda: _EMPTY)
    reasoning_tokens: int = 0

    @property
    def parts(self) -> AnswerParts:
        """Return content, reasoning and tool calls so far."""
        return AnswerParts("".join(self.texts)) if self.parser is None else self.parser.parts

    @property
    def finish(self) -> str | None:
        """Return why the answer ended: stop, length, or tool_calls."""
        finish = self.latest.finish
        return "tool_calls" if finish == "stop" and self.parser is not None and self.parser.has_calls else finish


def prompt_outputs(prompt: SequenceOf[int], tokens: Tokens, context_max: int) -> dict[str, Any]:
    """Return the outputs of a request without an answer: the tokens of its prompt, and their text."""
    names = [tokens.name_of(token, control=True).text for token in prompt]
    answer = {"index": 0, "text": tokens.decode(prompt, control=True), "finish_reason": "stop"}
    return {
        "text": answer["text"],
        "reasoning": "",
        "tool_calls": [],
        "usage": {
            "prompt_tokens": len(prompt), "completion_tokens": 0, "cached_tokens": 0, "finish_reason": "stop",
        },
        "logprobs": [],
        "answers": [answer | {"prompt_token_ids": list(prompt), "prompt_tokens": names, "context_max": context_max}],
    }  # fmt: skip


class RequestOutput:
    """Answers of one request.

    name:   name and bytes of a token, for log-probabilities.
    syntax: notation of reasoning and tool calls; None: all text is content.
    first:  first token of the prompt, which has no log-probability.
    """

    def __init__(
        self,
        count: int,
        name: Callable[[int], TokenName],
        syntax: AnswerSyntax | None = None,
        first: int = 0,
    ) -> None:
        parsers = [None if syntax is None else AnswerParser(syntax, index) for index in range(count)]
        self._answers = [_Answer(parser) for parser in parsers]
        self._name = name
        self._first = first
        self._forced = syntax is not None and syntax.forced
        self._prompt: tuple[SampledToken, ...] = ()
        self._latest = _EMPTY  # of any answer

    @property
    def streams(self) -> bool:
        """Return whether text is streamed: of a single answer, not of several at once."""
        return len(self._answers) == 1

    @property
    def begun(self) -> bool:
        """Return whether any update was added."""
        return self._latest is not _EMPTY

    def add(self, update: TokenUpdate) -> dict[str, Any]:
        """Add an update; return what it adds to the streamed outputs."""
        answer = self._answers[update.index]
        answer.latest = self._latest = update
        scored: dict[str, Any] = {}
        if update.logprobs:
            new = list(map(self._token, update.logprobs))
            answer.logprobs += new
            scored = {"logprobs": new} if self.streams else {}
        if update.prompt_logprobs:
            self._prompt = update.prompt_logprobs
        if answer.parser is None:
            if not update.text:
                return scored
            answer.texts.append(update.text)
            return {**scored, "text": update.text}
        begun = answer.parser.in_reasoning
        added = answer.parser.push(update.text, final=update.finish is not None)
        if begun or answer.parser.in_reasoning:
            answer.reasoning_tokens += len(update.tokens)
        texts = {name: text for name, text in (("text", added.content), ("reasoning", added.reasoning)) if text}
        return {**scored, **texts}

    def outputs(self) -> dict[str, Any]:
        """Return the step's outputs: parts and usage of the first answer, and all answers."""
        first = self._answers[0]
        parts = first.parts
        usage = {
            "prompt_tokens": self._latest.prompt_tokens,
            "completion_tokens": sum(answer.latest.completion_tokens for answer in self._answers),
            "cached_tokens": self._latest.cached_tokens,
            "finish_reason": first.finish,
        }
        if first.latest.stop_string:
            usage["stop_string"] = first.latest.stop_string
        if reasoning := sum(answer.reasoning_tokens for answer in self._answers):
            usage["reasoning_tokens"] = reasoning
        if any(answer.latest.drafted_tokens for answer in self._answers):
            usage["draft_tokens"] = sum(answer.latest.drafted_tokens for answer in self._answers)
            usage["accepted_tokens"] = sum(answer.latest.accepted_tokens for answer in self._answers)
        answers = [self._to_json(index, answer) for index, answer in enumerate(self._answers)]
        if self._prompt:
            answers[0]["prompt_logprobs"] = [self._unscored(self._first), *map(self._token, self._prompt)]
        return {
            "text": parts.content,
            "reasoning": parts.reasoning,
            "tool_calls": list(parts.calls),
            "usage": usage,
            "logprobs": answers[0].get("logprobs", []),
            "answers": answers,
        }

    def named_error(self, error: Exception) -> Exception:
        """Return an error about the grammar of a forced call as one about the tools that it was made of."""
        if not (self._forced and isinstance(error, InputError) and error.param == "grammar"):
            return error
        return InputError(f"tools: {str(error).removeprefix('sampling.grammar: ')}", param="tools")

    def _to_json(self, index: int, answer: _Answer) -> dict[str, Any]:
        parts = answer.parts
        body: dict[str, Any] = {"index": index, "text": parts.content, "finish_reason": answer.finish}
        if answer.latest.stop_string:
            body["stop_string"] = answer.latest.stop_string
        if parts.reasoning:
            body["reasoning"] = parts.reasoning
        if parts.calls:
            body["tool_calls"] = list(parts.calls)
        if answer.logprobs:
            body["logprobs"] = answer.logprobs
        return body

    def _token(self, one: SampledToken) -> dict[str, Any]:
        top = [self._named(token) | {"logprob": logprob} for token, logprob in one.top]
        return self._named(one.token) | {"logprob": one.logprob, "top": top}

    def _unscored(self, token: int) -> dict[str, Any]:
        return self._named(token) | {"logprob": None, "top": []}

    def _named(self, token: int) -> dict[str, Any]:
        name = self._name(token)
        return {"id": token, "token": name.text, "bytes": None if name.data is None else list(name.data)}
