import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from weftline.errors import ModelError
from weftline.nodes.contract import Batch, ConfigError, OpenContext, StepContext
from weftline.nodes.fakes import EXIT_KILLED, Echo, EchoConfig, Fail, FailConfig

STEP = StepContext(Path())


def test_echo_gives_the_very_object_it_was_given() -> None:
    array = np.zeros((2, 3), np.float32)
    node = Echo(EchoConfig(type="float32[2, 3]"))
    assert node.run(Batch({"value": [array]}))["value"][0] is array


def test_echo_has_one_port_each_way_of_the_type_it_is_told() -> None:
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
        "from weftline.nodes.fakes import *; from weftline.nodes.contract import Batch\n"
        "Fail(FailConfig(equals='x', kill=True)).run(Batch({'value': ['x']})); print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout) == (EXIT_KILLED, "")
