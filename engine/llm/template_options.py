"""Options of a request's prompt: the input `template` of an llm step. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from weftline.errors import InputError
from weftline.nodes.field_checks import read_fields, shown, unknown_key

VARIABLES_MAX = 64
DOCUMENTS_MAX = 1024
TOKENS_MAX = 1 << 20
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""Efforts of reasoning, as OpenAI and vLLM have them."""

THINKING = ("enable_thinking", "thinking")
"""Names that chat templates have for the switch of reasoning: Qwen's and GLM's, DeepSeek's and Kimi's."""
RESERVED = ("messages", "tools", "add_generation_prompt", "documents")


class TemplateOptions(Struct, frozen=True):
    """Options of the chat template of one request.

    apply:                  false: a prompt is the model's text as it is, without chat template and system message.
    add_special_tokens:     such a text begins with the tokenizer's prefix tokens.
    variables:              further variables of the template, such as enable_thinking.
    reasoning_effort:       sets the variable of that name, and those of THINKING, where the template reads them.
    documents:              texts for retrieval, for templates that read them.
    add_generation_prompt:  the prompt ends with the beginning of an answer.
    continue_final_message: the prompt ends with the text of the last message, which the answer continues.
    tokens:                 the prompt as token ids of the model, in place of its text; control tokens among them count.
    generate:               false: `answers` has the tokens of the prompt, and no answer.
    """

    apply: bool = True
    add_special_tokens: bool = True
    variables: Annotated[dict[str, Any], Meta(max_length=VARIABLES_MAX)] = {}
    reasoning_effort: Effort | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=DOCUMENTS_MAX)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tokens: Annotated[list[int], Meta(max_length=TOKENS_MAX)] | None = None
    generate: bool = True

    @classmethod
    def read(cls, value: object) -> TemplateOptions:
        """Parse the input; None has the defaults. InputError names a wrong key."""
        if value is None:
            return DEFAULT_TEMPLATE
        known = cls.__struct_fields__
        if not isinstance(value, Mapping):
            raise InputError(f"template: found {shown(value)}, expected an object with keys {', '.join(known)}")
        for key in value:
            if key not in known:
                raise InputError(f"template.{key!s:.40}: {unknown_key(str(key)[:40], known)}", param="template")
        options = read_fields(cls, value)
        taken = next((name for name in options.variables if name in RESERVED), None)
        if taken is not None:
            message = f"variables: found {taken}, which is set from the request's own field"
            raise InputError(message, param="variables")
        return options

    def variables_of(self, reads: frozenset[str]) -> dict[str, Any]:
        """Return the variables of the request. reads: names that the template reads.

        InputError for an effort of reasoning on a template without a variable for it.
        """
        effort = self.reasoning_effort
        if effort is None:
            return self.variables
        found = {"reasoning_effort": effort, **dict.fromkeys(THINKING, effort != "none")}
        if reads.isdisjoint(found) and effort != "none":
            message = "reasoning_effort: the model's chat template has no variable for it; leave it out"
            raise InputError(message, param="reasoning_effort")
        return {name: one for name, one in found.items() if name in reads} | self.variables


DEFAULT_TEMPLATE = TemplateOptions()
