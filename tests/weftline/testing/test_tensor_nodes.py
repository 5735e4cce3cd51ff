"""Tensors that are made, changed and read: by numpy on the host, by torch on a device, with the same numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.nodes.device_values import DEVICE, Bench, bits, down
from weftline.nodes.contract import Batch, ConfigError, Node, OpenContext, StepContext
from weftline.testing.nodes import Echo, EchoConfig, Fail, FailConfig
from weftline.testing.tensor_nodes import Add, AddConfig, Fill, FillConfig, Total, TotalConfig

STEP = StepContext(Path())


def opened(node: Any, device: str) -> Any:
    node.open(OpenContext(Path(), device))
    return node


@pytest.mark.parametrize("into", ["buffer", "new"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "int64"])
def test_fill_and_add_give_the_same_on_the_host_and_on_a_device(into: str, dtype: str) -> None:
    type, bench = f"{dtype}[2, 3]", Bench()
    here, buffers = [], {}

    def buffer(port: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        buffers[port] = np.zeros((2, *shape), dtype)
        return buffers[port]

    made = opened(Fill(FillConfig(type, into)), "cpu").run(Batch({"value": [3, 250]}, output_buffer=buffer))["value"]
    assert made.tolist() == [[[3] * 3] * 2, [[250] * 3] * 2] and made.dtype == dtype
    assert (made is buffers.get("value")) is (into == "buffer")
    here = opened(Add(AddConfig(type, 2.0, into)), "cpu").run(Batch({"value": list(made)}, output_buffer=buffer))[
        "value"
    ]
    assert here.tolist() == [[[5] * 3] * 2, [[252] * 3] * 2] and here.dtype == dtype
    assert (here is buffers["value"] if buffers else True) and not np.shares_memory(here, made)

    there = opened(Fill(FillConfig(type, into)), DEVICE).run(bench.batch({"value": [3, 250]}, buffer=True))["value"]
    assert (there is bench.buffers.pop("value", None)) is (into == "buffer")
    assert down(there).tobytes() == made.tobytes()
    near = bench.side_by_side(list(made))
    sums = opened(Add(AddConfig(type, 2.0, into)), DEVICE).run(bench.batch({"value": near}, buffer=True))["value"]
    assert (sums is bench.buffers.get("value")) is (into == "buffer")
    assert down(sums).tobytes() == here.tobytes()


def test_items_of_different_sizes_are_added_to_one_by_one() -> None:
    ones, bench = [bits("float32", (size,), size) for size in (3, 5)], Bench()
    node = opened(Add(AddConfig("float32[N]", 0.5)), DEVICE)
    sums = node.run(bench.batch({"value": [bench.put(one) for one in ones]}, buffer=True))["value"]
    assert [down(one).tolist() for one in sums] == [(one + 0.5).tolist() for one in ones]
    sums = opened(Add(AddConfig("float32[N]", 0.5)), "cpu").run(Batch({"value": ones}))["value"]
    assert [one.tolist() for one in sums] == [(one + 0.5).tolist() for one in ones]


def test_total_reads_every_element() -> None:
    ones, bench = [bits("int32", (3, size), size) for size in (4, 7)], Bench()
    wanted = [float(one.sum()) for one in ones]
    assert opened(Total(TotalConfig("int32[H, W]")), "cpu").run(Batch({"value": ones}))["total"] == wanted
    there = opened(Total(TotalConfig("int32[H, W]")), DEVICE)
    totals = there.run(bench.batch({"value": [bench.put(one) for one in ones]}))["total"]
    assert totals == wanted and all(type(total) is float for total in totals)


@pytest.mark.parametrize(
    ("node", "config", "option"),
    [
        (Fill, FillConfig("float32[N]"), "type"), (Fill, FillConfig("bfloat16[3]"), "type"),
        (Fill, FillConfig(into="nowhere"), "into"), (Add, AddConfig("image"), "type"),
        (Add, AddConfig("tensor"), "type"), (Add, AddConfig("uint8[3]", 0.5), "amount"),
        (Add, AddConfig(into="x"), "into"), (Total, TotalConfig("float33[N]"), "type"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_named(node: type[Node], config: Any, option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        node.ports(config, STEP)
    assert caught.value.option == option


def test_echo_and_fail_pass_on_device_tensors_unless_values_are_compared() -> None:
    near = Bench().put(bits("float32", (3,)))
    assert Echo(EchoConfig("float32[3]")).run(Batch({"value": [near]}))["value"][0] is near
    assert Fail(FailConfig("float32[3]", every=2)).run(Batch({"value": [near]}))["value"][0] is near
    for node, config, ports in (
        (Echo, EchoConfig("float32[3]"), {"value"}),
        (Fail, FailConfig("float32[3]"), {"value"}),
        (Fail, FailConfig("float32[3]", equals=[1, 2, 3]), set()),
        (Fill, FillConfig(), {"value"}),
        (Add, AddConfig(), {"value"}),
        (Total, TotalConfig(), {"value"}),
    ):
        assert node.device_ports(config, node.ports(config, STEP)) == ports
