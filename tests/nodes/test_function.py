from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weftline
from tests.nodes.device_values import DEVICE, Bench, bits, down
from weftline.errors import ModelError, StepError
from weftline.nodes.contract import Batch, ConfigError, OpenContext, StepContext
from weftline.nodes.current import Scope, within
from weftline.nodes.function import Function, FunctionConfig
from weftline.nodes.ports import Ports
from weftline.nodes.urgency import SequencePart, Urgency

SOURCE = """
from __future__ import annotations
from typing import Annotated, Any, Optional
import numpy as np
{extra}

def join(text: str, data: bytes, value: dict[str, Any], x: "float32[C, 4]", photo: "image",
         count: int = 3, *, name: Optional[str] = None) -> str:
    return text + str(count)

def split(text: str) -> {{"first": "text", "rest": "json"}}:
    first, *rest = text.split()
    return {{"first": first, "rest": rest}}

def double(x: Annotated[np.ndarray, "float32[N]"]) -> np.ndarray:
    return x * 2

def same(x: np.ndarray) -> np.ndarray:
    return x

def lengths(text: str) -> list[int]:
    return [len(t) for t in text]

def upper(text: str) -> str:
    if text == "bad":
        raise KeyError("bad")
    return 7 if text == "seven" else text.upper()

def shout(text: list) -> str:
    return [t.upper() for t in text]

def pictures(many: "list[image]", more: list["image"], most: Annotated[list, "list[audio]"], deep: list[list["audio"]],
             raw: list[bytes], arrays: list[np.ndarray], named: list[Annotated[np.ndarray, "float32[3]"]],
             found: list[Detections], few: list[Any] = None,
             words: list[str] = (), plain: list = (), numbers: list[dict[str, int]] = ()) -> list["float32[N, 2]"]:
    return [np.zeros((len(many), 2), np.float32)]

def greet(text: str, name: str = "you", count: int = 1) -> str:
    return f"{{text}} {{name}} {{count}}"

def greet_all(text: str, name: str = ("you",)) -> str:
    return [f"{{t}} {{n}}" for t, n in zip(text, list(name) * 9)]

def parts(text: str) -> {{"first": "text", "all": "list[text]"}}:
    return {{"first": 1 if text == "bad" else text, "all": 2 if text == "worse" else [text]}}

def mirror(photo: "image", more: "list[image]" = (), half: "bfloat16[N]" = None) -> "image":
    assert half is None or (type(half).__name__, str(half.dtype)) == ("Tensor", "torch.bfloat16")
    return photo.flip(1) if not len(more) else more[0].flip(1)

def mirror_all(photo: "image") -> "image":
    import torch
    return torch.stack(photo).flip(2)

def about(text: str) -> dict:
    import weftline
    now = weftline.current()
    part = now.sequence
    return {{"cancelled": now.cancelled, "priority": now.priority, "left_ms": now.left_ms, "items": len(now.items),
             "sequence": [part.id, part.start, part.end] if part else None}}

def about_all(text: str) -> dict:
    import weftline
    now = weftline.current()
    one = about(text) if len(text) == 1 else {{"cancelled": now.cancelled, "priority": now.priority,
                                               "left_ms": now.left_ms, "items": len(now.items)}}
    each = [[item.cancelled, item.sequence.id if item.sequence else None] for item in now.items]
    return [{{**one, "each": each}} for _ in text]

class Diary:
    def __init__(self):
        self.said = {{}}
    def __call__(self, text: str) -> str:
        import weftline
        part = weftline.current().sequence
        self.said.setdefault(part.id, []).append(text)
        return " ".join(self.said[part.id])
    def end_sequence(self, id):
        del self.said[id]

class Counter:
    def __init__(self):
        self.seen = 0
    def __call__(self, text: str) -> int:
        self.seen += 1
        return self.seen

def untyped(text): return text
def unreturned(text: str): return text
def starred(*texts: str) -> str: return ""
async def later(text: str) -> str: return text
def odd(text: complex) -> str: return ""
def wrong_dims(x: "float32[3, -1]") -> str: return ""
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SOURCE.format(extra=""))
    return tmp_path


def ports(folder: Path, name: str) -> Ports:
    return Function.ports(FunctionConfig(f"mine.py:{name}"), StepContext(folder))


def opened(folder: Path, name: str, device: str = "cpu", **options: Any) -> Function:
    node = Function(FunctionConfig(f"mine.py:{name}", **options))
    node.open(OpenContext(folder, device))
    return node


def test_annotations_become_ports(folder: Path) -> None:
    read = ports(folder, "join")
    assert {p.name: (str(p.type), p.optional) for p in read.inputs} == {
        "text": ("text", False), "data": ("bytes", False), "value": ("json", False),
        "x": ("float32[C, 4]", False), "photo": ("image", False), "count": ("json", True), "name": ("text", True),
    }  # fmt: skip
    assert [(p.name, str(p.type)) for p in read.outputs] == [("output", "text")]


def test_a_dict_annotation_gives_an_output_for_each_key(folder: Path) -> None:
    assert [(p.name, str(p.type)) for p in ports(folder, "split").outputs] == [("first", "text"), ("rest", "json")]
    assert opened(folder, "split").run(Batch({"text": ["a b c"]})) == {"first": ["a"], "rest": [["b", "c"]]}


def test_arrays_are_tensors_and_annotated_says_which(folder: Path) -> None:
    read = ports(folder, "double")
    assert (str(read.inputs[0].type), str(read.outputs[0].type)) == ("float32[N]", "tensor")


def test_checking_never_imports_the_users_module(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE.format(extra="import a_package_that_is_not_there"))
    assert ports(tmp_path, "upper").inputs[0].name == "text"
    with pytest.raises(ModelError, match="a_package_that_is_not_there"):
        opened(tmp_path, "upper")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("untyped", "no type for parameter text"), ("unreturned", "no return annotation"), ("starred", r"\*args"),
        ("later", "async"), ("odd", "complex"), ("wrong_dims", "no dimension"), ("absent", "defines no absent"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_a_config_error_with_a_remedy(folder: Path, name: str, found: str) -> None:
    with pytest.raises(ConfigError, match=found) as caught:
        ports(folder, name)
    assert caught.value.option == "function"
    assert caught.value.fix or caught.value.expected


@pytest.mark.parametrize(
    "reference", ["mine.py", "mine.py:", "no.py:f", "no_such_package.sub:f", "mine.py:a.b", "json:x y"]
)
def test_a_reference_that_leads_nowhere_is_a_config_error(folder: Path, reference: str) -> None:
    with pytest.raises(ConfigError):
        Function.ports(FunctionConfig(reference), StepContext(folder))


def test_a_syntax_error_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(ConfigError, match="line 2"):
        ports(tmp_path, "f")


def test_a_dotted_module_is_found_without_importing_its_package(tmp_path: Path) -> None:
    package = tmp_path / "weft_test_package"
    package.mkdir()
    (package / "__init__.py").write_text("import a_package_that_is_not_there")
    (package / "steps.py").write_text("def f(text: str) -> str: return text")
    read = Function.ports(FunctionConfig("weft_test_package.steps:f"), StepContext(tmp_path))
    assert read.inputs[0].name == "text"


def test_one_items_exception_fails_it_alone(folder: Path) -> None:
    answers = opened(folder, "upper").run(Batch({"text": ["a", "bad", "seven", "b"]}))["output"]
    assert [answers[0], answers[3]] == ["A", "B"]
    assert isinstance(answers[1], KeyError)
    assert isinstance(answers[2], StepError) and "wants text" in str(answers[2])


def test_an_array_that_is_passed_on_stays_the_same_object(folder: Path) -> None:
    x = np.zeros(3, np.float32)
    assert opened(folder, "same").run(Batch({"x": [x]}))["output"][0] is x


def test_an_unwired_parameter_takes_its_default(folder: Path) -> None:
    inputs = {"text": ["a"], "data": [b""], "value": [{}], "x": [None], "photo": [None]}
    assert opened(folder, "join").run(Batch(inputs))["output"] == ["a3"]


def test_lists_of_port_types_are_lists_and_all_others_json(folder: Path) -> None:
    read = ports(folder, "pictures")
    assert {p.name: str(p.type) for p in (*read.inputs, *read.outputs)} == {
        "many": "list[image]", "more": "list[image]", "most": "list[audio]", "deep": "list[list[audio]]",
        "raw": "list[bytes]", "arrays": "list[tensor]", "named": "list[float32[3]]",
        "found": "list[detections]", "few": "json", "words": "json",
        "plain": "json", "numbers": "json", "output": "list[float32[N, 2]]",
    }  # fmt: skip


def test_a_wrong_type_inside_a_list_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(a: list['pikture']) -> str: return ''")
    with pytest.raises(ConfigError, match="pikture"):
        ports(tmp_path, "f")


def test_an_absent_value_takes_the_default_for_its_item_alone(folder: Path) -> None:
    batch = Batch({"text": ["a", "b"], "name": [None, "me"], "count": [2, None]})
    assert opened(folder, "greet").run(batch)["output"] == ["a you 2", "b me 1"]


def test_a_batched_function_takes_the_default_where_all_are_absent(folder: Path) -> None:
    node = opened(folder, "greet_all", batched=True)
    assert node.run(Batch({"text": ["a"], "name": [None]}))["output"] == ["a you"]
    assert node.run(Batch({"text": ["a", "b"], "name": [None, "me"]}))["output"] == ["a None", "b me"]


def test_several_outputs_are_split_and_a_wrong_one_fails_its_item_only(folder: Path) -> None:
    answers = opened(folder, "parts").run(Batch({"text": ["a", "bad", "worse"]}))
    assert (answers["first"][0], answers["all"][0]) == ("a", ["a"])
    assert "the function's first wants text" in str(answers["first"][1])
    assert "the function's all wants list[text]" in str(answers["all"][2])
    assert isinstance(answers["all"][1], StepError) and isinstance(answers["first"][2], StepError)


def test_a_dict_with_other_keys_than_promised_fails_its_item(folder: Path) -> None:
    (folder / "odd.py").write_text("def f(text: str) -> {'a': str, 'b': str}: return {'a': text, 'c': text}")
    node = Function(FunctionConfig("odd.py:f"))
    node.open(OpenContext(folder))
    answers = node.run(Batch({"text": ["x"]}))
    assert isinstance(answers["a"][0], StepError) and "promises a dict of ['a', 'b']" in str(answers["b"][0])


def test_a_batched_functions_wrong_value_fails_its_item_alone(folder: Path) -> None:
    (folder / "odd.py").write_text("def f(text: list) -> str: return [text[0], 7]")
    node = Function(FunctionConfig("odd.py:f", batched=True))
    node.open(OpenContext(folder))
    first, second = node.run(Batch({"text": ["x", "y"]}))["output"]
    assert first == "x" and "the function's output wants text" in str(second)


def batch_of(ids: list[int], cancelled: set[int], urgency: list[Urgency]) -> Batch:
    return Batch({"text": ["t"] * len(ids)}, ids, cancelled=lambda id: id in cancelled, urgency=urgency)


def test_current_speaks_of_the_item_a_function_works_on(folder: Path) -> None:
    part = SequencePart("s", start=True)
    batch = batch_of([7, 8], {8}, [Urgency(3, 5000.0, part), Urgency()])
    first, second = opened(folder, "about").run(batch)["output"]
    assert 4000 < first.pop("left_ms") <= 5000
    assert first == {"cancelled": False, "priority": 3, "items": 1, "sequence": ["s", True, False]}
    assert second == {"cancelled": True, "priority": 0, "left_ms": None, "items": 1, "sequence": None}


def test_current_speaks_of_all_items_in_a_batched_function(folder: Path) -> None:
    urgency = [Urgency(3, 9000.0, SequencePart("s")), Urgency(-5, 5000.0)]
    node = opened(folder, "about_all", batched=True)
    answer = node.run(batch_of([7, 8], {8}, urgency))["output"][0]
    assert 4000 < answer.pop("left_ms") <= 5000
    assert answer == {
        "cancelled": False, "priority": 3, "items": 2, "each": [[False, "s"], [True, None]],
    }  # fmt: skip
    assert node.run(batch_of([7, 8], {7, 8}, urgency))["output"][0]["cancelled"]
    assert node.run(batch_of([7], set(), urgency[:1]))["output"][0]["sequence"] == ["s", False, False]


@pytest.mark.parametrize("what", ["sequence", "seed"])
def test_current_of_several_items_refuses_what_each_has_of_its_own(what: str) -> None:
    urgency = [Urgency(sequence=SequencePart("s"), seed=1), Urgency(sequence=SequencePart("t"), seed=2)]
    with within(Scope(batch_of([7, 8], set(), urgency))):
        with pytest.raises(StepError, match=rf"current\(\).{what}: this call works on 2 items(.|\n)*current\(\).items"):
            getattr(weftline.current(), what)
        assert [getattr(item, what) for item in weftline.current().items] == [getattr(one, what) for one in urgency]


def test_current_in_a_thread_that_a_step_started_is_refused(folder: Path) -> None:
    with ThreadPoolExecutor(1) as threads, within(Scope(batch_of([7], set(), [Urgency(3)]))):
        with pytest.raises(StepError, match="this thread was started by a step"):
            threads.submit(weftline.current).result()
        assert threads.submit(copy_context().run, weftline.current).result().priority == 3


def test_current_has_defaults_outside_of_a_step(folder: Path) -> None:
    opened(folder, "about").run(batch_of([7], {7}, [Urgency(3)]))
    now = weftline.current()
    assert (now.cancelled, now.priority, now.left_ms, now.sequence) == (False, 0, None, None)


def test_an_object_may_remember_a_sequence_until_it_ends(folder: Path) -> None:
    node = opened(folder, "Diary")
    for text, answer in (("a", "a"), ("b", "a b")):
        assert node.run(Batch({"text": [text]}, urgency=[Urgency(sequence=SequencePart("s"))]))["output"] == [answer]
    node.end_sequence("s")
    assert node.run(Batch({"text": ["c"]}, urgency=[Urgency(sequence=SequencePart("s"))]))["output"] == ["c"]
    opened(folder, "upper").end_sequence("s")


def test_a_batched_function_gets_lists(folder: Path) -> None:
    assert opened(folder, "shout", batched=True).run(Batch({"text": ["a", "b"]}))["output"] == ["A", "B"]
    with pytest.raises(StepError, match="2 items"):
        opened(folder, "upper", batched=True)._listed(["A"], 2)


def test_a_class_is_made_once_and_called(folder: Path) -> None:
    node = opened(folder, "Counter")
    assert node.run(Batch({"text": ["a", "b"]}))["output"] == [1, 2]
    assert node.run(Batch({"text": ["c"]}))["output"] == [3]


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_tensors_may_be_torch_tensors_where_they_lie(folder: Path, device: str) -> None:
    photos, half, bench = [bits("uint8", (4, 6, 3), seed) for seed in range(2)], bits("bfloat16", (5,)), Bench()
    near = [bench.put(photo) for photo in photos] if device == DEVICE else photos
    given = bench.put(half, "bfloat16") if device == DEVICE else half
    wanted = [photo[:, ::-1].tolist() for photo in photos]
    node = opened(folder, "mirror", device, tensors="torch")
    plain = node.run(Batch({"photo": near, "half": [given, None]}))["output"]
    assert [down(one).tolist() for one in plain] == wanted
    (first, second) = node.run(Batch({"photo": near, "more": [[near[1], near[0]], []]}))["output"]
    assert [down(first).tolist(), down(second).tolist()] == [wanted[1], wanted[1]]
    whole = opened(folder, "mirror_all", device, batched=True, tensors="torch").run(Batch({"photo": near}))["output"]
    assert [down(one).tolist() for one in whole] == wanted


def test_what_is_no_tensor_is_held_to_its_type_as_ever(folder: Path) -> None:
    (answer,) = opened(folder, "upper", tensors="torch").run(Batch({"text": ["seven"]}))["output"]
    assert isinstance(answer, StepError)


def test_its_ports_are_on_the_device_only_where_it_takes_torch_tensors(folder: Path) -> None:
    for tensors, near in (("numpy", set()), ("torch", {"photo", "more", "half", "output"})):
        config = FunctionConfig("mine.py:mirror", tensors=tensors)
        assert Function.device_ports(config, Function.ports(config, StepContext(folder))) == near
    with pytest.raises(ConfigError) as caught:
        Function.ports(FunctionConfig("mine.py:mirror", tensors="jax"), StepContext(folder))
    assert caught.value.option == "tensors"
