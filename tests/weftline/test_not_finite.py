"""NaN and infinities of one pipeline by every route: session, client, v2 over HTTP and gRPC, jobs."""

from __future__ import annotations

import json
import math
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

import weftline
from tests.weftline.served import serving

STEPS = """import math
import numpy as np

NUMBERS = (1.5, math.nan, math.inf, -math.inf)


def scored(n: "int64[]") -> float:
    return NUMBERS[int(n)]


def nested(n: "int64[]") -> dict:
    return {"a": [1, {"b": NUMBERS[int(n)]}], "c": None}


def vector(n: "int64[]") -> "float32[2]":
    return np.array([NUMBERS[int(n)], 1], np.float32)
"""
PIPELINE = """weftline: 1
name: odd
inputs: {n: "int64[]"}
steps:
  s: {node: function, function: "steps.py:scored", worker: one, inputs: {n: n}}
  d: {node: function, function: "steps.py:nested", worker: one, inputs: {n: n}}
  v: {node: function, function: "steps.py:vector", worker: one, inputs: {n: n}}
outputs: {score: s.output, deep: d.output, vector: v.output}
"""
NUMBERS = (1.5, math.nan, math.inf, -math.inf)


def expected(number: float) -> str:
    return repr((number, {"a": [1, {"b": number}], "c": None}, [number, 1.0]))


def found(score: Any, deep: Any, vector: Any) -> str:
    return repr((score, deep, np.asarray(vector).tolist()))


@pytest.mark.slow
def test_a_number_is_the_same_by_every_route(weft: Any, tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    file = tmp_path / "odd.yaml"
    file.write_text(PIPELINE)
    by_route: dict[str, list[str]] = {}
    with weftline.load(str(file)).open() as session:
        results = [session.run(n=n) for n in range(4)]
        by_route["session"] = [found(one["score"], one["deep"], one["vector"]) for one in results]
        rows = session.map([{"n": n} for n in range(4)])
        by_route["map"] = [found(one["score"], one["deep"], one["vector"]) for one in rows]
    with serving(tmp_path, "odd.yaml", "--port", "0", "--http-port", "0") as served:
        served.wait_up()
        by_route |= _over_the_network(served)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(4)))
    for name in ("out.jsonl", "out.parquet"):
        ended = weft("batch", str(file), "--data", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / name))
        assert ended.code == 0, ended.err
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    by_route["jsonl"] = [found(one["score"], one["deep"], one["vector"]) for one in lines]
    table = pq.read_table(tmp_path / "out.parquet").to_pylist()
    by_route["parquet"] = [found(json.loads(one["score"]), json.loads(one["deep"]), one["vector"]) for one in table]
    for route, values in by_route.items():
        assert values == [expected(number) for number in NUMBERS], route


def _over_the_network(served: Any) -> dict[str, list[str]]:
    routes: dict[str, list[str]] = {"client": [], "streamed": [], "triton grpc": [], "triton http": [], "json": []}
    with weftline.Client(served.grpc) as client:
        for n in range(4):
            whole = client.run("odd", n=n)
            routes["client"].append(found(whole["score"], whole["deep"], whole["vector"]))
            pieces = {one.output: one.value for one in client.stream("odd", n=n)}
            routes["streamed"].append(found(pieces["score"], pieces["deep"], pieces["vector"]))
    for route, triton, address in (
        ("triton grpc", triton_grpc, served.grpc), ("triton http", triton_http, served.http.partition("//")[2]),
    ):  # fmt: skip
        stock = triton.InferenceServerClient(address)
        for n in range(4):
            sent = triton.InferInput("n", [], "INT64")
            sent.set_data_from_numpy(np.array(n))
            answer = stock.infer("odd", [sent])
            texts = (json.loads(answer.as_numpy(name)[0]) for name in ("score", "deep"))
            routes[route].append(found(*texts, answer.as_numpy("vector")))
        stock.close()
    for n in range(4):
        body = json.dumps({"inputs": [{"name": "n", "datatype": "INT64", "shape": [], "data": [n]}]}).encode()
        with urllib.request.urlopen(f"{served.http}/v2/models/odd/infer", body) as answer:
            data = {one["name"]: one["data"] for one in json.loads(answer.read())["outputs"]}
        routes["json"].append(found(json.loads(data["score"][0]), json.loads(data["deep"][0]), data["vector"]))
    return routes
