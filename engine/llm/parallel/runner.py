"""Tensor-parallel model runner: heads, MLP shards and KV pages of each rank.

    runner = ParallelRunner.open("models/large", ["cuda:0", "cuda:1"])
    engine = Engine(runner, ...)

The engine lives with the first rank and notices nothing. Before that computes a round it sends the round to the others;
all compute the same layers at the same time, and meet where sums are added up. Page tables are the same everywhere.

What one rank cannot compute none can: when a round fails on one of them it fails with WorkerDied, and so does every
later one, until the model is opened again.

    python -m weftline.engine.llm.parallel.runner <descriptor> <rank> <ranks>      is a follower
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weftline.engine.llm.cpu import attention as attention_cpu
from weftline.engine.llm.model_loader import RunnerOptions, load_model
from weftline.engine.llm.parallel.followers import (
    LOAD_MAX_S,
    START_MAX_S,
    Followers,
    FollowerSettings,
    Kind,
    decode_round,
    encode_round,
    end_with,
    receive,
    send,
)
from weftline.engine.llm.parallel.peers import COLLECTIVE_MAX_S, Peers
from weftline.engine.llm.parallel.shards import shard
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.schedule import ScheduledChunk
from weftline.errors import ModelError, WorkerDied

RANKS_MAX = 16
"""Most devices of one model: as many as one machine has."""


class ParallelRunner(Runner):
    """First rank of a tensor-parallel model; drives the processes of the others until `close`; see `open`.

    lost: why rounds can no longer be computed, as a phrase; None while they can.
    """

    lost: str | None = None
    _peers: Peers
    _followers: Followers

    def __init__(self, model: Any, options: RunnerOptions) -> None:
        """Wrap this rank's shard of a model, without CUDA graphs.

        A graph recorded on one rank would wait in its collectives for ranks that do not run that round.
        """
        super().__init__(model, replace(options, graphs=False))

    @classmethod
    def open_on(
        cls,
        devices: Sequence[str],
        source: str | Path,
        options: RunnerOptions | None = None,
        progress: Callable[[str, float], None] = lambda phrase, fraction: None,
        shown: str | None = None,
        timeout_s: float = COLLECTIVE_MAX_S,
    ) -> ParallelRunner:
        """Load a model on `devices`, one rank each; ModelError if it cannot be loaded or sharded.

        options:   as for `Runner.open`; `device` is not used, and `kv_bytes` is for each rank.
        timeout_s: longest wait of a rank for the others within a round.

        The ranks read the model one after the other, so that the host's memory holds it whole only once.
        """
        if not 2 <= len(devices) <= RANKS_MAX:
            raise ModelError(f"devices: found {len(devices)}, expected 2 to {RANKS_MAX}")
        ranks, options, shown = len(devices), options or RunnerOptions(), shown or str(source)
        own = replace(options, device=devices[0])
        peers = Peers(0, ranks, torch.device(devices[0]))
        model = _load(source, own, peers, progress, shown)
        followers = Followers(ranks)
        try:
            for rank in range(1, ranks):
                own_options = asdict(replace(options, device=devices[rank]))
                settings = FollowerSettings(
                    str(source), shown, own_options, str(followers.meeting), torch.get_num_threads(), timeout_s
                )
                followers.send(Kind.SETTINGS, settings.encode(), rank)
            followers.wait_ready(START_MAX_S)
            for rank in range(1, ranks):
                progress(f"reading part {rank + 1} of {ranks}", 0.2 + 0.7 * rank / ranks)
                followers.send(Kind.LOAD, to=rank)
                followers.wait_ready(LOAD_MAX_S, rank)
            followers.send(Kind.MEET)
            peers.meet(followers.meeting, timeout_s)
            runner = cls(model, own)
            runner._peers, runner._followers = peers, followers
            followers.watch(peers.abort)
            pages = [int.from_bytes(found, "little") for found in followers.wait_ready(LOAD_MAX_S)]
            runner.resize(min([runner.pages, *pages]))
        except BaseException:
            followers.close()
            peers.close()
            raise
        return runner

    @property
    def follower_pids(self) -> tuple[int, ...]:
        """Return the process ids of the other ranks."""
        return self._followers.pids

    def run(self, chunks: Sequence[ScheduledChunk], copies: Sequence[tuple[int, int]] = ()) -> Tensor:
        """Compute a round on all ranks; see `Runner.run`. WorkerDied if one fails."""
        self._begin(Kind.ROUND, encode_round(chunks, copies))
        try:
            return super().run(chunks, copies)
        except Exception as error:  # this rank is somewhere in the middle, the others wait for it
            raise self._lose(error) from error

    def resize(self, pages: int) -> None:
        """Resize the KV memory of all ranks to `pages` pages; see `Runner.resize`."""
        self._begin(Kind.RESIZE, pages.to_bytes(8, "little"))
        try:
            super().resize(pages)
        except Exception as error:
            raise self._lose(error) from error

    def sleep(self, pages: int) -> None:
        """Raise: the other ranks would keep what they have. A step of several ranks is closed, and opened again."""
        raise RuntimeError("a model on several devices does not sleep")

    def close(self) -> None:
        """Stop the other ranks and wait for their exit."""
        self.lost = self.lost or "it is closed"
        self._followers.close()
        self._peers.close()

    def _begin(self, kind: Kind, payload: bytes) -> None:
        self.lost = self.lost or self._followers.lost
        if self.lost is not None:
            raise WorkerDied(f"the model is on several devices and computes nothing any more: {self.lost}")
        try:
            self._followers.send(kind, payload)
        except WorkerDied as error:
            raise self._lose(error) from error

    def _lose(self, error: Exception) -> WorkerDied:
        """Set `lost` and stop the followers: after a failed round the ranks are out of step."""
        reason = self._followers.gone() or f"a round failed on its first rank with {type(error).__name__}"
        self.lost = self.lost or reason
        self._followers.close()
        self._peers.abort()
        return WorkerDied(f"the model is on several devices and computes nothing any more: {self.lost}")


def _load(source: str | Path, options: RunnerOptions, peers: Peers, progress: Any, shown: str) -> Any:
    """Load this rank's shard of a model to its device."""
    model = load_model(source, options, progress, shown, whole=True).model
    shard(model, peers)
    return model.to(peers.device)


def follow(channel: socket.socket, rank: int, ranks: int) -> None:
    """Run follower `rank` until the first rank closes `channel`."""
    _, payload = receive(channel)
    settings = FollowerSettings.decode(payload)
    torch.set_num_threads(settings.threads)
    attention_cpu.set_threads(settings.threads)
    options = replace(RunnerOptions(**settings.options), graphs=False)  # as on the first rank
    peers = Peers(rank, ranks, torch.device(options.device))
    send(channel, Kind.READY)
    runner: Runner | None = None
    try:
        receive(channel)
        model = _load(settings.source, options, peers, lambda phrase, fraction: None, settings.shown)
        send(channel, Kind.READY)
        receive(channel)
        peers.meet(Path(settings.meeting), settings.timeout_s)
        runner = Runner(model, options)
    except ModelError as error:
        send(channel, Kind.FAILED, str(error).encode())
        return
    send(channel, Kind.READY, runner.pages.to_bytes(8, "little"))
    while True:
        kind, payload = receive(channel)
        if kind is Kind.ROUND:
            chunks, copies = decode_round(payload)
            runner.run(chunks, copies)  # type: ignore[arg-type]  # of a chunk it has what a runner reads
        elif kind is Kind.RESIZE:
            runner.resize(int.from_bytes(payload, "little"))


def main() -> None:
    """Be a follower: the first argument is the descriptor of its channel, then its rank and how many there are."""
    descriptor, rank, ranks = map(int, sys.argv[1:4])
    channel = socket.socket(fileno=descriptor)
    end_with(channel)
    with contextlib.suppress(EOFError):  # the first rank is gone, or closed the model
        follow(channel, rank, ranks)


if __name__ == "__main__":
    main()
