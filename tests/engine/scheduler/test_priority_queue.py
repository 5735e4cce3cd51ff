"""A line finds the most urgent item, the oldest and the one due first, whatever was taken out in between."""

import math
import random

from weftline.engine.scheduler.priority_queue import SWEEP_MIN, PriorityQueue, QueuedItem


class Book:
    """A line and the map of what is alive in it, as a Batcher keeps them."""

    def __init__(self) -> None:
        self.alive: dict[int, QueuedItem] = {}
        self.line = PriorityQueue("g", self.alive)
        self.serial = 0

    def add(self, item: int, key: float, arrived_ms: float = 0.0, due_ms: float = math.inf) -> None:
        self.serial += 1
        entry = QueuedItem(key, self.serial, item, arrived_ms, due_ms, self.line)
        self.alive[item] = entry
        self.line.add(entry)

    def discard(self, item: int) -> None:
        del self.alive[item]
        self.line.removed()


def test_items_leave_by_key_and_equal_keys_by_arrival() -> None:
    book = Book()
    for item, key in ((1, 5.0), (2, 3.0), (3, 5.0), (4, 4.0), (5, 3.0)):
        book.add(item, key)
    assert book.line.pop(5) == [2, 5, 4, 1, 3]
    assert book.line.size == 0 and book.line.first() is None and not book.alive


def test_an_empty_line_has_neither_an_oldest_nor_a_due_item() -> None:
    line = Book().line
    assert line.oldest_ms() == line.due_ms() == math.inf
    assert line.due_first() is None


def test_the_first_due_is_found_in_the_queue_and_in_the_heaps() -> None:
    book = Book()
    book.add(1, 10.0, due_ms=100.0)
    book.add(2, 20.0, due_ms=90.0)
    book.add(3, 5.0)
    first = book.line.due_first()
    assert first is not None and first.item == 2 and book.line.due_ms() == 90.0
    book.discard(2)
    first = book.line.due_first()
    assert first is not None and first.item == 1 and book.line.due_ms() == 100.0
    book.discard(1)
    assert book.line.due_first() is None and book.line.due_ms() == math.inf


def test_an_id_that_comes_back_is_a_new_item() -> None:
    book = Book()
    book.add(1, 1.0)
    book.add(2, 2.0)
    book.discard(1)
    book.add(1, 3.0)
    assert book.line.pop(2) == [2, 1]


def test_what_is_gone_is_swept() -> None:
    book, chance = Book(), random.Random(1)
    book.add(-1, -1.0)
    for item in range(5000):
        book.add(item, chance.random(), arrived_ms=chance.random(), due_ms=chance.random())
        if item >= 10:
            book.discard(item - 10)
    line = book.line
    assert line.size == 11
    for entries in (line._queue, line._heap, line._arrivals, line._dues):
        assert len(entries) <= 2 * line.size + SWEEP_MIN


def test_it_agrees_with_sorting() -> None:
    chance = random.Random(2)
    for _ in range(200):
        book, model = Book(), {}
        for item in range(chance.randrange(1, 40)):
            entry = (float(chance.randrange(5)), float(chance.randrange(5)), chance.choice([3.0, 4.0, math.inf]))
            book.add(item, *entry)
            model[item] = entry
            if chance.random() < 0.4:
                gone = chance.choice(list(model))
                del model[gone]
                book.discard(gone)
            first = book.line.first()
            assert (first.item if first else None) == min(model, key=lambda one: (model[one][0], one), default=None)
            assert book.line.oldest_ms() == min((arrived for _, arrived, _ in model.values()), default=math.inf)
            assert book.line.due_ms() == min((due for _, _, due in model.values()), default=math.inf)
        order = sorted(model, key=lambda one: (model[one][0], one))
        assert book.line.pop(len(order)) == order
