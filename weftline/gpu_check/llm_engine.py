"""GPU check parts that run the whole LLM engine.

Answers are compared with transformers' own code on the same device: every token must be the one that its forward pass
gives after the tokens before it, up to rounding (`compare_greedy`), which is what its greedy `generate` gives. Drawn
answers are compared with those of an engine on the CPU with the same seeds. All parts look at the graphs afterwards: a
round whose recording failed is computed each time, right and slow, and is wrong here. On a fake the models are tiny.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from weftline.engine.llm.engine import Engine
from weftline.engine.llm.gpu.models import Setup, build, build_fp8, made_prompts, token_bytes
from weftline.engine.llm.model_loader import RunnerOptions
from weftline.engine.llm.options import DEFAULT_LIMITS
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.quantised import weight_bytes
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.schedule import RoundLimits
from weftline.errors import InputError
from weftline.gpu_check.llm_parts import (
    ALLOWED,
    H200_COPY_BYTES_S,
    check_fusion,
    check_recorded,
    copy_bytes_s,
    fused_whole,
    need_card,
    scale_figures,
)
from weftline.gpu_check.outcomes import RIGHT, CheckOutcome, Skipped, Wrong, judged, quantile

PAGE_TOKENS = 16
SERVED = DEFAULT_LIMITS["gpu"]
"""Limits of rounds of an llm step on a GPU: graphs, tiles and buffers depend on them."""
TOGETHER_TOKENS_S = 6500.0
"""Bar of the H200 in `H200_COPY_BYTES_S`: tokens of answers a second, 64 requests of 512 and 128 tokens at a time."""
TOGETHER_70B_TOKENS_S = 0.45 * 2764.0
"""The same, 100 requests of 512 and 256 tokens, 70 billion weights in fp8: a share of what that card's rates allow."""
LONG_PROMPT_MS = 2000.0
"""Bar: from a prompt of 7 000 tokens to its first token, beside 63 sequences that decode; 8 billion weights."""
SLEPT_SHARE = 0.9
"""At least this part of weights and pages together has to be free on the device while a model sleeps."""
DIFFER_MAX = 1
"""Most drawn answers that may differ from a CPU's: a draw between two tokens that rounding makes equal."""
FAKE_CONTEXT = 512
"""Longest sequence on a fake, in tokens: torch's operations collect so many keys for every row."""
SLEEP_KV_BYTES = 256 << 20
MIB = 1 << 20


def open_engine(setup: Setup, model: Any, kv_tokens: int, sequences: int) -> Engine:
    """Return an engine for `model`, whose attention is ours, with pages for so many tokens."""
    bytes_each = token_bytes(model.config, model.dtype)
    # On a fake nothing is fused: its recording sees torch's operations only, and fused rows are numba's there.
    longest = FAKE_CONTEXT if setup.fake else None
    options = RunnerOptions(
        str(setup.device), page_tokens=PAGE_TOKENS, kv_bytes=kv_tokens * bytes_each, context_max=longest, form="gpu",
        fuse=not setup.fake, rows_max=SERVED.tokens_max, sequences_max=SERVED.sequences_max,
    )  # fmt: skip
    runner = Runner(model, options)
    if setup.fake and runner.graphs is not None:
        runner.graphs.capture = setup.capture()
    return Engine(runner, None, RoundLimits(SERVED.tokens_max, sequences))


@dataclass(slots=True)
class ClosedLoop:
    """Requests of an engine, at most `clients` at a time: the next one is added when one has its answer.

    answers:  of each prompt.   token_s: when each of its tokens came.   added_s: when it was added.
    on_round: called after each round with the number of rounds so far.
    """

    engine: Engine
    clients: int
    answers: list[list[int]] = field(default_factory=list)
    token_s: list[list[float]] = field(default_factory=list)
    added_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    on_round: Callable[[int], None] = lambda rounds: None

    def run(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> ClosedLoop:
        """Answer all prompts; raises what the first failure was."""
        count, rounds, began = len(prompts), 0, time.perf_counter()
        self.answers, self.token_s = [[] for _ in prompts], [[] for _ in prompts]
        while len(self.added_s) < min(self.clients, count):
            self._add(prompts, params, 0.0)
        while self.engine.busy:
            updates = self.engine.step((time.perf_counter() - began) * 1e3)
            now_s = time.perf_counter() - began
            for update in updates:
                if update.error is not None:
                    raise update.error
                self.answers[update.id] += update.tokens
                self.token_s[update.id] += [now_s] * len(update.tokens)
                if update.last and len(self.added_s) < count:
                    self._add(prompts, params, now_s)
            rounds += 1
            self.on_round(rounds)
        self.seconds = time.perf_counter() - began
        return self

    def _add(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], now_s: float) -> None:
        at = len(self.added_s)
        self.added_s.append(now_s)
        self.engine.add(at, prompts[at], params[at], now_ms=now_s * 1e3)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(tokens_max=tokens, ignore_eos=True)


@torch.inference_mode()
def compare_greedy(name: str, reference: Any, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> str:
    """Raise Wrong unless every token of every answer is the likeliest one by `reference`, up to rounding.

    reference: a model with transformers' own attention.
    Returns how many answers are exactly its own.
    """
    allowed, exact = ALLOWED[reference.dtype], 0
    for at, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if not answer:
            raise Wrong(f"{name}: request {at} has no answer")
        ids = torch.tensor([prompt + answer[:-1]], device=reference.device)
        logits = reference(input_ids=ids, use_cache=False, logits_to_keep=len(answer)).logits[0].float()
        chosen = logits.gather(1, torch.tensor(answer, device=logits.device)[:, None])[:, 0]
        gaps = (logits.amax(-1) - chosen) / logits.abs().max()
        worst = int(gaps.argmax())
        if not float(gaps[worst]) <= allowed:
            raise Wrong(
                f"{name}: token {worst} of answer {at} is {answer[worst]}, transformers' code has "
                f"{int(logits[worst].argmax())}; their logits differ by {float(gaps[worst]):.1e} of the largest"
            )
        exact += float(gaps[worst]) == 0.0
    return f"{exact} of {len(answers)} answers exactly transformers', the others up to rounding"


def check_refused(setup: Setup) -> dict[str, Any]:
    """Refuse a prompt that is longer than the pages hold; the requests beside it are answered."""
    tokens = 12 if setup.quick or setup.fake else 60
    engine = open_engine(setup, setup.build("small", torch.float32), 320, 8)
    prompts = made_prompts(4, 20, 60)
    refused: list[str] = []

    def refuse(rounds: int) -> None:
        if rounds != 3:
            return
        try:
            engine.add(99, made_prompts(1, 400, 400)[0], greedy(4))
        except InputError as error:
            refused.append(str(error))

    loop = ClosedLoop(engine, 4, on_round=refuse).run(prompts, [greedy(tokens)] * 4)
    if not refused:
        raise Wrong("a prompt of 400 tokens was taken where pages hold 320")
    if "400 tokens" not in refused[0]:
        raise Wrong(f"the refusal does not say how long the prompt is: {refused[0]}")
    engine.check()
    check_recorded("beside a refused prompt", engine.runner.graphs)
    same = compare_greedy("beside a refused prompt", setup.build("small", torch.float32, "sdpa"), prompts, loop.answers)
    engine.close()
    return {"refused": refused[0], "beside it": same}


def check_resize(setup: Setup) -> dict[str, Any]:
    """Grow and shrink the KV memory while requests decode; graphs are captured again, and answers stay."""
    tokens = 16 if setup.quick or setup.fake else 60
    engine = open_engine(setup, setup.build("small", torch.float32), 1024, 8)
    pages = engine.runner.pages
    sizes: list[int] = []

    def resize(rounds: int) -> None:
        if rounds == 5:
            sizes.append(engine.resize(4 * pages))
        if rounds == 10:
            sizes.append(engine.resize(pages))

    prompts = made_prompts(6, 20, 60)
    loop = ClosedLoop(engine, 6, on_round=resize).run(prompts, [greedy(tokens)] * 6)
    if sizes != [4 * pages, pages]:
        raise Wrong(f"KV memory of {pages} pages became {sizes}, {[4 * pages, pages]} were asked for")
    engine.check()
    check_recorded("after two resizes", engine.runner.graphs)
    same = compare_greedy("after two resizes", setup.build("small", torch.float32, "sdpa"), prompts, loop.answers)
    engine.close()
    return {"pages": f"{pages}, {sizes[0]}, {sizes[1]}", "answers": same}


def check_rounds(setup: Setup) -> dict[str, Any]:
    """Mix greedy, warm, top-p and penalised requests with prompts of newcomers in the same rounds.

    Greedy answers are transformers'; the others are those of an engine on the CPU with the same seeds.
    """
    tokens = 12 if setup.quick or setup.fake else 40
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {}, "warm": {"temperature": 0.9}, "top-p": {"temperature": 0.9, "top_p": 0.8},
        "top-k": {"temperature": 0.9, "top_k": 20}, "min-p": {"temperature": 0.9, "min_p": 0.1},
        "penalty": {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    }  # fmt: skip
    wanted = [*kinds.values()] * 2
    params = [SamplingParams(tokens + at % 5, ignore_eos=True, seed=at, **one) for at, one in enumerate(wanted)]
    prompts = made_prompts(len(params), 10, 120)
    cpu = torch.device("cpu")
    model = build("small", cpu, torch.float32, tiny=setup.fake)
    expected = Engine(Runner(copy.deepcopy(model), RunnerOptions("cpu", kv_bytes=64 << 20, form="cpu", fuse=False)))
    engine = open_engine(setup, model.to(setup.device), 4096, 8)
    loop = ClosedLoop(engine, 5).run(prompts, params)  # as one leaves, another's prompt is read beside the rest
    check_recorded("mixed rounds", engine.runner.graphs)
    found: dict[str, Any] = {}
    differ = []
    for at, one in enumerate(params):
        if expected.generate([prompts[at]], one) != [loop.answers[at]]:
            differ.append(at)
    for at, name in enumerate(kinds):
        found[name] = f"{sum(other not in differ for other in (at, at + len(kinds)))} of 2 answers the CPU's"
    reference = build("small", cpu, torch.float32, "sdpa", setup.fake).to(setup.device)
    own = [at for at, one in enumerate(wanted) if not one]
    found["greedy"] = compare_greedy("mixed rounds", reference, [prompts[at] for at in own],
                                     [loop.answers[at] for at in own])  # fmt: skip
    drawn = [at for at in differ if at not in own]
    if len(drawn) > DIFFER_MAX:
        names = ", ".join([*kinds][at % len(kinds)] for at in drawn)
        raise Wrong(f"{len(drawn)} drawn answers differ from the CPU's with the same seeds ({names})")
    engine.close()
    return found


def check_long_prompt(setup: Setup) -> CheckOutcome:
    """Read one long prompt beside sequences that decode: small for the answers, then with 8 billion weights for times.

    A fake does the first with fewer and shorter ones.
    """
    others, length = (7, 300) if setup.fake else (63, 7000)
    tokens = 40 if setup.fake else 100
    loop = _long_prompt(setup, setup.build("small", torch.float32), others, length, tokens)
    reference = setup.build("small", torch.float32, "sdpa")
    prompts = _beside(others, length)
    figures: dict[str, Any] = {
        f"{length} tokens beside {others}": compare_greedy("beside a long prompt", reference, prompts, loop.answers)
    }
    del loop, reference
    if setup.fake:
        figures["times"] = "not on a fake"
        return CheckOutcome("long prompt", RIGHT, figures=figures)
    torch.cuda.empty_cache()
    loop = _long_prompt(setup, setup.build("llama-3-8b", torch.bfloat16), others, length, 2 * tokens)
    first_ms = (loop.token_s[-1][0] - loop.added_s[-1]) * 1e3
    gaps = [
        (after - before) * 1e3
        for times in loop.token_s[:-1]
        for before, after in pairwise(times)
        if loop.added_s[-1] <= before <= loop.token_s[-1][0]
    ]
    figures["8 billion weights: from the prompt to its first token_ms"] = round(first_ms, 1)
    figures["the others meanwhile, between tokens, p50_ms"] = round(quantile(gaps, 0.5), 2)
    figures["the others meanwhile, between tokens, p99_ms"] = round(quantile(gaps, 0.99), 2)
    bar = judged("first token of a long prompt", first_ms, LONG_PROMPT_MS, "ms", judge=not setup.quick)
    return CheckOutcome("long prompt", RIGHT, figures=figures, bars=[bar])


def _beside(others: int, length: int) -> list[list[int]]:
    return [*made_prompts(others, 16, 16), *made_prompts(1, length, length, seed=4)]


def _long_prompt(setup: Setup, model: Any, others: int, length: int, tokens: int) -> ClosedLoop:
    """Let `others` decode, and add the long prompt when they have some tokens; the loop's last answer is its own."""
    kv_tokens = (others + 1) * (16 + 2 * tokens) + length + 64 * PAGE_TOKENS
    engine = open_engine(setup, model, kv_tokens, others + 1)
    loop = ClosedLoop(engine, others)
    prompts = _beside(others, length)
    if not setup.fake:  # compiling and recording take seconds, once
        ClosedLoop(engine, others).run(prompts[:-1], [greedy(8)] * others)
        engine.clear_prefixes()
    # the first to end has few tokens: its place is the long prompt's
    lengths = [tokens // 4, *[tokens] * (others - 1), 4]
    loop.run(prompts, [greedy(one) for one in lengths])
    check_recorded("beside a long prompt", engine.runner.graphs)
    engine.close()
    return loop


def time_together_8b(setup: Setup) -> CheckOutcome:
    """Time a closed loop of 64 requests, 512 tokens in and 128 out, and compare two answers.

    On a fake: a tiny model, every answer compared.
    """
    clients, prompt, tokens, dtype = (6, 40, 12, torch.float32) if setup.fake else (64, 512, 128, torch.bfloat16)
    model = setup.build("llama-3-8b", dtype)
    outcome, loop, prompts = _time_loop(setup, model, "together 8b", clients, prompt, tokens, TOGETHER_TOKENS_S)
    check = len(prompts) if setup.fake else 2
    del model
    reference = setup.build("llama-3-8b", dtype, "sdpa")
    outcome.figures["answers"] = compare_greedy("closed loop", reference, prompts[:check], loop.answers[:check])
    return outcome


def time_together_70b(setup: Setup) -> CheckOutcome:
    """Time a closed loop of 100 requests, 512 tokens in and 256 out, of a 70B model in fp8."""
    need_card(setup, "70 billion weights in fp8")
    try:
        import torchao  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise Skipped("package torchao is not installed, which has the products in fp8") from None
    del torchao
    if torch.cuda.get_device_capability(setup.device) < (8, 9):
        raise Skipped("this GPU has no products in fp8")
    if torch.cuda.mem_get_info(setup.device)[1] < 110 << 30:
        raise Skipped("70 billion weights in fp8, and their pages, need a GPU with more than 110 GiB")
    model = build_fp8("llama-3.3-70b", setup.device)
    return _time_loop(setup, model, "together 70b fp8", 100, 512, 256, TOGETHER_70B_TOKENS_S)[0]


def _time_loop(
    setup: Setup, model: Any, name: str, clients: int, prompt: int, tokens: int, wanted: float
) -> tuple[CheckOutcome, ClosedLoop, list[list[int]]]:
    """Time a closed loop with two requests for each client, after a first one in which all is compiled and recorded."""
    copied = H200_COPY_BYTES_S if setup.fake else copy_bytes_s(setup)
    tokens = 16 if setup.quick and not setup.fake else tokens
    engine = open_engine(setup, model, clients * (prompt + tokens + 2 * PAGE_TOKENS), clients)
    figures: dict[str, Any] = {} if setup.fake else scale_figures(copied)
    if not setup.fake:
        check_fusion(name, str(engine.runner.fusion), fused_whole(len(model.model.layers)))
    prompts = made_prompts(clients if setup.quick or setup.fake else 2 * clients, prompt, prompt)
    first = ClosedLoop(engine, clients).run(made_prompts(clients, prompt, prompt, seed=5), [greedy(tokens)] * clients)
    figures["the first time, with what is compiled and recorded_s"] = round(first.seconds, 2)
    loop = ClosedLoop(engine, clients).run(prompts, [greedy(tokens)] * len(prompts))
    check_recorded(name, engine.runner.graphs)
    rate = loop.tokens / loop.seconds
    firsts = [times[0] - added for times, added in zip(loop.token_s, loop.added_s)]
    figures[f"{clients} requests at a time, {prompt} in, {tokens} out: answers' tokens_per_s"] = round(rate)
    figures["tokens_per_s"] = round(rate)
    figures["to the first token, p50_s"] = round(quantile(firsts, 0.5), 3)
    bar = judged(f"closed loop of {clients}", rate, wanted * copied / H200_COPY_BYTES_S, "tokens/s", at_least=True,
                 judge=not setup.quick and not setup.fake)  # fmt: skip
    engine.close()
    return CheckOutcome(name, RIGHT, figures=figures, bars=[bar]), loop, prompts


def check_sleep(setup: Setup, kv_bytes: int = SLEEP_KV_BYTES) -> dict[str, Any]:
    """Have models answer, sleep and wake; their answers stay, and the device has their memory meanwhile."""
    found = dict[str, Any]()
    tokens = 8 if setup.quick or setup.fake else 60
    for shape in ("small",) if setup.quick or setup.fake else ("small", "small-gemma2", "llama-3-8b"):
        dtype = torch.float32 if shape.startswith("small") else torch.bfloat16
        options = RunnerOptions(str(setup.device), kv_bytes=kv_bytes if not setup.fake else 1 << 20)
        engine = Engine(Runner(setup.build(shape, dtype), options))
        held = weight_bytes(engine.runner.model) + engine.runner.pages * engine.runner.page_bytes
        first = _said(engine, tokens)
        if _said(engine, tokens) != first:
            raise Skipped(f"{shape}: its answers differ without a sleep already")
        for turn in range(2):
            before, began = _free(setup), time.perf_counter()
            engine.sleep()
            given, slept = _free(setup) - before, time.perf_counter()
            engine.wake()
            setup.synchronize()
            awake = time.perf_counter()
            if _said(engine, tokens) != first:
                raise Wrong(f"{shape}: it answers otherwise after sleep {turn + 1}")
            if setup.device.type == "cuda" and given < SLEPT_SHARE * held:
                raise Wrong(f"{shape}: the device got {given / MIB:.0f} MiB back of {held / MIB:.0f}")
            times = f"asleep in {(slept - began) * 1e3:.0f} ms, awake in {(awake - slept) * 1e3:.0f} ms"
            found[f"{shape}, sleep {turn + 1}"] = f"{given / MIB:.0f} of {held / MIB:.0f} MiB given back, {times}"
        if setup.device.type == "cuda":
            check_recorded(f"{shape}, after sleep", engine.runner.graphs)
        engine.close()
    return found


def _said(engine: Engine, tokens: int) -> list[list[int]]:
    engine.clear_prefixes()
    prompts = [[5 + at] * (9 * at + 3) for at in range(4)]
    return engine.generate(prompts, SamplingParams(tokens_max=tokens, ignore_eos=True))


def _free(setup: Setup) -> int:
    """Return what the device has free when torch keeps nothing for later."""
    setup.synchronize()
    if setup.device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(setup.device)[0]
