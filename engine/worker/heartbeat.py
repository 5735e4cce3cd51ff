"""The heartbeat of a worker, and the statistics it carries.

A thread sends a Heartbeat every BEAT_S: the process lives and its interpreter runs. It stops when the worker is stuck:
a node that holds the interpreter lock blocks this thread too, and a stopped process sends nothing. A heartbeat is never
sent in the middle of another message, and sending one never blocks.

Each heartbeat carries the latest statistics: the KV memory of streaming steps and the counters of nodes. The threads
that call the nodes collect them between calls (`StatsCollector.collect`); the heartbeat thread only reads the result.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping

from weftline.engine.protocol import figures
from weftline.engine.protocol.channel import Channel, ChannelClosed
from weftline.engine.protocol.messages import BEAT_S, Heartbeat, KvReport, NodeStats, encode
from weftline.engine.worker.stream import HostedStream
from weftline.nodes.contract import Node


class HeartbeatThread:
    """Sends heartbeats from `start` on, until the channel closes or the process ends.

    beat: returns the next heartbeat; called on this thread.
    """

    def __init__(self, channel: Channel, every_s: float = BEAT_S, beat: Callable[[], Heartbeat] = Heartbeat) -> None:
        self._channel = channel
        self._next = beat
        self._every_s = every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop sending. Does not wait for a heartbeat that is being sent."""
        self._stopped.set()

    def _beat(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                self._channel.try_send(encode(self._next()))
            except ChannelClosed:
                return


COLLECT_S = 0.25
"""Interval in seconds at which a busy worker collects statistics: four times per heartbeat."""


class StatsCollector:
    """Collects the statistics of one worker's nodes.

    nodes, streams: the worker's nodes and streaming steps, by step.
    reporting:      name of each step whose node reports statistics.
    """

    def __init__(self, nodes: Mapping[int, Node], streams: Mapping[int, HostedStream]) -> None:
        self.reporting: dict[int, str] = {}
        self._nodes = nodes
        self._streams = streams
        self._memory_uses: tuple[KvReport, ...] = ()  # read by the heartbeat thread, as are the node stats
        self._figures: tuple[NodeStats, ...] = ()
        self._latest: dict[int, NodeStats | None] = {}
        self._collected_s = 0.0

    @property
    def due(self) -> bool:
        return time.monotonic() - self._collected_s > COLLECT_S

    def collect(self, steps: Collection[int] | None = None) -> None:
        """Collect the statistics of every node; `steps`: only nodes of the calling thread."""
        self._collected_s = time.monotonic()
        uses = (stream.memory_use(index) for index, stream in self._streams.items())
        self._memory_uses = tuple(use for use in uses if use is not None)
        if self.reporting:
            for index, name in self.reporting.items():
                if steps is None or index in steps:
                    self._latest[index] = figures.take(index, name, self._nodes[index])
            self._figures = tuple(one for one in self._latest.values() if one is not None)

    def heartbeat(self) -> Heartbeat:
        """Return the next heartbeat; callable from any thread."""
        return Heartbeat(self._memory_uses, self._figures)
