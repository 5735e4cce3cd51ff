import logging
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import weftline
from tests.nodes.device_values import DEVICE, Bench, bits, down
from tests.nodes.model_files import broken
from weftline.errors import ModelError, PipelineError, StepError
from weftline.nodes.contract import Batch, ConfigError, OpenContext, StepContext
from weftline.nodes.onnx import Onnx, OnnxConfig
from weftline.nodes.onnx_file import ValueInfo, read_onnx
from weftline.nodes.onnx_session import SessionMemory, call, providers, session_memory, trt_profile
from weftline.nodes.ports import PortType
from weftline.pipelines.placement.machine import Machine
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.render.text import explain_text
from weftline.pipelines.spec.loader import load_file
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.spec import TensorSpec
from weftline.shm.view import torch_view


def linear(first: object = "N", path: Path | None = None) -> onnx.ModelProto:
    """y = x @ W + b, with x float32 [first, 4] and y float32 [first, 2]."""
    w, b = np.arange(8, dtype=np.float32).reshape(4, 2), np.ones(2, np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "W"], ["m"]), helper.make_node("Add", ["m", "b"], ["y.out"])],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [first, 4]),
            helper.make_tensor_value_info(
                "W", TensorProto.FLOAT, [4, 2]
            ),  # an initialiser listed as an input, as old files do
        ],
        [helper.make_tensor_value_info("y.out", TensorProto.FLOAT, [first, 2])],
        [numpy_helper.from_array(w, "W"), numpy_helper.from_array(b, "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    if path:
        onnx.save(model, path)
    return model


def opened(folder: Path, device: str = "cpu", **options: object) -> Onnx:
    node = Onnx(OnnxConfig("m.onnx", **options))
    node.open(OpenContext(folder, device))
    node.warm_up()
    return node


def written(folder: Path, **options: object) -> list[str]:
    ports = Onnx.ports(OnnxConfig("m.onnx", **options), StepContext(folder))
    return [f"{port.name}: {port.type}" for port in (*ports.inputs, *ports.outputs)]


X = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
Y = X @ np.arange(8, dtype=np.float32).reshape(4, 2) + 1


@pytest.mark.parametrize(
    ("first", "batched", "ports"),
    [
        ("N", "auto", ["x: float32[4]", "y_out: float32[2]"]),
        (None, "auto", ["x: float32[4]", "y_out: float32[2]"]),
        ("N", "false", ["x: float32[N, 4]", "y_out: float32[N, 2]"]),
        (1, "auto", ["x: float32[1, 4]", "y_out: float32[1, 2]"]),
        (1, True, ["x: float32[4]", "y_out: float32[2]"]),
    ],
)
def test_ports_and_results_follow_the_first_dimension(
    tmp_path: Path, first: object, batched: object, ports: list[str]
) -> None:
    linear(first, tmp_path / "m.onnx")
    assert written(tmp_path, batched=batched) == ports
    inside = ports[0] == "x: float32[4]"
    values = list(X) if inside else [x[None] for x in X]
    answers = opened(tmp_path, batched=batched).run(Batch({"x": values}))["y_out"]
    np.testing.assert_allclose(np.concatenate([np.atleast_2d(a) for a in answers]), Y, rtol=1e-5)


def test_a_batch_is_written_into_its_room(tmp_path: Path) -> None:
    linear("N", tmp_path / "m.onnx")
    buffer = np.zeros((3, 2), np.float32)
    batch = Batch({"x": list(X)}, output_buffer=lambda port, dtype, shape: buffer)
    answer = opened(tmp_path).run(batch)["y_out"]
    assert answer is buffer
    np.testing.assert_allclose(buffer, Y, rtol=1e-5)


@pytest.mark.parametrize("buffer", [False, True])
def test_a_batch_on_the_device_is_read_and_written_there(tmp_path: Path, buffer: bool) -> None:
    linear("N", tmp_path / "m.onnx")
    wanted = opened(tmp_path).run(Batch({"x": list(X)}))["y_out"]
    bench, node = Bench(), opened(tmp_path, DEVICE)
    answer = node.run(bench.batch({"x": bench.side_by_side(list(X))}, buffer))["y_out"]
    assert (answer is bench.buffers.get("y_out")) is buffer
    node.close()  # what it gave in memory of its own outlives it
    assert answer.spec.shape == (3, 2) and down(answer).tobytes() == wanted.tobytes()
    assert Onnx.device_ports(node.config, Onnx.ports(node.config, StepContext(tmp_path))) == {"x", "y_out"}


def test_arrays_given_to_a_session_on_the_device_are_taken_too(tmp_path: Path) -> None:
    linear("N", tmp_path / "m.onnx")
    np.testing.assert_allclose(down(opened(tmp_path, DEVICE).run(Batch({"x": list(X)}))["y_out"]), Y, rtol=1e-5)


@pytest.mark.parametrize(("first", "batched", "shape"), [(1, True, (4,)), (1, "auto", (1, 4)), ("N", "false", (1, 4))])
def test_items_on_the_device_are_run_one_by_one_where_the_file_says_so(
    tmp_path: Path, first: object, batched: object, shape: tuple[int, ...]
) -> None:
    linear(first, tmp_path / "m.onnx")
    bench = Bench()
    near = [bench.put(x.reshape(shape)) for x in X]
    answers = opened(tmp_path, DEVICE, batched=batched).run(bench.batch({"x": near}))["y_out"]
    assert [answer.spec.shape for answer in answers] == [(*shape[:-1], 2)] * 3
    np.testing.assert_allclose(np.stack([down(answer).reshape(2) for answer in answers]), Y, rtol=1e-5)


def doubling(path: Path, number: int, width: object) -> None:
    """y = 2 x, both of ONNX's type `number` and [N, width]."""
    casts = [("x", "f", TensorProto.FLOAT), ("d", "y", number)]
    nodes = [helper.make_node("Cast", [a], [b], to=to) for a, b, to in casts]
    nodes.insert(1, helper.make_node("Add", ["f", "f"], ["d"]))
    ports = [helper.make_tensor_value_info(name, number, ["N", width]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)


@pytest.mark.parametrize(
    ("number", "dtype"),
    [
        (TensorProto.BFLOAT16, "bfloat16"), (TensorProto.FLOAT8E4M3FN, "float8_e4m3fn"),
        (TensorProto.FLOAT8E5M2, "float8_e5m2"), (TensorProto.FLOAT16, "float16"), (TensorProto.INT64, "int64"),
    ],
)  # fmt: skip
def test_every_dtype_travels_by_its_bits_on_the_host_and_on_the_device(tmp_path: Path, number: int, dtype: str) -> None:
    doubling(tmp_path / "m.onnx", number, 5)
    assert written(tmp_path) == [f"x: {dtype}[5]", f"y: {dtype}[5]"]
    ones, bench = [bits(dtype, (5,), seed) for seed in range(3)], Bench()
    wanted = (torch_view(np.stack(ones), dtype).float() * 2).tolist()
    host = opened(tmp_path).run(Batch({"x": ones}))["y"]
    assert torch_view(host, dtype).float().tolist() == wanted
    there = opened(tmp_path, DEVICE).run(bench.batch({"x": bench.side_by_side(ones, dtype)}))["y"]
    assert there.dtype == dtype and down(there).tobytes() == host.tobytes()


def test_items_of_different_sizes_and_empty_ones_on_the_device(tmp_path: Path) -> None:
    doubling(tmp_path / "m.onnx", TensorProto.FLOAT, "W")
    bench = Bench()
    near = [bench.put(np.full(width, width, np.float32)) for width in (2, 0, 3, 2)]
    answers = opened(tmp_path, DEVICE).run(bench.batch({"x": near}))["y"]
    assert [down(answer).tolist() for answer in answers] == [[4, 4], [], [6, 6, 6], [4, 4]]


def test_a_session_synchronises_only_with_a_stream_of_its_own() -> None:
    assert session_memory("cpu", 7) == SessionMemory() and session_memory("fake:3") == SessionMemory(device="fake:3")
    assert session_memory("cuda:1") == SessionMemory("cuda", 1, "cuda:1", synchronises=True)
    assert session_memory("cuda", 7) == SessionMemory("cuda", 0, "cuda", synchronises=False)


class Binding:
    """Notes what it is asked to bind, in order; gives no outputs."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.asked.append((name, *arguments))

    def get_outputs(self) -> list[object]:
        return [None]

    def io_binding(self) -> "Binding":
        return self

    def run_with_iobinding(self, binding: object, options: object = None) -> None:
        self.asked.append(("run",))


def test_on_cuda_addresses_are_bound_and_calls_synchronise() -> None:
    x = DeviceTensor(TensorSpec("float32", (3, 4)), "cuda:1", 4096)
    buffer = DeviceTensor(TensorSpec("bfloat16", (3, 2)), "cuda:1", 8192, writable=True)
    info = [ValueInfo("x", "float32", (3, 4)), ValueInfo("y", "bfloat16", (3, 2))]
    session = Binding()
    assert call(session, session_memory("cuda:1"), [(info[0], x)], [(info[1], buffer)]) == [buffer]
    assert session.asked == [
        ("bind_input", "x", "cuda", 1, np.float32, [3, 4], 4096),
        ("bind_output", "y", "cuda", 1, TensorProto.BFLOAT16, [3, 2], 8192),
        ("synchronize_inputs",), ("run",), ("synchronize_outputs",),
    ]  # fmt: skip
    session = Binding()
    call(session, session_memory("cuda:1", 7), [(info[0], x)], [(info[1], buffer)])
    assert [asked[0] for asked in session.asked] == ["bind_input", "bind_output", "run"]


def test_items_of_different_sizes_are_run_in_groups(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0, noop_with_empty_axes=0)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", "T"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N"])],
    )
    graph.node[0].input.append("axes")
    graph.initializer.append(numpy_helper.from_array(np.array([1]), "axes"))
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "m.onnx")
    values = [np.ones(2, np.float32), np.ones(5, np.float32), np.full(2, 3, np.float32)]
    assert [float(y) for y in opened(tmp_path).run(Batch({"x": values}))["y"]] == [2, 5, 6]


def test_a_batch_that_comes_back_with_other_rows_is_an_error(tmp_path: Path) -> None:
    model = linear("N")
    model.graph.node[1].output[0] = "z"
    model.graph.node.append(helper.make_node("Concat", ["z", "z"], ["y.out"], axis=0))
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(StepError, match="batched: false"):
        opened(tmp_path).run(Batch({"x": list(X)}))


def test_batched_true_needs_a_free_first_dimension(tmp_path: Path) -> None:
    linear(3, tmp_path / "m.onnx")
    with pytest.raises(ConfigError, match="batched"):
        written(tmp_path, batched=True)


def test_ports_are_read_without_onnx_or_onnxruntime(tmp_path: Path) -> None:
    import subprocess
    import sys

    linear("N", tmp_path / "m.onnx")
    code = (
        "import sys; from pathlib import Path; from weftline.nodes.onnx import *\n"
        f"Onnx.ports(OnnxConfig('m.onnx'), StepContext(Path({str(tmp_path)!r})))\n"
        "print(sorted({'onnx', 'onnxruntime', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "[]", done.stderr


def external(location: str, inner: bool = False) -> onnx.ModelProto:
    model = linear("N")
    tensor = model.graph.initializer[0]
    if inner:  # the same tensor as a constant of a branch, where a careless check does not look
        branch = helper.make_graph(
            [helper.make_node("Constant", [], ["c"], value=tensor)],
            "b",
            [],
            [helper.make_tensor_value_info("c", TensorProto.FLOAT, [4, 2])],
        )
        model.graph.node.append(helper.make_node("If", ["q"], ["w"], then_branch=branch, else_branch=branch))
        node = model.graph.node[-1]
        tensors = [attribute.g.node[0].attribute[0].t for attribute in node.attribute]
    else:
        tensors = [tensor]
    for one in tensors:
        one.data_location = TensorProto.EXTERNAL
        one.external_data.add(key="location", value=location)
    return model


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize(
    "location",
    [
        "../secret.bin",
        "/etc/passwd",
        "a/../../secret.bin",
        "..\\secret.bin",
        "C:\\x",
        "link/secret.bin",
        "*/_ORT_MEM_ADDR_/*",
    ],
)
def test_external_data_outside_the_models_folder_is_refused(tmp_path: Path, location: str, inner: bool) -> None:
    (tmp_path / "secret.bin").write_bytes(b"\0" * 32)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    (folder / "m.onnx").write_bytes(external(location, inner).SerializeToString())
    with pytest.raises(ModelError, match="outside its own folder"):
        written(folder)


def test_a_graph_in_two_parts_which_protobuf_would_merge_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret.bin").write_bytes(b"\0" * 32)
    (tmp_path / "model").mkdir()
    first, second = onnx.ModelProto(), linear("N")
    first.graph.initializer.append(external("../secret.bin", inner=False).graph.initializer[0])
    data = first.SerializeToString() + second.SerializeToString()
    merged = onnx.ModelProto.FromString(data).graph
    assert len(merged.initializer) == 3 and merged.node  # protobuf reads both, as one
    (tmp_path / "model" / "m.onnx").write_bytes(data)
    with pytest.raises(ModelError, match="two graph fields"):
        written(tmp_path / "model")


def test_external_data_beside_the_model_is_used(tmp_path: Path) -> None:
    onnx.save(linear("N"), tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    assert (tmp_path / "w.bin").is_file()
    np.testing.assert_allclose(opened(tmp_path).run(Batch({"x": list(X)}))["y_out"], Y, rtol=1e-5)
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ModelError, match="missing"):
        written(tmp_path)


HOSTILE_PLACES = {
    "beyond the end": ([("offset", "8"), ("length", "32")], "ends outside that file of 32 bytes"),
    "far beyond the end": ([("offset", str(1 << 59)), ("length", "32")], "ends outside"),
    "longer than the tensor": ([("offset", "0"), ("length", "16")], "takes 32 bytes by its type and shape"),
    "negative": ([("offset", "-8"), ("length", "32")], "whose offset is '-8'"),
    "no number": ([("offset", "0x0")], "whose offset is '0x0'"),
    "long number": ([("length", "9" * 30)], "whose length is '999"),
    "stated twice": ([("offset", "0"), ("offset", "8")], "two values of 'offset'"),
}


@pytest.mark.parametrize("name", HOSTILE_PLACES)
def test_places_outside_an_external_file_are_refused(tmp_path: Path, name: str) -> None:
    entries, message = HOSTILE_PLACES[name]
    (tmp_path / "w.bin").write_bytes(b"\0" * 32)
    model = external("w.bin")
    for key, value in entries:
        model.graph.initializer[0].external_data.add(key=key, value=value)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=message):
        written(tmp_path)


@pytest.mark.parametrize(("second", "refused"), [(0, False), (16, True), (32, False)])
def test_tensors_in_one_file_share_all_bytes_or_none(tmp_path: Path, second: int, refused: bool) -> None:
    (tmp_path / "w.bin").write_bytes(b"\0" * 64)
    model = external("w.bin")
    model.graph.initializer.append(model.graph.initializer[0])
    model.graph.initializer[-1].name = "another"
    model.graph.initializer[-1].external_data.add(key="offset", value=str(second))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    if refused:
        with pytest.raises(ModelError, match="overlaps another one"):
            written(tmp_path)
    else:
        assert written(tmp_path)


def test_an_external_tensor_of_many_dimensions_is_refused(tmp_path: Path) -> None:
    model = external("w.bin")
    (tmp_path / "w.bin").write_bytes(b"\0" * 32)
    model.graph.initializer[0].dims.extend([1] * 100_000)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match="more than 16 dimensions"):
        written(tmp_path)


def test_a_tensor_that_is_read_often_counts_as_often_in_memory(tmp_path: Path) -> None:
    with (tmp_path / "w.bin").open("wb") as file:
        file.truncate(32 << 20)
    model = external("w.bin")
    model.graph.initializer[0].dims[0] = 4 << 20
    for place in range(1000):
        model.graph.initializer.append(model.graph.initializer[0])
        model.graph.initializer[-1].name = f"again {place}"
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    assert Onnx.model_bytes(OnnxConfig("m.onnx"), StepContext(tmp_path)) > 1000 * (32 << 20)


def test_every_truncation_and_flip_is_refused_or_harmless(tmp_path: Path) -> None:
    data = linear("N").SerializeToString()
    refused = 0
    for candidate in broken(data, flips=range(len(data))):
        (tmp_path / "m.onnx").write_bytes(candidate)
        node = Onnx(OnnxConfig("m.onnx"))
        started = time.process_time()
        try:
            node.open(OpenContext(tmp_path))
        except (ModelError, ConfigError) as error:
            refused += 1
            assert str(tmp_path) not in str(error)
        assert time.process_time() - started < 5  # all threads' time; the first one imports more
    assert refused >= 100


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.onnx"
    path.write_bytes(data)
    with pytest.raises(ModelError):
        read_onnx(path, "any.onnx")


def test_two_distributions_of_onnx_runtime_are_refused_with_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear(path=tmp_path / "m.onnx")
    for name in ("onnxruntime", "onnxruntime_gpu"):
        about = tmp_path / f"{name}-1.31.1.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.31.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="are both installed") as checked:
        written(tmp_path)
    assert checked.value.fix.startswith(
        "pip uninstall -y onnxruntime onnxruntime-gpu, then pip install 'weftline[gpu]'"
    )
    with pytest.raises(ModelError, match=r"are both installed(.|\n)*pip uninstall -y onnxruntime onnxruntime-gpu"):
        opened(tmp_path)
    (tmp_path / "pipeline.yaml").write_text(
        "weftline: 1\nname: scale\ninputs: {x: 'float32[4]'}\n"
        "steps:\n  scale:\n    node: onnx\n    model: m.onnx\n    inputs: {x: x}\noutputs: {y: scale.y_out}\n"
    )
    with pytest.raises(PipelineError, match=r"pipeline.yaml:6  steps.scale.node: .*both installed"):
        weftline.load(tmp_path / "pipeline.yaml")


def test_providers_follow_the_device(tmp_path: Path) -> None:
    everything = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    assert [name for name, _ in providers(everything, "cpu", tmp_path, True)] == ["CPUExecutionProvider"]
    found = providers(everything, "cuda:1", tmp_path / "engines", True)
    assert [name for name, _ in found] == everything
    assert found[0][1]["trt_engine_cache_path"] == str(tmp_path / "engines") and found[1][1]["device_id"] == 1
    assert [name for name, _ in providers(everything, "cuda", tmp_path, False)] == everything[1:]
    assert all("user_compute_stream" not in options for _, options in found)
    cuda = dict(found)["CUDAExecutionProvider"]
    assert (cuda["use_tf32"], cuda["cudnn_conv_algo_search"]) == ("0", "HEURISTIC")
    session = providers(everything, "cuda:1", tmp_path, True, stream=4711)
    assert [options.get("user_compute_stream") for _, options in session] == ["4711", "4711", None]
    assert [name for name, _ in providers(everything, "fake:0", tmp_path, True)] == ["CPUExecutionProvider"]
    with pytest.raises(ModelError, match=r"weftline\[gpu\]"):
        providers(["CPUExecutionProvider"], "cuda:0", tmp_path, True)


class Opened:
    """ONNX Runtime with TensorRT, as far as sessions are opened; refuses lists of providers with an option or name."""

    def __init__(self, *refused: str) -> None:
        self.refused, self.tried = refused, []

    def __call__(self, path: str, options: object, providers: list, **further: object) -> object:
        assert further == {"enable_fallback": 0}  # which would take the CPU without a word
        self.tried.append(providers)
        if any(name in self.refused or set(given) & set(self.refused) for name, given in providers):
            raise RuntimeError(f"no engine for {path}")
        return self


def tensorrt(monkeypatch: pytest.MonkeyPatch, *refused: str) -> Opened:
    session = Opened(*refused)
    everything = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr("onnxruntime.InferenceSession", session)
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: everything)
    return session


def test_tensorrt_is_given_the_shapes_of_all_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linear("N", tmp_path / "m.onnx")
    session = tensorrt(monkeypatch)
    Onnx(OnnxConfig("m.onnx")).open(OpenContext(tmp_path, "cuda:1", items_max=6, cache_dir=tmp_path))
    (name, options), (cuda, _), _ = session.tried[0]
    assert (name, cuda) == ("TensorrtExecutionProvider", "CUDAExecutionProvider") and len(session.tried) == 1
    assert {key: text for key, text in options.items() if "profile" in key} == {
        "trt_profile_min_shapes": "x:1x4", "trt_profile_opt_shapes": "x:6x4", "trt_profile_max_shapes": "x:6x4",
    }  # fmt: skip
    assert trt_profile({"a": (3, 8), "b": ()}, 2)["trt_profile_max_shapes"] == "a:2x3x8,b:2"
    assert trt_profile({}, 2) == trt_profile({"a:0": (3,)}, 2) == {}


@pytest.mark.parametrize("first", [1, "free width"])
def test_tensorrt_is_given_no_shapes_that_are_not_known(
    first: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = linear(1 if first == 1 else "N")
    if first != 1:
        model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "width"
    onnx.save(model, tmp_path / "m.onnx")
    session = tensorrt(monkeypatch)
    Onnx(OnnxConfig("m.onnx")).open(OpenContext(tmp_path, "cuda:0", items_max=6, cache_dir=tmp_path))
    assert not any("profile" in key for key in session.tried[0][0][1])


@pytest.mark.parametrize(
    ("refused", "kept"),
    [
        (("trt_profile_min_shapes",), ["Tensorrt", "CUDA", "CPU"]),
        (("trt_profile_min_shapes", "TensorrtExecutionProvider"), ["CUDA", "CPU"]),
    ],
)
def test_what_tensorrt_refuses_is_left_out_with_a_warning(
    refused: tuple[str, ...], kept: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(logging.getLogger("weftline"), "propagate", True)
    linear("N", tmp_path / "m.onnx")
    session = tensorrt(monkeypatch, *refused)
    Onnx(OnnxConfig("m.onnx")).open(OpenContext(tmp_path, "cuda:3", items_max=6, cache_dir=tmp_path, stream=7))
    last = session.tried[-1]
    assert [name.removesuffix("ExecutionProvider") for name, _ in last] == kept
    assert all(options["device_id"] == 3 and options["user_compute_stream"] == "7" for _, options in last[:-1])
    assert caplog.messages[0] == (
        "m.onnx is opened without the shapes of its batches for TensorRT: no engine for m.onnx"
    )
    assert len(caplog.messages) == len(refused) == len(session.tried) - 1


def test_a_gpu_that_refuses_the_model_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linear("N", tmp_path / "m.onnx")
    tensorrt(monkeypatch, "CUDAExecutionProvider")
    with pytest.raises(ModelError, match=r"no engine for m\.onnx"):
        Onnx(OnnxConfig("m.onnx")).open(OpenContext(tmp_path, "cuda:3", items_max=6, cache_dir=tmp_path))


@pytest.mark.parametrize(
    ("device", "items_max", "sizes", "batches"),
    [
        ("fake:0", 5, (), [5, 4, 3, 2, 1]),
        ("fake:0", 40, (24,), [40, 32, 24, 16, 8, 4, 2, 1]),
        ("fake:0", 1, (), [1]),
        ("cpu", 5, (), [1]),
    ],
)
def test_batches_are_warmed_up_on_a_gpu_the_largest_first(
    device: str, items_max: int, sizes: tuple[int, ...], batches: list[int], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    linear("N", tmp_path / "m.onnx")
    node, found = Onnx(OnnxConfig("m.onnx")), []
    node.open(OpenContext(tmp_path, device, items_max=items_max, sizes=sizes))
    run = node._answers
    monkeypatch.setattr(node, "_answers", lambda values, *more: found.append(len(values[0])) or run(values, *more))
    node.warm_up()
    assert found == batches


def test_a_batch_that_cannot_be_warmed_up_does_not_end_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("weftline"), "propagate", True)
    linear("N", tmp_path / "m.onnx")
    node = Onnx(OnnxConfig("m.onnx"))
    node.open(OpenContext(tmp_path, "fake:0", items_max=3))
    run = node._answers

    def short(values: list[np.ndarray], *more: object) -> object:
        if len(values[0]) > 2:
            raise RuntimeError("Failed to allocate memory for requested buffer of size 7")
        return run(values, *more)

    monkeypatch.setattr(node, "_answers", short)
    node.warm_up()
    assert caplog.messages == [
        "m.onnx: a batch of 3 failed before requests: Failed to allocate memory for requested buffer of size 7"
    ]


@pytest.mark.parametrize(
    ("types", "ports"),
    [
        ({"x": "float32[4]"}, ["x: float32[4]", "y_out: float32[2]"]),
        ({"x": "float32[1, 4]"}, ["x: float32[1, 4]", "y_out: float32[1, 2]"]),
        ({"x": "tensor"}, ["x: float32[1, 4]", "y_out: float32[1, 2]"]),
    ],
)
def test_a_batch_that_is_fixed_at_1_is_hidden_where_what_is_wired_lacks_it(
    tmp_path: Path, types: dict[str, str], ports: list[str]
) -> None:
    linear(1, tmp_path / "m.onnx")
    step = StepContext(tmp_path, ("x",), {name: PortType.parse(text) for name, text in types.items()})
    found = Onnx.ports(OnnxConfig("m.onnx"), step)
    assert [f"{port.name}: {port.type}" for port in (*found.inputs, *found.outputs)] == ports
    inside = ports[0] == "x: float32[4]"
    assert bool(Onnx.plan_notes(OnnxConfig("m.onnx"), step)) is inside
    answers = opened(tmp_path).run(Batch({"x": list(X) if inside else [x[None] for x in X]}))["y_out"]
    np.testing.assert_allclose(np.stack(answers), Y if inside else Y[:, None], rtol=1e-5)


def test_a_batch_fixed_at_1_is_noted_in_the_plan(tmp_path: Path) -> None:
    linear(1, tmp_path / "m.onnx")
    (tmp_path / "p.yaml").write_text(
        "weftline: 1\nname: p\ninputs: {x: 'float32[4]'}\nsteps: {s: {node: onnx, model: m.onnx, inputs: {x: x}}}\n"
        "outputs: {y: s.y_out}\n"
    )
    plan = explain_text(make_plan(load_file(tmp_path / "p.yaml"), Machine(cores=2, memory_bytes=8 << 30)))
    assert "s: items run one by one, since m.onnx fixes its batch at 1; export it with a dynamic first" in plan


def test_a_file_of_another_format_or_name_is_refused_with_what_to_do(tmp_path: Path) -> None:
    def refused(model: str) -> ConfigError:
        with pytest.raises(ConfigError) as caught:
            Onnx.ports(OnnxConfig(model), StepContext(tmp_path))
        return caught.value

    (tmp_path / "a.pt").write_bytes(b"PK")
    assert "PyTorch" in refused("a.pt").found and "torch.onnx.export" in refused("a.pt").fix
    (tmp_path / "m").mkdir()
    linear("N", tmp_path / "m" / "net.onnx")
    assert refused("m").fix == "name the file, m/net.onnx"
