"""A conversation with OpenAI's stock client: whole, streamed, and as JSON of a schema.

weftline serve examples/voice_photo_assistant.yaml --expose answer --http-port 8000
python examples/clients/openai_chat.py
"""

import sys

import openai

SHAPE = {"type": "string", "enum": ["circle", "square", "triangle", "star"]}


def main(url: str = "http://localhost:8000/v1", model: str = "voice-photo-assistant.answer") -> None:
    with openai.OpenAI(base_url=url, api_key="none") as client:  # with a token file: api_key=TOKEN
        print("models:", ", ".join(one.id for one in client.models.list()))
        said = [{"role": "user", "content": "The photo shows: 2 red circles. Question: How many circles are there?"}]
        whole = client.chat.completions.create(model=model, messages=said, temperature=0, max_tokens=32)
        print("whole:", whole.choices[0].message.content)
        print("streamed:", end=" ")
        stream = client.chat.completions.create(
            model=model, messages=said, stream=True, stream_options={"include_usage": True}
        )
        for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
            elif chunk.usage:
                print(f"  ({chunk.usage.completion_tokens} tokens)")
        shape = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SHAPE}}
        reply = client.chat.completions.create(model=model, messages=said, response_format=shape)
        print("as JSON:", reply.choices[0].message.content)


if __name__ == "__main__":
    main(*sys.argv[1:3])
