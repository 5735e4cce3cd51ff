"""Sentence embeddings as a step: a text as a point, near the points of texts that mean the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from weftline.nodes.contract import Batch, BatchNode, ConfigError, OpenContext, Outputs, StepContext
from weftline.nodes.hugging_face import find_config, load_network, load_tokens, tokens_limit
from weftline.nodes.near import placed, rest
from weftline.nodes.ports import Ports, port
from weftline.nodes.text_tokens import TextTokens
from weftline.shm.device.names import is_gpu

if TYPE_CHECKING:
    import torch

_WIDTH_KEYS = ("hidden_size", "dim", "d_model", "n_embd")


@dataclass(frozen=True, slots=True)
class EmbedConfig:
    """Options of `embed`.

    model:     a model of transformers as a folder or hub name: safetensors only, no code from the model.
    pooling:   'mean' of the text's tokens, or 'first', the model's own summary token; the model's card says which.
    normalise: scale every embedding to length 1, so that a dot product is a cosine.
    prefix:    put before every text, as some models were trained with ('query: ').
    """

    model: str
    pooling: str = "mean"
    normalise: bool = True
    prefix: str = ""


class Embed(BatchNode):
    """Turns texts into float32[D] embeddings, D read from the model's config.json."""

    Config: ClassVar[type[Any]] = EmbedConfig
    extra: ClassVar[str] = "llm"
    heavy: ClassVar[bool] = True
    batch_default: ClassVar[tuple[int, float]] = (32, 2.0)

    _network: Any = None
    _device: str  # as torch calls it
    _near: bool  # embeddings are given on the device
    _tokens: TextTokens

    @classmethod
    def ports(cls, config: EmbedConfig, step: StepContext) -> Ports:
        if config.pooling not in ("mean", "first"):
            raise ConfigError("pooling", f"{config.pooling!r:.40}", "mean or first")
        width = embedding_width(find_config(config.model, step.base_dir), config.model)
        return Ports(inputs=(port("text", "text"),), outputs=(port("embedding", f"float32[{width}]"),))

    @classmethod
    def device_ports(cls, config: EmbedConfig, ports: Ports) -> frozenset[str]:
        return frozenset({"embedding"})

    def open(self, context: OpenContext) -> None:
        self._device, self._near = context.framework_device, is_gpu(context.device)
        self._network = load_network("AutoModel", self.config.model, context)
        limit = tokens_limit(self._network.config.to_dict())
        self._tokens = load_tokens(self.config.model, context, limit)

    def warm_up(self) -> None:
        self._embed(["a text to begin with"])

    def run(self, batch: Batch) -> Outputs:
        found = self._embed([self.config.prefix + text for text in batch["text"]])
        return {"embedding": placed(batch, "embedding", found, self._near)}

    def sleep(self, keep: str) -> bool:
        if keep != "host":
            return False
        rest(self._network)
        return True

    def wake(self) -> None:
        self._network.to(self._device)

    def close(self) -> None:
        self._network = None

    def _embed(self, texts: list[str]) -> torch.Tensor:
        """Return float32 [texts, D] on the network's device."""
        import torch

        rows, device = self._tokens.rows(texts), self._device
        with torch.inference_mode():
            ids, mask = torch.from_numpy(rows.ids).to(device), torch.from_numpy(rows.mask).to(device)
            states = self._network(input_ids=ids, attention_mask=mask).last_hidden_state.float()
            pooled = states[:, 0] if self.config.pooling == "first" else _mean(states, mask.unsqueeze(-1).float())
            if self.config.normalise:
                pooled = torch.nn.functional.normalize(pooled, dim=-1)
            found: torch.Tensor = pooled
            return found


def _mean(states: Any, mask: Any) -> Any:
    return (states * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def embedding_width(config: dict[str, Any] | None, model: str) -> int | str:
    """Return the embedding's size, or the name D while the model's config.json is not on this machine."""
    if config is None:
        return "D"
    for key in _WIDTH_KEYS:
        if type(config.get(key)) is int and config[key] > 0:
            width: int = config[key]
            return width
    raise ConfigError("model", f"{model}/config.json has none of {', '.join(_WIDTH_KEYS)}", "a model's config.json")
