"""Output sizes follow from numbers and from the names that inputs bind."""

from weftline.engine.protocol.messages import Item, Value
from weftline.engine.scheduler.output_sizes import OutputSizes
from weftline.nodes.ports import Port, PortType
from weftline.pipelines.placement.plan import PlannedInput, PlannedStep
from weftline.pipelines.spec.policy import BatchPolicy
from weftline.pipelines.spec.wire import Wire


def sizes(input: str, *outputs: str) -> OutputSizes:
    ports = tuple(Port(f"y{i}", PortType.parse(type)) for i, type in enumerate(outputs))
    given = (PlannedInput("x", Wire(None, "x"), PortType.parse(input)),)
    step = PlannedStep("s", "n", {}, given, ports, {}, BatchPolicy(), False, False, False, "cpu", (0,), 1000.0)
    return OutputSizes(step)


def item(*shape: int) -> Item:
    return Item(1, (Value("tensor", "float32", shape, b""),))


def test_numbers_and_bound_names_are_known_beforehand() -> None:
    known = sizes("float32[C, H]", "uint8[H, 10]", "float32[4]", "float32[M]", "text", "float32[]")
    assert known.item_bytes([item(3, 5)]) == {0: 50, 1: 16, 4: 4}


def test_items_of_different_sizes_have_no_common_buffer() -> None:
    known = sizes("float32[N]", "float32[N]", "float32[2]")
    assert known.item_bytes([item(3), item(4)]) == {1: 8}
    assert known.item_bytes([item(3), item(3)]) == {0: 12, 1: 8}


def test_outputs_that_are_read_on_the_device_are_listed_by_port() -> None:
    given = (PlannedInput("x", Wire(None, "x"), PortType.parse("float32[N]")),)
    ports = tuple(Port(name, PortType.parse("float32[N]")) for name in ("a", "b", "c"))
    near = {"c": "both", "a": "device"}
    policy = BatchPolicy()
    step = PlannedStep(
        "s", "n", {}, given, ports, {}, policy, False, False, False, "fake:0", (0,), 1000.0, device_outputs=near
    )
    assert OutputSizes(step).device_ports == {0: "device", 2: "both"}
