"""Creation of ONNX Runtime sessions: TensorRT, CUDA or CPU, with bounded threads."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from weftline.errors import MissingPackage, ModelError
from weftline.nodes.contract import ConfigError, OpenContext
from weftline.shm.device.names import index_of

Provider = tuple[str, dict[str, Any]]

_BOTH = "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files"
_ONE = (
    "pip uninstall -y onnxruntime onnxruntime-gpu, then pip install 'weftline[gpu]' for a GPU "
    "or pip install 'weftline[onnx]' for the CPU"
)


def check_runtime() -> None:
    """Raise ConfigError when the CPU and the GPU distribution of ONNX Runtime are both installed."""
    if _installed("onnxruntime") and _installed("onnxruntime-gpu"):
        raise ConfigError("node", _BOTH, fix=_ONE)


def _installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def open_session(path: Path, shown: str, context: OpenContext, tensorrt: bool = True, graphs: bool = False) -> Any:
    """Return an InferenceSession on `context`'s device; ModelError when the file or the device does not work.

    graphs: its runs may be captured as CUDA graphs; ModelError too when the model's cannot.
    """
    try:
        check_runtime()
    except ConfigError:
        raise ModelError(f"{_BOTH}\n    fix: {_ONE}") from None
    try:
        import onnxruntime
    except ImportError:
        raise MissingPackage("onnxruntime", "onnx") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = context.threads, 1
    options.log_severity_level = 4
    # A waiting thread pool that spins takes the cores of the step that is working.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    available, engines = onnxruntime.get_available_providers(), _engine_dir(path, context)
    wanted = providers(available, context.device, engines, tensorrt and not graphs, context.stream, graphs)
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=wanted)
    except Exception as error:
        reason = str(error).replace(str(path), shown).splitlines()[0]
        raise ModelError(f"{shown} cannot be opened by ONNX Runtime: {reason:.300}") from None


def providers(
    available: Sequence[str], device: str, engine_dir: Path, tensorrt: bool, stream: int = 0, graphs: bool = False
) -> list[Provider]:
    """Return ONNX Runtime's providers for `device`, best first, with their options; ModelError when it has none.

    stream: the CUDA stream they are to compute on; 0: one of their own.
    graphs: the CUDA provider captures runs that say so.
    """
    cpu: Provider = ("CPUExecutionProvider", {})
    if not device.startswith("cuda"):
        return [cpu]
    if "CUDAExecutionProvider" not in available:
        fix = "pip uninstall -y onnxruntime, then pip install 'weftline[gpu]'; or set device: cpu"
        raise ModelError(f"the installed ONNX Runtime cannot use {device}\n    fix: {fix}")
    on = {"device_id": index_of(device)} | ({"user_compute_stream": str(stream)} if stream else {})
    captures = {"enable_cuda_graph": "1"} if graphs else {}
    found: list[Provider] = [("CUDAExecutionProvider", on | captures), cpu]
    if tensorrt and "TensorrtExecutionProvider" in available:
        engine_dir.mkdir(parents=True, exist_ok=True)
        kept = {"trt_engine_cache_enable": True, "trt_timing_cache_enable": True}
        paths = {"trt_engine_cache_path": str(engine_dir), "trt_timing_cache_path": str(engine_dir)}
        found.insert(0, ("TensorrtExecutionProvider", {**on, **kept, **paths}))
    return found


def _engine_dir(path: Path, context: OpenContext) -> Path:
    """Return a folder of this very file's own: TensorRT's engine names do not change with the weights."""
    about = path.stat()
    mark = hashlib.sha256(f"{path}\0{about.st_size}\0{about.st_mtime_ns}".encode()).hexdigest()[:16]
    return context.cache_dir / "tensorrt" / mark
