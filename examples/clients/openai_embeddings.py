"""Texts as vectors with OpenAI's stock client.

weftline serve examples/embedding.yaml --expose embed --http-port 8000
python examples/clients/openai_embeddings.py
"""

import sys

import openai


def main(url: str = "http://localhost:8000/v1", model: str = "embedding.embed") -> None:
    with openai.OpenAI(base_url=url, api_key="none") as client:
        reply = client.embeddings.create(model=model, input=["a red circle", "a red square", "good morning"])
        first = reply.data[0].embedding
        for one in reply.data:
            print(f"{len(one.embedding)} numbers, likeness to the first:", end=" ")
            print(round(sum(a * b for a, b in zip(first, one.embedding, strict=True)), 3))


if __name__ == "__main__":
    main(*sys.argv[1:3])
