"""ONNX files without the exporter's notes: it writes stack traces, with paths of the machine it ran on, into them."""

from pathlib import Path

import onnx


def without_notes(path: Path) -> None:
    """Rewrite the ONNX file at `path` without metadata on the model, its graph, nodes and values."""
    model = onnx.load(path)
    graph = model.graph
    for part in (model, graph, *graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer):
        part.ClearField("metadata_props")
    onnx.save(model, path)
