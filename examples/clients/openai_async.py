"""Many questions at once with OpenAI's stock client; the llm step answers them in the same rounds.

weftline serve examples/voice_photo_assistant.yaml --expose answer --http-port 8000
python examples/clients/openai_async.py
"""

import asyncio
import sys

import openai

THINGS = ("2 red circles", "1 blue star", "3 green squares", "nothing")


async def main(url: str = "http://localhost:8000/v1", model: str = "voice-photo-assistant.answer") -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=30) as client:

        async def ask(things: str) -> str:
            said = [{"role": "user", "content": f"The photo shows: {things}. Question: What is in the photo?"}]
            reply = await client.chat.completions.create(model=model, messages=said, max_tokens=32)
            return reply.choices[0].message.content or ""

        for things, answer in zip(THINGS, await asyncio.gather(*map(ask, THINGS)), strict=True):
            print(f"{things}: {answer}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
