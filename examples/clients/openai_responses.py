"""OpenAI's Responses API with OpenAI's stock client: a conversation, streamed, and as JSON of a schema.

weftline serve examples/voice_photo_assistant.yaml --expose answer --http-port 8000
python examples/clients/openai_responses.py
"""

import sys

import openai

SHAPE = {"type": "string", "enum": ["circle", "square", "triangle", "star"]}


def main(url: str = "http://localhost:8000/v1", model: str = "voice-photo-assistant.answer") -> None:
    with openai.OpenAI(base_url=url, api_key="none") as client:  # with a token file: api_key=TOKEN
        asked = "The photo shows: 2 red circles. Question: How many circles are there?"
        whole = client.responses.create(model=model, input=asked, max_output_tokens=32)
        print("whole:", whole.output_text)
        print("streamed:", end=" ")
        for event in client.responses.create(model=model, input=asked, stream=True):
            if event.type == "response.output_text.delta":
                print(event.delta, end="", flush=True)
            elif event.type == "response.completed" and event.response.usage:
                print(f"  ({event.response.usage.output_tokens} tokens)")
        again = client.responses.create(model=model, input=asked, previous_response_id=whole.id)
        print("asked again:", again.output_text)
        shape = {"format": {"type": "json_schema", "name": "shape", "schema": SHAPE}}
        print("as JSON:", client.responses.create(model=model, input=asked, text=shape).output_text)


if __name__ == "__main__":
    main(*sys.argv[1:3])
