"""langchain-openai: invoke, stream, tools, structured output, log-probabilities, token counts and embeddings."""

import sys

import openai
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

URL, TOKEN, LIMITED = sys.argv[1:4]
HI = "The photo shows: 2 red circles.\nQuestion: How many red circles are there?"
ANSWER = "There are 2 red circles."


class Weather(BaseModel):
    """The weather of a day."""

    rain: bool


@tool
def forecast(rain: bool) -> str:
    """Return the forecast."""
    return f"rain: {rain}"


def model(name: str, **more) -> ChatOpenAI:
    return ChatOpenAI(**{"model": name, "base_url": f"{URL}/v1", "api_key": TOKEN, "max_retries": 0, **more})


def raised(error: type[Exception], work) -> None:
    try:
        work()
    except error:
        return
    raise AssertionError(f"no {error.__name__}")


chat = model("chat", temperature=0)
whole = chat.invoke([SystemMessage("You answer in one sentence."), HumanMessage(HI)])
assert whole.usage_metadata["input_tokens"] > 10 and whole.response_metadata["finish_reason"] == "stop", whole
assert chat.invoke(HI).content == ANSWER
pieces = list(chat.stream(HI, stream_usage=True))
assert "".join(str(one.content) for one in pieces) == ANSWER and len(pieces) > 3
total = pieces[0]
for one in pieces[1:]:
    total += one
assert total.usage_metadata["output_tokens"] > 2, total
scored = model("chat", temperature=0, logprobs=True, top_logprobs=2).invoke(HI)
assert len(scored.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2
assert chat.batch([HI, HI])[1].content == ANSWER
assert chat.invoke([HumanMessage([{"type": "text", "text": HI}])]).content == ANSWER
assert model("gpt-4o").get_num_tokens("two red circles") > 1
assert model("gpt-4o").get_num_tokens_from_messages([HumanMessage(HI)]) > 10

complete = OpenAI(model="complete", base_url=f"{URL}/v1", api_key=TOKEN, max_retries=0, max_tokens=5, temperature=0)
assert complete.invoke("The photo") == "".join(complete.stream("The photo"))

calls = model("calls", temperature=1, seed=3)
for choice in ("any", "forecast", "required"):
    bound = calls.bind_tools([forecast], tool_choice=choice, parallel_tool_calls=False)
    called = bound.invoke(HI)
    assert called.tool_calls[0]["name"] == "forecast" and isinstance(called.tool_calls[0]["args"]["rain"], bool), called
    streamed = None
    for one in bound.stream(HI):
        streamed = one if streamed is None else streamed + one
    assert streamed.tool_calls[0]["args"].keys() == {"rain"}, streamed
result = forecast.invoke(called.tool_calls[0])
assert isinstance(result, ToolMessage)
free = calls.bind_tools([forecast], tool_choice="none").bind(max_tokens=4)
assert isinstance(free.invoke([HumanMessage(HI), called, result]), AIMessage)
assert isinstance(
    calls.bind(max_tokens=4).invoke([HumanMessage(HI), called, result, AIMessage("it rains"), HumanMessage(HI)]),
    AIMessage,
)
for method in ("function_calling", "json_schema"):
    found = calls.with_structured_output(Weather, method=method).invoke(HI)
    assert isinstance(found, Weather), found
    raw = calls.with_structured_output(Weather, method=method, include_raw=True).invoke(HI)
    assert raw["parsing_error"] is None and isinstance(raw["parsed"], Weather), raw
    assert list(calls.with_structured_output(Weather, method=method).stream(HI))[-1] is not None
found = model("calls", seed=3, max_tokens=2000).with_structured_output(None, method="json_mode").invoke(HI)
assert isinstance(found, dict), found
schema = Weather.model_json_schema()
assert isinstance(calls.with_structured_output(schema, method="json_schema", strict=True).invoke(HI)["rain"], bool)

long = "the user asks and the assistant answers " * 400
raised(ContextOverflowError, lambda: chat.invoke(long))
raised(ContextOverflowError, lambda: list(chat.stream(long)))
raised(openai.NotFoundError, lambda: model("nope").invoke(HI))
limited = model("chat", api_key=LIMITED, max_tokens=1)
limited.invoke(HI)
raised(openai.RateLimitError, lambda: limited.invoke(HI))
assert model("nope").with_fallbacks([chat]).invoke(HI).content == ANSWER

texts = OpenAIEmbeddings(model="embed", base_url=f"{URL}/v1", api_key=TOKEN, check_embedding_ctx_length=False)
[one, two] = texts.embed_documents(["two red circles", "a blue star"])
assert len(one) == len(two) == len(texts.embed_query("two red circles")) and one != two
# By default it sends token ids, of OpenAI's vocabulary, whose first ids are characters.
ids = OpenAIEmbeddings(model="embed", base_url=f"{URL}/v1", api_key=TOKEN)
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=TOKEN)
[wanted] = client.embeddings.create(model="embed", input=[[64]], encoding_format="float").data
found = ids.embed_query("a")
assert max(abs(a - b) for a, b in zip(found, wanted.embedding, strict=True)) < 1e-5
assert found != texts.embed_query("a")
raised(openai.BadRequestError, lambda: ids.embed_query("two red circles"))
