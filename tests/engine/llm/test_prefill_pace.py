"""Prompt tokens per round, on a simulated machine."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from weftline.engine.llm.prefill_pace import CHUNK_FIRST, CHUNK_MIN, CHUNK_MIN_GPU, BalancedPace, Pace, StretchedPace

PROMPT, DECODING, ROUND = 8192, 32, 2048
WITHIN = 1.5


@dataclass
class Device:
    """A made-up device: what rounds of DECODING sequences take on it, by how many prompt tokens it has read so far.

    noise:  each round takes up to this share longer.
    spikes: this share of the rounds meets something else and takes 10 times as long.
    """

    quiet_ms: float
    fixed_ms: Callable[[int], float]
    token_ms: Callable[[int], float]
    noise: float = 0.0
    spikes: float = 0.0
    seed: int = 1
    read: int = 0
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def decode(self, pace: Pace, rounds: int) -> None:
        for _ in range(rounds):
            pace.note(DECODING, 0, self._seen(self.quiet_ms))

    def read_prompt(self, pace: Pace, most: int = ROUND - DECODING) -> tuple[float, float]:
        """Read a prompt beside those that decode; return the time it takes, and that between their tokens."""
        left, total, rounds = PROMPT, 0.0, 0
        while left:
            chunk = min(pace.chunk(DECODING) or left, left, most)
            ms = self.fixed_ms(self.read) + self.token_ms(self.read) * chunk
            pace.note(DECODING, chunk, self._seen(ms))
            total, rounds, left, self.read = total + ms, rounds + 1, left - chunk, self.read + chunk
        return total, total / rounds

    def with_chunks(self, chunk: int) -> tuple[float, float]:
        """Return both times where all chunks are of one size, at what rounds take now."""
        rounds = -(-PROMPT // chunk)
        total = rounds * self.fixed_ms(self.read) + PROMPT * self.token_ms(self.read)
        return total, self.fixed_ms(self.read) + self.token_ms(self.read) * chunk

    def _seen(self, ms: float) -> float:
        return ms * (1 + self.noise * self.rng.random()) * (10 if self.rng.random() < self.spikes else 1)


def _gpu(fixed_ms: float = 15.0, token_ms: float = 0.04, **more: float) -> Device:
    """Decoding by graph, prompts eagerly."""
    return Device(6.0, lambda at: fixed_ms, lambda at: token_ms, **more)  # type: ignore[arg-type]


def _ratios(device: Device, pace: Pace) -> tuple[float, float]:
    """Read a prompt; return how far its time, and that between others' tokens, are from the best of each."""
    total, between = device.read_prompt(pace)
    return total / device.with_chunks(ROUND - DECODING)[0], between / device.with_chunks(CHUNK_MIN_GPU)[1]


@pytest.mark.parametrize(
    ("fixed_ms", "token_ms"),
    [(15.0, 0.04), (8.0, 0.04), (6.5, 0.04), (30.0, 0.04), (100.0, 0.04), (15.0, 0.01), (15.0, 0.3)],
)
def test_on_a_gpu_prompt_and_decoding_are_within_1_5_times_their_best(fixed_ms, token_ms):
    """The best for the prompt are the largest chunks that a round has room for; for the others, the least chunks.

    From the very first prompt on, with nothing measured but rounds that decode.
    """
    device, pace = _gpu(fixed_ms, token_ms), BalancedPace(ROUND)
    device.decode(pace, 20)
    for _ in range(3):
        prompt, others = _ratios(device, pace)
        assert prompt <= WITHIN and others <= WITHIN
        device.decode(pace, 30)


@pytest.mark.parametrize("seed", range(5))
def test_on_a_gpu_noise_and_rounds_that_met_something_else_change_little(seed):
    device, pace = _gpu(noise=0.2, spikes=0.05, seed=seed), BalancedPace(ROUND)
    device.decode(pace, 20)
    found = [_ratios(device, pace) for _ in range(8)]
    for ratios in zip(*found, strict=True):
        assert sum(ratios) / len(ratios) <= WITHIN
        assert max(ratios) <= 1.2 * WITHIN


@pytest.mark.parametrize(("fixed_ms", "token_ms"), [(8.0, 0.04), (45.0, 0.04), (15.0, 0.12), (30.0, 0.08), (7.0, 0.01)])
def test_on_a_gpu_costs_that_change_during_a_prompt_are_followed(fixed_ms, token_ms):
    change = 2 * PROMPT + PROMPT // 2
    device = Device(
        6.0, lambda at: 15.0 if at < change else fixed_ms, lambda at: 0.04 if at < change else token_ms, noise=0.1
    )
    pace = BalancedPace(ROUND)
    device.decode(pace, 20)
    for _ in range(4):  # the third one meets the change
        device.read_prompt(pace)
        device.decode(pace, 10)
    prompt, others = _ratios(device, pace)
    assert prompt <= WITHIN and others <= WITHIN


def test_on_a_gpu_nothing_but_rounds_with_prompts_is_enough_to_learn_from():
    device, pace = _gpu(), BalancedPace(ROUND)
    device.read_prompt(pace)
    prompt, others = _ratios(device, pace)
    assert prompt <= WITHIN and others <= WITHIN


def test_on_a_gpu_a_chunk_has_256_tokens_or_more_and_fits_the_round():
    pace = BalancedPace(ROUND)
    for fixed_ms, token_ms in [(0.1, 5.0), (500.0, 0.001)]:
        for _ in range(100):
            chunk = pace.chunk(DECODING)
            assert chunk is not None and CHUNK_MIN_GPU <= chunk <= ROUND - DECODING
            pace.note(DECODING, chunk, fixed_ms + token_ms * chunk)
    assert BalancedPace(100).chunk(8) == 100, "where a round is smaller than that, all of it"


@pytest.mark.parametrize(("quiet_ms", "token_ms"), [(40.0, 1.5), (40.0, 0.4), (3.0, 0.05), (110.0, 2.0)])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_on_a_cpu_a_long_prompt_takes_at_most_1_5_times_the_bound(quiet_ms, token_ms, noise):
    device, pace = Device(quiet_ms, lambda at: 1.05 * quiet_ms, lambda at: token_ms, noise), StretchedPace()
    device.decode(pace, 20)
    device.read_prompt(pace, 512 - DECODING)
    total, between = device.read_prompt(pace, 512 - DECODING)
    chunk = int((1.7 * quiet_ms - 1.05 * quiet_ms) / token_ms)
    assert total <= WITHIN * device.with_chunks(max(CHUNK_MIN, min(chunk, 512 - DECODING)))[0]
    assert between <= 1.15 * max(1.7 * quiet_ms, device.with_chunks(CHUNK_MIN)[1])


def test_rising_token_costs_keep_rounds_within_their_bound():
    device, pace = Device(10.0, lambda at: 10.0, lambda at: 0.05 + 0.2 * (at % PROMPT) / PROMPT), StretchedPace()
    device.decode(pace, 20)
    left, took = PROMPT, list[float]()
    while left:
        chunk = min(pace.chunk(DECODING) or left, left)
        took.append(10.0 + device.token_ms(PROMPT - left) * chunk)
        pace.note(DECODING, chunk, took[-1])
        left -= chunk
    assert sorted(took)[int(0.99 * len(took))] <= 2.0 * 10.0


def _play(quiet_ms: float, token_ms: float, noise: float, rounds: int = 300, seed: int = 1) -> tuple[Pace, list[float]]:
    """Rounds of a machine on which a prompt's token costs `token_ms`; returns how long mixed ones took."""
    pace, rng, took = StretchedPace(), random.Random(seed), []
    for at in range(rounds):
        chunk = pace.chunk(8) or 0 if at >= 20 else 0
        ms = (quiet_ms + token_ms * chunk) * (1 + noise * rng.random())
        pace.note(8, chunk, ms)
        if chunk:
            took.append(ms)
    return pace, took


@pytest.mark.parametrize("token_ms", [0.01, 0.05, 0.2])
def test_rounds_with_chunks_use_most_of_twice_a_quiet_round(token_ms):
    _, took = _play(10.0, token_ms, 0.2)
    settled = sorted(took[50:])
    assert settled[int(0.99 * len(settled))] <= 2.0 * 10.0 * 1.2
    assert sum(settled) / len(settled) >= 1.4 * 10.0


def test_without_decoding_sequences_there_is_no_bound():
    assert StretchedPace().chunk(0) is None


def test_before_anything_is_measured_chunks_are_small():
    pace = StretchedPace()
    assert pace.chunk(4) == CHUNK_FIRST
    pace.note(4, 0, 10.0)
    assert pace.chunk(4) == CHUNK_FIRST


def test_a_prompt_always_goes_on():
    pace, _ = _play(1.0, 50.0, 0.0)
    assert pace.chunk(8) == CHUNK_MIN


def test_one_round_that_met_something_else_teaches_little():
    pace, _ = _play(10.0, 0.1, 0.0)
    before = pace.chunk(8)
    pace.note(8, 0, 5000.0)
    assert pace.chunk(8) <= 2 * before


def test_the_time_of_so_many_is_taken_from_the_nearest_number_seen():
    pace = StretchedPace()
    for _ in range(20):
        pace.note(2, 0, 5.0)
        pace.note(64, 0, 40.0)
        pace.note(2, 10, 6.0)
    assert pace.chunk(100) > 3 * pace.chunk(1)


@pytest.mark.parametrize("measured", [(0, 5, 1.0), (3, 0, 0.0), (3, 0, -5.0)])
def test_what_says_nothing_is_not_taken_in(measured):
    pace = StretchedPace()
    pace.note(*measured)
    assert pace.chunk(3) == CHUNK_FIRST
