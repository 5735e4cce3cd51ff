"""The jobs that benchmarks/batch.py measures, and hand-written loops.

A loop reads the same file with pyarrow, calls the same model at the same batch size, and writes the same columns; it
checks nothing, commits nothing, and loses everything when it dies.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from weftline.engine.jobs.job import run_job
from weftline.engine.jobs.runners.factory import local_runner_factory
from weftline.engine.jobs.spec import DataSpec, JobSpec, OutSpec
from weftline.engine.llm.node import Llm
from weftline.nodes.contract import Batch, BatchNode, OpenContext
from weftline.nodes.embed import Embed, EmbedConfig
from weftline.nodes.onnx import Onnx, OnnxConfig

MODELS = Path(__file__).parent.parent / "examples" / "models"

TRIVIAL = """
weftline: 1
name: trivial
inputs: {text: text}
steps:
  length: {node: template, template: "{{ text | length }}", inputs: {text: text}, batch: {items_max: 256}}
outputs: {length: length.text}
"""

EMBED = """
weftline: 1
name: embed
inputs: {text: text}
steps:
  embed: {node: embed, model: MODELS/shapes-chat, pooling: mean, inputs: {text: text}, batch: {items_max: BATCH}}
outputs: {embedding: embed.embedding}
"""

SHAPES = """
weftline: 1
name: shapes
inputs: {image: "float32[3, 32, 32]"}
steps:
  shape: {node: onnx, model: MODELS/tiny/shape-classifier.onnx, inputs: {image: image}, batch: {items_max: BATCH}}
outputs: {scores: shape.scores}
"""

LLM = """
weftline: 1
name: chat
inputs: {prompt: text}
steps:
  answer:
    node: llm
    model: MODELS/shapes-chat
    inputs: {prompt: prompt}
    sampling: {temperature: 0.0, tokens_max: 48}
outputs: {text: answer.text}
"""


LLM_OPTIONS = {"model": str(MODELS / "shapes-chat"), "sampling": {"temperature": 0.0, "tokens_max": 48}}
TRIVIAL, EMBED, SHAPES, LLM = (text.replace("MODELS", str(MODELS)) for text in (TRIVIAL, EMBED, SHAPES, LLM))


def write_words(file: Path, rows: int, words: tuple[int, int] = (1, 6)) -> Path:
    """Write rows of text, in groups of 50 000."""
    draws = random.Random(1)
    schema = pa.schema([("text", pa.string()), ("n", pa.int64())])
    with pq.ParquetWriter(file, schema) as out:
        for start in range(0, rows, 50_000):
            numbers = range(start, min(start + 50_000, rows))
            texts = [" ".join(["how many red circles"] * draws.randint(*words)) + f" {n}" for n in numbers]
            out.write_table(pa.table({"text": texts, "n": list(numbers)}, schema))
    return file


def job(pipeline: Path, data: Path, out: Path, mode: str = "auto", block_rows: int | None = None) -> dict[str, Any]:
    """Run a job and return its figures; time is counted from the first row asked to the last committed."""
    spec = JobSpec(pipeline, DataSpec((str(data),)), OutSpec(str(out)), block_rows=block_rows)
    seen: list[Any] = []
    opening = local_runner_factory(pipeline, mode=mode, block_rows=block_rows)
    began_s = time.perf_counter()
    end = run_job(spec, opening, watch=seen.append)
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {
        "rows": end.rows,
        "errors": end.errors,
        "seconds": end.elapsed_s,
        "all_seconds": time.perf_counter() - began_s,
        "mode": opening.mode,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "worker_mb": children / 1024,
        "figures": dict(end.figures),
        "batches": {name: one.rows / one.batches for name, one in end.tally.steps.items() if one.batches},
    }


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that a job and a loop run.

    pipeline: with BATCH where the size of batches belongs.
    write:    writes so many rows to a file.
    open:     returns the node, ready.
    port, column: what it is given; `output` what it gives.
    """

    name: str
    pipeline: str
    write: Callable[[Path, int], Path]
    open: Callable[[int], BatchNode]
    port: str
    column: str
    output: str


def _write_shapes(file: Path, rows: int) -> Path:
    """Write float32[3, 32, 32] pictures as fixed-size lists."""
    pictures = np.random.default_rng(1).random((rows, 3 * 32 * 32), np.float32)
    column: Any = pa.array(pictures.ravel())
    for size in (32, 32, 3):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    pq.write_table(pa.table({"image": column, "n": list(range(rows))}), file)
    return file


def _open_embed(batch: int) -> BatchNode:
    return _opened(Embed(EmbedConfig(str(MODELS / "shapes-chat"), pooling="mean")), batch)


def _open_shapes(batch: int) -> BatchNode:
    return _opened(Onnx(OnnxConfig(str(MODELS / "tiny" / "shape-classifier.onnx"))), batch)


def _opened(node: BatchNode, batch: int) -> BatchNode:
    node.open(OpenContext(MODELS, threads=os.cpu_count() or 1, items_max=batch))
    node.warm_up()
    return node


SUBJECTS = (
    Subject("embed", EMBED, write_words, _open_embed, "text", "text", "embedding"),
    Subject("shapes", SHAPES, _write_shapes, _open_shapes, "image", "image", "scores"),
)


def loop(subject: str, data: str, out: str, batch: int) -> dict[str, float]:
    """Do by hand what a job does; return the seconds from the first row to the last."""
    one = next(one for one in SUBJECTS if one.name == subject)
    node = one.open(batch)
    writer = None
    began_s = time.perf_counter()
    for table in pq.ParquetFile(data).iter_batches(batch_size=batch):
        column = table.column(one.column)
        if one.column == "image":
            values: Sequence[Any] = column.flatten().flatten().flatten().to_numpy().reshape(len(column), 3, 32, 32)
        else:
            values = column.to_pylist()
        found = np.stack(list(node.run(Batch({one.port: values}))[one.output]))
        made = pa.FixedSizeListArray.from_arrays(pa.array(found.reshape(-1)), found[0].size)
        rows = pa.table({"n": table.column("n"), "out": made})
        if writer is None:
            writer = pq.ParquetWriter(out, rows.schema, compression="zstd")
        writer.write_table(rows)
    if writer is not None:
        writer.close()
    return {"seconds": time.perf_counter() - began_s}


def write_prompts(file: Path, rows: int) -> Path:
    """Write questions to the bundled language model."""
    draws = random.Random(2)
    shapes = [f"{draws.randint(1, 4)} {colour} {shape}s" for colour in ("red", "blue") for shape in ("circle", "star")]
    prompts = [
        f"The photo shows: {', '.join(draws.sample(shapes, draws.randint(1, 4)))}.\nQuestion: What is there? ({n})"
        for n in range(rows)
    ]
    pq.write_table(pa.table({"prompt": prompts, "n": list(range(rows))}), file)
    return file


def llm(data: str) -> dict[str, float]:
    """Give the engine all prompts at once, by hand: no worker, no pipeline, no files."""
    node = Llm(Llm.Config(**LLM_OPTIONS))
    node.open(OpenContext(MODELS, threads=os.cpu_count() or 1))
    node.warm_up()
    before = dict(node.figures())
    prompts = pq.read_table(data).column("prompt").to_pylist()
    began_s, left = time.perf_counter(), len(prompts)
    for item, prompt in enumerate(prompts):
        node.submit(item, {"prompt": prompt})
    while left:
        left -= sum(piece.last for piece in node.round())
    seconds, after = time.perf_counter() - began_s, node.figures()
    tokens, rounds = (after[name] - before.get(name, 0.0) for name in ("completion_tokens_total", "rounds_total"))
    return {"seconds": seconds, "tokens": tokens, "wide": tokens / rounds}


if __name__ == "__main__":  # one job or loop in a process of its own, so that its memory is its own
    arguments = json.loads(sys.argv[2])
    if sys.argv[1] == "job":
        arguments = {name: Path(value) for name, value in arguments.items()}
    print(json.dumps({"job": job, "loop": loop, "llm": llm}[sys.argv[1]](**arguments)))
