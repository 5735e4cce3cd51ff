"""Formats of quantised checkpoints: recognition by config.json, and refusal of those that cannot be loaded.

    found = read_format({"quant_method": "awq", "bits": 4, "version": "gemm", ...}, "models/chat")
    found.packed      # PackedFormat("awq", 4, 0)

Imports neither torch nor transformers, so that `weftline check` refuses a checkpoint before it is opened. awq and gptq
are unpacked by `packed_weights`; transformers and the package of the format load the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from weftline.errors import ModelError
from weftline.nodes.contract import ConfigError, model_error

PLAIN_FIX = "name the folder of its unquantised weights, or of one of the formats expected"


@dataclass(frozen=True, slots=True)
class Method:
    """One kind of quantised checkpoint.

    packages: what must be installed, as (module, what to install).
    unpacked: it is loaded into plain weights, which can be quantised anew; else they stay as they are.
    """

    packages: tuple[tuple[str, str], ...] = ()
    unpacked: bool = False


METHODS: Mapping[str, Method] = {
    # transformers would fetch this one's matrix products from a hub, as code
    "fp8": Method((("accelerate", "weftline[quantised]"),), unpacked=True),
    "compressed-tensors": Method((("compressed_tensors", "weftline[quantised]"),), unpacked=True),
    "torchao": Method((("torchao", "weftline[quantised]"),)),
    "gptq": Method(unpacked=True),
    "awq": Method(unpacked=True),
}
AWQ_VERSIONS = ("gemm",)
GPTQ_FORMATS = {"gptq": 1, "gptq_v2": 0}
"""Formats of GPTQ checkpoints, with what is added to a stored zero point."""
GPTQ_BITS = (4, 8)
PARTS = ("qweight", "qzeros", "scales", "g_idx")
"""Tensors of a layer in place of its weight; only gptq has the last, and not always."""
COMPRESSED = (
    "dense", "naive-quantized", "int-quantized", "float-quantized", "pack-quantized", "nvfp4-pack-quantized",
    "mixed-precision",
)  # fmt: skip
"""Formats of compressed-tensors that transformers unpacks on any device."""


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """Layout of the packed weights of AWQ and GPTQ; see `packed_weights`.

    method:      awq or gptq.
    bits:        bits of a weight.
    zero_offset: what is added to a stored zero point.
    """

    method: str
    bits: int
    zero_offset: int


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """Format of a quantised checkpoint. packed: for awq and gptq."""

    method: str
    packed: PackedFormat | None = None


def read_format(settings: Mapping[str, Any], shown: str) -> CheckpointFormat | None:
    """Return the format that a `quantization_config` names, None for plain weights.

    shown: the model's name in errors. ConfigError about option `model` for a format that cannot be loaded.
    """
    if not settings:
        return None
    method = str(settings.get("quant_method", "")).rpartition(".")[2].lower().replace("_", "-")
    if method not in METHODS:
        known = ", ".join(METHODS)
        found = f"{shown}: its weights are quantised by {method!r:.40}"
        raise ConfigError("model", found, f"one of: {known}", PLAIN_FIX)
    if method == "awq":
        return CheckpointFormat(method, _read_awq(settings, shown))
    if method == "gptq":
        return CheckpointFormat(method, _read_gptq(settings, shown))
    if method == "compressed-tensors":
        _expect(settings, "format", COMPRESSED, COMPRESSED[0], method, shown)
        _expect(settings.get("sparsity_config") or {}, "format", COMPRESSED[:1], COMPRESSED[0], method, shown)
    return CheckpointFormat(method)


def _read_awq(settings: Mapping[str, Any], shown: str) -> PackedFormat:
    # the same setting, as AutoAWQ and transformers call it
    version = settings.get("version", settings.get("format"))
    _expect({"version": version}, "version", AWQ_VERSIONS, AWQ_VERSIONS[0], "awq", shown)
    bits = _expect(settings, "bits", (4,), 4, "awq", shown)
    _expect(settings, "zero_point", (True,), True, "awq", shown)
    return PackedFormat("awq", bits, 0)


def _read_gptq(settings: Mapping[str, Any], shown: str) -> PackedFormat:
    written = settings.get("checkpoint_format", settings.get("format"))
    if settings.get("is_marlin_format"):
        written = "marlin"
    form = _expect({"checkpoint_format": written}, "checkpoint_format", tuple(GPTQ_FORMATS), "gptq", "gptq", shown)
    bits = _expect(settings, "bits", GPTQ_BITS, None, "gptq", shown)
    _expect(settings, "pack_dtype", ("int32",), "int32", "gptq", shown)
    for pattern, changed in (settings.get("dynamic") or {}).items():
        # layers that "-:" names are not quantised, and other keys change how single layers were computed
        if isinstance(changed, Mapping) and changed.get("bits", bits) != bits:
            found = f"{shown}: quantised by gptq with {bits} bits, and {pattern!r:.60} with {changed['bits']!r:.20}"
            raise ConfigError("model", found, "the same number of bits in all layers", PLAIN_FIX)
    return PackedFormat("gptq", bits, GPTQ_FORMATS[form])


def _expect(
    settings: Mapping[str, Any], key: str, allowed: tuple[Any, ...], default: Any, method: str, shown: str
) -> Any:
    """Return a setting; ConfigError unless it is one of `allowed`. default: its value where it is not set."""
    value = settings.get(key)
    value = default if value is None else value
    value = value.lower() if isinstance(value, str) else value
    if value not in allowed or type(value) is not type(allowed[0]):
        names = ", ".join(map(str, allowed))
        raise ConfigError(
            "model", f"{shown}: quantised by {method} with {key} {value!r:.40}", f"{key} {names}", PLAIN_FIX
        )
    return value


def packed_layers(names: Iterable[str], packed: PackedFormat) -> list[str]:
    """Return the layers with packed weights by their tensors' names; ValueError where some are missing or unknown."""
    known = set(names)
    layers = [name.removesuffix(".qweight") for name in known if name.endswith(".qweight")]
    if not layers:
        raise ValueError(f"its config says {packed.method}, but no tensor is named ...qweight")
    missing = sorted({f"{layer}.{part}" for layer in layers for part in PARTS[:3]} - known)
    if missing:
        raise ValueError(f"tensor {missing[0]} of a packed weight is missing")
    own = {f"{layer}.{part}" for layer in layers for part in PARTS}
    left = sorted(name for name in known - own if name.rpartition(".")[2] in PARTS)
    if left:  # such as AutoAWQ's `act.scales`, by which it divides an activation
        raise ValueError(f"tensor {left[0]} belongs to no packed weight, and is not supported")
    return sorted(layers)


def settings_of(config: Any) -> dict[str, Any]:
    """Return the quantisation settings of a config, config.json's or transformers'; {} for none."""
    if isinstance(config, Mapping):
        found = config.get("quantization_config")
    else:
        found = getattr(config, "quantization_config", None)
    if found is None:
        return {}
    return dict(found if isinstance(found, Mapping) else found.to_dict())


def find_format(config: Any, shown: str) -> CheckpointFormat | None:
    """Return the format of the checkpoint of a transformers config; ModelError for one that cannot be loaded here.

    shown: the model's name in errors.
    """
    try:
        found = read_format(settings_of(config), shown)
    except ConfigError as error:
        raise model_error(error) from None
    if found is None:
        return None
    missing = {install for module, install in METHODS[found.method].packages if find_spec(module) is None}
    if missing:
        names = " ".join(f"'{name}'" for name in sorted(missing))
        raise ModelError(
            f"model {shown}: its weights are quantised by {found.method}, whose packages are not installed\n"
            f"    fix: pip install {names}"
        )
    return found


def is_fp8(config: Any) -> bool:
    """Return whether all weights of a checkpoint of compressed-tensors are 8-bit floating point."""
    groups = (settings_of(config).get("config_groups") or {}).values()
    weights = [(group.get("weights") or {}) if isinstance(group, Mapping) else {} for group in groups]
    return bool(weights) and all(w.get("type") == "float" and w.get("num_bits") == 8 for w in weights)


def set_options(config: Any, **settings: bool) -> None:
    """Add `settings` to the quantisation config of a checkpoint."""
    config.quantization_config = {**settings_of(config), **settings}
