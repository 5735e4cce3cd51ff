"""Values of a batch as torch tensors: in place on the device, and the same from arrays."""

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.nodes.device_values import Bench, bits, down
from weftline import node as public
from weftline.nodes import contract
from weftline.nodes.contract import Batch, OpenContext, StepContext
from weftline.nodes.device_tensors import as_array, as_torch, placed, stacked_group, stacked_torch
from weftline.shm.spec import ITEM_BYTES


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_every_dtype_is_seen_in_place_and_equals_the_arrays(bench: Bench, dtype: str) -> None:
    array = bits(dtype, (2, 3))
    there = bench.put(array, dtype)
    tensor = as_torch(there)
    assert tensor.data_ptr() == there.address and str(tensor.dtype) == f"torch.{dtype}"
    assert as_array(tensor).tobytes() == array.tobytes() == as_array(as_torch(array, dtype)).tobytes()


def test_neighbours_are_one_tensor_without_a_copy_and_others_with_one(bench: Bench) -> None:
    rows = [np.arange(3, dtype=np.float32) + place for place in range(4)]
    near = bench.side_by_side(rows)
    whole = stacked_torch(bench.batch({"x": near}), "x")
    assert whole.data_ptr() == near[0].address and whole.tolist() == np.stack(rows).tolist()
    mixed = [near[2], near[0]]
    for batch in (bench.batch({"x": mixed}), Batch({"x": mixed})):
        assert stacked_torch(batch, "x").tolist() == [rows[2].tolist(), rows[0].tolist()]
    assert stacked_group(near, [3, 1], None, "cpu").tolist() == [rows[3].tolist(), rows[1].tolist()]
    assert stacked_group(rows, [3, 1], None, "cpu").tolist() == [rows[3].tolist(), rows[1].tolist()]


def test_a_plain_batch_stacks_device_tensors_on_their_device(bench: Bench) -> None:
    halves = [bits("bfloat16", (5,), seed) for seed in range(2)]
    whole = Batch({"x": [bench.put(half, "bfloat16") for half in halves]}).stacked("x")
    assert (whole.device, whole.dtype, whole.shape) == ("fake:0", "bfloat16", (2, 5))
    assert down(whole).tolist() == np.stack(halves).tolist()


def test_results_go_into_the_room_there_is_of_either_kind(bench: Bench) -> None:
    made = torch.tensor([[1.5, 2.5]], dtype=torch.bfloat16)
    batch = bench.batch({"x": [bench.put(np.zeros(2, np.float32))]}, buffer=True)
    assert placed(batch, "y", made, there=True) is bench.buffers["y"]
    assert torch.equal(bench.buffers["y"].torch(), made)
    buffer = np.zeros((1, 2), np.uint16)
    assert placed(Batch({"x": [0]}, output_buffer=lambda port, dtype, shape: buffer), "y", made, there=True) is buffer
    assert buffer.tolist() == as_array(made).tolist()
    assert placed(Batch({"x": [0]}), "y", made, there=True) is made
    assert placed(Batch({"x": [0]}), "y", made, there=False).tolist() == buffer.tolist()


def test_the_example_of_a_node_on_its_device_runs_on_every_device(bench: Bench) -> None:
    text = public.__doc__ or ""
    lines = text[
        text.index("    from weftline.node import BatchNode, Ports, as_torch") : text.index("\nThe engine orders")
    ]
    names: dict[str, Any] = {}
    exec(textwrap.dedent(lines), names)  # noqa: S102
    node = names["Mirror"](contract.NoConfig())
    assert node.device_ports(node.config, node.ports(node.config, StepContext(Path()))) == {"image"}
    photo = bits("uint8", (2, 3, 3))
    for device, image in (("cpu", photo), ("fake:0", bench.put(photo))):
        node.open(OpenContext(Path(), device))
        assert down(node.run(Batch({"image": [image]}))["image"][0]).tolist() == photo[:, ::-1].tolist()
