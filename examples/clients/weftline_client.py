"""A spoken question about a photo over gRPC with Weftline's own client: files in, text and detections out.

weftline serve examples/voice_photo_assistant.yaml
python examples/clients/weftline_client.py
"""

import sys
from pathlib import Path

import weftline

MODEL = "voice-photo-assistant"
DATA = Path(__file__).parents[1] / "data"


def main(url: str = "localhost:8001") -> None:
    with weftline.Client(url) as client:
        for name, port in client.describe(MODEL).inputs.items():
            print(f"wants {name}: {port}")
        photo, question = DATA / "photo.png", DATA / "question.wav"
        for piece in client.stream(MODEL, weftline.RequestOptions(deadline_ms=60_000), question=question, photo=photo):
            print(f"{piece.output}{'' if piece.last else ' ...'}: {piece.value}")
        print("answered so far:", client.stats(MODEL)[MODEL].requests)


if __name__ == "__main__":
    main(*sys.argv[1:2])
