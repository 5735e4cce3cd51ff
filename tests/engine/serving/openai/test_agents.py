"""Agent frameworks whose protocol is the Responses API: openai-agents, and the AI SDK of Node (`make setup-slow`).

Models are random and their calls forced: what matters is that the frameworks accept each answer and go on with it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.engine.serving.http.hosted import Hosted
from tests.engine.serving.openai.test_tool_calls import SCHEMA, hosted_callers

BUILD = Path(__file__).resolve().parents[4] / "build"
FRAMEWORKS = BUILD / "frameworks/bin/python"
TOOLS: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
FORCED: Any = {"type": "function", "name": "weather"}
pytestmark = pytest.mark.slow

AGENT = """
import asyncio, json, sys
from typing import Literal
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
called = []

@function_tool
def weather(unit: Literal["C", "F"], days: Literal[1, 2, 3]) -> str:
    called.append([unit, days])
    return "rain"

settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=150, temperature=1)
model = OpenAIResponsesModel(model=sys.argv[2], openai_client=client)
agent = Agent(name="forecast", instructions="Be brief.", model=model, tools=[weather], model_settings=settings)

async def main():
    first = await Runner.run(agent, "Will it rain?", auto_previous_response_id=True)
    once = agent.clone(tool_use_behavior="stop_on_first_tool")
    second = Runner.run_streamed(once, "And tomorrow?", previous_response_id=first.last_response_id)
    events = [event.data.type async for event in second.stream_events() if event.type == "raw_response_event"]
    kinds = [[item.type for item in run.new_items] for run in (first, second)]
    usage = [run.context_wrapper.usage.output_tokens for run in (first, second)]
    outputs = [run.final_output for run in (first, second)]
    print(json.dumps({"called": called, "kinds": kinds, "outputs": outputs, "usage": usage, "events": events}))

asyncio.run(main())
"""

SDK = """
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const openai = createOpenAI({ baseURL: process.argv[2], apiKey: "none" });
const model = openai(process.argv[3]);
const called = [];
const weather = tool({
  description: "Forecast the weather.",
  inputSchema: z.object({ unit: z.enum(["C", "F"]), days: z.literal([1, 2, 3]) }),
  execute: async (input) => { called.push(input); return { sky: "rain" }; },
});
const asked = { model, maxRetries: 0, maxOutputTokens: 150, temperature: 1, tools: { weather },
  stopWhen: stepCountIs(2), system: "Be brief.", prompt: "Will it rain?",
  providerOptions: { openai: { parallelToolCalls: false } },
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" }) };
const whole = await generateText(asked);
const stream = streamText({ ...asked, onError: ({ error }) => { throw error; } });
let pieces = 0, text = "";
for await (const part of stream.textStream) { pieces += 1; text += part; }
const steps = await stream.steps;
const { object } = await generateObject({ model, maxRetries: 0, maxOutputTokens: 150, prompt: "How many?",
  schema: z.object({ count: z.enum(["seven", "eleven"]) }) });
const plain = await generateText({ model, maxRetries: 0, maxOutputTokens: 20, prompt: "Hello",
  providerOptions: { openai: { store: false, include: ["reasoning.encrypted_content"], reasoningSummary: "auto" } } });
const id = plain.providerMetadata.openai.responseId;
const next = await generateText({ model, maxRetries: 0, maxOutputTokens: 20, prompt: "And?",
  providerOptions: { openai: { previousResponseId: whole.providerMetadata.openai.responseId } } });
const thought = streamText({ model: openai(process.argv[4]), maxRetries: 0, maxOutputTokens: 20, prompt: "Why?" });
const parts = [];
for await (const part of thought.fullStream) parts.push(part.type);
console.log(JSON.stringify({ parts, thought: await thought.finishReason, called, object, pieces, text, id,
  steps: [whole.steps, steps].map((all) => all.map((one) => [one.toolCalls.length, one.finishReason])),
  tokens: [whole.totalUsage.outputTokens, next.usage.inputTokens], end: steps.at(-1).text }));
"""


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    folder = tmp_path_factory.mktemp("pipelines")
    with hosted_callers(folder, max_position_embeddings=2048) as endpoint:
        yield endpoint


def run(command: list[str], **environment: str) -> dict[str, Any]:
    """Run a program and return the JSON that it prints."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})
    assert ended.returncode == 0, ended.stderr[-4000:]
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def test_an_agent_of_openai_calls_its_tool_and_goes_on(endpoint: Hosted, tmp_path: Path) -> None:
    if not FRAMEWORKS.exists():
        pytest.skip("build/frameworks is not installed: make setup-slow")
    (tmp_path / "agent.py").write_text(AGENT)
    found = run([str(FRAMEWORKS), str(tmp_path / "agent.py"), f"{endpoint.url}/v1", "calls"])
    assert len(found["called"]) == 2
    assert all(unit in ("C", "F") and days in (1, 2, 3) for unit, days in found["called"])
    first, second = found["kinds"]
    assert first == ["tool_call_item", "tool_call_output_item", "message_output_item"] and second == first[:2]
    assert found["outputs"][0] and found["outputs"][1] == "rain" and all(found["usage"])
    assert found["events"].count("response.created") == 1
    assert "response.function_call_arguments.done" in found["events"]


def test_the_ai_sdk_generates_streams_calls_tools_and_objects(endpoint: Hosted, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None or not (BUILD / "npm/node_modules/@ai-sdk/openai").is_dir():
        pytest.skip("the npm packages ai and @ai-sdk/openai are not installed: make setup-slow")
    (tmp_path / "node_modules").symlink_to(BUILD / "npm/node_modules")
    (tmp_path / "sdk.mjs").write_text(SDK)
    found = run([node, str(tmp_path / "sdk.mjs"), f"{endpoint.url}/v1", "calls", "thinks"])
    assert len(found["called"]) == 2 and found["object"]["count"] in ("seven", "eleven")
    for steps in found["steps"]:
        assert steps[0] == [1, "tool-calls"] and steps[1][0] == 0
    assert found["pieces"] > 1 and found["text"].endswith(found["end"]) and found["id"].startswith("resp_")
    assert all(found["tokens"]) and found["thought"] == "length"
    assert "reasoning-start" in found["parts"] and "error" not in found["parts"]


@pytest.mark.parametrize("model", ["calls", "thinks"])
def test_a_streamed_response_of_a_model_is_the_whole_one(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "input": "Will it rain?", "max_output_tokens": 120, "tools": TOOLS}
    for choice in ("auto", FORCED):
        whole = client.responses.create(tool_choice=choice, **asked)
        with client.responses.stream(tool_choice=choice, **asked) as stream:
            events = list(stream)
        streamed = events[-1].response  # type: ignore[union-attr]
        for one in (whole, streamed):
            Response.model_validate(one.to_dict(), strict=True)
        contents = [[_content(item) for item in one.output] for one in (whole, streamed)]
        assert contents[0] == contents[1] and whole.status == streamed.status
        assert whole.usage is not None and whole.usage.output_tokens == streamed.usage.output_tokens


def _content(item: Any) -> tuple[Any, ...]:
    if item.type == "function_call":
        return item.type, item.status, item.call_id, item.name, item.arguments
    return item.type, item.status, [part.text for part in item.content]


def test_reasoning_is_an_item_with_its_tokens(client: openai.OpenAI) -> None:
    found = client.responses.create(model="thinks", input="Will it rain?", max_output_tokens=8)
    assert [one.type for one in found.output] == ["reasoning"] and found.status == "incomplete"
    assert found.incomplete_details is not None and found.incomplete_details.reason == "max_output_tokens"
    assert found.usage is not None
    assert found.usage.output_tokens_details.reasoning_tokens == found.usage.output_tokens == 8
