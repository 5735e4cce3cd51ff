"""A recording as text with OpenAI's stock client.

weftline serve examples/voice_photo_assistant.yaml --expose hear --http-port 8000
python examples/clients/openai_speech.py
"""

import sys
from pathlib import Path

import openai

RECORDING = Path(__file__).parents[1] / "data" / "question.wav"


def main(url: str = "http://localhost:8000/v1", model: str = "voice-photo-assistant.hear") -> None:
    with openai.OpenAI(base_url=url, api_key="none") as client:
        print(client.audio.transcriptions.create(model=model, file=RECORDING).text)


if __name__ == "__main__":
    main(*sys.argv[1:3])
