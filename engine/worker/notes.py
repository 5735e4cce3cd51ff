"""What a worker notes of its nodes for the next beat: what streaming steps do with their memory, what nodes count.

Nodes are asked by the worker's own thread, between calls; the pulse's thread takes along what was noted last.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from weftline.engine import figures
from weftline.engine.messages import Beat, Figures, KvReport
from weftline.engine.worker.streaming import HostedStream
from weftline.nodes.contract import Node

NOTE_S = 0.25
"""How often a busy worker notes what its memory is used for and what its nodes count, in seconds; four times a beat."""


class Notes:
    """The notes of one worker.

    nodes, streams: the worker's, by step.
    counting:       name of each step whose node offers figures.
    """

    def __init__(self, nodes: Mapping[int, Node], streams: Mapping[int, HostedStream]) -> None:
        self.counting: dict[int, str] = {}
        self._nodes = nodes
        self._streams = streams
        self._memory_uses: tuple[KvReport, ...] = ()  # read by the pulse's thread, as are the figures
        self._figures: tuple[Figures, ...] = ()
        self._noted_s = 0.0

    @property
    def due(self) -> bool:
        return time.monotonic() - self._noted_s > NOTE_S

    def take(self) -> None:
        """Ask every node that has something to say."""
        self._noted_s = time.monotonic()
        uses = (stream.memory_use(index) for index, stream in self._streams.items())
        self._memory_uses = tuple(use for use in uses if use is not None)
        if self.counting:
            taken = (figures.take(index, name, self._nodes[index]) for index, name in self.counting.items())
            self._figures = tuple(one for one in taken if one is not None)

    def beat(self) -> Beat:
        """Return the next beat; from any thread."""
        return Beat(self._memory_uses, self._figures)
