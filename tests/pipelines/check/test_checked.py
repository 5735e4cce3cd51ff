"""Types along wires: what fits what, and what a fixed size at one end says about names elsewhere."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weftline.nodes.ports import PortType, port
from weftline.pipelines.check.checked import Sizes, loose, mismatch


def fits(given_: str, wanted: str) -> bool:
    return Sizes().fit(PortType.parse(given_), "a", PortType.parse(wanted), "b")


@pytest.mark.parametrize(
    ("given_", "wanted"),
    [
        ("list[text]", "json"), ("list[list[json]]", "json"), ("list[text]", "list[json]"), ("list[image]", "any"),
        ("list[image]", "list[uint8[H, W, 3]]"), ("list[float32[N]]", "list[float32[3]]"), ("any", "list[text]"),
        ("text", "text"), ("image", "uint8[H, W, 3]"), ("uint8[480, 640, 3]", "image"), ("audio", "float32[samples]"),
        ("float32[16000]", "audio"), ("text", "json"), ("detections", "json"), ("float32[3, 32]", "tensor"),
        ("tensor", "float32[3, 32]"), ("float32", "float32[3]"), ("float32[3]", "float32"), ("image", "tensor"),
        ("image", "any"), ("any", "text"), ("float32[?, 4]", "float32[N, 4]"), ("float32[]", "float32[]"),
        ("uint8[H, W, C]", "image"), ("float32[N, N]", "float32[3, 3]"),
    ],
)  # fmt: skip
def test_these_fit(given_: str, wanted: str) -> None:
    assert fits(given_, wanted)


@pytest.mark.parametrize(
    ("given_", "wanted"),
    [
        ("json", "text"), ("json", "detections"), ("text", "bytes"), ("bytes", "json"), ("image", "float32[H, W, 3]"),
        ("uint8[H, W, 4]", "image"), ("audio", "image"), ("float32[3]", "float32[4]"), ("float32[3]", "float32[3, 1]"),
        ("float32[3]", "float64[3]"), ("float32", "uint8[3]"), ("tensor", "text"), ("tensor", "json"),
        ("detections", "tensor"), ("float32[N, N]", "float32[3, 4]"), ("float32[3, 4]", "float32[N, N]"),
        ("float32[]", "float32[1]"), ("list[text]", "text"), ("text", "list[text]"), ("json", "list[json]"),
        ("list[image]", "json"), ("list[float32[3]]", "list[float32[4]]"), ("list[json]", "list[text]"),
    ],
)  # fmt: skip
def test_these_do_not(given_: str, wanted: str) -> None:
    assert not fits(given_, wanted)


def test_a_size_flows_down_a_chain() -> None:
    sizes, any_row = Sizes(), PortType.parse("float32[N, 4]")
    assert sizes.fit(any_row, "first", any_row, "second")
    assert sizes.fit(any_row, "second", any_row, "third")
    assert str(sizes.settle(any_row, "first")) == "float32[N, 4]"
    assert sizes.fit(PortType.parse("float32[7, 4]"), "source", any_row, "first")
    assert [str(sizes.settle(any_row, step)) for step in ("first", "second", "third")] == ["float32[7, 4]"] * 3
    assert str(sizes.settle(any_row, "elsewhere")) == "float32[N, 4]"


def test_elements_of_a_list_may_differ_in_what_is_only_named() -> None:
    sizes, rows = Sizes(), PortType.parse("list[float32[N, 4]]")
    assert sizes.fit(PortType.parse("list[float32[7, 4]]"), "a", rows, "step")
    assert sizes.fit(PortType.parse("list[float32[8, 4]]"), "b", rows, "step")
    assert str(sizes.settle(rows, "step")) == "list[float32[N, 4]]"
    assert str(sizes.meet(PortType.parse("list[float32[7, 4]]"), "a", rows, "step")) == "list[float32[7, 4]]"
    assert str(loose(rows)) == "list[float32[?, 4]]"


def test_a_name_is_one_size_within_a_step() -> None:
    sizes, one = Sizes(), PortType.parse("float32[N]")
    assert sizes.fit(PortType.parse("float32[3]"), "a", one, "step")
    assert not sizes.fit(PortType.parse("float32[4]"), "b", one, "step")
    assert sizes.fit(PortType.parse("float32[4]"), "b", one, "another")


def test_a_wire_that_does_not_fit_teaches_nothing() -> None:
    sizes = Sizes()
    assert not sizes.fit(PortType.parse("float32[5, 6]"), "a", PortType.parse("float32[N, 7]"), "b")
    assert str(sizes.settle(PortType.parse("float32[N]"), "b")) == "float32[N]"


@pytest.mark.parametrize(
    ("given_", "wanted", "met"),
    [
        ("image", "any", "image"), ("image", "uint8[H, W, 3]", "uint8[H, W, 3]"), ("text", "json", "json"),
        ("float32[3, 32]", "tensor", "float32[3, 32]"), ("tensor", "float32[3]", "float32[3]"),
        ("uint8[480, 640, 3]", "image", "image"),
        ("float32[3, ?]", "float32[C, L]", "float32[3, L]"), ("image", "tensor", "uint8[?, ?, 3]"),
        ("float32", "float32[3]", "float32[3]"), ("tensor", "any", "tensor"), ("any", "text", "text"),
    ],
)  # fmt: skip
def test_the_taker_sees_its_own_type_with_what_the_giver_knows(given_: str, wanted: str, met: str) -> None:
    sizes, left, right = Sizes(), PortType.parse(given_), PortType.parse(wanted)
    assert sizes.fit(left, "a", right, "b")
    assert str(sizes.meet(left, "a", right, "b")) == met


DIMS = st.lists(st.sampled_from([2, 3, "N", "M", "?"]), max_size=3).map(tuple)
KINDS = ("text", "json", "image", "audio", "detections", "tensor", "any")
TYPES = st.sampled_from([PortType(kind) for kind in KINDS]) | DIMS.map(lambda dims: PortType("tensor", "float32", dims))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(TYPES, st.sampled_from("ab"), TYPES, st.sampled_from("cd")), max_size=6))
def test_settled_types_still_fit_and_stay_settled(wires: list[tuple[PortType, str, PortType, str]]) -> None:
    sizes = Sizes()
    held = [wire for wire in wires if sizes.fit(*wire)]
    for left, giver, right, taker in held:
        assert sizes.fit(left, giver, right, taker), "a wire that fitted fits again"
        once = sizes.settle(right, taker)
        assert sizes.settle(once, taker) == once
        assert Sizes().fit(sizes.settle(left, giver), giver, once, taker), "what is known of both ends agrees"


@pytest.mark.parametrize(
    ("given_", "wanted", "fix"),
    [
        ("detections", "text", "{{ a.x | describe }}"), ("json", "text", "{{ a.x }}"),
        ("float32[3]", "uint8[3]", "turns float32 into uint8"), ("float32[8, 9]", "float32[9, 8]", "another order"),
        ("text", "image", "turns text into image"), ("float32[3]", "float32[4]", "turns float32[3] into float32[4]"),
    ],
)  # fmt: skip
def test_a_mismatch_names_both_ends_and_a_fix(given_: str, wanted: str, fix: str) -> None:
    problem = mismatch("steps.b.inputs.y", PortType.parse(given_), "a.x", PortType.parse(wanted), [])
    assert problem.found == f"wants {PortType.parse(wanted)}, a.x gives {PortType.parse(given_)}"
    assert fix in problem.fix


def test_another_output_that_fits_is_the_first_remedy() -> None:
    others = [("see.labels", port("labels", "text"))]
    problem = mismatch("p", PortType.parse("detections"), "see.detections", PortType.parse("text"), others)
    assert problem.fix == "read see.labels instead"


@pytest.mark.parametrize(
    ("given", "wanted", "fix"),
    [
        ("image", "float32[3, 224, 224]", "(np.asarray(image, np.float32) / 255).transpose(2, 0, 1)"),
        ("image", "float32[224, 224, 3]", "np.asarray(image, np.float32) / 255, at the size"),
        ("float32[3, H, W]", "image", "x.transpose(1, 2, 0) scaled to 0..255"),
        ("float32[3, 8, 8]", "float32[4, 3, 8, 8]", "a batch that the model fixes at 4: export it again"),
    ],
)
def test_fixes_between_images_and_tensors_and_for_a_fixed_batch(given, wanted, fix) -> None:
    problem = mismatch("steps.s.inputs.x", PortType.parse(given), "x", PortType.parse(wanted), ())
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("Image", "image"), ("Text", "text"), ("Float32[3]", "float32[3]"), ("str", "text"), ("int", "json"),
        ("dict", "json"), ("np.ndarray", "tensor"), ("torch.float32[3]", "float32[3]"), ("List[str]", "list[text]"),
        ("list[Image]", "list[image]"), ("PIL.Image", "image"), ("FP32[2, 2]", "float32[2, 2]"), ("list", "list[json]"),
        ("list[dict]", "list[json]"),
    ],
)  # fmt: skip
def test_a_type_by_another_name_is_refused_with_the_port_type(written: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean {re.escape(meant)}\\?"):
        PortType.parse(written)
    PortType.parse(meant)
