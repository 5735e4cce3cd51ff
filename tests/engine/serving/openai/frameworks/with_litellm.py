"""litellm: completions, streams, forced calls, JSON, embeddings, and the exceptions that its fallbacks act on."""

import json
import sys

import litellm
from pydantic import BaseModel

URL, TOKEN, LIMITED = sys.argv[1:4]
HI = [{"role": "user", "content": "The photo shows: 2 red circles.\nQuestion: How many red circles are there?"}]
ANSWER = "There are 2 red circles."
PARAMETERS = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}
PARAMETERS["additionalProperties"] = False
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


class Weather(BaseModel):
    unit: bool


def ask(model: str, **more):
    given = {"messages": HI, "api_base": f"{URL}/v1", "api_key": TOKEN, "num_retries": 0, **more}
    return litellm.completion(model=f"openai/{model}", **given)


def raised(error: type[Exception], **more) -> None:
    try:
        ask(**more)
    except error as found:
        assert type(found) is error, repr(found)
    else:
        raise AssertionError(f"no {error.__name__}")


whole = ask("chat", temperature=0)
assert whole.choices[0].message.content == ANSWER, whole
assert whole.usage.prompt_tokens > 10 and whole.usage.completion_tokens > 2, whole.usage
chunks = list(ask("chat", temperature=0, stream=True, stream_options={"include_usage": True}))
assert litellm.stream_chunk_builder(chunks, messages=HI).choices[0].message.content == ANSWER
assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
for stream in (False, True):
    called = ask("calls", tools=TOOLS, tool_choice="required", parallel_tool_calls=False, stream=stream)
    called = litellm.stream_chunk_builder(list(called), messages=HI) if stream else called
    assert called.choices[0].finish_reason == "tool_calls", called
    [call] = called.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["unit"] in ("C", "F"), call
result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
history = [*HI, called.choices[0].message, result]
assert ask("calls", messages=history, tools=TOOLS, max_tokens=4).choices[0].finish_reason == "length"
typed = ask("calls", response_format=Weather)
Weather.model_validate_json(typed.choices[0].message.content)
several = ask("chat", n=2, temperature=1, seed=7, logprobs=True, top_logprobs=2)
assert len(several.choices) == 2 and several.choices[0].logprobs.content[0].top_logprobs

vectors = litellm.embedding(model="openai/embed", input=["one", "two"], api_base=f"{URL}/v1", api_key=TOKEN)
assert [one["index"] for one in vectors.data] == [0, 1] and vectors.usage.prompt_tokens > 0, vectors

long = [{"role": "user", "content": "the user asks and the assistant answers " * 400}]
for stream in (False, True):
    raised(litellm.ContextWindowExceededError, model="chat", messages=long, stream=stream)
    raised(litellm.NotFoundError, model="nope", stream=stream)
    raised(litellm.AuthenticationError, model="chat", api_key="wrong", stream=stream)
    raised(litellm.BadRequestError, model="chat", temperature=-3, stream=stream)
server = {"api_base": f"{URL}/v1", "api_key": TOKEN}
for work, given in (
    (litellm.text_completion, {"model": "text-completion-openai/complete", "prompt": long[0]["content"]}),
    (litellm.embedding, {"model": "openai/embed", "input": long[0]["content"]}),
):
    try:
        work(**given, **server)
    except litellm.ContextWindowExceededError:
        continue
    raise AssertionError(f"no error of {given['model']}")
completed = litellm.text_completion(model="text-completion-openai/complete", prompt="The", max_tokens=3, **server)
assert completed.choices[0].text, completed
ask("chat", api_key=LIMITED, max_tokens=1)
raised(litellm.RateLimitError, model="chat", api_key=LIMITED, max_tokens=1)

fallback = ask("chat", messages=long, max_tokens=4, context_window_fallback_dict={"openai/chat": "openai/calls"})
assert fallback.choices[0].message.content, fallback
router = litellm.Router(
    model_list=[
        {"model_name": name, "litellm_params": {"model": f"openai/{served}", "api_base": f"{URL}/v1", "api_key": key}}
        for name, served, key in (
            ("small", "chat", TOKEN),
            ("big", "calls", TOKEN),
            ("missing", "nope", TOKEN),
            ("busy", "chat", LIMITED),
        )
    ],
    fallbacks=[{"missing": ["small"]}, {"busy": ["small"]}],
    context_window_fallbacks=[{"small": ["big"]}],
    num_retries=0,
)
assert router.completion("missing", messages=HI, temperature=0).choices[0].message.content == ANSWER
assert router.completion("busy", messages=HI, temperature=0).choices[0].message.content == ANSWER
assert router.completion("small", messages=long, max_tokens=4).choices[0].message.content
