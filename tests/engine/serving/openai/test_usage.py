"""Usage of embeddings and rerank, whatever a pipeline outputs; no client sees the output that carries it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton

from tests.engine.serving.http.hosted import hosted_pipelines
from weftline.engine.serving.config import ServedPipeline
from weftline.engine.serving.exposed_models import models_with_errors, with_usage
from weftline.engine.serving.model_info import USAGE
from weftline.engine.serving.serve_file import assemble
from weftline.errors import PipelineError
from weftline.pipelines.spec.loader import load_file

CHAT = Path(__file__).parents[4] / "examples/models/shapes-chat"
EMBED = """weftline: 1
name: vectors
inputs: {text: text}
steps:
  turn: {node: embed, model: "CHAT", pooling: mean, inputs: {text: text}}
outputs: {OUTPUTS}
"""
RERANK = """weftline: 1
name: ranks
inputs: {query: text, passages: "list[text]"}
steps:
  rank: {node: rerank, model: "CHAT", inputs: {query: query, passages: passages}}
outputs: {relevance: rank.scores}
"""


def graph(folder: Path, text: str, outputs: str) -> dict[str, str]:
    (folder / "p.yaml").write_text(text.replace("CHAT", str(CHAT)).replace("OUTPUTS", outputs))
    return {name: str(wire) for name, wire in with_usage(load_file(folder / "p.yaml")).outputs.items()}


@pytest.mark.parametrize(
    ("text", "outputs", "usage"),
    [
        (EMBED, "vector: turn.embedding", "turn.usage"), (EMBED, "usage: turn.usage", None),
        (EMBED, "vector: turn.embedding, usage: turn.usage", None), (RERANK, "", "rank.usage"),
        (EMBED.replace("embed, model", "echo, type").replace('"CHAT", pooling: mean', "text"), "a: turn.value", None),
        (EMBED.replace("text: text}\n", 'text: "list[text]"}\n').replace("{text: text}}", "{text: text}, map: text}"),
         "vector: turn.embedding", None),
    ],
)  # fmt: skip
def test_the_step_of_an_embedding_or_scores_counts(tmp_path: Path, text: str, outputs: str, usage: str | None) -> None:
    assert graph(tmp_path, text, outputs).get(USAGE) == usage


def test_an_output_of_the_name_that_no_client_sees_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(EMBED.replace("CHAT", str(CHAT)).replace("OUTPUTS", f"{USAGE}: turn.usage"))
    (tmp_path / "serve.yaml").write_text("pipelines: {vectors: p.yaml}\n")
    with pytest.raises(PipelineError, match=r"p.yaml:6  outputs._usage: .*\n    fix: rename it"):
        models_with_errors("vectors", ServedPipeline(file), load_file(file), frozenset())
    assert "outputs._usage" in str(assemble([], str(tmp_path / "serve.yaml"), {}).failed["vectors"])


@pytest.mark.slow
def test_tokens_are_counted_though_the_pipeline_does_not_output_them(tmp_path: Path) -> None:
    (tmp_path / "v.yaml").write_text(EMBED.replace("CHAT", str(CHAT)).replace("OUTPUTS", "vector: turn.embedding"))
    with hosted_pipelines({"vectors": ServedPipeline(tmp_path / "v.yaml")}) as server:
        body: dict[str, Any] = {"model": "vectors", "input": ["two red circles", "a star"]}
        usage = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60).json()["usage"]
        single = httpx.post(f"{server.url}/v1/embeddings", json=body | {"input": "a star"}, timeout=60).json()["usage"]
        assert usage["prompt_tokens"] == usage["total_tokens"] > single["prompt_tokens"] > 0
        plain = httpx.post(f"{server.url}/run/vectors", json={"text": "a star"}, timeout=60).json()
        assert list(plain) == ["vector"]
        client = triton.InferenceServerClient(server.url.removeprefix("http://"))
        given = triton.InferInput("text", [1], "BYTES")
        given.set_data_from_numpy(np.array([b"a star"], object))
        answer = client.infer("vectors", [given]).get_response()
        assert [one["name"] for one in answer["outputs"]] == ["vector"]
        assert [one["name"] for one in client.get_model_metadata("vectors")["outputs"]] == ["vector"]
        events = httpx.post(f"{server.url}/v2/models/vectors/generate_stream", json={"text": "a star"}, timeout=60)
        assert events.status_code == 200 and USAGE not in events.text
