"""What steps need of a GPU is what the pipeline states, or else what was measured there."""

from __future__ import annotations

from pathlib import Path

import pytest

from weftline.pipelines.check.checker import examine
from weftline.pipelines.check.options import to_options
from weftline.pipelines.placement.machine import Device, Machine
from weftline.pipelines.placement.needs import Need, Needs, gpus_of, needs_of
from weftline.pipelines.placement.profile_file import Measured, Profile, StepProfile, digest_of
from weftline.pipelines.spec.loader import load_yaml

MIB = 1 << 20
MIXED = Machine(4, 1 << 34, (Device("cuda:0", 1 << 34, "NVIDIA H200"), Device("cuda:1", 1 << 34, "NVIDIA L4")))
ROOT = Path(__file__).parents[3]


@pytest.fixture
def found(device_catalog: dict[str, str]):
    def find(step: str, profile=lambda digest: None, outputs: str = "a.image", inputs: str = "photo: image") -> Needs:
        catalog = device_catalog | {"llm": "weftline.engine.llm.node:Llm"}
        text = f"weftline: 1\nname: n\ninputs: {{{inputs}}}\nsteps: {{a: {step}}}\noutputs: {{o: {outputs}}}\n"
        checked = examine(load_yaml(text, "n.yaml", ROOT, catalog), catalog)
        assert checked.problems == ()
        one = checked.steps["a"]
        return needs_of(checked, MIXED, profile(digest_of(one.reference, to_options(one.config))))

    return find


def measured(on: dict[str, Measured]):
    return lambda digest: Profile({"a": StepProfile(digest, on)}, {"cuda L4": 7})


def test_what_is_stated_holds_on_every_gpu(found) -> None:
    assert found("{node: blur, inputs: {image: photo}, device_bytes: 5}") == Needs(
        {"a": Need({"cuda:0": 5, "cuda:1": 5}, gives=True)}
    )


def test_what_is_measured_holds_on_its_kind_for_batches_of_the_step(found) -> None:
    known = measured({"cuda L4": Measured(MIB, {1: 2 * MIB, 8: 9 * MIB}), "cpu": Measured(3)})
    needs = found("{node: blur, inputs: {image: photo}, batch: {items_max: 8}}", known)
    assert needs.steps["a"] == Need({"cuda:1": 9 * MIB}, stated=False, gives=True)
    assert needs.context_bytes == {"cuda:1": 7} and needs.notes == ()
    assert found("{node: blur, inputs: {image: photo}, batch: {items_max: 1}}", known).steps["a"].bytes == {
        "cuda:1": 2 * MIB
    }


def test_measurements_of_other_gpus_are_noted(found) -> None:
    blur = "{node: blur, inputs: {image: photo}}"
    (note,) = found(blur, measured({"cuda GB200": Measured(MIB), "cpu": Measured(3)})).notes
    assert note.startswith("a was measured on cuda GB200, and not on cuda H200, cuda L4: run `weftline")
    assert found(blur, measured({"cuda GB200": Measured(MIB), "cuda L4": Measured(3)})).notes == ()
    assert found(blur, measured({"cpu": Measured(3)})).notes == ()


def test_times_are_of_the_batches_that_a_step_makes(found) -> None:
    known = measured({"cuda L4": Measured(MIB, run_ms={1: 5, 8: 16, 32: 32}), "cuda H200": Measured(MIB)})
    blur = "{node: blur, inputs: {image: photo}, batch: {items_max: %s}}"
    assert [found(blur % most, known).steps["a"].ms for most in (1, 8, 32)] == [{"cuda:1": ms} for ms in (5, 2, 1)]
    stated = found("{node: blur, inputs: {image: photo}, device_bytes: 5}", known).steps["a"]
    assert stated.ms == {"cuda:1": 5}, "memory that is stated says nothing of times"


def test_rounds_take_as_long_as_with_the_most_that_were_measured(found) -> None:
    known = measured({"cuda H200": Measured(MIB, run_ms={1: 100, 64: 640})})
    assert found(f"{{{LLM}}}", known, outputs="a.text", inputs="q: text").steps["a"].ms == {"cuda:0": 10}


def test_who_answers_where_another_fails_has_no_work(device_catalog: dict[str, str]) -> None:
    text = "weftline: 1\nname: n\ninputs: {photo: image}\noutputs: {o: a.image}\nsteps:\n"
    text += "  a: {node: blur, inputs: {image: photo}, fallback: b}\n  b: {node: blur, inputs: {image: photo}}\n"
    checked = examine(load_yaml(text, "n.yaml", ROOT, device_catalog), device_catalog)
    digest = digest_of(checked.steps["a"].reference, to_options(checked.steps["a"].config))
    both = StepProfile(digest, {"cuda L4": Measured(MIB, run_ms={1: 5})})
    needs = needs_of(checked, MIXED, Profile({"a": both, "b": both})).steps
    assert (needs["a"].ms, needs["b"].ms) == ({"cuda:1": 5}, {"cuda:1": 0})


def test_nothing_is_known_without_either(found) -> None:
    assert found("{node: blur, inputs: {image: photo}}") == Needs({"a": Need({}, stated=False, gives=True)})


def test_a_step_that_gives_no_arrays_needs_no_arena(found) -> None:
    assert not found("{node: count, inputs: {image: photo}}", outputs="a.count").steps["a"].gives


LLM = "node: llm, model: examples/models/shapes-chat, inputs: {prompt: q}"


@pytest.mark.parametrize(
    ("more", "kv_bytes", "ranks"),
    [
        ("", None, 1),
        (", kv_bytes: 1048576", 1048576, 1),
        (", ranks: 2", 0, 2),
        (", ranks: 2, kv_bytes: 9999999", 9999999, 2),
    ],
)
def test_llm_steps_are_alone_and_have_kv_memory(found, more: str, kv_bytes: int | None, ranks: int) -> None:
    need = found(f"{{{LLM}{more}}}", outputs="a.text", inputs="q: text").steps["a"]
    assert (need.kv_bytes, need.ranks, need.alone, need.gives) == (kv_bytes, ranks, True, False)


@pytest.mark.parametrize("ranks", ["5", "many"])
def test_an_option_ranks_of_another_node_is_no_number_of_gpus(found, ranks: str) -> None:
    step = f"{{node: weftline_device_nodes:Best, inputs: {{image: photo}}, ranks: {ranks}, kv_bytes: none}}"
    need = found(step, outputs="a.label").steps["a"]
    assert (need.ranks, need.kv_bytes) == (1, 0)


@pytest.mark.parametrize(
    ("device", "gpus"),
    [("cuda:1", ("cuda:1", "cuda:2")), ("fake:1", ("fake:1",)), ("cpu", ("cpu",))],
)
def test_ranks_take_a_gpu_each_from_their_own_on(device: str, gpus: tuple[str, ...]) -> None:
    assert gpus_of(device, 2) == gpus and gpus_of(device, 1) == (device,)


def test_rounds_need_what_they_were_seen_to_need_at_most(found) -> None:
    known = measured({"cuda H200": Measured(10 * MIB, {1: 12 * MIB, 64: 20 * MIB}, kv_bytes=4 * MIB)})
    needs = found(f"{{{LLM}}}", known, outputs="a.text", inputs="q: text")
    assert needs.steps["a"].bytes == {"cuda:0": 16 * MIB}, "without the KV memory of that time"
