"""ONNX Runtime sessions: providers with bounded threads, I/O binding, and CUDA graph replay.

Inputs and outputs are bound by address, on the host or on the device. An output without a buffer is allocated by the
session: on the device where it computes there, else as an array. bfloat16 and float8, which numpy lacks, are bound by
their ONNX numbers, and appear in numpy as their stand-ins. ONNX Runtime computes on a stream of its own unless one is
set; the caller must then synchronise before and after a call (`SessionMemory.synchronises`).

ONNX Runtime captures a CUDA graph in the first run with a new `gpu_graph_id`, if its CUDA provider was opened with
`enable_cuda_graph`. Runs with the same id need inputs and outputs at the same addresses, and a model that runs on the
CUDA provider as a whole, without control flow. A replay is complete when its run returns. A run with id -1 uses no
graph. There is one graph for each batch size.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np

from weftline.errors import MissingPackage, ModelError, first_line
from weftline.nodes.contract import ConfigError, OpenContext
from weftline.nodes.onnx_file import DTYPES, ValueInfo
from weftline.shm.device.driver import GpuDriver
from weftline.shm.device.names import index_of, is_fake, is_gpu
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.spec import STAND_INS, TensorSpec

Provider = tuple[str, dict[str, Any]]
Shapes = Mapping[str, tuple[int, ...]]
NO_SHAPES: Shapes = {}

_log = logging.getLogger(__name__)

_BOTH = "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files"
_ONE = (
    "pip uninstall -y onnxruntime onnxruntime-gpu, then pip install 'weftline[gpu]' for a GPU "
    "or pip install 'weftline[onnx]' for the CPU"
)

_LOCALE_FIX = (
    "export the model's StringNormalizer with the locale C, as skl2onnx does with "
    "options={TfidfVectorizer: {'locale': 'C'}}, or install the locale on this machine (locale-gen)"
)


def check_runtime() -> None:
    """Raise ConfigError when both the CPU and the GPU distribution of ONNX Runtime are installed."""
    if _installed("onnxruntime") and _installed("onnxruntime-gpu"):
        raise ConfigError("node", _BOTH, fix=_ONE)


def _installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def open_session(
    path: Path, shown: str, context: OpenContext, tensorrt: bool = True, graphs: bool = False, items: Shapes = NO_SHAPES
) -> Any:
    """Return an InferenceSession on `context`'s device; ModelError when the file or the device does not work.

    graphs: its runs may be captured as CUDA graphs; ModelError too when the model's cannot.
    items:  the shape of one item of every input; empty where a size is free, or items run one by one.
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
    # A spinning thread pool would occupy the cores of working steps.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    available, engines = onnxruntime.get_available_providers(), _engine_dir(path, context)
    wanted = providers(available, context.device, engines, tensorrt and not graphs, context.stream, graphs)
    attempts = _attempts(wanted, trt_profile(items, context.items_max))
    # ONNX Runtime's own fallback takes the CPU, or the first GPU without these options, and only prints it.
    own = {"enable_fallback": 0} if len(wanted) > 1 else {}
    for left, (providers_used, without) in zip(reversed(range(len(attempts))), attempts):
        try:
            return onnxruntime.InferenceSession(str(path), options, providers=providers_used, **own)
        except Exception as error:
            reason = first_line(error).replace(str(path), shown)
            if not left:
                fix = f"\n    fix: {_LOCALE_FIX}" if "construct locale" in reason else ""
                raise ModelError(f"{shown} cannot be opened by ONNX Runtime: {reason:.300}{fix}") from None
            _log.warning("%s is opened without %s: %.300s", shown, without, reason)
    raise RuntimeError("no attempt to open a session")  # not reached: there is always one


def _attempts(wanted: list[Provider], profile: dict[str, str]) -> list[tuple[list[Provider], str]]:
    """Return the lists of providers to try in turn, each with what the next one leaves out."""
    first, *others = wanted
    if first[0] != TENSORRT:
        return [(wanted, "")]
    attempts = [(wanted, "TensorRT"), (others, "")]
    if profile:  # refused where only parts of the model run on TensorRT, whose inputs need shapes too
        attempts.insert(0, ([(TENSORRT, first[1] | profile), *others], "the shapes of its batches for TensorRT"))
    return attempts


def trt_profile(items: Shapes, items_max: int) -> dict[str, str]:
    """Return TensorRT's options for batches of 1 to `items_max`; none where they cannot be stated.

    Without them an engine is built for the first batch, and again for each that is smaller or larger than any before.
    """
    if not items or any(mark in name for name in items for mark in ":,"):
        return {}

    def shapes(batch: int) -> str:
        return ",".join(f"{name}:{'x'.join(map(str, (batch, *shape)))}" for name, shape in items.items())

    largest = shapes(items_max)
    return {"trt_profile_min_shapes": shapes(1), "trt_profile_opt_shapes": largest, "trt_profile_max_shapes": largest}


TENSORRT = "TensorrtExecutionProvider"
CUDA_OPTIONS = {
    "use_tf32": "0",  # float32 means float32
    "cudnn_conv_algo_search": "HEURISTIC",  # EXHAUSTIVE times all convolutions at the first batch of every size
    "arena_extend_strategy": "kSameAsRequested",  # the other doubles memory beyond what the step claims
}
"""Options of the CUDA provider that differ from its defaults (ONNX Runtime, CUDA Execution Provider)."""


def providers(
    available: Sequence[str], device: str, engine_dir: Path, tensorrt: bool, stream: int = 0, graphs: bool = False
) -> list[Provider]:
    """Return ONNX Runtime's providers for `device`, best first, with their options; ModelError when it has none.

    stream: CUDA stream of the session; 0: one of its own.
    graphs: the CUDA provider captures runs with a graph id.
    """
    cpu: Provider = ("CPUExecutionProvider", {})
    if not device.startswith("cuda"):
        return [cpu]
    if "CUDAExecutionProvider" not in available:
        fix = "pip uninstall -y onnxruntime, then pip install 'weftline[gpu]'; or set device: cpu"
        raise ModelError(f"the installed ONNX Runtime cannot use {device}\n    fix: {fix}")
    on = {"device_id": index_of(device)} | ({"user_compute_stream": str(stream)} if stream else {})
    captures = {"enable_cuda_graph": "1"} if graphs else {}
    found: list[Provider] = [("CUDAExecutionProvider", on | CUDA_OPTIONS | captures), cpu]
    if tensorrt and TENSORRT in available:
        engine_dir.mkdir(parents=True, exist_ok=True)
        kept = {"trt_engine_cache_enable": True, "trt_timing_cache_enable": True}
        paths = {"trt_engine_cache_path": str(engine_dir), "trt_timing_cache_path": str(engine_dir)}
        found.insert(0, (TENSORRT, {**on, **kept, **paths}))
    return found


def _engine_dir(path: Path, context: OpenContext) -> Path:
    """Return a cache folder for this file: TensorRT's engine names do not change with the weights."""
    about = path.stat()
    mark = hashlib.sha256(f"{path}\0{about.st_size}\0{about.st_mtime_ns}".encode()).hexdigest()[:16]
    return context.cache_dir / "tensorrt" / mark


Tensor = np.ndarray | DeviceTensor

_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class SessionMemory:
    """SessionMemory that a session computes in.

    kind:   ONNX Runtime's name of the memory, 'cpu' or 'cuda'; `index`: of the device.
    device: our name, 'cuda:0'; '' on the host, where outputs are arrays.
    synchronises:  it has a stream of its own, so that a call synchronises for the device before and after.
    """

    kind: str = "cpu"
    index: int = 0
    device: str = ""
    synchronises: bool = False


def session_memory(device: str, stream: int = 0) -> SessionMemory:
    """Return the memory of a session on `device`; `stream`: its CUDA stream, 0 for one of its own."""
    if not is_gpu(device):
        return SessionMemory()
    return (
        SessionMemory(device=device)
        if is_fake(device)
        else SessionMemory("cuda", index_of(device), device, synchronises=not stream)
    )


def call(
    session: Any,
    memory: SessionMemory,
    inputs: Sequence[tuple[ValueInfo, Tensor]],
    outputs: Sequence[tuple[ValueInfo, Tensor | None]],
    options: Any = None,
) -> list[Tensor]:
    """Run the session once and return its outputs in order: the given buffers, or new memory.

    options: ONNX Runtime's RunOptions; None: defaults.
    """
    binding = session.io_binding()
    kept = [_bind_input(binding, memory, info, value) for info, value in inputs]
    for info, buffer in outputs:
        _bind_output(binding, memory, info, buffer)
    if memory.synchronises:
        binding.synchronize_inputs()
    session.run_with_iobinding(binding, options)
    if memory.synchronises:
        binding.synchronize_outputs()
    del kept  # not before: ONNX Runtime reads by address
    given: list[Tensor] = []
    for (info, buffer), value in zip(outputs, binding.get_outputs(), strict=True):
        given.append(buffer if buffer is not None and _is_writable(buffer) else _given(value, info, memory, session))
    return given


def bind_at(bind: Callable[..., None], name: str, memory: SessionMemory, tensor: DeviceTensor) -> None:
    """Bind a value of the session to a tensor where the session computes."""
    bind(name, memory.kind, memory.index, _element(tensor.dtype), list(tensor.shape), tensor.address)


def _bind_input(binding: Any, memory: SessionMemory, info: ValueInfo, value: Tensor) -> Tensor:
    """Bind an input and return the object to keep alive until the call has ended."""
    if isinstance(value, DeviceTensor):
        bind_at(binding.bind_input, info.name, memory, value)
        return value
    array = np.ascontiguousarray(value) if value.ndim else value
    if info.dtype in STAND_INS:
        binding.bind_input(info.name, "cpu", 0, _element(info.dtype), list(array.shape), array.ctypes.data)
    else:
        binding.bind_cpu_input(info.name, array)
    return array


def _bind_output(binding: Any, memory: SessionMemory, info: ValueInfo, buffer: Tensor | None) -> None:
    if buffer is None or not _is_writable(buffer):
        binding.bind_output(info.name, memory.kind, memory.index)
    elif isinstance(buffer, DeviceTensor):
        bind_at(binding.bind_output, info.name, memory, buffer)
    else:
        binding.bind_output(info.name, "cpu", 0, _element(info.dtype or ""), list(buffer.shape), buffer.ctypes.data)


def _is_writable(buffer: Tensor) -> bool:
    """Return True for writable, contiguous and non-empty buffers."""
    if isinstance(buffer, DeviceTensor):
        return buffer.writable and buffer.nbytes > 0
    return bool(buffer.flags.c_contiguous and buffer.flags.writeable and buffer.nbytes)


def _given(value: Any, info: ValueInfo, memory: SessionMemory, session: Any) -> Tensor:
    """Return an output in the session's memory, which stays valid while it is referenced."""
    if memory.device:
        spec = TensorSpec(info.dtype or "", tuple(value.shape()))
        return DeviceTensor(spec, memory.device, value.data_ptr(), (value, session), writable=True)
    if info.dtype not in STAND_INS:
        array: np.ndarray = value.numpy()
        return array
    held = TensorSpec(info.dtype, tuple(value.shape()))
    data = ctypes.string_at(value.data_ptr(), held.size_bytes)
    return np.frombuffer(bytearray(data), STAND_INS[info.dtype]).reshape(held.shape)


def _element(dtype: str) -> Any:
    """Return ONNX Runtime's element type of a dtype: numpy's type, or ONNX's number where numpy has none."""
    return _NUMBERS[dtype] if dtype in STAND_INS else np.dtype(dtype).type


WITHOUT_GRAPH = -1
"""The number of runs that neither capture nor replay; ONNX Runtime keeps 0 for runs that name none."""

Values = Mapping[str, tuple[ValueInfo, tuple[int, ...]]]
"""Values of a graph by port: as the file has them, and the shape of one item."""


class OnnxGraphs:
    """The graphs of one session on one device.

    driver: the device's driver, for copies into the fixed buffers.
    stream: the session's stream; 0: it has one of its own, so copies are synchronised.
    """

    def __init__(
        self,
        session: Any,
        memory: SessionMemory,
        driver: GpuDriver,
        stream: int,
        inputs: Values,
        outputs: Values,
        sizes: Sequence[int],
    ) -> None:
        """Capture a graph for each size, from the largest; raises what a run or the driver does."""
        self._session = session
        self._driver = driver
        self._synchronises = not stream
        self._stream = stream or driver.stream()
        self._addresses: list[int] = []
        self._sizes = tuple(sorted(sizes))
        try:
            self._inputs = {port: self._take(memory, *value) for port, value in inputs.items()}
            self._outputs = {port: self._take(memory, *value) for port, value in outputs.items()}
            self._bindings = {size: self._bound(memory, size, inputs, outputs) for size in sorted(sizes, reverse=True)}
            for size in self._bindings:
                self._run(size)
        except BaseException:
            self.close()
            raise

    def __call__(self, values: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Return a batch's outputs, which the next call overwrites; None where no graph is large enough."""
        items = len(next(iter(values.values())))
        size = next((size for size in self._sizes if size >= items), None)
        if size is None or any(value.shape[1:] != self._inputs[port].shape[1:] for port, value in values.items()):
            return None
        kept = [self._copy(value, self._inputs[port]) for port, value in values.items()]
        if self._synchronises:
            self._driver.synchronize(self._stream)
        self._run(size)
        del kept  # not before: the copies read by address
        return {port: _first(tensor, items) for port, tensor in self._outputs.items()}

    def close(self) -> None:
        """Release the memory; outputs must not be used afterwards."""
        while self._addresses:
            self._driver.free(self._addresses.pop())

    def _take(self, memory: SessionMemory, info: ValueInfo, shape: tuple[int, ...]) -> DeviceTensor:
        spec = TensorSpec(info.dtype or "", (self._sizes[-1], *shape))
        address = self._driver.allocate(max(spec.size_bytes, 1))
        self._addresses.append(address)
        return DeviceTensor(spec, memory.device, address, self, writable=True)

    def _bound(self, memory: SessionMemory, size: int, inputs: Values, outputs: Values) -> Any:
        binding = self._session.io_binding()
        for port, (info, _) in inputs.items():
            bind_at(binding.bind_input, info.name, memory, _first(self._inputs[port], size))
        for port, (info, _) in outputs.items():
            bind_at(binding.bind_output, info.name, memory, _first(self._outputs[port], size))
        return binding

    def _copy(self, value: Tensor, to: DeviceTensor) -> Tensor:
        """Enqueue a copy, and return the object to keep alive until it has ended."""
        if not isinstance(value, DeviceTensor):
            value = np.ascontiguousarray(value)
        address = value.address if isinstance(value, DeviceTensor) else value.ctypes.data
        if value.nbytes:
            self._driver.copy(to.address, address, value.nbytes, self._stream)
        return value

    def _run(self, size: int) -> None:
        self._session.run_with_iobinding(self._bindings[size], run_options(size))


def run_options(graph: int) -> Any:
    """Return ONNX Runtime's options of a run that captures or replays the graph of that number."""
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph))
    return options


def _first(tensor: DeviceTensor, items: int) -> DeviceTensor:
    spec = TensorSpec(tensor.spec.dtype, (items, *tensor.shape[1:]))
    return DeviceTensor(spec, tensor.device, tensor.address, tensor.owner, writable=True)
