"""Texts, maps and columns of ONNX models, as scikit-learn exports them, and the types that no port carries."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
from onnx import TensorProto, TypeProto, ValueInfoProto, helper

import weftline
from tests.engine.serving.http.hosted import hosted_pipelines
from weftline.engine.serving.config import ServedPipeline
from weftline.errors import InputError, PipelineError
from weftline.nodes.contract import Batch, ConfigError, OpenContext, StepContext
from weftline.nodes.onnx import Onnx, OnnxConfig
from weftline.nodes.onnx_values import to_texts
from weftline.nodes.ports import PortType

FLOAT, TEXT, INT64 = TensorProto.FLOAT, TensorProto.STRING, TensorProto.INT64
WEIGHTS = np.array([[1, 0, -1], [0, 1, 0.5]], np.float32)  # of two features for each of three classes


def value(name: str, type: int, dims: Sequence[Any] | None) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, type, dims)


def of_type(name: str, type: TypeProto) -> ValueInfoProto:
    return helper.make_value_info(name, type)


def maps(name: str, key: int = TEXT) -> ValueInfoProto:
    numbers = helper.make_tensor_type_proto(FLOAT, [])
    return of_type(name, helper.make_sequence_type_proto(helper.make_map_type_proto(key, numbers)))


def ml(operator: str, inputs: list[str], outputs: list[str], **attributes: Any) -> Any:
    return helper.make_node(operator, inputs, outputs, domain="ai.onnx.ml", **attributes)


def write(path: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any]) -> None:
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(helper.make_model(graph, opset_imports=domains, ir_version=9), path)


def classifier(labels: Sequence[Any]) -> list[Any]:
    """Return nodes from x [N, 2] to label [N], scores [N, 3] and p, a sequence of maps."""
    texts = isinstance(labels[0], str)
    weights = {"coefficients": WEIGHTS.T.flatten().tolist(), "intercepts": [0.0] * 3, "post_transform": "SOFTMAX"}
    own = {"classlabels_strings" if texts else "classlabels_ints": labels}
    zipped = {"classlabels_strings" if texts else "classlabels_int64s": labels}
    return [
        ml("LinearClassifier", ["x"], ["label", "scores"], **weights, **own),
        ml("ZipMap", ["scores"], ["p"], **zipped),
    ]


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x @ WEIGHTS)
    found: np.ndarray = powers / powers.sum(axis=1, keepdims=True)
    return found


def ports(folder: Path, read: Sequence[str] = (), types: dict[str, str] | None = None, **options: Any) -> list[str]:
    known = {name: PortType.parse(type) for name, type in (types or {}).items()}
    found = Onnx.ports(OnnxConfig("m.onnx", **options), StepContext(folder, types=known, read=tuple(read)))
    return [f"{port.name}: {port.type}" for port in (*found.inputs, *found.outputs)]


def opened(folder: Path, **options: Any) -> Onnx:
    node = Onnx(OnnxConfig("m.onnx", **options))
    node.open(OpenContext(folder))
    node.warm_up()
    return node


CLASSES = ("no", "maybe", "yes")
X = np.array([[2, 0], [0, 3], [-1, 0]], np.float32)


@pytest.mark.parametrize("labels", [CLASSES, (4, 0, 7)])
@pytest.mark.parametrize("first", ["N", None])
def test_probabilities_of_zipmap_are_json(tmp_path: Path, labels: Sequence[Any], first: Any) -> None:
    text = isinstance(labels[0], str)
    outputs = [value("label", TEXT if text else INT64, [first]), maps("p", TEXT if text else INT64)]
    write(tmp_path / "m.onnx", classifier(labels), [value("x", FLOAT, [first, 2])], outputs)
    assert ports(tmp_path) == ["x: float32[2]", f"label: {'text' if text else 'int64[]'}", "p: json"]
    found = opened(tmp_path).run(Batch({"x": list(X)}))
    wanted = softmax(X)
    assert [one if text else int(one) for one in found["label"]] == [labels[place] for place in wanted.argmax(axis=1)]
    for one, row in zip(found["p"], wanted, strict=True):
        assert one == {str(label): pytest.approx(float(p), abs=1e-6) for label, p in zip(labels, row, strict=True)}
    assert Onnx.device_ports(OnnxConfig("m.onnx"), Onnx.ports(OnnxConfig("m.onnx"), StepContext(tmp_path))) == set()


def test_a_batch_fixed_at_one_gives_each_item_its_map(tmp_path: Path) -> None:
    outputs = [value("label", TEXT, [1]), value("scores", FLOAT, [1, 3]), maps("p")]
    write(tmp_path / "m.onnx", classifier(("a", "b", "c")), [value("x", FLOAT, [1, 2])], outputs)
    assert ports(tmp_path, types={"x": "float32[2]"}) == [
        "x: float32[2]", "label: text", "scores: float32[3]", "p: json"
    ]  # fmt: skip
    found = opened(tmp_path).run(Batch({"x": list(X)}))
    assert found["label"] == ["a", "b", "c"] and found["scores"][0].shape == (3,)
    assert [max(one, key=one.get) for one in found["p"]] == ["a", "b", "c"]


def encoder(dims: Sequence[Any] | None, out: Sequence[Any] | None) -> tuple[list[Any], list[Any], list[Any]]:
    """Return a graph that exchanges the texts a and b; others become '?'."""
    node = ml("LabelEncoder", ["x"], ["y"], keys_strings=["a", "b"], values_strings=["b", "ä"], default_string="?")
    return [node], [value("x", TEXT, dims)], [value("y", TEXT, out)]


@pytest.mark.parametrize(
    ("dims", "type", "items", "wanted"),
    [
        (["N"], "text", ["a", "b", ""], ["b", "ä", "?"]),
        (["N", 1], "text", ["a", "b", "c"], ["b", "ä", "?"]),
        ([1], "text", ["a", "b", "c"], ["b", "ä", "?"]),
        ([1, 1], "text", ["a", "b", "c"], ["b", "ä", "?"]),
        (["N", 2], "list[text]", [["a", "b"], ["c", "a"]], [["b", "ä"], ["?", "b"]]),
        (["N", "K"], "list[text]", [["a"], ["b", "a"], ["c"]], [["b"], ["ä", "b"], ["?"]]),
        (["N", 1, 2], "list[list[text]]", [[["a", "b"]]], [[["b", "ä"]]]),
        (None, "json", [["a", "b"], [["a"], ["b"]]], [["b", "ä"], [["b"], ["ä"]]]),
    ],
)
def test_texts_are_read_and_written(tmp_path: Path, dims: Any, type: str, items: list[Any], wanted: list[Any]) -> None:
    write(tmp_path / "m.onnx", *encoder(dims, dims))
    assert ports(tmp_path) == [f"x: {type}", f"y: {type}"]
    node = opened(tmp_path)
    assert node.run(Batch({"x": items}))["y"] == wanted
    assert [node.run(Batch({"x": [one]}))["y"][0] for one in items] == wanted


def test_lists_of_wrong_sizes_fail_alone(tmp_path: Path) -> None:
    write(tmp_path / "m.onnx", *encoder(["N", 2], ["N", 2]))
    items = [["a", "b"], ["a"], ["a", "b", "c"], [], ["b", "b"]]
    found = opened(tmp_path).run(Batch({"x": items}))["y"]
    assert found[0] == ["b", "ä"] and found[4] == ["ä", "ä"]
    assert str(found[1]) == "x: found lists of sizes [1], expected texts of sizes [2]"
    assert all(isinstance(one, InputError) for one in found[1:4])
    assert isinstance(to_texts([["a"], ["b", "c"]], None, "x"), InputError)
    assert isinstance(to_texts(["a", 1], None, "x"), InputError)


def columns(path: Path) -> None:
    """Write y = age + 10 n + the number of the sex, [N, 1], of a column for each feature."""
    number = {"keys_strings": ["male", "female"], "values_floats": [1.0, 2.0], "default_float": -1.0}
    nodes = [
        ml("LabelEncoder", ["sex"], ["s"], **number),
        helper.make_node("Cast", ["n"], ["f"], to=FLOAT),
        helper.make_node("Constant", [], ["ten"], value_float=10.0),
        helper.make_node("Mul", ["f", "ten"], ["tens"]),
        helper.make_node("Add", ["age", "tens"], ["sum"]),
        helper.make_node("Add", ["sum", "s"], ["y"]),
        helper.make_node("Identity", ["sex"], ["same"]),
    ]
    inputs = [value("age", FLOAT, [None, 1]), value("sex", TEXT, [None, 1]), value("n", INT64, [None, 1])]
    write(path, nodes, inputs, [value("y", FLOAT, [None, 1]), value("same", TEXT, [None, 1])])


def test_a_column_for_each_feature_takes_scalars_and_rows_of_one(tmp_path: Path) -> None:
    columns(tmp_path / "m.onnx")
    assert ports(tmp_path) == ["age: float32[1]", "sex: text", "n: int64[1]", "y: float32[1]", "same: text"]
    scalars = {"age": "float32[]", "sex": "text", "n": "int64[]"}
    assert ports(tmp_path, types=scalars)[:3] == ["age: float32[]", "sex: text", "n: int64[]"]
    ages, sexes, counts = [40.5, 22.0, 1.0], ["male", "female", "?"], [3, 1, 0]
    for dims in ((), (1,)):
        batch = {
            "age": [np.full(dims, age, np.float32) for age in ages],
            "sex": sexes,
            "n": [np.full(dims, count, np.int64) for count in counts],
        }
        found = opened(tmp_path).run(Batch(batch))
        assert [one.tolist() for one in found["y"]] == [[71.5], [34.0], [0.0]] and found["same"] == sexes


def test_a_column_of_numbers_alone_takes_scalars(tmp_path: Path) -> None:
    nodes = [helper.make_node("Add", ["a", "b"], ["y"])]
    inputs = [value(name, TensorProto.DOUBLE, ["N", 1]) for name in ("a", "b")]
    write(tmp_path / "m.onnx", nodes, inputs, [value("y", TensorProto.DOUBLE, ["N", 1])])
    assert ports(tmp_path, types={"a": "float64[]"}) == ["a: float64[]", "b: float64[1]", "y: float64[1]"]
    items = {"a": [np.float64(1.5), np.float64(2)], "b": [np.array([1.0]), np.array([0.1])]}
    found = opened(tmp_path).run(Batch(items))["y"]
    assert np.asarray(found).tolist() == [[2.5], [2.1]]


def test_words_are_counted_as_a_vectoriser_of_scikit_learn_does(tmp_path: Path) -> None:
    count = {"mode": "TF", "min_gram_length": 1, "max_gram_length": 1, "max_skip_count": 0, "ngram_counts": [0]}
    nodes = [
        helper.make_node("StringNormalizer", ["text"], ["low"], case_change_action="LOWER", locale="C"),
        helper.make_node("TfIdfVectorizer", ["low"], ["y"], ngram_indexes=[0, 1], pool_strings=["red", "sea"], **count),
    ]
    write(tmp_path / "m.onnx", nodes, [value("text", TEXT, ["N"])], [value("y", FLOAT, [2])])
    assert ports(tmp_path, batched=False) == ["text: list[text]", "y: float32[2]"]
    found = opened(tmp_path, batched=False).run(Batch({"text": [["Red", "sea", "RED"], ["sky"]]}))["y"]
    assert [one.tolist() for one in found] == [[2.0, 1.0], [0.0, 0.0]]


SPARSE = helper.make_sparse_tensor_type_proto(FLOAT, [None, 2])
SEQUENCE = helper.make_sequence_type_proto(helper.make_tensor_type_proto(FLOAT, [None]))
OPTIONAL = helper.make_optional_type_proto(helper.make_tensor_type_proto(FLOAT, [None]))
MAP = helper.make_map_type_proto(TEXT, helper.make_tensor_type_proto(FLOAT, []))
STRANGE = {
    "a sparse tensor": SPARSE, "a sequence of tensors": SEQUENCE, "an optional": OPTIONAL, "a map": MAP,
    "a tensor of complex128": helper.make_tensor_type_proto(TensorProto.COMPLEX128, [None]),
    "a tensor of uint4": helper.make_tensor_type_proto(TensorProto.UINT4, [None]),
    "a sequence of maps": helper.make_sequence_type_proto(
        helper.make_map_type_proto(TEXT, helper.make_tensor_type_proto(TEXT, []))
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", STRANGE)
def test_types_that_no_port_carries_are_refused_where_they_are_used(tmp_path: Path, kind: str) -> None:
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    strange = of_type("z.out", STRANGE[kind])
    write(tmp_path / "m.onnx", nodes, [value("x", FLOAT, ["N"])], [value("y", FLOAT, ["N"]), strange])
    assert ports(tmp_path) == ["x: float32[]", "y: float32[]"]  # nothing reads it
    for read, inputs, outputs in (
        (["z_out"], [value("x", FLOAT, ["N"])], [value("y", FLOAT, ["N"]), strange]),
        ([], [value("x", FLOAT, ["N"]), strange], [value("y", FLOAT, ["N"])]),
        ([], [value("x", FLOAT, ["N"])], [strange]),
    ):
        write(tmp_path / "m.onnx", nodes, inputs, outputs)
        with pytest.raises(ConfigError) as caught:
            ports(tmp_path, read)
        assert caught.value.found == f"its z.out is {kind}" and "or run it in a node of your own" in caught.value.fix


def test_an_output_that_nothing_reads_is_left_out_when_the_model_runs(tmp_path: Path) -> None:
    nodes = [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("SequenceConstruct", ["x", "x"], ["z"])]
    outputs = [of_type("z", SEQUENCE), value("y", FLOAT, ["N"])]
    write(tmp_path / "m.onnx", nodes, [value("x", FLOAT, ["N"])], outputs)
    assert np.asarray(opened(tmp_path).run(Batch({"x": [np.float32(2), np.float32(3)]}))["y"]).tolist() == [2, 3]
    text = "weftline: 1\nname: p\ninputs: {{x: 'float32[]'}}\noutputs: {{y: m.{}}}\n"
    step = "steps: {m: {node: onnx, model: m.onnx, inputs: {x: x}}}\n"
    for output, wrong in (("y", False), ("z", True)):
        (tmp_path / "p.yaml").write_text(text.format(output) + step)
        if not wrong:
            weftline.load(tmp_path / "p.yaml")
            continue
        with pytest.raises(PipelineError, match=r"its z is a sequence of tensors[\s\S]*ConcatFromSequence"):
            weftline.load(tmp_path / "p.yaml")


def test_maps_are_outputs_only(tmp_path: Path) -> None:
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    write(tmp_path / "m.onnx", nodes, [value("x", FLOAT, ["N"]), maps("p")], [value("y", FLOAT, ["N"])])
    with pytest.raises(ConfigError) as caught:
        ports(tmp_path)
    assert caught.value.found == "its p is a sequence of maps" and "DictVectorizer" in caught.value.fix


def pipeline(folder: Path) -> Path:
    columns(folder / "m.onnx")
    outputs = [value("label", TEXT, [None]), maps("p")]
    write(folder / "c.onnx", classifier(CLASSES), [value("x", FLOAT, [None, 2])], outputs)
    (folder / "p.yaml").write_text(
        "weftline: 1\nname: p\ninputs: {age: 'float32[]', sex: text, n: 'int64[]', x: 'float32[2]'}\n"
        "steps:\n  m: {node: onnx, model: m.onnx, inputs: {age: age, sex: sex, n: n}}\n"
        "  c: {node: onnx, model: c.onnx, inputs: {x: x}}\n"
        "outputs: {y: m.y, same: m.same, label: c.label, p: c.p}\n"
    )
    return folder / "p.yaml"


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("way", ["session", "http"])
def test_texts_and_maps_arrive_as_the_model_gave_them(tmp_path: Path, way: str) -> None:
    file = pipeline(tmp_path)
    if way == "session":
        with weftline.load(file).open() as session:
            inputs = {"age": np.float32(22), "sex": "female", "n": np.int64(1), "x": X[0]}
            rows = [dict(session.run(**inputs)), *(dict(one) for one in session.map([inputs, inputs]))]
    else:
        with hosted_pipelines({"p": ServedPipeline(file)}) as endpoint:
            rows = [by_http(endpoint.url)]
    for found in rows:
        assert np.asarray(found["y"]).tolist() == [34.0] and (found["same"], found["label"]) == ("female", "no")
        assert found["p"] == {str(name): pytest.approx(float(p), abs=1e-5) for name, p in zip(CLASSES, softmax(X)[0])}


def by_http(url: str) -> dict[str, Any]:
    """Return the outputs of a request in KServe's protocol."""
    typed = [
        ("age", "FP32", [], [22.0]), ("sex", "BYTES", [1], ["female"]), ("n", "INT64", [], [1]),
        ("x", "FP32", [2], [2.0, 0.0]),
    ]  # fmt: skip
    inputs = [dict(zip(("name", "datatype", "shape", "data"), one, strict=True)) for one in typed]
    response = httpx.post(f"{url}/v2/models/p/infer", json={"inputs": inputs}, timeout=60)
    assert response.status_code == 200, response.text
    found = {one["name"]: one["data"] for one in response.json()["outputs"]}
    return found | {"same": found["same"][0], "label": found["label"][0], "p": json.loads(found["p"][0])}
