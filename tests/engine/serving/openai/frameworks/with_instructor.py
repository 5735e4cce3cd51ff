"""instructor: typed answers as tools, JSON and a JSON schema, whole and in pieces."""

import sys

import instructor
import openai
from instructor.core.exceptions import IncompleteOutputException
from pydantic import BaseModel, model_validator

URL, TOKEN = sys.argv[1:3]
HI = [{"role": "user", "content": "Will it rain?"}]


class Weather(BaseModel, extra="forbid"):
    rain: bool
    wind: bool


tries = []


class SecondTry(Weather):
    @model_validator(mode="after")
    def refuse_first(self) -> "SecondTry":
        tries.append(self)
        if len(tries) % 2:
            raise ValueError("again")
        return self


class Anything(BaseModel, extra="allow"):
    pass


client = openai.OpenAI(base_url=f"{URL}/v1", api_key=TOKEN, max_retries=0)
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    asked = {"model": "calls", "messages": HI, "max_retries": 0, "max_tokens": 300}
    made = instructor.from_openai(client, mode=mode)
    found, raw = made.chat.completions.create_with_completion(response_model=Weather, **asked)
    assert isinstance(found, Weather) and raw.usage.completion_tokens > 2, (mode, raw)
    again = asked | {"max_retries": 1}  # the second request has the refused answer as history
    found, raw = made.chat.completions.create_with_completion(response_model=SecondTry, **again)
    assert isinstance(found, SecondTry) and len(tries) % 2 == 0, (mode, tries)
    pieces = list(made.chat.completions.create_partial(response_model=Weather, **asked))
    assert isinstance(pieces[-1].rain, bool) and isinstance(pieces[-1].wind, bool), (mode, pieces[-1:])
made = instructor.from_openai(client, mode=instructor.Mode.JSON)
asked = {"response_model": Anything, "model": "calls", "messages": HI, "max_retries": 0, "max_tokens": 200}
for seed in range(20):  # any object is valid, and a random model may write a long one
    try:
        assert isinstance(made.chat.completions.create(**asked, seed=seed), Anything)
        break
    except IncompleteOutputException:
        continue
else:
    raise AssertionError("no object was complete")
