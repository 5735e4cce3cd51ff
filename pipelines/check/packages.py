"""Optional packages that the steps of a plan need and this environment lacks.

No framework is imported: modules are only looked up. A node's `extra` names what installs its framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

from weftline.errors import WeftlineError
from weftline.nodes.catalog import resolve
from weftline.nodes.classify import Classify, is_onnx
from weftline.nodes.contract import ConfigError
from weftline.pipelines.placement.plan import PlannedStep

MODULES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "torch": (("torch",),),
    "onnx": (("onnxruntime",),),
    "whisper": (("whisper", "faster_whisper"),),
    "yolo": (("torch",), ("ultralytics",)),
    "llm": (("torch",), ("transformers",), ("tokenizers",)),
    "openai": (("httpx2",),),
    "transformers": (("torch",), ("transformers",)),
}
"""Modules that nodes of an extra import to open; one of each group suffices."""


def _is_installed(module: str) -> bool:
    return find_spec(module) is not None


def missing_packages(
    steps: Iterable[PlannedStep], base_dir: Path, is_installed: Callable[[str], bool] = _is_installed
) -> str:
    """Return one line with all missing packages, their steps and the command that installs them; '' if none is."""
    missing: dict[str, list[str]] = {}
    extras: list[str] = []
    for step in steps:
        extra = _extra_of(step, base_dir)
        for group in MODULES.get(extra, ()):
            if not any(map(is_installed, group)):
                missing.setdefault(" or ".join(group), []).append(step.name)
                extras += [extra] if extra not in extras else []
    if not missing:
        return ""
    named = "; ".join(f"{package} ({', '.join(names)})" for package, names in missing.items())
    return f"packages that steps need are not installed: {named}. fix: pip install 'weftline[{','.join(extras)}]'"


def _extra_of(step: PlannedStep, base_dir: Path) -> str:
    """Return the extra of a built-in node; '' for nodes of a user, whose packages are theirs."""
    if step.control or not step.node.startswith("weftline."):
        return ""
    try:
        node, model = resolve(step.node, base_dir), step.options.get("model")
        return "onnx" if node is Classify and isinstance(model, str) and is_onnx(model, base_dir) else node.extra
    except (ConfigError, WeftlineError, ImportError):
        return ""
