"""A PyTorch module as a step: a TorchScript file, a torch.export file, or a class of the user's with its weights.

A batch is one call: every input is one tensor [items, ...], every output one tensor [items, ...]. bfloat16 and float8
values, which numpy does not have, travel as the unsigned integers of weftline.shm.spec.STAND_INS with the same bits;
this node turns them into true torch tensors on the way in and back on the way out, so modules never see the difference.

On a GPU, tensors are taken where they lie and given where they were made; who reads them decides where they go.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from weftline.errors import MissingPackage, ModelError, StepError
from weftline.nodes.contract import Batch, BatchNode, ConfigError, OpenContext, Outputs, StepContext
from weftline.nodes.grouping import alike
from weftline.nodes.model_file import need_file
from weftline.nodes.near import as_array, placed, rest, stacked_group, stacked_torch
from weftline.nodes.ports import Port, Ports, PortType
from weftline.nodes.torch_export import load_exported
from weftline.nodes.user_code import load, locate
from weftline.nodes.weights import load_into, load_weights
from weftline.shm.device.names import is_gpu


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
    """

    accepts: dict[str, str]
    gives: dict[str, str]
    model: str = ""
    module: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    weights: str = ""


class TorchModule(BatchNode):
    """Runs a torch module on batches of tensors, in inference mode."""

    Config: ClassVar[type[Any]] = TorchConfig
    extra: ClassVar[str] = "torch"
    heavy: ClassVar[bool] = True
    batch_default: ClassVar[tuple[int, float]] = (8, 1.0)

    _module: Any = None
    _ports: Ports
    _device: str  # as torch calls it
    _near: bool  # tensors are given on the device

    @classmethod
    def ports(cls, config: TorchConfig, step: StepContext) -> Ports:
        if bool(config.model) == bool(config.module):
            raise ConfigError("model", "neither model nor module, or both", "one of them", "see the docs of node torch")
        if config.model:
            need_file(config.model, step.base_dir)
        else:
            if not _of_the_framework(config.module):
                locate(config.module, step.base_dir, "module")
        if config.weights:
            need_file(config.weights, step.base_dir, "weights")
        return Ports(_declared(config.accepts, "accepts"), _declared(config.gives, "gives"))

    @classmethod
    def device_ports(cls, config: TorchConfig, ports: Ports) -> frozenset[str]:
        return frozenset(port.name for port in (*ports.inputs, *ports.outputs))

    def open(self, context: OpenContext) -> None:
        try:
            import torch
        except ImportError:
            raise MissingPackage("torch", self.extra) from None
        torch.set_num_threads(max(context.threads, 1))
        self._ports = self.ports(self.config, StepContext(context.base_dir))
        self._device, self._near = context.framework_device, is_gpu(context.device)
        context.progress("reading weights", 0.1)
        module = self._open_file(context.base_dir) if self.config.model else self._make(context.base_dir)
        self._module = module.to(self._device)

    def warm_up(self) -> None:
        import torch

        types = [port.type for port in self._ports.inputs]
        if all(type.dtype and type.dims is not None and all(isinstance(d, int) for d in type.dims) for type in types):
            shapes = [((1, *_sizes(type)), getattr(torch, type.dtype or "")) for type in types]
            self._call([torch.zeros(shape, dtype=dtype, device=self._device) for shape, dtype in shapes])

    def run(self, batch: Batch) -> Outputs:
        ports, device = self._ports.inputs, self._device
        groups = alike([batch[port.name] for port in ports], len(batch))
        if len(groups) == 1:
            answers = self._call([stacked_torch(batch, port.name, port.type.dtype, device) for port in ports])
            return {name: placed(batch, name, tensor, self._near) for name, tensor in answers.items()}
        found: dict[str, list[Any]] = {port.name: [None] * len(batch) for port in self._ports.outputs}
        for group in groups:
            inputs = [stacked_group(batch[port.name], group, port.type.dtype, device) for port in ports]
            for name, tensor in self._call(inputs).items():
                rows = tensor if self._near else as_array(tensor)
                for item, row in zip(group, rows, strict=True):
                    found[name][item] = row
        return found

    def sleep(self, keep: str) -> bool:
        if keep != "host":
            return False
        rest(self._module)
        return True

    def wake(self) -> None:
        self._module.to(self._device)

    def close(self) -> None:
        self._module = None

    def _open_file(self, base_dir: Path) -> Any:
        import torch

        path, shown = need_file(self.config.model, base_dir), self.config.model
        if path.suffix == ".pt2":
            return load_exported(path, shown)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch advises torch.export; both are taken here
                return torch.jit.load(path, map_location="cpu").eval()  # type: ignore[no-untyped-call]
        except Exception as error:
            reason = str(error).replace(str(path), shown).strip().splitlines() or [type(error).__name__]
            raise ModelError(f"{shown} is no TorchScript file, or is corrupt: {reason[0]:.200}") from None

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
    """Whether `module` is one of torch's own where torch is not installed: checking must not need it, opening will."""
    package = module.partition(":")[0].partition(".")[0]
    return package in ("torch", "torchvision") and importlib.util.find_spec(package) is None
