"""Tensors where they lie: seen by numpy, torch and CUDA's friends in place, copied up and down on request."""

import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from weftline.shm.block import Block
from weftline.shm.device import dlpack
from weftline.shm.device.arena import DeviceArena
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.spec import ITEM_BYTES, STAND_INS, TensorSpec
from weftline.shm.view import numpy_dtype
from weftline.testing.fake_gpu.gpu import FakeGpu
from weftline.testing.recorder import Recorder

MIB = 1 << 20


@pytest.fixture
def driver() -> FakeGpu:
    return FakeGpu("fake:0")


@pytest.fixture
def arena(driver: FakeGpu) -> Iterator[DeviceArena]:
    with DeviceArena.create(driver, MIB) as arena:
        yield arena


def room(arena: DeviceArena, dtype: str, *shape: int) -> DeviceTensor:
    spec = TensorSpec(dtype, shape)
    return arena.view(Block(1, 256, spec.size_bytes, 1).place(0, spec.size_bytes), spec, writable=True)


def filled(driver: FakeGpu, arena: DeviceArena, dtype: str, *shape: int) -> DeviceTensor:
    """Return a tensor that holds 0, 1, 2, ... (of a stand-in: these bits)."""
    count = int(np.prod(shape))
    array = (np.arange(count) % 2 if dtype == "bool" else np.arange(count)).astype(numpy_dtype(dtype)).reshape(shape)
    stream = driver.stream()
    tensor = DeviceTensor.from_array(driver, array, stream, dtype, into=room(arena, dtype, *shape))
    driver.synchronize(stream)
    return tensor


@pytest.mark.parametrize("dtype", list(ITEM_BYTES))
def test_every_dtype_goes_up_and_comes_down_and_is_seen_by_torch_in_place(
    driver: FakeGpu, arena: DeviceArena, dtype: str
) -> None:
    torch = pytest.importorskip("torch")
    tensor = filled(driver, arena, dtype, 2, 3)
    down = tensor.host(driver, driver.stream())
    wanted = [[0, 1, 0], [1, 0, 1]] if dtype == "bool" else [[0, 1, 2], [3, 4, 5]]
    assert (down.dtype, down.tolist()) == (numpy_dtype(dtype), wanted)
    seen = tensor.torch()
    assert (seen.dtype, tuple(seen.shape), seen.data_ptr()) == (getattr(torch, dtype), (2, 3), tensor.address)
    stand_in = STAND_INS.get(dtype)
    assert (seen.view(getattr(torch, stand_in)) if stand_in else seen).tolist() == wanted


def test_numpy_sees_a_fake_device_in_place_and_read_only_where_it_is(driver: FakeGpu, arena: DeviceArena) -> None:
    tensor = filled(driver, arena, "float32", 2, 3)
    np.asarray(tensor)[1, 2] = 7
    assert np.asarray(tensor).tolist() == [[0, 1, 2], [3, 4, 7]]
    reading = DeviceTensor(tensor.spec, "fake:0", tensor.address, tensor.owner)
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(reading)[0, 0] = 1
    with pytest.raises(ValueError, match="read-only"):
        np.from_dlpack(reading)[0, 0] = 1
    np.from_dlpack(tensor)[0, 0] = 8
    assert np.asarray(room(arena, "bfloat16", 4)).dtype == np.uint16


def test_elements_and_runs_of_the_first_axis_lie_in_place(driver: FakeGpu, arena: DeviceArena) -> None:
    tensor = filled(driver, arena, "int32", 4, 3)
    assert np.asarray(tensor[1]).tolist() == [3, 4, 5]
    assert np.asarray(tensor[-1]).tolist() == [9, 10, 11]
    assert np.asarray(tensor[1:3]).tolist() == [[3, 4, 5], [6, 7, 8]]
    assert np.asarray(tensor[3:1]).shape == (0, 3)
    assert [np.asarray(row).tolist()[0] for row in tensor] == [0, 3, 6, 9]
    assert tensor[1:3].owner is tensor.owner
    assert np.asarray(tensor[2][1]).tolist() == 7
    with pytest.raises(IndexError, match="element 4 of 4"):
        tensor[4]
    with pytest.raises(IndexError, match="steps of 2"):
        tensor[::2]
    with pytest.raises(TypeError, match="no axes"):
        len(tensor[2][1])


def test_another_shape_of_the_same_bytes(driver: FakeGpu, arena: DeviceArena) -> None:
    tensor = filled(driver, arena, "int32", 4, 3)
    assert np.asarray(tensor.reshape(2, -1)).tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert tensor.reshape(12).address == tensor.address
    assert tensor[:1].reshape(3)[2].reshape().shape == ()
    for wrong in ((5,), (-1, -1), (2, -1, 5), (0, -1), (-12, -1)):
        with pytest.raises(ValueError, match="cannot be seen in the shape"):
            tensor.reshape(*wrong)


def test_tensors_without_elements_have_a_shape_all_the_same(driver: FakeGpu, arena: DeviceArena) -> None:
    torch = pytest.importorskip("torch")
    empty = filled(driver, arena, "float8_e5m2", 0, 3)
    assert empty.host(driver, driver.stream()).shape == (0, 3)
    assert (empty.torch().shape, empty.torch().dtype) == (torch.Size([0, 3]), torch.float8_e5m2)
    assert np.asarray(empty).shape == (0, 3)
    assert DeviceTensor.from_array(driver, np.zeros((0, 2)), driver.stream()).shape == (0, 2)


def test_an_upload_without_a_buffer_owns_memory_until_its_last_view(driver: FakeGpu) -> None:
    pytest.importorskip("torch")
    freed = []
    driver.free = lambda address: freed.append(address)  # type: ignore[method-assign]
    stream = driver.stream()
    tensor = DeviceTensor.from_array(driver, np.arange(6.0), stream)
    driver.synchronize(stream)
    address, seen = tensor.address, tensor[2:].torch()
    assert tensor.writable
    del tensor
    assert (seen.tolist(), freed) == ([2, 3, 4, 5], [])
    del seen
    assert freed == [address]


def test_an_upload_keeps_its_array_until_the_tensor_is_forgotten(driver: FakeGpu, arena: DeviceArena) -> None:
    array = np.arange(6.0)
    source = weakref.ref(array)
    tensor = DeviceTensor.from_array(driver, array, driver.stream(), into=room(arena, "float64", 6))
    del array
    assert source() is not None
    del tensor
    assert source() is None


def test_uploads_that_do_not_fit_are_refused(driver: FakeGpu, arena: DeviceArena) -> None:
    stream, array = driver.stream(), np.zeros(4, np.float32)
    with pytest.raises(ValueError, match=r"float32\[4\] cannot be written to"):
        DeviceTensor.from_array(driver, array, stream, into=room(arena, "float32", 5))
    reading = DeviceTensor(TensorSpec("float32", (4,)), "fake:0", arena.address)
    with pytest.raises(ValueError, match="which is read-only"):
        DeviceTensor.from_array(driver, array, stream, into=reading)
    with pytest.raises(ValueError, match="cannot hold bfloat16"):
        DeviceTensor.from_array(driver, array, stream, "bfloat16")
    with pytest.raises(ValueError, match="cannot hold float32"):
        DeviceTensor.from_array(driver, array.astype(">f4"), stream)


def test_what_does_not_lie_in_one_piece_is_made_so_before_it_goes_up(driver: FakeGpu, arena: DeviceArena) -> None:
    turned = np.arange(6, dtype=np.int32).reshape(2, 3).T
    tensor = DeviceTensor.from_array(driver, turned, driver.stream(), into=room(arena, "int32", 3, 2))
    assert tensor.host(driver, driver.stream()).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_copy_to_the_host_can_go_to_room_that_fits(driver: FakeGpu, arena: DeviceArena) -> None:
    tensor, stream = filled(driver, arena, "bfloat16", 2, 3), driver.stream()
    into = np.zeros((2, 3), np.uint16)
    assert tensor.host(driver, stream, into) is into
    assert into.tolist() == [[0, 1, 2], [3, 4, 5]]
    for wrong in (np.zeros((3, 2), np.uint16), np.zeros((2, 3), np.int16), np.zeros((2, 6), np.uint16)[:, ::2]):
        with pytest.raises(ValueError, match="cannot be copied"):
            tensor.host(driver, stream, wrong)
    into.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        tensor.host(driver, stream, into)


def test_a_copy_to_the_host_is_waited_for() -> None:
    recorder = Recorder(FakeGpu("fake:0"))
    with DeviceArena.create(recorder.driver, MIB) as arena:
        room(arena, "int8", 4).host(recorder.driver, recorder.driver.stream())
        assert [call.name for call in recorder.calls][-2:] == ["copy", "synchronize"]


def test_a_real_device_says_where_it_is_and_numpy_is_refused() -> None:
    tensor = DeviceTensor(TensorSpec("bfloat16", (2, 3)), "cuda:1", 0x7F0000000000)
    assert tensor.__cuda_array_interface__ == {
        "shape": (2, 3),
        "typestr": "<u2",
        "data": (0x7F0000000000, True),
        "version": 3,
        "strides": None,
        "stream": None,
    }
    assert tensor.__dlpack_device__() == (dlpack.CUDA, 1)
    taken = dlpack.Taken(tensor.__dlpack__(stream=1, max_version=(1, 1)))
    assert (taken.spec, taken.device, taken.writable) == (tensor.spec, (dlpack.CUDA, 1), False)
    assert (taken.address, taken.dense) == (0x7F0000000000, True)
    assert dlpack.Taken(tensor.__dlpack__()).writable  # the older form cannot say that it is read-only
    assert not hasattr(tensor, "__array_interface__")
    with pytest.raises(TypeError, match="lies in device memory"):
        np.asarray(tensor)


def test_a_fake_device_does_not_pass_for_cuda(arena: DeviceArena) -> None:
    tensor = room(arena, "float32", 4)
    assert not hasattr(tensor, "__cuda_array_interface__")
    assert tensor.__dlpack_device__() == (dlpack.CPU, 0)
    with pytest.raises(BufferError, match="shared where it lies"):
        tensor.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="not on the DLPack device"):
        tensor.__dlpack__(dl_device=(dlpack.CUDA, 0))
