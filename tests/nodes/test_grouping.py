"""Items share a group when the dtypes and shapes of their values agree."""

import numpy as np
import pytest

from weftline.engine.protocol.messages import ABSENT, Value
from weftline.engine.protocol.packed import Packed
from weftline.nodes.grouping import group_by, group_by_shape, padded_size, shape_key


def test_groups_and_their_items_keep_the_order_they_came_in() -> None:
    assert group_by([5, 2, 3, 8, 1], lambda item: item % 2) == [[5, 3, 1], [2, 8]]
    assert group_by([], lambda item: item) == []


def test_arrays_are_stacked_with_those_of_their_shape_on_every_port() -> None:
    image, other = np.zeros((2, 3)), np.zeros((3, 2))
    assert group_by_shape([[image, other, image, image], [image, image, image, other]], 4) == [[0, 2], [1], [3]]


@pytest.mark.parametrize("kind", [Value, Packed])
def test_values_to_send_and_values_received_have_equal_keys(kind: type[Value] | type[Packed]) -> None:
    assert shape_key(kind("tensor", "float32", (3,))) == shape_key(Value("tensor", "float32", (3,)))
    different = [kind("tensor", "float32", (4,)), kind("tensor", "float16", (3,)), kind("tensor", "float32", (3, 1))]
    assert len({shape_key(one) for one in [*different, kind("tensor", "float32", (3,)), None]}) == 5
    assert shape_key(kind("text")) is None


def test_missing_values_are_one_group() -> None:
    assert shape_key(None) == shape_key(ABSENT) != shape_key(Value("text"))


def test_lists_agree_when_their_elements_do() -> None:
    one, two = Value("tensor", "uint8", (1,)), Value("tensor", "uint8", (2,))
    keys = [shape_key(Value("list", items=items)) for items in [(one, two), (one, two), (two, one), (one,), ()]]
    assert keys[0] == keys[1] and len(set(keys)) == 4


def test_a_padded_size_is_the_next_one_that_fits() -> None:
    assert [padded_size(size, (16, 32)) for size in (1, 16, 17, 30, 32, 33)] == [16, 16, 32, 32, 32, 33]
    assert padded_size(7, ()) == 7


def test_sizes_padded_to_the_same_size_share_a_group() -> None:
    keys = [shape_key(Value("tensor", "float32", (size, 80)), ((16, 32), ())) for size in (17, 30, 33)]
    assert keys[0] == keys[1] != keys[2]
    unlike = Value("tensor", "float32", (17,))
    assert shape_key(unlike, ((16, 32), ())) == ("float32", (17,)), "another rank than the type's is not padded"
