"""DLPack capsules: read by numpy and torch, taken from them, and released by their last user."""

import subprocess
import sys
import weakref

import numpy as np
import pytest

from weftline.shm.device import dlpack
from weftline.shm.spec import ITEM_BYTES, STAND_INS, TensorSpec


class Owner:
    """Something whose end can be seen."""


def capsule_of(array: np.ndarray, owner: object, versioned: bool, writable: bool = True) -> object:
    spec = TensorSpec(str(array.dtype), array.shape)
    return dlpack.make(spec, array.ctypes.data, (dlpack.CPU, 0), owner, writable, versioned)


@pytest.mark.parametrize("versioned", [False, True])
@pytest.mark.parametrize("dtype", [name for name in ITEM_BYTES if name not in STAND_INS])
def test_what_is_made_is_what_is_taken(dtype: str, versioned: bool) -> None:
    array = np.ones((2, 3), dtype)
    taken = dlpack.Taken(capsule_of(array, array, versioned, writable=False))
    assert taken.spec == TensorSpec(dtype, (2, 3))
    assert taken.address == array.ctypes.data
    assert (taken.device, taken.dense, taken.writable) == ((dlpack.CPU, 0), True, not versioned)


@pytest.mark.parametrize("dtype", list(ITEM_BYTES))
def test_torch_reads_and_gives_every_dtype(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros((2, 3), dtype=getattr(torch, dtype))
    taken = dlpack.Taken(tensor.__dlpack__())
    assert taken.spec == TensorSpec(dtype, (2, 3))
    capsule = dlpack.make(taken.spec, taken.address, taken.device, tensor, writable=True, versioned=False)
    back = torch.from_dlpack(capsule)
    assert (back.dtype, tuple(back.shape), back.data_ptr()) == (tensor.dtype, (2, 3), tensor.data_ptr())


@pytest.mark.parametrize("versioned", [False, True])
def test_the_owner_lives_until_the_consumer_lets_go(versioned: bool) -> None:
    torch = pytest.importorskip("torch")
    owner, array = Owner(), np.arange(4.0)
    seen, capsule = weakref.ref(owner), capsule_of(array, owner, versioned)
    del owner
    tensor = torch.from_dlpack(capsule)
    del capsule
    assert seen() is not None
    assert tensor.tolist() == [0, 1, 2, 3]
    del tensor
    assert seen() is None


@pytest.mark.parametrize("versioned", [False, True])
def test_an_unconsumed_capsule_releases_its_owner(versioned: bool) -> None:
    owner = Owner()
    seen, capsule = weakref.ref(owner), capsule_of(np.arange(4.0), owner, versioned)
    del owner
    assert seen() is not None
    del capsule
    assert seen() is None


def test_a_taken_tensor_keeps_its_giver_and_tells_it_when_forgotten() -> None:
    array = np.arange(4.0)
    base = weakref.ref(array)
    taken = dlpack.Taken(array.__dlpack__())
    del array
    assert base() is not None
    del taken
    assert base() is None


def test_a_capsule_is_taken_once_and_nothing_else_is_one() -> None:
    capsule = np.arange(4.0).__dlpack__()
    first = dlpack.Taken(capsule)
    with pytest.raises(ValueError, match="taken before"):
        dlpack.Taken(capsule)
    with pytest.raises(ValueError, match="no DLPack capsule"):
        dlpack.Taken(object())
    assert first.dense


def test_strides_that_are_not_row_major_are_seen() -> None:
    array = np.zeros((4, 6), np.float32)
    assert not dlpack.Taken(array.T.__dlpack__()).dense
    assert not dlpack.Taken(array[:, :3].__dlpack__()).dense
    assert dlpack.Taken(array[1:3].__dlpack__()).dense
    assert dlpack.is_dense((1, 6), (99, 1))  # the stride of an axis of one element leads nowhere
    assert dlpack.is_dense((0, 6), (99, 99))
    assert dlpack.dense_strides((2, 3, 4)) == (12, 4, 1)
    assert dlpack.dense_strides(()) == ()


@pytest.mark.parametrize("versioned", [False, True])
def test_the_device_and_the_offset_are_part_of_where_a_tensor_lies(versioned: bool) -> None:
    array = np.arange(4.0)
    capsule = dlpack.make(TensorSpec("float64", (4,)), 4096, (dlpack.CUDA, 3), array, True, versioned)
    name, form = (b"dltensor_versioned", dlpack._ManagedVersioned) if versioned else (b"dltensor", dlpack._Managed)
    form.from_address(dlpack._pointer(capsule, name)).tensor.byte_offset = 16  # some libraries slice so
    taken = dlpack.Taken(capsule)
    assert (taken.device, taken.address) == ((dlpack.CUDA, 3), 4112)


def test_a_dtype_that_no_port_has_is_reported() -> None:
    assert dlpack.Taken(np.zeros(2, np.complex128).__dlpack__()).spec is None


def test_a_consumer_may_release_at_the_end_of_the_process() -> None:
    script = (
        "import builtins,numpy as np;from weftline.shm.device import dlpack;from weftline.shm.spec import TensorSpec\n"
        "a=np.arange(4.0)\n"
        "for kind in (False,True):\n"
        "    c=dlpack.make(TensorSpec('float64',(4,)),a.ctypes.data,(1,0),a,True,kind)\n"
        "    class Given:\n"
        "        def __dlpack__(self,**_): return c\n"
        "        def __dlpack_device__(self): return (1,0)\n"
        "    setattr(builtins,f'kept_{kind}',np.from_dlpack(Given()))\n"
        "    setattr(builtins,f'left_{kind}',dlpack.make(TensorSpec('float64',(4,)),a.ctypes.data,(1,0),a,True,kind))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
