"""A conversation with Anthropic's stock client: whole, streamed, as JSON of a schema, and its tokens.

weftline serve examples/voice_photo_assistant.yaml --expose answer --http-port 8000
python examples/clients/anthropic_messages.py
"""

import sys

import anthropic

SHAPE = {"type": "string", "enum": ["circle", "square", "triangle", "star"]}


def main(url: str = "http://localhost:8000", model: str = "voice-photo-assistant.answer") -> None:
    with anthropic.Anthropic(base_url=url, api_key="none") as client:  # with a token file: api_key=TOKEN
        said = [{"role": "user", "content": "The photo shows: 2 red circles. Question: How many circles are there?"}]
        print("tokens:", client.messages.count_tokens(model=model, messages=said).input_tokens)
        whole = client.messages.create(model=model, messages=said, max_tokens=32)
        print("whole:", whole.content[0].text, f"({whole.stop_reason})")
        print("streamed:", end=" ")
        with client.messages.stream(model=model, messages=said, max_tokens=32) as stream:
            for text in stream.text_stream:
                print(text, end="", flush=True)
            print(f"  ({stream.get_final_message().usage.output_tokens} tokens)")
        shape = {"format": {"type": "json_schema", "schema": SHAPE}}
        reply = client.messages.create(model=model, messages=said, max_tokens=32, output_config=shape)
        print("as JSON:", reply.content[0].text)


if __name__ == "__main__":
    main(*sys.argv[1:3])
