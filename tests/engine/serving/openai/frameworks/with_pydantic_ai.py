"""pydantic-ai: an agent with a tool and typed output, whole and streamed, over OpenAIChatModel."""

import asyncio
import sys

from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, ModelRetry, NativeOutput, ToolOutput, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, TOKEN = sys.argv[1:3]
HI = "The photo shows: 2 red circles.\nQuestion: How many red circles are there?"


class Weather(BaseModel):
    rain: bool


client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=TOKEN, max_retries=0)


def model(name: str) -> OpenAIChatModel:
    return OpenAIChatModel(name, provider=OpenAIProvider(openai_client=client))


async def main() -> None:
    plain = Agent(model("chat"), model_settings={"temperature": 0})
    assert (await plain.run(HI)).output == "There are 2 red circles."
    async with plain.run_stream(HI) as stream:
        assert await stream.get_output() == "There are 2 red circles."
    goes_on = await plain.run(HI, message_history=(await plain.run(HI)).all_messages())
    assert goes_on.output and goes_on.usage.input_tokens > 20, goes_on

    for output in (ToolOutput(Weather), NativeOutput(Weather)):
        agent = Agent(model("calls"), output_type=output, retries=3)
        found = await agent.run("Will it rain?")
        assert isinstance(found.output, Weather), found
        async with agent.run_stream("Will it rain?") as stream:
            assert isinstance(await stream.get_output(), Weather)

    refused = []
    agent = Agent(model("calls"), output_type=ToolOutput(Weather), retries=3)

    @agent.output_validator
    def refuse_first(output: Weather) -> Weather:
        refused.append(output)
        if len(refused) == 1:
            raise ModelRetry("again")
        return output

    assert isinstance((await agent.run("Will it rain?")).output, Weather) and len(refused) == 2

    called = []
    agent = Agent(model("calls"), output_type=ToolOutput(Weather), retries=3)

    @agent.tool_plain
    def forecast(days: bool) -> str:
        """Return the forecast."""
        called.append(days)
        return "rain"

    # A random model chooses one of two forced calls, so that it may call the tool for ever.
    for seed in range(8):
        limits = UsageLimits(request_limit=6)
        try:
            found = await agent.run("Will it rain?", usage_limits=limits, model_settings={"seed": seed})
        except UsageLimitExceeded:
            continue
        assert isinstance(found.output, Weather), found
    assert called

    try:
        await Agent(model("nope")).run("hi")
    except ModelHTTPError as error:
        assert error.status_code == 404, error
    else:
        raise AssertionError("no error of an unknown model")


asyncio.run(main())
