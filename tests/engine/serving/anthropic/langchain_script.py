"""Use a server through LangChain's ChatAnthropic: `langchain_script.py URL`; prints what it received as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}


def main(url: str) -> dict[str, Any]:
    options: dict[str, Any] = {"base_url": url, "api_key": "none", "max_retries": 0}
    model = ChatAnthropic(model="calls", max_tokens=40, stop=["no such text"], **options)
    long = ChatAnthropic(model="calls", max_tokens=200, **options)
    said = [SystemMessage("Be short."), HumanMessage("Will it rain?")]
    whole = model.invoke(said)
    pieces = list(model.stream(said))
    called = long.bind_tools([WEATHER], tool_choice="weather", parallel_tool_calls=False).invoke(said)
    result = ToolMessage("rain", tool_call_id=called.tool_calls[0]["id"], status="error")
    after = model.invoke([*said, called, result, HumanMessage("And?")])
    shaped = long.with_structured_output(SCHEMA | {"title": "weather"}, method="json_schema").invoke(said)
    thinks = ChatAnthropic(model="thinks", max_tokens=8, thinking={"type": "adaptive"}, **options)
    thinking = thinks.invoke(said)
    again = model.invoke([*said, AIMessage(thinking.content), HumanMessage("And?")])
    return {
        "whole": whole.text, "streamed": "".join(piece.text for piece in pieces), "usage": whole.usage_metadata,
        "stop": whole.response_metadata["stop_reason"], "calls": called.tool_calls, "after": after.text,
        "shaped": shaped, "thinking": [one["type"] for one in thinking.content], "again": again.text,
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
