"""Which model families answer as transformers' own generate does, under everything an engine does to a request.

    python -m tests.engine.llm.coverage --prompts 200 [--families llama,qwen3] [--seed 1]

Prompts of mixed lengths, many with common beginnings, join at random moments into pages that are too few for them:
chunks, prefix hits, preemptions and cancels all happen, and the drive says how often. The tests take a few prompts of
each family; this prints the table of a full run.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass

from tests.engine.llm import tiny
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.schedule import RoundLimits

PAGES = 22
"""Of 8 tokens each: too few for what runs at once."""
TOKENS_MAX = 20
"""Longest answer, in tokens."""
CANCEL_CHANCE = 0.02
"""In each round."""


@dataclass(frozen=True, slots=True)
class Tally:
    """What one drive found. ties: answers that leave generate's where the two best logits are within tiny.TIE.

    different: answers to the same prompts that are not alike; few of them would make the comparison worthless.
    """

    equal: int
    ties: int
    wrong: tuple[int, ...]
    cancelled: int
    preemptions: int
    hit_tokens: int
    different: int


def drive(family: str, prompts_count: int, seed: int) -> Tally:
    """Answer so many prompts under random joins, preemptions and cancels, and compare each answer with generate's."""
    rng = random.Random(seed)
    engine = Engine(tiny.runner(family, PAGES), None, RoundLimits(37, 6))
    prompts, wanted = tiny.prompts(prompts_count, seed), [rng.randint(1, TOKENS_MAX) for _ in range(prompts_count)]
    answers: dict[int, list[int]] = {}
    coming, finished, cancelled = list(range(prompts_count)), set(), set()
    while coming or engine.busy:
        while coming and (not engine.busy or rng.random() < 0.5):
            at = coming.pop(0)
            engine.add(at, prompts[at], SamplingParams(tokens_max=wanted[at]))
            answers[at] = []
        if rng.random() < CANCEL_CHANCE and set(answers) - finished - cancelled:
            gone = rng.choice(sorted(set(answers) - finished - cancelled))
            engine.cancel(gone)
            cancelled.add(gone)
        for update in engine.step():
            if update.error is not None:
                raise update.error
            answers[update.id] += update.tokens
            finished |= {update.id} if update.finish else set()
        engine.check()
    stats = engine.stats()
    if stats.pages_used or finished | cancelled != set(range(prompts_count)):
        raise AssertionError(f"{family}: {stats.pages_used} pages are still held, {len(finished)} finished")
    verdicts = {at: tiny.continues(family, prompts[at], answers[at], wanted[at]) for at in sorted(finished)}
    return Tally(
        sum(verdict is True for verdict in verdicts.values()),
        sum(verdict is None for verdict in verdicts.values()),
        tuple(at for at, verdict in verdicts.items() if verdict is False),
        len(cancelled),
        stats.preemptions,
        stats.prefix_hit_tokens,
        len({tuple(answers[at]) for at in finished}),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompts", type=int, default=200, help="prompts of each family")
    parser.add_argument("--families", default=",".join(tiny.FAMILIES), help="which families, with commas between")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    columns = ("equal", "ties", "wrong", "cancelled", "preempted", "hit tokens", "different", "seconds")
    print(f"{'family':<12}" + "".join(f"{column:>12}" for column in columns))
    for family in options.families.split(","):
        began = time.monotonic()
        tally = drive(family, options.prompts, options.seed)
        row = (
            tally.equal, tally.ties, len(tally.wrong), tally.cancelled, tally.preemptions, tally.hit_tokens,
            tally.different, round(time.monotonic() - began, 1),
        )  # fmt: skip
        print(f"{family:<12}" + "".join(f"{value:>12}" for value in row), flush=True)


if __name__ == "__main__":
    main()
