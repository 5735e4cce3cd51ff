"""Pieces on their way from one step to another: when their reader begins, what waits for it, and who waits for whom.

A unit that takes an input in pieces is *fed*: it begins with the first piece, when all else that it reads is settled,
and the whole value follows as the last one. Pieces are not kept once they are sent, so a fed task is not tried again,
nor is a task whose pieces somebody was fed. A reader that has more than `limits.stream_bytes_max` unread pauses its
source. One that ends early, and was the last to want anything of its source, takes the source's task along.

What pieces go to callers is decided in `answers`; what a whole value's leases are, in `book`.
"""

from __future__ import annotations

from collections.abc import Callable

from weftline.engine import messages as msg
from weftline.engine.batching.lanes import Lane
from weftline.engine.crew.crew import Crew
from weftline.engine.messages import Value
from weftline.engine.scheduling import events as ev
from weftline.engine.scheduling.book import Book
from weftline.engine.scheduling.request import OPEN, Feed, Request, Task
from weftline.engine.scheduling.tasks import Tasks
from weftline.pipelines.plan import Plan

PIECE_BYTES = 256
"""What a piece counts beside its bytes, for the objects around it."""


class Feeds:
    """Pure; owned by the scheduler."""

    def __init__(self, plan: Plan, tasks: Tasks, book: Book, crew: Crew, emit: Callable[[ev.Command], None]) -> None:
        self._steps = plan.steps
        self._bytes_max = plan.limits.stream_bytes_max
        self._tasks = tasks
        self._book = book
        self._crew = crew
        self._emit = emit
        self._unsent: dict[tuple[int, int], list[msg.PieceFor]] = {}  # by worker and step: one message for a round

    # from the source

    def pass_on(self, source: Task, slot: int, value: Value) -> None:
        """A task has given a piece of the value in `slot`: it goes to every unit that takes them."""
        request = source.request
        for place in request.route.takers[slot]:
            if request.state != OPEN:
                return
            feed = request.feeds.get(place)
            if feed is None:
                if request.missing[place] < 0:
                    continue  # it will not run, or its stand-in was not needed
                feed = request.feeds[place] = Feed(source)
            if not feed.open:
                continue
            source.said = True
            feed.waiting.append(value)
            feed.unread_bytes += value.size_bytes + PIECE_BYTES
            if feed.task is None and request.missing[place] == 1:  # all else is there
                self._book.advance(request, place)
            if request.state != OPEN:
                return
            if feed.task is not None:
                self._send(feed, feed.task)
                self._hold(feed)
            elif feed.unread_bytes > self._bytes_max or request.missing[place] < 0:
                feed.end()  # it is given the whole, or nothing

    def complete(self, request: Request, place: int, slot: int, value: Value) -> bool:
        """A value is whole: hand it to the unit that was fed its pieces; False when there is no such task any more.

        The task keeps the value's leases as those of any other input.
        """
        feed = request.feeds.get(place)
        task = feed.task if feed is not None else None
        if feed is None or task is None or not feed.open or task.unit.slots[task.unit.feed] != slot:
            return False
        task.keys = (*task.keys, *self._book.take(request, slot))
        timeout_ms = self._steps[task.unit.step].timeout_ms
        if timeout_ms is not None:  # its time counts from here: until now it waited for its input
            self._tasks.timers.add(self._book.now_ms + timeout_ms, ("timeout", task.id))
        if task.worker < 0:  # it was never given a piece, and is as good as any other
            inputs = list(task.inputs)
            inputs[task.unit.feed] = value
            task.inputs, task.feed = tuple(inputs), None
            feed.end()
            return True
        feed.waiting.append(value)
        self._send(feed, task, last=True)
        feed.whole_ms = self._book.now_ms
        feed.end()
        return True

    # to the reader

    def dispatched(self, task: Task) -> None:
        """A fed task has left for its worker: what waited goes with it."""
        feed = task.feed
        if feed is not None and feed.open:
            task.said = True
            self._send(feed, task)
            self.flush()

    def took(self, task: Task) -> None:
        """The worker has handed one more piece to the node."""
        feed = task.feed
        if feed is not None and feed.unread:
            feed.unread_bytes -= feed.unread.popleft()
            self._hold(feed)

    def over(self, request: Request, place: int) -> None:
        """A unit has ended: what fed it goes on for others, or ends too when there are none."""
        feed = request.feeds.get(place)
        if feed is None or request.state != OPEN or feed.source.id not in self._tasks.live:
            return
        if self._is_wanted(feed.source):
            self._hold(feed)
            return
        self._tasks.drop(feed.source)
        self.over(request, feed.source.place)

    def flush(self) -> None:
        """Send what has gathered."""
        unsent, self._unsent = self._unsent, {}
        for (worker, step), pieces in unsent.items():
            self._emit(ev.Send(worker, msg.Feed(step, tuple(pieces))))

    def _send(self, feed: Feed, task: Task, last: bool = False) -> None:
        if task.worker < 0 or not feed.waiting:
            return
        self._crew.members[task.worker].spoke_ms = self._book.now_ms
        to = self._unsent.setdefault((task.worker, task.unit.step), [])
        for value in feed.waiting:
            whole = last and value is feed.waiting[-1]
            to.append(msg.PieceFor(task.id, task.unit.feed, value, whole))
            feed.unread.append(0 if whole else value.size_bytes + PIECE_BYTES)
        feed.waiting.clear()

    # between the two

    def let_go(self, lane: Lane) -> None:
        """Suspects wait for a step: what feeds those that wait behind them goes on."""
        for task in self._tasks.live.values():
            if task.unit.step == lane.index and task.feed is not None and task.worker < 0:
                self._hold(task.feed)

    def _is_behind(self, reader: Task) -> bool:
        """Whether suspects go before a task that waits."""
        return bool(self._tasks.lanes[reader.unit.step].suspects)

    def _is_wanted(self, task: Task) -> bool:
        """Whether anybody will read, or goes on reading, something that a task gives."""
        request, route = task.request, task.request.route
        if task.place in request.called or task.element >= 0:
            return True
        feeds, missing = request.feeds, request.missing
        return any(
            bool(route.outputs_at[slot])
            or any(missing[r] >= 0 or (r in feeds and feeds[r].open) for r in route.readers[slot])
            for slot in task.unit.returns
        )

    def _hold(self, feed: Feed) -> None:
        """Pause the source of a reader that has fallen behind, or let it go on when all of them have caught up.

        Beside a suspect nothing begins, and a suspect begins where nothing else is done: a source does not wait for a
        reader that may wait for its end.
        """
        source, reader = feed.source, feed.task
        waits = reader is not None and reader.worker < 0 and (source.deaths > 0 or self._is_behind(reader))
        feed.slow = feed.open and not waits and feed.unread_bytes > self._bytes_max * (0.5 if feed.slow else 1)
        held = any(one.slow for one in source.request.feeds.values() if one.source is source)
        if held == source.held or source.id not in self._tasks.live:
            return
        source.held = held
        if not source.request.stalled and source.worker >= 0:
            self._crew.members[source.worker].spoke_ms = self._book.now_ms
            self._emit(ev.Send(source.worker, (msg.Pause if held else msg.Resume)(source.unit.step, (source.id,))))
