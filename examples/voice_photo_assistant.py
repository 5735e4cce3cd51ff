"""The voice-photo assistant in Python: the same pipeline as voice_photo_assistant.yaml, step for step.

python examples/voice_photo_assistant.py
"""

from pathlib import Path

import weftline

HERE = Path(__file__).parent

PROMPT = """\
The photo shows: {{ see.detections | describe }}.
Question: {{ hear.text }}"""


def build() -> weftline.Pipeline:
    """Return the pipeline; `weftline.load(build())` gives the plan that the YAML file gives."""
    p = weftline.Pipeline("voice-photo-assistant", about="Answers a spoken question about a photo.", base_dir=HERE)
    question = p.input("question", "audio", seconds_max=30)
    photo = p.input("photo", "image")
    hear = p.step(
        "hear", "whisper", audio=question, model="models/spoken-questions", batch={"items_max": 8, "wait_max_ms": 5}
    )
    see = p.step("see", "yolo", image=photo, model="models/shapes-detector", batch={"items_max": 16, "wait_max_ms": 2})
    answer = p.step(
        "answer", "llm", model="models/shapes-chat", prompt=PROMPT, sampling={"tokens_max": 64, "temperature": 0}
    )
    guard = p.step(
        "guard",
        "guardrail",
        text=answer.text,
        classifier="models/guardrail",
        policy={"block": ["secrets", "personal", "abuse"], "on_violation": "replace"},
    )
    p.output("transcript", hear.text)
    p.output("detections", see.detections)
    p.output("answer", guard.text)
    p.output("verdict", guard.verdict)
    return p


if __name__ == "__main__":
    with weftline.load(build()).open() as session:
        result = session.run(question=HERE / "data/question.wav", photo=HERE / "data/photo.png")
        print(result["transcript"], "->", result["answer"])
