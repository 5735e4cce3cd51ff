"""Shared-memory methods: system regions; CUDA regions are refused.

A CUDA IPC handle is validated and then refused: this server reads tensors from messages and from system memory, and
opening a client's handle would map its memory into this process.
"""

from __future__ import annotations

from typing import Any

from weftline.engine.serving.auth.shared_memory import SharedMemory
from weftline.engine.serving.grpc.protos import V2
from weftline.engine.serving.grpc.service import Unary
from weftline.engine.serving.v2.messages import check_name
from weftline.errors import InputError

HANDLE_BYTES = 64
"""sizeof(cudaIpcMemHandle_t)."""

NO_GPU_MEMORY = "this server has no GPU memory to share; send the tensor, or register system shared memory"


class GrpcSharedMemory:
    """The six shared-memory methods."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    def methods(self) -> dict[str, Unary]:
        return {
            "SystemSharedMemoryStatus": self.system_status,
            "SystemSharedMemoryRegister": self.system_register,
            "SystemSharedMemoryUnregister": self.system_unregister,
            "CudaSharedMemoryStatus": self.cuda_status,
            "CudaSharedMemoryRegister": self.cuda_register,
            "CudaSharedMemoryUnregister": self.cuda_unregister,
        }

    async def system_status(self, request: Any) -> Any:
        response = V2.SystemSharedMemoryStatusResponse()
        for one in self._memory.status(request.name):
            region = response.regions[one.name]
            region.name, region.key, region.offset, region.byte_size = one.name, one.key, one.offset, one.size_bytes
        return response

    async def system_register(self, request: Any) -> Any:
        self._memory.register(request.name, request.key, request.offset, request.byte_size)
        return V2.SystemSharedMemoryRegisterResponse()

    async def system_unregister(self, request: Any) -> Any:
        if request.name:
            self._memory.unregister(request.name)
        else:
            self._memory.unregister_all()
        return V2.SystemSharedMemoryUnregisterResponse()

    async def cuda_status(self, request: Any) -> Any:
        if request.name:
            raise InputError(f"no GPU region is registered as {check_name(request.name, 'region')}")
        return V2.CudaSharedMemoryStatusResponse()

    async def cuda_register(self, request: Any) -> Any:
        check_name(request.name, "region")
        if len(request.raw_handle) != HANDLE_BYTES:
            size = len(request.raw_handle)
            raise InputError(f"raw_handle: found {size} bytes, expected the {HANDLE_BYTES} of a CUDA IPC handle")
        if request.device_id < 0:
            raise InputError(f"device_id: found {request.device_id}, expected 0 or more")
        if request.byte_size < 1:
            raise InputError("byte_size: found 0, expected 1 or more")
        raise InputError(NO_GPU_MEMORY)

    async def cuda_unregister(self, request: Any) -> Any:
        if request.name:
            check_name(request.name, "region")  # none is registered; unregistering an unknown name succeeds
        return V2.CudaSharedMemoryUnregisterResponse()
