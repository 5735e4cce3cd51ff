"""Collective operations over tensor-parallel ranks.

NCCL between GPUs, gloo between CPU processes. The ranks find each other through a file that only their user can read;
nothing listens beyond this machine. A process can be in one such group at a time, as torch keeps it in one place.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from weftline.errors import ModelError

COLLECTIVE_MAX_S = 120.0
"""Longest wait of a rank for the others within a round; the first round may compile kernels on each."""


class Peers:
    """Process group of `size` ranks: rendezvous and collective operations."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        """rank: of this process, from 0.   device: where it computes."""
        self.rank, self.size, self.device = rank, size, device

    def meet(self, meeting: Path, timeout_s: float) -> None:
        """Join the process group through the file `meeting`; ModelError after `timeout_s`, or if already in one.

        timeout_s: longest wait for the others, here and in every sum later on.
        """
        if dist.is_initialized():
            raise ModelError("this process already holds a part of a model on several devices; expected at most one")
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self.device)
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would take whatever the machine's name points to
        try:
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=dist.FileStore(str(meeting), self.size),  # type: ignore[attr-defined]
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=timeout_s),
            )
        except Exception as error:  # torch raises several kinds of it
            raise ModelError(f"rank {self.rank} did not meet the others: {type(error).__name__}") from error

    def add(self, part: Tensor) -> Tensor:
        """All-reduce: sum `part` over the ranks, in place."""
        dist.all_reduce(part)
        return part

    def join(self, part: Tensor) -> Tensor:
        """All-gather: concatenate the ranks' `part` [..., width] to [..., ranks * width]."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, -1)

    def abort(self) -> None:
        """Abort pending NCCL collectives from another thread, after a rank died."""
        if dist.is_initialized() and dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()

    def close(self) -> None:
        """Leave the process group without waiting for the other ranks."""
        if dist.is_initialized():
            dist.destroy_process_group()
