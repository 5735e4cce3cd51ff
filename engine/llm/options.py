"""Options of an llm step, and checks that need no model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from weftline.engine.llm.answer_syntax import TOOL_FORMATS
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.schedule import RoundLimits
from weftline.errors import InputError
from weftline.fields import REQUEST, RESOURCE
from weftline.nodes.contract import ConfigError
from weftline.nodes.model_store import is_url
from weftline.shm.device.names import torch_device

TOOLS = ("auto", "none", *TOOL_FORMATS)
DEFAULT_LIMITS = {"cpu": RoundLimits(512, 32), "gpu": RoundLimits(2048, 256)}
"""Default limits of rounds by device. A GPU reads weights once for all rows, so more rows cost little."""
ADAPTERS_MAX = 8
"""Most LoRA adapters of a step: each layer reserves memory for all of them."""
Count = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True, slots=True)
class LlmConfig:
    """Options of an llm step."""

    model: Annotated[str, Meta(min_length=1)]
    """Folder of a transformers model (config.json, *.safetensors, tokenizer), its name on the hub, or a GGUF file."""
    task: Literal["generate", "embed", "classify"] = "generate"
    """generate: answers. embed: a vector for each text. classify: scores by the model's classification head."""
    system: Annotated[str, REQUEST] = ""
    """System message before every `prompt`; needs a model with a chat template."""
    prefix: Annotated[str, REQUEST] = ""
    """Fixed beginning of every prompt; its pages are kept longest. A step with `prompt:` sets it itself."""
    sampling: Annotated[SamplingParams, REQUEST] = field(default_factory=SamplingParams)
    """Sampling options and stop conditions; a request's `sampling` input changes single keys."""
    tool_format: Annotated[str, REQUEST] = "auto"
    """Notation of tool calls: auto (found in the chat template), hermes, llama3, mistral, qwen3_coder, or none (calls
    stay in `text`)."""
    reasoning: Annotated[Literal["auto", "none"], REQUEST] = "auto"
    """Separation of reasoning: auto (text between `<think>` and `</think>` is the output `reasoning`, if the chat
    template has these marks) or none (it stays in `text`)."""
    pooling: Literal["last", "mean", "first"] = "last"
    """Pooling of token embeddings: last, mean or first."""
    page_tokens: Count = 16
    """Tokens in one page of the KV memory."""
    kv_bytes: Annotated[Count | None, RESOURCE] = None
    """KV memory in bytes, reserved at start; by default 256 MiB on a CPU, less where the model cannot use it,
    and on a GPU what its budget leaves."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """Number format of keys and values: auto (that of the weights), or fp8, half the memory of 16 bits."""
    round_tokens_max: Annotated[int, Meta(ge=1, le=1 << 17)] | None = None
    """Most tokens of one round: a larger one computes prompts faster, a smaller one streams more evenly; by default 512
    on a CPU and 2048 on a GPU."""
    sequences_max: Annotated[int, Meta(ge=1, le=4096)] | None = None
    """Most requests that generate at a time; others wait inside the step; by default 32 on a CPU and 256 on a GPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of weights and KV: auto (float32 on CPU, the checkpoint's on a GPU), float32, bfloat16, float16."""
    weights: Literal["auto", "fp8", "int8", "int4"] = "auto"
    """Number format of weights in memory: auto (the checkpoint's), fp8, int8 or int4."""
    context_max: Annotated[int, Meta(ge=2)] | None = None
    """Longest prompt and answer together, in tokens; by default the model's own limit."""
    speculation: Literal["none", "ngram", "draft"] = "none"
    """Speculative decoding: none, ngram (earlier text) or draft (a smaller model). Answers do not change."""
    draft_model: str = ""
    """Smaller model for `speculation: draft`, with the same vocabulary."""
    draft_tokens_max: Count = 5
    """Most draft tokens per round."""
    adapters: Annotated[dict[str, str], Meta(max_length=ADAPTERS_MAX)] = field(default_factory=dict)
    """LoRA adapters, {name: folder}, at most 8; a request's `adapter` input names one of them."""
    fuse: bool = True
    """Merge weights at load where results stay the same: fewer and larger matrix products."""
    ranks: Count = 1
    """Processes that share the model (tensor parallelism)."""
    image_cache_bytes: Count = 128 << 20
    """Most bytes of image features kept in host memory; a picture seen again is not encoded again."""

    engine: Literal["weftline", "openai"] = "weftline"
    """Engine: weftline, in the step's own process, or openai, a server with OpenAI's API, which has other options."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampling", checked_sampling(self.sampling))


def checked_sampling(given: object) -> SamplingParams:
    """Return the option `sampling`, which is a mapping in a file; ConfigError names a wrong key."""
    if isinstance(given, SamplingParams):
        return given
    try:
        return SamplingParams.read(given)
    except InputError as error:
        option, _, found = str(error).partition(": ")
        raise ConfigError(option, found) from error


def round_limits(config: LlmConfig, device: str) -> RoundLimits:
    """Return the limits of a step's rounds on a device: sizes of buffers, graphs and the schedule."""
    default = DEFAULT_LIMITS["cpu" if torch_device(device) == "cpu" else "gpu"]
    return RoundLimits(config.round_tokens_max or default.tokens_max, config.sequences_max or default.sequences_max)


def check_options(config: LlmConfig) -> None:
    """Raise ConfigError for an option that is invalid beside others, or for more than its bounds state."""
    if url := next((folder for folder in config.adapters.values() if is_url(folder)), None):
        raise ConfigError("adapters", f"found {url:.200}", "a folder of this machine: adapters are not fetched")
    if config.tool_format not in TOOLS:
        raise ConfigError("tool_format", f"found {config.tool_format!r:.40}", f"one of {', '.join(TOOLS)}")
    if (config.speculation == "draft") != bool(config.draft_model):
        raise ConfigError("draft_model", f"found {config.draft_model!r:.60}", "a model exactly with speculation: draft")
    for option in ("tool_format", "reasoning"):
        if config.task != "generate" and getattr(config, option) != "auto":
            raise ConfigError(option, f"found {getattr(config, option)}", f"auto, with task: {config.task}")
    if config.task != "generate" and (config.speculation != "none" or config.adapters):
        raise ConfigError("task", f"found {config.task}", "generate, with speculation or adapters")
    plain = config.task == "generate" and config.weights == "auto" and config.speculation != "draft"
    if config.ranks > 1 and (config.adapters or not plain):
        raise ConfigError("ranks", f"found {config.ranks}", "1 with other tasks, weights, adapters or a draft model")
