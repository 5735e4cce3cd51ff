import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from weftline.errors import ModelError, StepError
from weftline.nodes.contract import Batch, ConfigError, OpenContext, StepContext
from weftline.nodes.urgency import SequencePart, Urgency
from weftline.testing.nodes import (
    EXIT_KILLED,
    Echo,
    EchoConfig,
    Fail,
    FailConfig,
    Remember,
    RememberConfig,
    Trickle,
    TrickleConfig,
)

STEP = StepContext(Path())


def test_echo_gives_the_very_object_it_was_given() -> None:
    array = np.zeros((2, 3), np.float32)
    node = Echo(EchoConfig(type="float32[2, 3]"))
    assert node.run(Batch({"value": [array]}))["value"][0] is array


def test_echo_has_one_input_and_one_output_of_the_configured_type() -> None:
    ports = Echo.ports(EchoConfig(type="float32[C, 4]"), STEP)
    assert str(ports.inputs[0].type) == str(ports.outputs[0].type) == "float32[C, 4]"


def test_a_type_that_is_none_is_a_config_error_about_type() -> None:
    with pytest.raises(ConfigError) as caught:
        Echo.ports(EchoConfig(type="pikture"), STEP)
    assert caught.value.option == "type"


def test_fail_fails_every_third_item_over_its_whole_life() -> None:
    node = Fail(FailConfig(every=3))
    answers = [*node.run(Batch({"value": list("abcd")}))["value"], *node.run(Batch({"value": list("ef")}))["value"]]
    assert [isinstance(answer, Exception) for answer in answers] == [False, False, True, False, False, True]


def test_fail_fails_on_one_value_alone_or_the_whole_call() -> None:
    alone = Fail(FailConfig(equals="bad")).run(Batch({"value": ["good", "bad", "good"]}))["value"]
    assert [isinstance(answer, Exception) for answer in alone] == [False, True, False]
    with pytest.raises(RuntimeError, match="failed on purpose"):
        Fail(FailConfig(equals="bad", whole=True)).run(Batch({"value": ["good", "bad"]}))


def test_fail_compares_arrays_whole() -> None:
    node = Fail(FailConfig(type="float32[2]", equals=[1, 2]))
    answers = node.run(Batch({"value": [np.array([1, 2], np.float32), np.array([1, 3], np.float32)]}))["value"]
    assert isinstance(answers[0], Exception) and isinstance(answers[1], np.ndarray)


def test_fail_can_refuse_to_open() -> None:
    with pytest.raises(ModelError, match="no such weights"):
        Fail(FailConfig(fail_open=True, message="no such weights")).open(OpenContext(Path()))


def test_kill_ends_the_process_at_once() -> None:
    code = (
        "from weftline.testing.nodes import *; from weftline.node import Batch\n"
        "Fail(FailConfig(equals='x', kill=True)).run(Batch({'value': ['x']})); print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout) == (EXIT_KILLED, "")


def took_ms(node: Echo, items: int, clock: Callable[[], float]) -> float:
    started = clock()
    node.run(Batch({"value": ["x"] * items}))
    return (clock() - started) * 1e3


def test_echo_takes_a_fixed_time_and_one_for_each_item() -> None:
    node = Echo(EchoConfig(delay_ms=10, delay_item_ms=5))
    assert took_ms(node, 1, time.perf_counter) >= 15
    assert took_ms(node, 4, time.perf_counter) >= 30
    assert took_ms(node, 4, time.thread_time) < 15


def test_a_busy_echo_computes_all_that_time() -> None:
    assert took_ms(Echo(EchoConfig(delay_ms=10, delay_item_ms=5, busy=True)), 2, time.thread_time) >= 20


def test_fail_has_no_memory_for_larger_batches() -> None:
    node = Fail(FailConfig(out_of_memory_above=2))
    assert node.run(Batch({"value": ["a", "b"]})) == {"value": ["a", "b"]}
    with pytest.raises(MemoryError, match="3 items; there is memory for 2"):
        node.run(Batch({"value": ["a", "b", "c"]}))
    with pytest.raises(MemoryError):
        Fail(FailConfig(out_of_memory_above=1)).run(Batch({"value": ["a", "b"]}))
    with pytest.raises(ConfigError):
        Fail.ports(FailConfig(out_of_memory_above=-1), STEP)


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize(("option", "ticks"), [("hang", True), ("hold_gil", False)])
def test_a_call_that_never_returns_lets_other_threads_run_or_not(option: str, ticks: bool) -> None:
    code = (
        "import threading, time; from weftline.testing.nodes import *; from weftline.node import Batch\n"
        f"node = Fail(FailConfig(equals='x', {option}=True)); print(node.run(Batch({{'value': ['y']}})), flush=True)\n"
        "def tick():\n    while True: time.sleep(0.05); print('tick', flush=True)\n"
        "threading.Thread(target=tick, daemon=True).start(); node.run(Batch({'value': ['x']})); print('back')"
    )
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=Path(__file__).parents[2], timeout=1.5)
    said = (caught.value.stdout or b"").decode()
    assert said.startswith("{'value': ['y']}") and "back" not in said
    assert ("tick" in said) is ticks


def test_remember_answers_with_its_sequence_until_it_ends() -> None:
    node = Remember(RememberConfig())

    def say(text: str, part: SequencePart | None) -> object:
        return node.run(Batch({"value": [text]}, urgency=[Urgency(sequence=part)]))["value"][0]

    assert say("a", SequencePart("one", start=True)) == "a"
    assert say("x", SequencePart("two", start=True)) == "x"
    assert say("b", SequencePart("one")) == "a b"
    assert say("alone", None) == "alone"
    assert node.live == ("one", "two")
    node.end_sequence("one")
    node.end_sequence("never seen")
    refused = say("c", SequencePart("one", end=True))
    assert isinstance(refused, StepError) and "'one' was never started" in str(refused)
    assert say("again", SequencePart("two", start=True)) == "again"
    assert (Remember.stateful, Remember.idempotent) == (True, False)


def test_trickle_gives_each_item_a_piece_a_round_and_the_whole_at_the_end() -> None:
    node = Trickle(TrickleConfig(pieces=2, piece_bytes=3))
    node.submit(1, {"value": "any"})
    assert [piece.outputs["value"] for piece in node.round()] == ["aaa"]
    node.submit(2, {"value": "any"})
    assert [(p.item, p.outputs["value"], p.last) for p in node.round()] == [
        (1, "bbb", False), (1, "aaabbb", True), (2, "aaa", False),
    ]  # fmt: skip
    assert [piece.item for piece in node.round()] == [2, 2]
    assert not node.busy and node.round() == []


def test_a_paused_or_cancelled_trickle_gives_nothing_and_is_not_busy() -> None:
    node = Trickle(TrickleConfig(pieces=9))
    node.submit(1, {"value": "any"})
    node.submit(2, {"value": "any"})
    node.pause(1)
    assert {piece.item for piece in node.round()} == {2}
    node.cancel(2)
    assert not node.busy and node.round() == []
    node.resume(1)
    assert node.busy and [piece.item for piece in node.round()] == [1]
    node.pause(1)
    node.cancel(1)
    node.pause(99)
    node.submit(3, {"value": "any"})
    assert node.busy


def test_trickle_names_an_option_that_is_too_small() -> None:
    with pytest.raises(ConfigError) as caught:
        Trickle.ports(TrickleConfig(piece_bytes=0), STEP)
    assert caught.value.option == "piece_bytes"
