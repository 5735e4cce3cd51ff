"""Other libraries' tensors on a device, taken for what they are, in place, and kept alive."""

import weakref
from typing import Any

import numpy as np
import pytest

from weftline.shm.device import dlpack
from weftline.shm.device.foreign import as_device
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.spec import TensorSpec
from weftline.testing.fake_gpu.gpu import FakeGpu

FOUR = TensorSpec("float32", (2, 2))


class OnCuda:
    """An array of a library such as CuPy, as far as its interface goes."""

    def __init__(self, **interface: Any) -> None:
        usual = {"shape": (2, 2), "typestr": "<f4", "data": (4096, False), "version": 3}
        self.__cuda_array_interface__ = {**usual, **interface}


class Exporting:
    """A tensor that speaks DLPack and says on which device; it notes how it was asked."""

    def __init__(self, device: tuple[int, int], modern: bool = True) -> None:
        self.device, self.modern, self.asked = device, modern, {}
        self.array = np.arange(4, dtype=np.float32).reshape(2, 2)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **asked: Any) -> Any:
        if "max_version" in asked and not self.modern:
            raise TypeError("unexpected keyword argument 'max_version'")
        self.asked = asked
        return dlpack.make(FOUR, self.array.ctypes.data, self.device, self, True, versioned=self.modern)


def test_tensors_of_the_same_device_pass_through_and_others_do_not() -> None:
    tensor = DeviceTensor(FOUR, "cuda:1", 4096)
    assert as_device(tensor, "cuda:1") is tensor
    assert as_device(tensor, "cuda:0") is None


@pytest.mark.parametrize("value", [np.zeros(4), np.float32(1), [1, 2], "text", None, 3.0, b"bytes"])
def test_what_lies_on_the_host_is_not_on_a_device(value: object) -> None:
    assert as_device(value, "fake:0") is None
    assert as_device(value, "cuda:0") is None


def test_torch_tensors_are_seen_in_place_and_kept() -> None:
    torch = pytest.importorskip("torch")
    value = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    tensor = as_device(value, "fake:0")
    assert tensor is not None
    assert (tensor.spec, tensor.address, tensor.writable) == (
        TensorSpec("bfloat16", (2, 3)),
        value.data_ptr(),
        True,
    )
    kept = weakref.ref(value.untyped_storage())
    del value
    assert tensor.torch().tolist() == [[0, 1, 2], [3, 4, 5]]
    del kept
    assert as_device(torch.zeros(2), "cuda:0") is None
    assert as_device(torch.zeros(2, dtype=torch.complex128), "fake:0") is None
    assert as_device(torch.zeros(2).to_sparse(), "fake:0") is None
    assert as_device(torch.zeros(2, device="meta"), "fake:0") is None


def test_torch_makes_a_tensor_dense_first_and_forgets_its_gradients() -> None:
    torch = pytest.importorskip("torch")
    turned = torch.arange(6.0, requires_grad=True).reshape(2, 3).T
    tensor = as_device(turned, "fake:0")
    assert tensor is not None
    assert np.asarray(tensor).tolist() == [[0, 3], [1, 4], [2, 5]]
    conjugated = as_device(torch.tensor([1 + 2j], dtype=torch.complex64).conj(), "fake:0")
    assert conjugated is not None
    assert np.asarray(conjugated).tolist() == [1 - 2j]
    parameter = as_device(torch.nn.Parameter(torch.ones(2)), "fake:0")
    assert parameter is not None
    assert np.asarray(parameter).tolist() == [1, 1]


def test_cuda_arrays_are_seen_in_place_and_kept() -> None:
    value = OnCuda(data=(8192, True), strides=(8, 4))
    kept = weakref.ref(value)
    tensor = as_device(value, "cuda:0")
    assert tensor is not None
    assert (tensor.spec, tensor.device, tensor.address, tensor.writable) == (FOUR, "cuda:0", 8192, False)
    del value
    assert kept() is not None
    assert as_device(OnCuda(), "fake:0") is None


def test_cuda_arrays_that_no_port_can_carry_are_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="make it contiguous"):
        as_device(OnCuda(strides=(4, 8)), "cuda:0")
    with pytest.raises(ValueError, match="no port has this dtype"):
        as_device(OnCuda(typestr="<c16"), "cuda:0")
    with pytest.raises(ValueError, match="no port has this dtype"):
        as_device(OnCuda(typestr=">f4"), "cuda:0")


def test_what_a_cuda_arrays_maker_still_writes_comes_before_our_stream() -> None:
    done: list[tuple[str, ...]] = []

    class Watching(FakeGpu):
        def event(self, shared: bool = False) -> int:
            return 77

        def record(self, event: int, stream: int) -> None:
            done.append(("record", str(event), str(stream)))

        def wait(self, stream: int, event: int) -> None:
            done.append(("wait", str(stream), str(event)))

        def destroy_event(self, event: int) -> None:
            done.append(("destroy", str(event)))

    driver = Watching("cuda:0")
    as_device(OnCuda(stream=None), "cuda:0", driver, 5)
    as_device(OnCuda(stream=5), "cuda:0", driver, 5)
    assert done == []
    as_device(OnCuda(stream=9), "cuda:0", driver, 5)
    assert done == [("record", "77", "9"), ("wait", "5", "77"), ("destroy", "77")]


def test_dlpack_says_which_device_a_cuda_array_is_on() -> None:
    class Both(OnCuda):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (dlpack.CUDA, 1)

    assert as_device(Both(), "cuda:0") is None
    assert as_device(Both(), "cuda:1") is not None


@pytest.mark.parametrize("modern", [True, False])
def test_everybody_else_is_asked_by_dlpack_for_our_stream(modern: bool) -> None:
    value = Exporting((dlpack.CUDA, 0), modern)
    tensor = as_device(value, "cuda:0", stream=5)
    assert tensor is not None
    assert (tensor.spec, tensor.address) == (FOUR, value.array.ctypes.data)
    assert value.asked == {"stream": 5} | ({"max_version": (1, 0)} if modern else {})
    assert as_device(value, "cuda:1") is None
    assert as_device(value, "fake:0") is None
    as_device(value, "cuda:0")
    assert value.asked["stream"] == 1  # the default stream, by DLPack's number
    kept = weakref.ref(value)
    del value
    assert kept() is not None
    del tensor
    assert kept() is None


def test_on_a_fake_device_dlpacks_host_memory_is_the_devices() -> None:
    value = Exporting((dlpack.CPU, 0))
    tensor = as_device(value, "fake:0")
    assert tensor is not None
    assert np.asarray(tensor).tolist() == [[0, 1], [2, 3]]
    assert "stream" not in value.asked
