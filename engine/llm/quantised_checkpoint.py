"""Pre-quantised checkpoints: supported formats, requirements and loading.

A checkpoint says so in its config's `quantization_config`. Loading is left to transformers and the package that made
the format. A format whose package would fetch code, or that cannot run on the device, is loaded into plain weights
instead where its maker offers that, and otherwise refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from weftline.errors import ModelError


@dataclass(frozen=True, slots=True)
class Method:
    """One kind of quantised checkpoint.

    packages:   what must be installed, as (module, what to install).
    needs_gpu:  it has no form for CPUs.
    unpacked:   it is loaded into plain weights, which can be quantised anew; else they stay as they are.
    """

    packages: tuple[tuple[str, str], ...]
    needs_gpu: bool = False
    unpacked: bool = False


METHODS: Mapping[str, Method] = {
    # transformers would fetch this one's matrix products from a hub, as code
    "fp8": Method((("accelerate", "accelerate"),), unpacked=True),
    "compressed-tensors": Method((("compressed_tensors", "compressed-tensors>=0.15"),), unpacked=True),
    "torchao": Method((("torchao", "weftline[quantised]"),)),
    "gptq": Method((("gptqmodel", "gptqmodel"), ("optimum", "optimum")), needs_gpu=True),
    "awq": Method((("gptqmodel", "gptqmodel"), ("accelerate", "accelerate")), needs_gpu=True),
}


def find_method(config: Any, shown: str) -> str | None:
    """Return the name of the method in METHODS by which a checkpoint is quantised, None for plain weights.

    `config` is transformers' config; `shown` the model's name in errors. ModelError for a method that is not known.
    """
    settings = _settings(config)
    if not settings:
        return None
    method = str(settings.get("quant_method", "")).rpartition(".")[2].lower().replace("_", "-")
    if method not in METHODS:
        known = ", ".join(METHODS)
        raise ModelError(f"model {shown}: its weights are quantised by {method!r:.40}, expected one of: {known}")
    return method


def check_method(method: str, shown: str, on_cpu: bool) -> None:
    """Raise ModelError unless a checkpoint of that method can be loaded here."""
    if METHODS[method].needs_gpu and on_cpu:
        raise ModelError(f"model {shown}: its weights are quantised by {method}, which needs a GPU; found cpu")
    missing = [install for module, install in METHODS[method].packages if find_spec(module) is None]
    if missing:
        names = " ".join(f"'{name}'" for name in missing)
        raise ModelError(
            f"model {shown}: its weights are quantised by {method}, whose packages are not installed\n"
            f"    fix: pip install {names}"
        )


def is_fp8(config: Any) -> bool:
    """Return whether all weights of a checkpoint of compressed-tensors are 8-bit floating point."""
    groups = (_settings(config).get("config_groups") or {}).values()
    weights = [(group.get("weights") or {}) if isinstance(group, Mapping) else {} for group in groups]
    return bool(weights) and all(w.get("type") == "float" and w.get("num_bits") == 8 for w in weights)


def set_options(config: Any, **settings: bool) -> None:
    """Add `settings` to the quantisation config of a checkpoint."""
    config.quantization_config = {**_settings(config), **settings}


def _settings(config: Any) -> dict[str, Any]:
    found = getattr(config, "quantization_config", None)
    if found is None:
        return {}
    return dict(found if isinstance(found, Mapping) else found.to_dict())
