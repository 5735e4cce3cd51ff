"""The two kernels compile for the cards they are for, and their launch fits the driver's own functions."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
from pathlib import Path

import pytest

from weftline.gpu_check import device_worker
from weftline.gpu_check.kernels import PTX, UNMAPPED_ADDRESS, CudaKernels
from weftline.gpu_check.outcomes import Skipped
from weftline.shm.device.driver import DriverError


def ptxas() -> Path:
    """Return the assembler that Triton brings along."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        pytest.skip("Triton is not installed")
    file = Path(found.origin).parent / "backends/nvidia/bin/ptxas"
    if not file.is_file():
        pytest.skip("this Triton brings no assembler")
    return file


@pytest.mark.parametrize("card", ["sm_75", "sm_80", "sm_90"])
def test_the_kernels_compile(tmp_path: Path, card: str) -> None:
    source = tmp_path / "kernels.ptx"
    source.write_text(PTX)
    command = [ptxas(), f"-arch={card}", str(source), "-o", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    code = (tmp_path / "out").read_bytes()
    assert b"delay" in code
    assert b"poke" in code


def test_a_kernel_with_a_mistake_does_not_compile(tmp_path: Path) -> None:
    source = tmp_path / "kernels.ptx"
    source.write_text(PTX.replace("setp.lt.u64", "setp.lt.u65"))
    command = [ptxas(), "-arch=sm_90", str(source), "-o", str(tmp_path / "out")]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


def test_kernels_are_loaded_and_launched_as_the_bindings_want_it() -> None:
    pytest.importorskip("cuda.bindings.driver")
    from tests.shm.device.bindings import StandIn

    stand_in = StandIn()
    kernels = CudaKernels(stand_in)
    kernels.delay(7, 20)
    kernels.poke(7)
    assert stand_in.of("cuModuleLoadData") == [(PTX.encode() + b"\0",)]
    delayed, poked = stand_in.of("cuLaunchKernel")
    assert [int(delayed[8]), delayed[1:8], delayed[9]] == [7, (1, 1, 1, 1, 1, 1, 0), ((20_000,), (ctypes.c_uint64,))]
    assert poked[9] == ((UNMAPPED_ADDRESS,), (ctypes.c_uint64,))
    assert [name for _, name in stand_in.of("cuModuleGetFunction")] == [b"delay", b"poke"]


def test_a_launch_that_the_driver_refuses_is_reported_by_name() -> None:
    pytest.importorskip("cuda.bindings.driver")
    from tests.shm.device.bindings import StandIn

    stand_in = StandIn()
    stand_in.refuses["cuLaunchKernel"] = "CUDA_ERROR_INVALID_HANDLE"
    with pytest.raises(DriverError, match="cuLaunchKernel: CUDA_ERROR_INVALID_HANDLE"):
        CudaKernels(stand_in).poke(7)


def test_kernels_without_a_compiler_are_a_reason_to_skip() -> None:
    pytest.importorskip("cuda.bindings.driver")
    from tests.shm.device.bindings import StandIn

    stand_in = StandIn()
    stand_in.refuses["cuModuleLoadData"] = "CUDA_ERROR_JIT_COMPILER_NOT_FOUND"
    with pytest.raises(Skipped, match="libnvidia-ptxjitcompiler"):
        CudaKernels(stand_in)


def test_leases_of_different_numbers_have_different_bytes() -> None:
    bank = device_worker.bank()
    begins = {bank[device_worker.start_of(number) :][:64].tobytes() for number in range(1000)}
    assert len(begins) == 1000
    assert all(device_worker.start_of(number) + device_worker.LONGEST_BYTES <= bank.nbytes for number in range(5000))
