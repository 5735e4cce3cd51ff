"""Start-up of an llm step: model, tokenizer, KV cache and optional features."""

from __future__ import annotations

import logging

import torch

from weftline.engine.llm.cpu import attention as attention_cpu
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.heads import open_head
from weftline.engine.llm.kv_sizing import TorchMeter, fill_device
from weftline.engine.llm.model_loader import RunnerOptions
from weftline.engine.llm.options import LlmConfig, round_limits
from weftline.engine.llm.request_grammars import RequestGrammars
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.sampling.sampler import Sampler
from weftline.engine.llm.schedule import RoundLimits
from weftline.engine.llm.speculation import DraftModelProposer, NgramProposer, Speculation
from weftline.engine.llm.tokens import Tokens
from weftline.engine.llm.vision.reader import ImageReader, open_reader
from weftline.errors import ModelError
from weftline.nodes.contract import OpenContext
from weftline.nodes.hugging_face import local_or_hub

DRAFT_KV_SHARE = 4
"""Divisor of the target model's KV memory for the draft model, which has fewer and narrower layers."""


def open_engine(config: LlmConfig, context: OpenContext) -> tuple[Engine, Tokens, ImageReader | None]:
    """Load the model and features of a step; ModelError if one is unsuitable.

    Returns None in place of an ImageReader for a model of texts.

    On GPUs, `ranks` consecutive devices are used, starting with the step's own.
    """
    # torchao, which transformers imports where it is installed, makes torch warn of what its users cannot change
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    threads = max(1, context.threads)
    torch.set_num_threads(threads)
    attention_cpu.set_threads(threads)
    runner = _runner(config, context, config.model, config.kv_bytes)
    source = local_or_hub(config.model, context.base_dir)
    tokens = Tokens.open(source, runner.context_max, config.model)
    images = open_reader(runner, tokens, source, context.base_dir, config)
    for name, folder in config.adapters.items():
        runner.load_adapter(name, local_or_hub(folder, context.base_dir), folder)
    limits = round_limits(config, context.device)
    draft = _draft(config, context, runner)
    if context.memory_limit is not None and runner.device.type == "cuda":
        context.progress("computing the largest round", 0.95)
        models = [runner] if draft is None else [runner, draft]
        fill_device(models, limits, context.memory_limit, TorchMeter(runner.device))
    speculation = _speculation(config, draft, limits)
    grammars = RequestGrammars(tokens, runner.vocabulary, runner.ends, config.sampling.constraint)
    engine = Engine(runner, tokens, limits, True, speculation, grammars)
    return engine, tokens, images


def _runner(config: LlmConfig, context: OpenContext, model: str, kv_bytes: int | None) -> Runner:
    source = local_or_hub(model, context.base_dir)
    limits = round_limits(config, context.device)
    options = RunnerOptions(
        device=context.framework_device,
        dtype=config.dtype,
        page_tokens=config.page_tokens,
        kv_bytes=kv_bytes,
        context_max=config.context_max if model == config.model else None,
        kv_dtype=config.kv_dtype,
        weights=config.weights if model == config.model else "auto",
        fuse=config.fuse,
        rows_max=limits.tokens_max,
        sequences_max=limits.sequences_max,
    )
    if config.task != "generate":
        return open_head(source, config.task, options, context.progress, model, pooling=config.pooling)
    if config.ranks > 1:
        from weftline.engine.llm.parallel.runner import ParallelRunner

        devices = _devices(context.framework_device, config.ranks)
        return ParallelRunner.open_on(devices, source, options, context.progress, model)
    return Runner.open(source, options, context.progress, model)


def _devices(first: str, ranks: int) -> list[str]:
    if not first.startswith("cuda"):
        return [first] * ranks
    start = int(first.partition(":")[2] or 0)
    return [f"cuda:{start + rank}" for rank in range(ranks)]


def _draft(config: LlmConfig, context: OpenContext, runner: Runner) -> Runner | None:
    if config.speculation != "draft":
        return None
    kv_bytes = max(1, runner.pages * runner.page_bytes // DRAFT_KV_SHARE)
    try:
        small = _runner(config, context, config.draft_model, kv_bytes)
    except ModelError as error:
        raise ModelError(f"draft_model (pages: 1/{DRAFT_KV_SHARE} of kv_bytes): {error}") from None
    if small.vocabulary != runner.vocabulary:
        raise ModelError(
            f"draft_model {config.draft_model}: a vocabulary of {small.vocabulary}, expected {runner.vocabulary}, "
            "as the target model has\n    fix: use a smaller model of the same family"
        )
    return small


def _speculation(config: LlmConfig, draft: Runner | None, limits: RoundLimits) -> Speculation | None:
    if config.speculation == "none":
        return None
    if draft is None:
        return Speculation(NgramProposer(), config.draft_tokens_max)
    proposer = DraftModelProposer(draft, Sampler(draft.ends, draft.vocabulary), limits.tokens_max)
    return Speculation(proposer, config.draft_tokens_max)
