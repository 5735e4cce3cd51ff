"""Items share a batch when their shapes agree, once sizes that are padded are counted as what they are padded to."""

from typing import Any

from weftline.engine.protocol.messages import ABSENT, Value
from weftline.engine.scheduler.shapes import Shapes
from weftline.nodes.ports import PortType
from weftline.pipelines.placement.plan import PlannedInput, PlannedStep
from weftline.pipelines.spec.policy import BatchPolicy
from weftline.pipelines.spec.wire import Wire


def shapes(*types: str, **policy: Any) -> Shapes:
    inputs = tuple(PlannedInput(f"x{i}", Wire(None, f"x{i}"), PortType.parse(type)) for i, type in enumerate(types))
    return Shapes(
        PlannedStep("s", "n", {}, inputs, (), {}, BatchPolicy(**policy), False, False, False, "cpu", (0,), 1000.0)
    )


def tensor(*shape: int, dtype: str = "float32") -> Value:
    return Value("tensor", dtype, shape, b"")


def test_by_default_everything_may_share_and_nothing_is_looked_at() -> None:
    free = shapes("float32[N]")
    assert free.any
    assert free.group([tensor(3)]) is None


def test_same_shapes_share_and_others_do_not() -> None:
    same = shapes("tensor", "image", shapes="same")
    assert not same.any
    image = Value("image", "uint8", (8, 8, 3), b"")
    assert same.group([tensor(3), image]) == same.group([tensor(3), image])
    others = [[tensor(4), image], [tensor(3, 1), image], [tensor(3, dtype="float16"), image]]
    assert len({same.group(other) for other in [*others, [tensor(3), image]]}) == 4


def test_what_has_no_shape_does_not_matter() -> None:
    same = shapes("text", "json", shapes="same")
    assert same.group([Value("text", data=b"a"), Value("json", data=b"1")]) == same.group(
        [Value("text", data=b"bc"), Value("json", data=b"22")]
    )


def test_sizes_that_are_padded_meet_in_their_bucket() -> None:
    padded = shapes("float32[T, 80]", pad={"T": (64, 32)})
    assert not padded.any
    group = [padded.group([tensor(size, 80)]) for size in (1, 32, 33, 64, 65, 66)]
    assert group[0] == group[1] == (("float32", (32, 80)),)
    assert group[2] == group[3] == (("float32", (64, 80)),)
    assert group[4] != group[5]  # above the last they are left as they are
    assert padded.group([tensor(10, 81)]) != group[0]


def test_a_name_is_padded_wherever_it_stands_and_other_axes_are_not() -> None:
    padded = shapes("float32[T]", "float32[C, T]", pad={"T": (8,)})
    assert padded.group([tensor(3), tensor(2, 3)]) == padded.group([tensor(5), tensor(2, 5)])
    assert padded.group([tensor(3), tensor(2, 3)]) != padded.group([tensor(3), tensor(4, 3)])


def test_an_absent_input_makes_a_group_of_its_own() -> None:
    same = shapes("float32[N]", shapes="same")
    assert same.group([ABSENT]) == same.group([ABSENT]) != same.group([tensor(1)])


def test_lists_share_when_their_elements_do() -> None:
    same = shapes("list[float32[N]]", shapes="same")
    two, other, three = ([tensor(3)] * 2, [tensor(3), tensor(4)], [tensor(3)] * 3)
    groups = [same.group([Value("list", items=tuple(items))]) for items in (two, list(two), other, three)]
    assert groups[0] == groups[1] and len(set(groups)) == 3
