"""What open pipelines hold of GPUs is not free for the next one, and comes back when they are gone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weftline.errors import PipelineError
from weftline.pipelines.placement.budget import open_kv, over_commits
from weftline.pipelines.placement.machine import Device, Machine, Taken
from weftline.pipelines.placement.needs import Need, Needs
from weftline.pipelines.placement.place import place
from weftline.pipelines.placement.plan import Claim, DeviceBudget, Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.placement.reservations import Owner, ReservationTable, reserved_memory, without_workers
from weftline.pipelines.spec.graph import Step
from weftline.pipelines.spec.loader import load_yaml
from weftline.pipelines.spec.policy import GpuPolicy, Limits

GIB, MIB = 1 << 30, 1 << 20
ONE = Machine(8, 64 * GIB, (Device("cuda:0", 24 * GIB),))
TWO = Machine(8, 64 * GIB, (Device("cuda:0", 24 * GIB), Device("cuda:1", 24 * GIB)))
OCR, CHAT, SEE = Owner("ocr", 1), Owner("chat", 2), Owner("see", 3)
NAME = "name: {{node: name, inputs: {{image: photo}}{}}}"
GROW = "grow: {{node: grow, inputs: {{x: x}}{}}}"
INPUTS = {NAME: ("photo: image", "label: name.label"), GROW: ('x: "float32[4, 8]"', "y: grow.y")}


@pytest.fixture
def planned(device_catalog: dict[str, str]):
    """Return the plan of one step: `name` takes what it says, `grow` what is left as well."""

    def make(step: str, machine: Machine = ONE, gib: float | None = None, more: str = "", options: str = "") -> Plan:
        takes, gives = INPUTS[step]
        stated = "" if gib is None else f", device_bytes: {int(gib * GIB)}"
        text = f"inputs: {{{takes}}}\nsteps:\n  {step.format(stated + options)}\noutputs: {{{gives}}}\n{more}\n"
        pipeline = load_yaml(f"weftline: 1\nname: one\n{text}", "one.yaml", Path(), device_catalog)
        return make_plan(pipeline, machine, device_catalog)

    return make


@pytest.fixture
def refused(planned):
    """Return the one problem of a plan that is refused."""

    def find(*args, **more):
        with pytest.raises(PipelineError) as error:
            planned(*args, **more)
        (problem,) = error.value.problems
        return problem

    return find


def test_without_reservations_a_machine_and_its_plans_are_unchanged(planned) -> None:
    reservations = ReservationTable()
    assert reservations.alone(OCR) and reservations.beside(TWO, OCR) == TWO
    assert reservations.try_reserve(OCR, planned(NAME, Machine(8, 64 * GIB))), "without a GPU nothing is taken"
    assert reservations.alone(CHAT) and reservations.reserved_bytes == {}
    reservations.try_reserve(OCR, planned(NAME, TWO, 10))
    assert reservations.beside(TWO, OCR) == TWO, "what it has itself is not taken from it"
    assert not reservations.alone(CHAT) and reservations.beside(Machine(8, 1), CHAT) == Machine(8, 1)


def test_the_next_plan_goes_where_there_is_room(planned) -> None:
    reservations = ReservationTable()
    assert reservations.try_reserve(OCR, planned(NAME, TWO, 20))
    there = reservations.beside(TWO, CHAT)
    assert there.devices[0].taken == (Taken("ocr", 20 * GIB + 512 * MIB),) and there.devices[1].taken == ()
    assert planned(NAME, there, 10).step("name").device == "cuda:1"
    assert planned(NAME, there).step("name").device == "cuda:0", "not measured: where its process fits"
    assert planned(GROW, there).step("grow").device == "cuda:1", "it takes what is left, and wants to be alone"
    assert planned(NAME, there, 2, options=", device: cuda").budgets[0].claims[-1] == Claim(
        "ocr", "another pipeline", 20 * GIB + 512 * MIB, "claimed"
    )


def two_gpus(first: Taken, second: Taken, reserve_bytes: int = 0) -> Machine:
    """Return a machine of two GPUs of which others have this; who has something of the first wants so much left."""
    one, two = TWO.devices
    first_gpu = dataclasses.replace(one, taken=(first,), reserve_bytes=reserve_bytes)
    return Machine(8, 64 * GIB, (first_gpu, dataclasses.replace(two, taken=(second,))))


def test_a_gpu_that_others_fill_is_filled(planned) -> None:
    machine = two_gpus(Taken("chat", 10 * GIB, fills=True), Taken("ocr", 12 * GIB))
    assert planned(GROW, machine, 2).step("grow").device == "cuda:1", "although less is free there"


def test_reservations_on_one_gpu_do_not_affect_others() -> None:
    """These fit on two GPUs only if one of them is filled first; that a third has too much is no hindrance."""
    sizes = {"a": 5, "b": 5, "c": 4, "d": 3, "e": 3}
    needs = Needs({name: Need({f"cuda:{gpu}": gib * GIB for gpu in range(3)}) for name, gib in sizes.items()})
    devices = tuple(Device(f"cuda:{gpu}", 10 * GIB) for gpu in range(2))
    third = Device("cuda:2", 10 * GIB, taken=(Taken("ocr", 11 * GIB),))
    steps, heavy = [Step(name, "x") for name in sizes], dict.fromkeys(sizes, True)
    bare = GpuPolicy(reserve_bytes=0, context_bytes=0)
    placement, _ = place(steps, heavy, Limits(), Machine(8, 1 << 40, (*devices, third)), bare, needs)
    full = {
        gpu: sum(sizes[name] for name, at in placement.devices.items() if at == (gpu,)) for gpu in ("cuda:0", "cuda:1")
    }
    assert full == {"cuda:0": 10, "cuda:1": 10}


def test_a_reserve_of_others_is_not_free(planned) -> None:
    machine = two_gpus(Taken("chat", 4 * GIB), Taken("ocr", 10 * GIB), reserve_bytes=18 * GIB)
    assert planned(NAME, machine, 9).step("name").device == "cuda:1"


def test_kv_memory_is_what_others_leave(planned) -> None:
    reservations = ReservationTable()
    reservations.try_reserve(OCR, planned(NAME, ONE, 10))
    plan = planned(GROW, reservations.beside(ONE, CHAT), 4)
    assert plan.budgets[0].kv_bytes == planned(GROW, ONE, 4).budgets[0].kv_bytes - 10 * GIB - 512 * MIB
    assert plan.step("grow").options["kv_bytes"] == plan.budgets[0].kv_bytes
    assert reservations.try_reserve(CHAT, plan) and reservations.reserved_bytes == {"cuda:0": 23 * GIB}, (
        "all but the reserve"
    )
    assert reservations.beside(ONE, SEE).devices[0].taken[1].fills


def test_too_much_is_refused_with_a_row_for_what_others_hold_by_name(planned, refused) -> None:
    reservations = ReservationTable()
    reservations.try_reserve(OCR, planned(NAME, ONE, 10))
    problem = refused(NAME, reservations.beside(ONE, CHAT), 14)
    assert (problem.path, problem.file, problem.line) == ("steps.name.device_bytes", "one.yaml", 5)
    assert problem.found.splitlines() == [
        "cuda:0 has 24 GiB, and 26 GiB of it are claimed: 2 GiB too much",
        "       14 GiB  name        weights and work  stated",
        "       10 GiB  ocr         another pipeline  claimed",
        "        1 GiB              reserve           assumed",
        "      512 MiB  name        context           assumed",
        "       26 GiB  together",
        "       24 GiB  cuda:0 has",
    ]
    assert problem.fix.startswith("put name or others on another GPU") and problem.fix.endswith("; or unload ocr")
    largest = refused(NAME, reservations.beside(ONE, CHAT), 7, f"gpu: {{reserve_bytes: {7 * GIB}}}")
    assert largest.path in ("gpu.reserve_bytes", "steps.name.device_bytes"), "where something of its own stands"
    reservations.release(OCR)
    assert planned(NAME, reservations.beside(ONE, CHAT), 14).step("name").device == "cuda:0"


def test_who_took_all_that_was_left_can_be_bounded(planned, refused) -> None:
    reservations = ReservationTable()
    reservations.try_reserve(CHAT, planned(GROW, ONE, 4))
    problem = refused(NAME, reservations.beside(ONE, OCR), 4)
    assert "chat        another pipeline, with all that was left  claimed" in problem.found
    assert problem.fix.endswith("; or bound the KV memory of chat (limits.kv_bytes there); or unload chat")
    bounded = f"limits: {{kv_bytes: {{cuda: {8 * GIB}}}}}"
    reservations.try_reserve(CHAT, planned(GROW, ONE, 4, bounded))
    assert planned(NAME, reservations.beside(ONE, OCR), 4).step("name").device == "cuda:0"


def test_the_next_version_is_planned_beside_the_one_that_serves(planned, refused) -> None:
    reservations, new = ReservationTable(), dataclasses.replace(OCR, version=2)
    reservations.try_reserve(OCR, planned(NAME, ONE, 10))
    small = planned(NAME, reservations.beside(ONE, new), 8)
    assert Claim("ocr", "the version that serves", 10 * GIB + 512 * MIB, "claimed") in small.budgets[0].claims
    assert reservations.try_reserve(new, small) and reservations.reserved_bytes == {"cuda:0": 19 * GIB}
    reservations.release(OCR)
    assert reservations.reserved_bytes == {"cuda:0": 8 * GIB + 512 * MIB}
    third = dataclasses.replace(OCR, version=3)
    fix = refused(NAME, reservations.beside(ONE, third), 18).fix
    assert fix.endswith("unload the version that serves and load the new one (until then the old one goes on serving)")
    assert "unload ocr" not in fix and "limits.kv_bytes" not in fix
    reservations.release(new)
    reservations.try_reserve(OCR, planned(GROW, ONE, 4))
    fix = refused(NAME, reservations.beside(ONE, new), 4).fix
    assert "; or bound its KV memory (limits.kv_bytes), in the version that serves too; or unload the version" in fix


def test_a_reserve_is_left_once_and_as_much_as_anybody_wants(planned, refused) -> None:
    reservations = ReservationTable()
    wants = "gpu: {{reserve_bytes: {}}}"
    reservations.try_reserve(OCR, planned(NAME, ONE, 10, wants.format(4 * GIB)))
    there = reservations.beside(ONE, CHAT)
    assert planned(NAME, there, 8.5).budgets[0].claims[-1] == Claim(
        "", "reserve of other pipelines", 3 * GIB, "claimed"
    )
    assert refused(NAME, there, 10).found.startswith("cuda:0 has 24 GiB, and 25 GiB of it are claimed")
    own = planned(NAME, there, 8, wants.format(5 * GIB))
    assert [claim.bytes for claim in own.budgets[0].claims if "reserve" in claim.what] == [5 * GIB]
    assert reserved_memory(own, own.budgets[0]).reserve_bytes == 5 * GIB
    assert reserved_memory(planned(NAME, there, 8), own.budgets[0]).reserve_bytes == 5 * GIB
    plan = planned(NAME, there, 8)
    assert reserved_memory(plan, plan.budgets[0]).reserve_bytes == GIB, "what others want is theirs"
    assert not reservations.try_reserve(CHAT, planned(NAME, ONE, 10)) and reservations.try_reserve(
        CHAT, planned(NAME, ONE, 9)
    )
    assert reservations.settle(CHAT, "cuda:0", 9 * GIB, 20 * GIB).reserve_bytes == 4 * GIB


def test_a_plan_that_cannot_be_made_again_fits_as_it_is_or_says_why_not(planned) -> None:
    reservations = ReservationTable()
    reservations.try_reserve(OCR, planned(NAME, ONE, 10))
    assert reservations.try_reserve(SEE, planned(NAME, ONE, 4))
    filled = planned(GROW, ONE, 4)
    before = reservations.changes, reservations.reserved_bytes
    assert not reservations.try_reserve(CHAT, filled) and (reservations.changes, reservations.reserved_bytes) == before
    (problem,) = over_commits(reservations.beside_others(filled, CHAT))
    assert (
        "llm steps   KV memory         planned" in problem.found
        and "see         another pipeline  claimed" in problem.found
    )
    assert problem.fix.startswith("lower limits.kv_bytes.cuda:0 by 15 GiB")


# what was measured


def test_a_measurement_is_reserved_where_the_claim_was_unknown(planned) -> None:
    reservations = ReservationTable()
    reservations.try_reserve(OCR, planned(NAME, ONE))
    there = reservations.beside(ONE, CHAT)
    assert there.devices[0].taken == (Taken("ocr", 512 * MIB, known=False),)
    unknown = planned(GROW, there, 4)
    assert unknown.budgets[0].kv_bytes == 0, "how much is left is known when ocr has been measured"
    assert Claim("ocr", "another pipeline", 0, "unknown") in unknown.budgets[0].claims
    left = reservations.settle(OCR, "cuda:0", 9 * GIB, 20 * GIB)
    assert (left.bytes, left.others, left.reserve_bytes) == (14 * GIB, (), GIB)
    assert reservations.beside(ONE, CHAT).devices[0].taken == (Taken("ocr", 9 * GIB + 512 * MIB),)


def test_who_takes_what_is_left_holds_it_from_the_moment_it_is_known(planned) -> None:
    reservations = ReservationTable()
    reservations.try_reserve(OCR, planned(NAME, ONE, 4))
    reservations.try_reserve(CHAT, planned(GROW, reservations.beside(ONE, CHAT)))
    first = reservations.settle(CHAT, "cuda:0", 5 * GIB, 24 * GIB)
    assert (first.bytes, first.waits) == (24 * GIB - GIB - 5 * GIB - 4 * GIB - 512 * MIB, False), "ocr's is held"
    assert reservations.reserved_bytes == {"cuda:0": 23 * GIB}
    reservations.try_reserve(SEE, planned(NAME, ONE))
    assert reservations.reserved_bytes == {"cuda:0": 23 * GIB}, "who comes later finds nothing left"


@pytest.fixture
def two_that_take(planned) -> ReservationTable:
    """Return reservations of one that claims 4 GiB and two that were not measured and use the remainder."""
    reservations = ReservationTable()
    reservations.try_reserve(OCR, planned(NAME, ONE, 4))
    reservations.try_reserve(CHAT, planned(GROW, reservations.beside(ONE, CHAT)))
    reservations.try_reserve(SEE, planned(GROW, reservations.beside(ONE, SEE)))
    return reservations


def test_two_that_wait_divide_the_remainder_once_both_are_measured(two_that_take) -> None:
    reservations = two_that_take
    first = reservations.settle(CHAT, "cuda:0", 5 * GIB, 24 * GIB)
    assert first.waits and reservations.pop_new_shares() == {} and not reservations.taken("cuda:0", SEE)[1].known
    assert reservations.reserved_bytes == {"cuda:0": 14 * GIB + 512 * MIB - 4 * GIB}, "it holds no more than it has"
    part = (24 - 1 - 4 - 5 - 3) * GIB // 2 - 3 * 256 * MIB
    second = reservations.settle(SEE, "cuda:0", 3 * GIB, 24 * GIB)
    assert (second.bytes, second.waits) == (part, False)
    assert reservations.pop_new_shares() == {(CHAT, "cuda:0"): part} and reservations.pop_new_shares() == {}
    assert reservations.reserved_bytes == {"cuda:0": 23 * GIB}, "all but the reserve"
    assert all(one.known and one.fills for one in reservations.taken("cuda:0", OCR))


def test_a_released_version_is_not_waited_for(two_that_take) -> None:
    reservations = two_that_take
    reservations.settle(CHAT, "cuda:0", 5 * GIB, 24 * GIB)
    reservations.release(SEE)
    assert reservations.pop_new_shares() == {(CHAT, "cuda:0"): (24 - 1 - 4 - 5 - 1) * GIB}
    assert reservations.reserved_bytes == {"cuda:0": 23 * GIB}


def test_an_over_committed_version_has_no_share_and_the_other_all(two_that_take) -> None:
    reservations = two_that_take
    reservations.settle(CHAT, "cuda:0", 5 * GIB, 24 * GIB)
    assert reservations.settle(SEE, "cuda:0", 15 * GIB, 24 * GIB).bytes < 0
    assert reservations.pop_new_shares() == {}
    reservations.release(SEE)
    assert reservations.pop_new_shares() == {(CHAT, "cuda:0"): (24 - 1 - 4 - 5 - 1) * GIB}


def test_what_is_divided_is_free_by_the_driver_of_who_was_measured_last(two_that_take) -> None:
    reservations = two_that_take
    reservations.settle(CHAT, "cuda:0", 5 * GIB, 15 * GIB)
    part = (7 * GIB - GIB) // 2
    assert reservations.settle(SEE, "cuda:0", 3 * GIB, 7 * GIB).bytes == part
    assert reservations.pop_new_shares() == {(CHAT, "cuda:0"): part}


def test_shares_follow_instances_after_all_measurements(planned) -> None:
    reservations = ReservationTable()
    reservations.try_reserve(CHAT, planned(GROW, ONE, options=", instances: 2"))
    reservations.try_reserve(SEE, planned(GROW, reservations.beside(ONE, SEE)))
    reservations.try_reserve(OCR, planned(NAME, reservations.beside(ONE, OCR)))
    assert (
        reservations.settle(CHAT, "cuda:0", 4 * GIB, 24 * GIB).waits
        and reservations.settle(SEE, "cuda:0", GIB, 24 * GIB).waits
    )
    reservations.settle(OCR, "cuda:0", 2 * GIB, 24 * GIB)
    shares = reservations.pop_new_shares()
    third = (24 - 1 - 4 - 1 - 2 - 2) * GIB // 3
    assert [shares[who, "cuda:0"] // MIB for who in (CHAT, SEE)] == [2 * third // MIB, third // MIB]


def test_memory_that_the_driver_lacks_is_no_remainder(planned) -> None:
    reservations = ReservationTable()
    reservations.try_reserve(CHAT, planned(GROW, ONE))
    assert reservations.settle(CHAT, "cuda:0", 5 * GIB, 6 * GIB).bytes == 5 * GIB
    assert reservations.reserved_bytes == {"cuda:0": 10 * GIB + 512 * MIB}


def test_what_was_claimed_and_is_not_taken_yet_stays_held(planned) -> None:
    reservations = ReservationTable()
    reservations.try_reserve(OCR, planned(NAME, ONE, 10))
    reservations.settle(OCR, "cuda:0", 2 * GIB, 20 * GIB)
    assert reservations.reserved_bytes == {"cuda:0": 10 * GIB + 512 * MIB}
    reservations.settle(OCR, "cuda:0", 11 * GIB, 12 * GIB)
    assert reservations.reserved_bytes == {"cuda:0": 11 * GIB + 512 * MIB}, "it takes more than its plan said"
    limits = f"limits: {{kv_bytes: {{cuda: {8 * GIB}}}}}"
    reservations.release(OCR)
    reservations.try_reserve(CHAT, planned(GROW, ONE, None, limits))
    reservations.settle(CHAT, "cuda:0", 3 * GIB + 4 * GIB, 24 * GIB)
    assert reservations.reserved_bytes == {"cuda:0": (3 + 8) * GIB + 512 * MIB}, (
        "it starts with half, and may have the rest"
    )


CLAIMS = st.lists(st.tuples(st.sampled_from(("cuda:0", "cuda:1")), st.integers(1, 60)), min_size=1, max_size=2)
EVENTS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), CLAIMS, st.integers(0, 100)), max_size=60)


@settings(max_examples=150, deadline=None)
@given(EVENTS)
def test_reservations_never_exceed_the_gpu_and_are_all_released(events: list) -> None:
    r"""Reservations, measurements \(at most the claim\) and releases, in any order."""
    template = make_plan(
        load_yaml("weftline: 1\nname: p\ninputs: {x: text}\nsteps: {s: {node: echo, inputs: {value: x}}}\n"
                  "outputs: {y: s.value}\n", "p.yaml", Path()), ONE)  # fmt: skip
    reservations, held, measured = ReservationTable(), dict[Owner, Plan](), set[tuple[Owner, str]]()
    for who, what, claims, share in events:
        owner = Owner("p", who)
        if what == 0 and owner not in held:
            found = [
                DeviceBudget(
                    device, 100, (Claim("s", "weights and work", bytes, "stated"), Claim("", "reserve", 10, ""))
                )
                for device, bytes in dict(claims).items()
            ]
            takes = dataclasses.replace(
                template.steps[0], streams=True, options={"kv_bytes": None}, devices=tuple(dict(claims))
            )
            plan = dataclasses.replace(template, budgets=tuple(found), steps=(takes,) if share % 2 else template.steps)
            if reservations.try_reserve(owner, plan):
                held[owner] = plan
            else:
                assert over_commits(reservations.beside_others(plan, owner)), "a refusal has a reason"
        elif what == 1 and owner in held:
            budget = held[owner].budgets[share % len(held[owner].budgets)]
            taken = budget.claims[0].bytes * share // 100
            assert reservations.settle(owner, budget.device, taken, 100 - taken).bytes >= 0
            measured.add((owner, budget.device))
        elif what == 2:
            reservations.release(owner)
            held.pop(owner, None)
            measured -= {(owner, "cuda:0"), (owner, "cuda:1")}
        for device in ("cuda:0", "cuda:1"):
            takers = {owner for owner, plan in held.items() if open_kv(plan, device)}
            divided = all(one.known for one in reservations.taken(device, Owner("", 0)))
            assert divided == all((one, device) in measured for one in takers), (
                "versions wait only for missing measurements"
            )
        assert all(bytes + 10 <= 100 for bytes in reservations.reserved_bytes.values())
    for owner in held:
        reservations.release(owner)
    assert reservations.reserved_bytes == {} and reservations.alone(Owner("p", 99))


SEVERAL = """
weftline: 1
name: several
inputs: {photo: image, x: "float32[4, 8]"}
gpu: {processes: separate, context_bytes: 1073741824}
steps:
  one: {node: name, device_bytes: 4294967296, inputs: {image: photo}}
  two: {node: name, device_bytes: 2147483648, inputs: {image: photo}}
  grow: {node: grow, KNOWN, inputs: {x: x}}
  more: {node: grow, device_bytes: 1073741824, inputs: {x: x}}
outputs: {a: one.label, b: two.label, c: grow.y, d: more.y}
"""


@pytest.mark.parametrize("known", [True, False])
def test_what_ended_workers_had_is_released_and_shared_kv_memory_stays(
    device_catalog: dict[str, str], known: bool
) -> None:
    """Sizes in GiB: processes have 1 and their steps 4, 2, 1 and 1; the llm steps divide what is left of 23."""
    text = SEVERAL.replace("KNOWN", "device_bytes: 1073741824" if known else "instances: 1")
    plan = make_plan(load_yaml(text, "several.yaml", Path(), device_catalog), ONE, device_catalog)
    reservations = ReservationTable()
    reservations.try_reserve(OCR, plan)

    def held() -> float:
        return reservations.reserved_bytes.get("cuda:0", 0) / GIB

    takes = {"one": 4, "two": 2, "grow": 3, "more": 3}  # measured; of the llm steps 2 are their first KV memory
    assert held() == (23 if known else 11)
    left = reservations.settle(OCR, "cuda:0", sum(takes.values()) * GIB, 24 * GIB - (sum(takes.values()) + 4) * GIB)
    assert held() == 23 and left.bytes == 7 * GIB
    for gone, then in (("one", 18), ("grow", 16), ("two", 13), ("more", 0)):
        del takes[gone]
        ended = {"one", "two", "grow", "more"} - takes.keys()
        kept = {"cuda:0": 2 * GIB} if gone == "grow" and not known else {}
        reservations.shrink(OCR, without_workers(plan, ended), {"cuda:0": sum(takes.values()) * GIB}, kept)
        assert held() == then, gone
    assert reservations.reserved_bytes == {} and reservations.alone(CHAT)
