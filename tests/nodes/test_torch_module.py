import io
import json
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.nodes.device_values import DEVICE, Bench, bits, down, moves_of_modules
from tests.nodes.model_files import Harm, broken
from weftline.errors import ModelError, StepError
from weftline.nodes import torch_export
from weftline.nodes.contract import Batch, ConfigError, OpenContext, StepContext
from weftline.nodes.torch_module import TorchConfig, TorchModule

SOURCE = """
import torch
class Scale(torch.nn.Module):
    def __init__(self, width=3, dtype="float32"):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=getattr(torch, dtype)))
    def forward(self, x):
        assert torch.is_inference_mode_enabled()
        return x * self.weight
class Pair(torch.nn.Module):
    def forward(self, x, y):
        return {"total": x + y, "rows": x.sum(1)}
def not_a_module():
    return 7
class Mirror(torch.nn.Module):
    def forward(self, x):
        return x.flip(1)
class Pass(torch.nn.Module):
    def forward(self, x):
        return x
class Bad(torch.nn.Module):
    def forward(self, x):
        return x.sum()
"""
ONE = {"accepts": {"x": "float32[3]"}, "gives": {"y": "float32[3]"}}
X = np.arange(6, dtype=np.float32).reshape(2, 3)


class Double(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    (tmp_path / "mine.py").write_text(SOURCE)
    torch.jit.script(Double()).save(str(tmp_path / "double.pt"))
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(Double(), (torch.zeros(2, 3),), dynamic_shapes={"x": {0: batch}})
    torch.export.save(program, tmp_path / "double.pt2")
    return tmp_path


def opened(folder: Path, device: str = "cpu", **options: object) -> TorchModule:
    node = TorchModule(TorchConfig(**{**ONE, **options}))
    node.open(OpenContext(folder, device))
    node.warm_up()
    return node


@pytest.mark.parametrize("model", ["double.pt", "double.pt2"])
def test_a_saved_program_runs_on_a_batch(folder: Path, model: str) -> None:
    np.testing.assert_array_equal(opened(folder, model=model).run(Batch({"x": list(X)}))["y"], X * 2)


def test_a_users_module_gets_its_arguments_and_weights(folder: Path) -> None:
    state = {"weight": torch.tensor([1.0, 2.0, 3.0])}
    save_file(state, folder / "w.safetensors")
    torch.save(state, folder / "w.pt")
    for weights in ("w.safetensors", "w.pt"):
        node = opened(folder, module="mine.py:Scale", weights=weights, arguments={"width": 3})
        np.testing.assert_array_equal(node.run(Batch({"x": list(X)}))["y"], X * [1, 2, 3])
    with pytest.raises(ModelError, match="size mismatch"):
        opened(folder, module="mine.py:Scale", weights="w.pt", arguments={"width": 4})


def test_read_only_inputs_are_taken_without_a_warning(folder: Path, recwarn: pytest.WarningsRecorder) -> None:
    x = X.copy()
    x.flags.writeable = False
    opened(folder, model="double.pt").run(Batch({"x": list(x)}, stacked=lambda port: x))
    assert not recwarn.list


def test_results_are_written_into_the_room(folder: Path) -> None:
    buffer = np.zeros((2, 3), np.float32)
    answer = opened(folder, model="double.pt").run(
        Batch({"x": list(X)}, output_buffer=lambda port, dtype, shape: buffer)
    )["y"]
    assert answer is buffer and buffer.tolist() == (X * 2).tolist()


def test_bfloat16_travels_as_the_same_bits(folder: Path) -> None:
    types = {"accepts": {"x": "bfloat16[3]"}, "gives": {"y": "bfloat16[3]"}}
    node = opened(folder, module="mine.py:Scale", arguments={"dtype": "bfloat16"}, **types)
    bits = torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16).view(torch.uint16).numpy()
    answer = node.run(Batch({"x": [bits, bits]}))["y"]
    assert answer.dtype == np.uint16 and answer[1].tolist() == bits.tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "int64"])
@pytest.mark.parametrize("buffer", [False, True])
def test_tensors_stay_on_the_device_in_every_dtype(folder: Path, dtype: str, buffer: bool) -> None:
    types = {"accepts": {"x": f"{dtype}[3]"}, "gives": {"y": f"{dtype}[3]"}}
    made = [bits(dtype, (3,), seed) for seed in range(2)]
    bench = Bench()
    near = bench.side_by_side(made, dtype)
    for module in ("mine.py:Pass",) if dtype.startswith("float8") else ("mine.py:Mirror", "mine.py:Pass"):
        options = {"module": module, **types}
        answer = opened(folder, DEVICE, **options).run(bench.batch({"x": near}, buffer))["y"]
        wanted = opened(folder, **options).run(Batch({"x": made}))["y"]
        assert down(answer).tobytes() == wanted.tobytes()
        assert (answer is bench.buffers.get("y")) is buffer
    if not buffer:  # the module gave its input as it is: it was neither copied on the way in nor on the way out
        assert answer.data_ptr() == near[0].address


def test_items_of_different_sizes_on_the_device_and_arrays_given_to_it(folder: Path) -> None:
    types = {"accepts": {"x": "float32[N]", "y": "float32[N]"}, "gives": {"total": "float32[N]", "rows": "float32[]"}}
    node, bench = opened(folder, DEVICE, module="mine.py:Pair", **types), Bench()
    short, long = np.ones(2, np.float32), np.ones(4, np.float32)
    near = [bench.put(short), bench.put(long), bench.put(short)]
    answer = node.run(bench.batch({"x": near, "y": [short, long, short]}))
    assert [down(row).tolist() for row in answer["total"]] == [[2, 2], [2, 2, 2, 2], [2, 2]]
    assert [float(row) for row in answer["rows"]] == [2, 4, 2]
    whole = node.run(bench.batch({"x": [short, short], "y": bench.side_by_side([short, short])}))
    assert down(whole["total"]).tolist() == [[2, 2], [2, 2]]


def test_all_its_ports_are_tensors_on_the_device(folder: Path) -> None:
    config = TorchConfig(accepts={"x": "float32[3]"}, gives={"y": "float32[3]"}, model="double.pt")
    assert TorchModule.device_ports(config, TorchModule.ports(config, StepContext(folder))) == {"x", "y"}


def test_asleep_its_weights_are_in_host_memory_and_awake_where_they_were(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = opened(folder, module="mine.py:Scale", arguments={"width": 3})
    node._device = "cuda:1"
    moves = moves_of_modules(monkeypatch)
    assert not node.sleep("nothing") and not node.sleep("process")
    assert node.sleep("host") and moves == ["cpu"]
    node.wake()
    assert moves == ["cpu", "cuda:1"]


def test_after_a_sleep_its_answers_are_the_same(folder: Path) -> None:
    node, bench = opened(folder, DEVICE, model="double.pt2"), Bench()
    batch = bench.batch({"x": bench.side_by_side(list(X))})
    before = down(node.run(batch)["y"])
    assert node.sleep("host")
    node.wake()
    assert down(node.run(batch)["y"]).tobytes() == before.tobytes() == (X * 2).tobytes()


def test_several_outputs_by_name_and_items_of_different_sizes(folder: Path) -> None:
    types = {"accepts": {"x": "float32[N]", "y": "float32[N]"}, "gives": {"total": "float32[N]", "rows": "float32[]"}}
    node = opened(folder, module="mine.py:Pair", **types)
    short, long = np.ones(2, np.float32), np.ones(4, np.float32)
    answer = node.run(Batch({"x": [short, long, short], "y": [short, long, short]}))
    assert [row.tolist() for row in answer["total"]] == [[2, 2], [2, 2, 2, 2], [2, 2]]
    assert [float(row) for row in answer["rows"]] == [2, 4, 2]


def test_what_a_module_returns_is_compared_with_its_ports(folder: Path) -> None:
    with pytest.raises(StepError, match="first dimension"):
        opened(folder, module="mine.py:Bad")
    with pytest.raises(StepError, match="gives declares float64"):
        opened(folder, model="double.pt", gives={"y": "float64[3]"})
    with pytest.raises(StepError, match="1 values"):
        opened(folder, model="double.pt", gives={"y": "float32[3]", "z": "float32[3]"})


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({}, "model"), ({"model": "a.pt", "module": "mine.py:Scale"}, "model"), ({"model": "absent.pt"}, "model"),
        ({"module": "absent.py:X"}, "module"), ({"model": "double.pt", "accepts": {"x": "text"}}, "accepts.x"),
        ({"model": "double.pt", "gives": {}}, "gives"),
        ({"model": "double.pt", "gives": {"y": "float33[3]"}}, "gives.y"),
        ({"module": "mine.py:Scale", "weights": "absent.pt"}, "weights"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_named(folder: Path, options: dict[str, object], option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TorchModule.ports(TorchConfig(**{**ONE, **options}), StepContext(folder))
    assert caught.value.option == option


def test_a_factory_that_makes_no_module_is_a_model_error(folder: Path) -> None:
    with pytest.raises(ModelError, match="int"):
        opened(folder, module="mine.py:not_a_module")
    with pytest.raises(ModelError, match="TypeError"):
        opened(folder, module="mine.py:Scale", arguments={"height": 3})


@pytest.mark.parametrize("name", ["double.pt", "double.pt2"])
def test_truncated_and_damaged_programs_are_refused_or_harmless(folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    refused = 0
    for candidate in broken(data, truncations=100, flips=range(0, 64, 8)):
        (folder / f"broken{Path(name).suffix}").write_bytes(candidate)
        started = time.process_time()
        try:
            opened(folder, model=f"broken{Path(name).suffix}")
        except (ModelError, StepError) as error:
            refused += 1
            assert str(folder) not in str(error)
        assert time.process_time() - started < 1
    assert refused >= 100


def test_an_exported_program_with_a_pickle_in_it_does_not_run_it(folder: Path) -> None:
    payload = folder / "payload.pt"
    torch.save(({"a": Harm(folder / "ran")}, {}), payload)
    for entry, data in (
        ("data/sample_inputs/model.pt", payload.read_bytes()),
        ("data/constants/opaque_obj_0", b"\x80\x02."),
        ("data/aotinductor/model/x.so", b"\x7fELF"),
    ):
        with zipfile.ZipFile(folder / "double.pt2") as old, zipfile.ZipFile(folder / "bad.pt2", "w") as new:
            for item in old.infolist():
                if not item.filename.endswith(entry):
                    new.writestr(item.filename, old.read(item))
            top = old.infolist()[0].filename.partition("/")[0]
            new.writestr(f"{top}/{entry}", data)
        with pytest.raises(ModelError):
            opened(folder, model="bad.pt2")
        assert not (folder / "ran").exists()


def _with_entry(folder: Path, ending: str, data: bytes, compression: int) -> None:
    """Write bad.pt2: double.pt2 with `data` in place of the entry of that ending, compressed in that way."""
    with zipfile.ZipFile(folder / "double.pt2") as old, zipfile.ZipFile(folder / "bad.pt2", "w") as new:
        for item in old.infolist():
            chosen = item.filename.endswith(ending)
            new.writestr(item.filename, data if chosen else old.read(item), compression if chosen else None)


def test_a_zip_bomb_in_an_exported_program_is_refused_before_it_unpacks(folder: Path) -> None:
    zeros = b" " * 30_000_000
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", zeros)
    for ending, data, compression in (
        ("models/model.json", zeros + b"{}", zipfile.ZIP_DEFLATED),
        ("data/sample_inputs/model.pt", inner.getvalue(), zipfile.ZIP_STORED),
    ):
        _with_entry(folder, ending, data, compression)
        assert (folder / "bad.pt2").stat().st_size < 200_000
        tracemalloc.start()
        with pytest.raises(ModelError, match=r"bad\.pt2 .*it unpacks to 30\d+ bytes"):
            opened(folder, model="bad.pt2")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 5_000_000


def test_an_encrypted_program_is_refused(folder: Path) -> None:
    data = bytearray((folder / "double.pt2").read_bytes())
    at = data.find(b"PK\x01\x02")
    while at >= 0:  # the encryption flag of every entry in the zip's directory
        data[at + 8] |= 1
        at = data.find(b"PK\x01\x02", at + 4)
    (folder / "bad.pt2").write_bytes(data)
    with pytest.raises(ModelError, match=r"no torch\.export file"):
        opened(folder, model="bad.pt2")


def test_a_program_too_large_to_be_read_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_export, "PROGRAM_BYTES_MAX", 1_000)
    with pytest.raises(ModelError, match="at most 1000"):
        opened(folder, model="double.pt2")


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("target", "torch.hub.load"), ("target", "torch.ops.load_library.__call__"),
        ("target", "_operator.methodcaller"), ("expr_str", "exec(chr(49))"), ("expr_str", "__import__('os')"),
        ("expr_str", "s0.func"),
    ],
)  # fmt: skip
def test_an_exported_program_that_names_other_functions_is_refused(folder: Path, key: str, text: str) -> None:
    with zipfile.ZipFile(folder / "double.pt2") as old, zipfile.ZipFile(folder / "bad.pt2", "w") as new:
        for item in old.infolist():
            data = old.read(item)
            if "/models/" in item.filename:
                program = json.loads(data)
                program["graph_module"]["graph"]["nodes"][0][key] = text
                data = json.dumps(program).encode()
            new.writestr(item.filename, data)
    with pytest.raises(ModelError, match="not an operator or a size"):
        opened(folder, model="bad.pt2")


def test_an_exported_program_with_symbolic_sizes_and_a_branch_is_taken(folder: Path) -> None:
    class Windows(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.pad(x, (0, x.shape[1] // 2 + 1)).reshape(x.shape[0], -1) + x.shape[1] * 2

    sizes = {"x": {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("width", min=2, max=64)}}
    torch.export.save(
        torch.export.export(Windows(), (torch.zeros(2, 6),), dynamic_shapes=sizes), folder / "windows.pt2"
    )
    node = opened(folder, model="windows.pt2", accepts={"x": "float32[N]"}, gives={"y": "float32[M]"})
    assert node.run(Batch({"x": [np.ones(4, np.float32)]}))["y"].tolist() == [[9, 9, 9, 9, 8, 8, 8]]


def test_a_module_of_torchs_own_is_checked_where_torch_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"accepts": {"x": "float32[3]"}, "gives": {"y": "float32[3]"}}
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    step = StepContext(Path())
    ports = TorchModule.ports(TorchConfig(module="torch.nn:Flatten", **options), step)
    assert [port.name for port in ports.outputs] == ["y"]
    with pytest.raises(ConfigError, match="no Python module"):
        TorchModule.ports(TorchConfig(module="nowhere.nn:Flatten", **options), step)


LINEAR = torch.nn.Linear(3, 3)


def old(path: Path) -> None:
    torch.save(LINEAR, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize(
    ("name", "make", "found", "fix"),
    [
        ("whole.pt", lambda path: torch.save(LINEAR, path), r"\(torch.nn.modules.linear.Linear\)", "torch.export.save"),
        ("dict.pt", lambda path: torch.save({"model": Double()}, path), r"\(.*\.Double\)", "torch.export.save"),
        ("state.pt", lambda path: torch.save(LINEAR.state_dict(), path), "weights without the module", "`weights`"),
        ("m.safetensors", lambda path: save_file(LINEAR.state_dict(), path), "weights without", "`weights`"),
        ("old.pt", old, "is a pickle", "torch.export.save"),
        ("m.onnx", lambda path: path.write_bytes(b"\x08\x09"), "an ONNX model", "node onnx"),
    ],
)
def test_a_file_without_a_program_is_refused_with_a_fix(folder, name, make, found, fix) -> None:
    make(folder / name)
    with pytest.raises(ConfigError, match=found) as caught:
        TorchModule.ports(TorchConfig(**ONE, model=name), StepContext(folder))
    assert caught.value.option == "model" and fix in caught.value.fix and "torch.export" in caught.value.expected


def test_a_program_or_a_whole_module_as_weights_is_refused_when_checked(folder) -> None:
    torch.save(torch.nn.Linear(3, 3), folder / "whole.pt")
    for name, fix in (("double.pt", "`model`"), ("double.pt2", "`model`"), ("whole.pt", "state_dict()")):
        with pytest.raises(ConfigError) as caught:
            TorchModule.ports(TorchConfig(**ONE, module="mine.py:Scale", weights=name), StepContext(folder))
        assert caught.value.option == "weights" and fix in caught.value.fix
    torch.save(torch.nn.Linear(3, 3).state_dict(), folder / "state.pt")
    TorchModule.ports(TorchConfig(**ONE, module="mine.py:Scale", weights="state.pt"), StepContext(folder))


def test_an_exported_program_under_another_name_is_opened(folder) -> None:
    (folder / "double.pt2").rename(folder / "renamed.pt")
    node = TorchModule(TorchConfig(**ONE, model="renamed.pt"))
    TorchModule.ports(node.config, StepContext(folder))
    node.open(OpenContext(folder))
    np.testing.assert_array_equal(node.run(Batch({"x": list(X)}))["y"], X * 2)
