"""Properties of every built-in node: no framework at import, documented options, distinct ports."""

import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

NODES = {
    "function": "function:Function", "torch": "torch_module:TorchModule", "onnx": "onnx:Onnx",
    "whisper": "whisper:Whisper", "yolo": "yolo:Yolo", "classify": "classify:Classify", "embed": "embed:Embed",
    "rerank": "rerank:Rerank",
    "template": "template:Template", "guardrail": "guardrail:Guardrail", "crop": "crop:Crop",
    "transformers": "transformers_tasks.node:Transformers",
}  # fmt: skip
FRAMEWORKS = (
    "PIL", "cv2", "jinja2", "onnx", "onnxruntime", "pydantic", "scipy", "soundfile", "tokenizers", "torch",
    "transformers", "ultralytics", "whisper",
)  # fmt: skip


def test_importing_every_module_of_the_room_imports_no_framework() -> None:
    folder = Path(__file__).parents[2] / "nodes"
    skipped = {"template_sandbox", "__init__"}  # Jinja2's, imported by a template node
    files = sorted(path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py"))
    modules = [".".join(path.parts) for path in files if path.name not in skipped]
    code = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module('weftline.nodes.' + name)\n"
        f"print(sorted(set({FRAMEWORKS!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder.parent)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("name", NODES)
def test_every_option_is_documented_and_has_a_frozen_home(name: str) -> None:
    module, _, attribute = NODES[name].partition(":")
    node = getattr(importlib.import_module(f"weftline.nodes.{module}"), attribute)
    assert node.__doc__ and node.Config.__doc__
    for field in dataclasses.fields(node.Config):
        assert f"    {field.name}:" in node.Config.__doc__, field.name
    assert node.Config.__dataclass_params__.frozen
    assert node.batch_default[0] >= 1 and node.batch_default[1] >= 0
