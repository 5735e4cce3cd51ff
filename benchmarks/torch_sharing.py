"""A tensor handed to and fro between two processes by torch.multiprocessing: the peer of `weftline.gpu_check`.

    python benchmarks/torch_sharing.py [--device cuda:0] [--rounds 300] [--sizes 1024 1048576] [--json FILE]

On a GPU that is torch's CUDA sharing: an IPC handle and a reference count for each message, pickled into a pipe. Two
kinds: 'pass', each side's own tensor again and again, whose handle the other has already; 'new', a fresh tensor each
time, made by one copy on the device, which is what a step that makes something new would send. One hop is half a round
trip: the sender waits for its stream, as torch's documentation asks of producers that share, and the receiver looks at
the first bytes. With `--device cpu` it is torch's sharing of host memory, and says nothing of a GPU.

It stands apart from the package because it speaks pickle, which the package never does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

WARM_UP = 4
MOVED_BYTES_MAX = 8 << 30
MARK_BYTES = 64


def follow(device: str, pipe: Any) -> None:
    """Answer every tensor with one of this process until None comes: torch does not send on what it received."""
    import torch

    own = torch.zeros(0, dtype=torch.uint8)
    while (message := pipe.recv()) is not None:
        kind, tensor = message
        _look(torch, tensor)
        if kind == "pass" and own.numel() != tensor.numel():
            own = _tensor(torch, device, tensor.numel())
        if kind == "pass":
            own[:MARK_BYTES] = tensor[:MARK_BYTES]
        sent = own if kind == "pass" else tensor.clone()
        _wait(torch, device)
        pipe.send(sent)
        del tensor, sent, message
        if kind == "new" and device != "cpu":
            torch.cuda.ipc_collect()


def hop(device: str, pipe: Any, kind: str, size_bytes: int, rounds: int) -> list[float]:
    """Return the milliseconds of every round trip but the first ones."""
    import torch

    tensor = _tensor(torch, device, size_bytes)
    times = []
    for number in range(rounds + WARM_UP):
        tensor[:MARK_BYTES].fill_(number % 251)
        started = time.perf_counter()
        sent = tensor if kind == "pass" else tensor.clone()
        _wait(torch, device)
        pipe.send((kind, sent))
        back = pipe.recv()
        _look(torch, back)
        times.append((time.perf_counter() - started) * 1000)
        if int(back[0]) != number % 251:
            raise RuntimeError(f"{kind}, {size_bytes} bytes: the tensor that came back is not the one that was sent")
        del back, sent
    return times[WARM_UP:]


def _tensor(torch: Any, device: str, size_bytes: int) -> Any:
    made = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    return made.share_memory_() if device == "cpu" else made


def _look(torch: Any, tensor: Any) -> None:
    """Read the first bytes on the device and wait for it, as a consumer that orders by the host does."""
    tensor[:MARK_BYTES].clone()
    _wait(torch, str(tensor.device))


def _wait(torch: Any, device: str) -> None:
    if device != "cpu":
        torch.cuda.current_stream().synchronize()


def measured(device: str, rounds: int, sizes: list[int]) -> dict[str, str]:
    """Return the figures by kind and size, in words."""
    import torch.multiprocessing as torch_multiprocessing

    context = torch_multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=follow, args=(device, theirs), daemon=True)
    process.start()
    figures = {}
    try:
        for kind in ("pass", "new"):
            for size in sizes:
                count = rounds if kind == "pass" else max(min(rounds, MOVED_BYTES_MAX // size // 4), 10)
                times = sorted(one / 2 for one in hop(device, ours, kind, size, count))
                p50, p99 = times[len(times) // 2], times[min(len(times) * 99 // 100, len(times) - 1)]
                figures[f"{kind}, {size} bytes"] = f"p50 {p50:.4f} ms, p99 {p99:.4f} ms of {len(times)}"
        ours.send(None)
        process.join(10)
    finally:
        process.kill()
    return figures


def main() -> int:
    """Run the command; writes what `weftline.gpu_check` reads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << 10, 1 << 20, 32 << 20, 1 << 30])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    try:
        import torch
    except ImportError:
        made: dict[str, Any] = {"state": "skipped", "why": "package torch is not installed", "figures": {}}
    else:
        if given.device != "cpu":
            torch.cuda.set_device(given.device)
        made = {"state": "right", "why": "", "figures": measured(given.device, given.rounds, given.sizes)}
        made["figures"]["torch"] = torch.__version__
    text = json.dumps({"name": "torch.multiprocessing", **made}, indent=1)
    print(text)
    if given.json is not None:
        given.json.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
