"""Answer format of a model: its notation of reasoning and tool calls, applied to requests.

`AnswerFormat.prepare` is called once per request. It returns the syntax for the parser of the answers. Where a call is
required, it adds the grammar of the calls to the sampling options; where the answer is JSON of a schema and there are
tools, that of either.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weftline.engine.llm.answer_syntax import (
    END_THINK,
    FORCED_FORMATS,
    MARKED_FORMATS,
    MARKS,
    OPENING,
    THINK,
    AnswerSyntax,
    find_tool_format,
)
from weftline.engine.llm.grammar.constraint import Constraint
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.tool_choice import ToolRequest
from weftline.engine.llm.vision.prompt import PromptImage
from weftline.errors import InputError

if TYPE_CHECKING:
    from weftline.engine.llm.tokens import Tokens

KEY_TOKENS = 1024
"""Last tokens of the prompt that the ids of calls depend on."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request with its answer's notation.

    syntax: None: all text of the answer is content.
    images: pictures of the prompt.
    """

    prompt: list[int]
    params: SamplingParams
    syntax: AnswerSyntax | None
    images: tuple[PromptImage, ...] = ()


class AnswerFormat:
    """Answer format of one model.

    tools:   format of its tool calls; '' if none is known.
    reasons: True if its answers may begin with reasoning.
    """

    def __init__(self, tool_format: str, reasoning: str, tokens: Tokens) -> None:
        """tool_format, reasoning: as in LlmConfig."""
        self.tools, self.reasons = read_notation(tool_format, reasoning, tokens.template)
        self._tokens = tokens

    def prepare(self, request: ToolRequest, prompt: list[int], params: SamplingParams) -> Prepared:
        """Return prompt, options and notation of a request; InputError where its tool choice cannot be met."""
        if request.forced:
            self._check_forced(params)
        tools = self.tools if request.offered else ""
        if params.echo or not (tools or self.reasons):
            return Prepared(prompt, params, None)
        # a constraint begins with the answer: there is no reasoning before it
        thinking = self.reasons and not params.constraint and self._tokens.ends_with(prompt, THINK)
        syntax = AnswerSyntax(
            tools=tools,
            schemas=request.schemas() if tools else {},
            reasoning=self.reasons,
            thinking=thinking,
            forced=request.forced,
            calls_max=request.calls_max,
            key=b"".join(token.to_bytes(4, "little") for token in prompt[-KEY_TOKENS:]) if tools else b"",
        )
        schema = params.json_schema or ({"type": "object"} if params.json_object else None)
        if request.forced:
            params = replace(params, grammar=request.grammar(tools, self._tokens.added_ids(MARKS), thinking))
        elif schema is not None and tools in MARKED_FORMATS:  # the answer is a call, or JSON
            Constraint.read(params.constraint)
            grammar = request.grammar(tools, self._tokens.added_ids(MARKS), False, schema)
            params = replace(params, json_schema=None, json_object=False, grammar=grammar)
        if self._has_special_marks(syntax):
            params = replace(params, skip_special_tokens=False)
        return Prepared(prompt, params, syntax)

    def _check_forced(self, params: SamplingParams) -> None:
        if self.tools not in FORCED_FORMATS:
            why = f"in the notation {self.tools}" if self.tools else "if the notation of the model's calls is not known"
            fix = f"send tool_choice auto, or set tool_format of the step to {', '.join(FORCED_FORMATS)}"
            raise InputError(f"tool_choice: a call cannot be required {why}; {fix}", param="tool_choice")
        found = next(iter(params.constraint), "echo" if params.echo else "")
        if found:
            raise InputError(
                f"tool_choice: a required call and sampling.{found} exclude each other", param="tool_choice"
            )

    def _has_special_marks(self, syntax: AnswerSyntax) -> bool:
        marks = [OPENING[syntax.tools]] if syntax.tools else []
        marks += [THINK, END_THINK] if syntax.reasoning else []
        return any(map(self._tokens.skips, marks))


def read_notation(tool_format: str, reasoning: str, template: str) -> tuple[str, bool]:
    """Return the format of tool calls ('' for none), and whether reasoning is separated. template: '' for none."""
    found = {"auto": find_tool_format(template), "none": ""}
    return found.get(tool_format, tool_format), reasoning == "auto" and END_THINK in template
