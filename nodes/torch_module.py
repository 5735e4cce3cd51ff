"""PyTorch node: a TorchScript file, a torch.export file, or a user's class with its weights.

A batch is one call: every input is one tensor [items, ...], every output one tensor [items, ...]. bfloat16 and float8
values, which numpy does not have, travel as the unsigned integers of weftline.shm.spec.STAND_INS with the same bits;
this node turns them into true torch tensors on the way in and back on the way out, so modules never see the difference.

On a GPU, tensors are read and written on the device; their readers decide whether they are copied.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from weftline.errors import first_line
from weftline.node import (
    Batch,
    BatchNode,
    ConfigError,
    MissingPackage,
    ModelError,
    OpenContext,
    Outputs,
    Port,
    Ports,
    PortType,
    StepContext,
    StepError,
    as_array,
    placed,
    stacked_torch,
)
from weftline.nodes.class_labels import with_labels
from weftline.nodes.contract import model_error
from weftline.nodes.cuda_graphs import TorchGraphs, check_graphs, graph_sizes, graphs_or_none
from weftline.nodes.declared_files import named_paths
from weftline.nodes.device_tensors import offload, stacked_group
from weftline.nodes.grouping import group_by_shape
from weftline.nodes.model_file import (
    EXPORTED,
    OLD_PICKLE,
    PICKLED_OBJECT,
    STATE_DICT,
    TORCHSCRIPT,
    check_safetensors,
    check_torch_zip,
    load_into,
    load_weights,
    need_file,
    stored_bytes,
    torch_kind,
)
from weftline.nodes.torch_export import check_exported, load_exported
from weftline.nodes.user_code import load, locate
from weftline.shm.device.names import is_gpu

if TYPE_CHECKING:
    from weftline.nodes.cuda_capture import Capture


@dataclass(frozen=True, slots=True)
class TorchConfig:
    """Options of `torch`: either `model`, or `module` with its weights.

    accepts:   input ports, name to tensor type of one item, such as {x: "float32[3, 32, 32]"}; given to the module in
               this order.
    gives:     output ports, likewise; the module returns one tensor, a tuple in this order, or a dict by name.
    model:     a TorchScript file, or a torch.export .pt2 file. Both are programs: name only one you would run.
    module:    'file.py:Class' or 'package.module:Class', a class (or function) that makes the nn.Module.
    arguments: keyword arguments of `module`.
    weights:   safetensors, or a torch state dict, for `module`; loaded without running code from it.
    graphs:    repeat calls as CUDA graphs, captured when the step opens: for each of `batch.sizes`, else for powers of
               two, and for `batch.items_max`; batches between are padded. All sizes in `accepts` and `gives` must be
               fixed. A module that cannot be captured runs without, with a warning; on the CPU there are none.
    labels:    a text file with the name of a class on each line, in the order of an output's elements. Clients of a
               server receive them with `class_count`.
    """

    accepts: dict[str, str]
    gives: dict[str, str]
    model: str = ""
    module: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    weights: str = ""
    graphs: bool = False
    labels: str = ""


class TorchModule(BatchNode):
    """Runs a torch module on batches of tensors, in inference mode."""

    Config: ClassVar[type[Any]] = TorchConfig
    extra: ClassVar[str] = "torch"
    heavy: ClassVar[bool] = True
    user_code: ClassVar[bool] = True
    batch_default: ClassVar[tuple[int, float]] = (8, 1.0)

    _module: Any = None
    _ports: Ports
    _device: str  # as torch calls it
    _on_device: bool  # outputs stay on the device
    _sizes: tuple[int, ...] = ()  # batch sizes to capture as graphs
    _graphs: TorchGraphs | None = None

    @classmethod
    def ports(cls, config: TorchConfig, step: StepContext) -> Ports:
        if bool(config.model) == bool(config.module):
            raise ConfigError("model", "neither model nor module, or both", "one of them", "see the docs of node torch")
        if config.model:
            _check_program(need_file(config.model, step.base_dir), config.model)
        else:
            if not _of_the_framework(config.module):
                locate(config.module, step.base_dir, "module")
        if config.weights:
            _check_weights(need_file(config.weights, step.base_dir, "weights"), config.weights)
        outputs = with_labels(_declared(config.gives, "gives"), config.labels, step.base_dir)
        ports = Ports(_declared(config.accepts, "accepts"), outputs)
        if config.graphs:
            check_graphs((*ports.inputs, *ports.outputs))
        return ports

    @classmethod
    def device_ports(cls, config: TorchConfig, ports: Ports) -> frozenset[str]:
        return frozenset(port.name for port in (*ports.inputs, *ports.outputs))

    @classmethod
    def model_bytes(cls, config: TorchConfig, step: StepContext) -> int:
        return sum(stored_bytes(one, step.base_dir) for one in (config.model, config.weights) if one)

    @classmethod
    def files(cls, config: TorchConfig, step: StepContext) -> list[Path]:
        named = (config.model, config.weights, config.labels)
        return [path for one in named for path in named_paths(one, step.base_dir)]

    def open(self, context: OpenContext) -> None:
        try:
            import torch
        except ImportError:
            raise MissingPackage("torch", self.extra) from None
        torch.set_num_threads(max(context.threads, 1))
        try:
            self._ports = self.ports(self.config, StepContext(context.base_dir))
        except ConfigError as error:
            raise model_error(error) from None
        self._device, self._on_device = context.framework_device, is_gpu(context.device)
        context.progress("reading weights", 0.1)
        module = self._open_file(context.base_dir) if self.config.model else self._make(context.base_dir)
        self._module = module.to(self._device)
        if self.config.graphs and self._device.startswith("cuda"):
            self._sizes = graph_sizes(context.items_max, context.sizes)

    def warm_up(self) -> None:
        import torch

        types = [port.type for port in self._ports.inputs]
        if all(type.dtype and type.dims is not None and all(isinstance(d, int) for d in type.dims) for type in types):
            shapes = [((1, *_sizes(type)), getattr(torch, type.dtype or "")) for type in types]
            inputs = [torch.zeros(shape, dtype=dtype, device=self._device) for shape, dtype in shapes]
            self._call(inputs)
            if self._sizes:
                shown = self.config.model or self.config.module
                self._graphs = graphs_or_none(self._compute, inputs, self._sizes, self._capture, shown)

    def run(self, batch: Batch) -> Outputs:
        ports, device = self._ports.inputs, self._device
        groups = group_by_shape([batch[port.name] for port in ports], len(batch))
        if len(groups) == 1:
            answers = self._call([stacked_torch(batch, port.name, port.type.dtype, device) for port in ports])
            return {name: placed(batch, name, tensor, self._on_device) for name, tensor in answers.items()}
        found: dict[str, list[Any]] = {port.name: [None] * len(batch) for port in self._ports.outputs}
        for group in groups:
            inputs = [stacked_group(batch[port.name], group, port.type.dtype, device) for port in ports]
            for name, tensor in self._call(inputs).items():
                rows = tensor if self._on_device else as_array(tensor)
                for item, row in zip(group, rows, strict=True):
                    found[name][item] = row
        return found

    def sleep(self, keep: str) -> bool:
        if keep != "host":
            return False
        self._graphs = None  # they refer to the weights' old addresses
        offload(self._module)
        return True

    def wake(self) -> None:
        self._module.to(self._device)
        if self._sizes:
            self.warm_up()

    def close(self) -> None:
        self._module = self._graphs = None

    def _capture(self) -> Capture:
        import torch

        from weftline.nodes.cuda_capture import CudaCapture

        return CudaCapture(torch.device(self._device))

    def _open_file(self, base_dir: Path) -> Any:
        import torch

        path, shown = need_file(self.config.model, base_dir), self.config.model
        if path.suffix == ".pt2" or torch_kind(path)[0] == EXPORTED:
            return load_exported(path, shown)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch recommends torch.export; both are supported
                return torch.jit.load(path, map_location="cpu").eval()  # type: ignore[no-untyped-call]
        except Exception as error:
            reason = first_line(error).replace(str(path), shown)
            raise ModelError(f"{shown} is no TorchScript file, or is corrupt: {reason:.200}") from None

    def _make(self, base_dir: Path) -> Any:
        import torch

        make = load(self.config.module, base_dir, "module")
        try:
            module = make(**self.config.arguments)
        except Exception as error:
            raise ModelError(f"{self.config.module} failed: {type(error).__name__}: {error}") from error
        if not isinstance(module, torch.nn.Module):
            raise ModelError(f"{self.config.module} gives {type(module).__name__}, expected a torch.nn.Module")
        if self.config.weights:
            state = load_weights(need_file(self.config.weights, base_dir, "weights"), self.config.weights)
            load_into(module, state, self.config.weights)
        return module.eval()

    def _call(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """Return each output as a torch tensor [items, ...], dense and on the module's device."""
        import torch

        with torch.inference_mode():
            repeated = self._graphs(inputs) if self._graphs is not None else None
        return self._compute(inputs) if repeated is None else repeated

    def _compute(self, inputs: Sequence[Any]) -> dict[str, Any]:
        import torch

        with torch.inference_mode():
            answer = self._by_name(self._module(*inputs))
            return {port.name: _checked(answer[port.name], port, len(inputs[0])) for port in self._ports.outputs}

    def _by_name(self, answer: Any) -> Mapping[str, Any]:
        names = [port.name for port in self._ports.outputs]
        if isinstance(answer, Mapping):
            missing = [name for name in names if name not in answer]
            if missing:
                found = ", ".join(map(str, answer))
                raise StepError(f"the module returned no {', '.join(missing)}; it returned {found}")
            return answer
        values = list(answer) if isinstance(answer, tuple | list) else [answer]
        if len(values) != len(names):
            raise StepError(f"the module returned {len(values)} values, gives declares {len(names)}")
        return dict(zip(names, values, strict=True))


_EXPORT = "where its class is: torch.export.save(torch.export.export(model.eval(), (example,)), 'model.pt2')"
_PROGRAM = "a torch.export .pt2 file or a TorchScript file"


def _check_program(path: Path, shown: str) -> None:
    """Raise ConfigError when `model` names a file without the program in it, or another framework's."""
    kind, name = torch_kind(path)
    if kind == PICKLED_OBJECT:
        found = f"{shown} is a pickle by torch.save of an object ({name:.80}), which needs its class and can run code"
        raise ConfigError("model", found, _PROGRAM, f"export it {_EXPORT}")
    if kind == STATE_DICT or path.suffix == ".safetensors":
        found = f"{shown} holds weights without the module that they belong to"
        fix = f"name it in `weights`, and the class in `module`; or export the module {_EXPORT}"
        raise ConfigError("model", found, _PROGRAM, fix)
    if kind == OLD_PICKLE:
        raise ConfigError("model", f"{shown} is a pickle, which can run code", _PROGRAM, f"export it {_EXPORT}")
    if path.suffix == ".onnx":
        raise ConfigError("model", f"{shown} is an ONNX model", _PROGRAM, "use node onnx")
    if not kind:
        raise ConfigError("model", f"{shown} is no file of torch, or a truncated one", _PROGRAM)
    if kind == EXPORTED:
        _as_problem("model", check_exported, path, shown)


def _check_weights(path: Path, shown: str) -> None:
    """Raise ConfigError when `weights` names a file that holds something else than tensors by name."""
    kind, name = torch_kind(path)
    if kind in (TORCHSCRIPT, EXPORTED):
        what = "TorchScript" if kind == TORCHSCRIPT else "torch.export"
        fix = "name it in `model`, and leave out `module` and `weights`"
        raise ConfigError("weights", f"{shown} is a {what} file, a whole program", "a state dict", fix)
    if kind in (PICKLED_OBJECT, OLD_PICKLE):
        what = f"an object ({name:.80})" if name else "an old form"
        fix = "where you trust it: torch.save(model.state_dict(), ...), or safetensors.torch.save_file"
        raise ConfigError("weights", f"{shown} is a pickle of {what}, which can run code", "a state dict", fix)
    _as_problem("weights", check_safetensors if path.suffix == ".safetensors" else check_torch_zip, path, shown)


def _as_problem(option: str, check: Callable[[Path, str], None], path: Path, shown: str) -> None:
    """Call a check of a file; ConfigError about `option` where it raises ModelError."""
    try:
        check(path, shown)
    except ModelError as error:
        raise ConfigError(option, str(error)) from None


def _declared(written: Mapping[str, str], option: str) -> tuple[Port, ...]:
    if not written:
        raise ConfigError(option, "empty", "at least one port", f'{option}: {{x: "float32[3, 32, 32]"}}')
    ports = []
    for name, text in written.items():
        try:
            type = PortType.parse(text)
        except ValueError as error:
            raise ConfigError(f"{option}.{name}", str(error)) from None
        if type.kind != "tensor" or type.dtype is None:
            raise ConfigError(f"{option}.{name}", f"{text}", "a tensor with a dtype, such as float32[3, 32, 32]")
        ports.append(Port(name, type))
    return tuple(ports)


def _sizes(type: PortType) -> tuple[int, ...]:
    return tuple(dim for dim in type.dims or () if isinstance(dim, int))


def _checked(tensor: Any, port: Port, items: int) -> Any:
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0 or len(tensor) != items:
        found = f"a tensor {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise StepError(
            f"the module's {port.name} is {found}; expected a tensor whose first dimension is {items} items"
        )
    name = str(tensor.dtype).removeprefix("torch.")
    if name != port.type.dtype:
        raise StepError(f"the module's {port.name} is {name}, gives declares {port.type}")
    return tensor.detach().contiguous()


def _of_the_framework(module: str) -> bool:
    """Return True for a module of torch's own where torch is not installed: a check must not need it."""
    package = module.partition(":")[0].partition(".")[0]
    return package in ("torch", "torchvision") and importlib.util.find_spec(package) is None
