"""KV cache: page pool and prefix cache.

The KV memory is divided into pages of a fixed number of tokens. A sequence's *page table* lists its pages in token
order; sequences with a common prefix share pages. At every moment each page is

    used   in at least one table (its reference count is the number of tables),
    idle   in no table, but registered in the prefix cache, or
    free.

and used + idle + free = all. When too few adjacent pages are free, idle ones are evicted: lowest retention priority
first, least recently used among equals (`weftline.engine.llm.retention`).

A shared page is read-only. A sequence that must write to one first replaces it with a page of its own (`try_own`,
copy-on-write).

Adjacent pages can be read as one slice, without a gather, which is most of the cost of attention on a CPU. The pool
therefore allocates neighbours where it can: a table grows into the page behind its last one, and a new table is placed
where its expected growth fits. Only speed depends on it.

    map   U U U h h . . U U h . . . I I .      U used, I idle, h free but reserved for growth of a table, . free

Every full page has a key: the SHA-256 of the previous page's key and its own tokens, so equal keys mean equal tokens
from the first one on. The first page with tokens of the caller is also keyed by the caller's salt: two callers share
the operator's pages only, so timing reveals nothing about another caller's prompts.

    key(0) = H(H(salt) + tokens 0..15)    key(1) = H(key(0) + tokens 16..31)    ...
    of the first page after the `shared` tokens, k:    key(k) = H(H(key(k - 1) + H(own salt)) + tokens)

The tokens of two pictures are the same placeholders, so the key of a page with a picture's features contains the hash
of the picture as well.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weftline.engine.llm.retention import USUAL, IdlePages, PagePriority, page_priority
from weftline.engine.llm.vision.prompt import page_key

if TYPE_CHECKING:
    from weftline.engine.llm.sequence import Sequence

_epochs = itertools.count()
_FREE, _RESERVED, _TAKEN = 0, 1, 2


@dataclass(slots=True, eq=False)
class PageTable:
    """The pages of one sequence, in token order; only the pool changes it.

    run:      index in `pages` from which on all pages are adjacent in memory.
    reserved: free pages behind the last one, preferred for its growth.
    epoch:    changes whenever pages change other than by appending; unique among all tables.
    """

    pages: list[int] = field(default_factory=list)
    run: int = 0
    reserved: range = range(0)
    epoch: int = field(default_factory=_epochs.__next__)

    def _append(self, page: int) -> None:
        if self.pages and self.pages[-1] + 1 != page:
            self.run = len(self.pages)
        self.pages.append(page)

    def _replace(self, index: int, page: int) -> None:
        pages = self.pages
        pages[index] = page
        self.epoch = next(_epochs)
        breaks = (at for at in range(len(pages) - 1, 0, -1) if pages[at - 1] + 1 != pages[at])
        self.run = next(breaks, 0)


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by state; used + idle + free is the size of the pool."""

    used: int
    idle: int
    free: int


class PagePool:
    """Allocates `pages` pages of `page_tokens` tokens each. `evicted` is called with each evicted page."""

    def __init__(self, pages: int, page_tokens: int, evicted: Callable[[int], None] = lambda page: None) -> None:
        if pages < 1 or page_tokens < 1:
            raise ValueError(f"a pool of {pages} pages of {page_tokens} tokens; both are at least 1")
        self.size = pages
        self.page_tokens = page_tokens
        self._evicted = evicted
        self._map = bytearray(pages)
        self._references = [0] * pages
        self._kept: dict[int, PagePriority] = {}
        self._idle = IdlePages()
        self._free = pages
        self.now_ms = 0.0

    @property
    def available(self) -> int:
        """Return the number of pages that could be allocated, idle ones included."""
        return self._free + len(self._idle)

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages for `tokens` tokens."""
        return -(-tokens // self.page_tokens)

    def counts(self) -> PageCounts:
        return PageCounts(self.size - self.available, len(self._idle), self._free)

    def try_grow(self, table: PageTable, count: int, room: int = 0) -> bool:
        """Append `count` pages to `table`; return False and change nothing when there are too few.

        room: expected further growth in pages; used to choose a place.
        """
        if count > self.available:
            return False
        if count < 1:
            return True
        if not self._has_neighbours(table, count):
            self._evict(count, count + room)
        for page in self._choose(table, count, room):
            self._map[page] = _TAKEN
            self._references[page] = 1
            table._append(page)
        self._free -= count
        return True

    def share(self, table: PageTable, page: int) -> None:
        """Append `page`, which holds the next tokens of `table`, without copying it."""
        if self._references[page] == 0:
            if page not in self._idle:
                raise RuntimeError(f"page {page} is free and cannot be shared")
            self._idle.remove(page)
        self._references[page] += 1
        table._append(page)

    def drop(self, table: PageTable) -> None:
        """Release all pages of `table`, last ones first, so that common prefixes are evicted last."""
        for page in reversed(table.pages):
            if self._references[page] < 1:
                raise RuntimeError(f"page {page} was released more often than it was allocated")
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._kept:
                    self._idle.add(page, self._kept[page], self.now_ms)
                else:
                    self._map[page] = _FREE
                    self._free += 1
        self._unreserve(table)
        table.pages.clear()
        table.run = 0
        table.epoch = next(_epochs)

    def references(self, page: int) -> int:
        """Return the number of tables that contain `page`."""
        return self._references[page]

    def is_shared(self, table: PageTable, index: int) -> bool:
        """Return whether other tables share the page at `index` of `table`, so that it is read-only."""
        return index < len(table.pages) and self._references[table.pages[index]] > 1

    def try_own(self, table: PageTable, index: int) -> tuple[int, int] | None:
        """Replace the shared page at `index` by a new one; return (old, new), or None when there is no page."""
        if self.available < 1:
            return None
        old = table.pages[index]
        lone = PageTable()
        self.try_grow(lone, 1)
        new = lone.pages[0]
        self._references[old] -= 1
        table._replace(index, new)
        return old, new

    def keep(self, page: int, priority: PagePriority = USUAL) -> None:
        """Register `page` as cached: when released it becomes idle instead of free.

        Of two priorities the one that is higher now applies; of equal ones the one that lasts longer.
        """
        before = self._kept.get(page, priority)
        self._kept[page] = max(before, priority, key=lambda one: one.rank(self.now_ms))

    def resize(self, pages: int) -> int:
        """Grow or shrink to `pages`, but not below the last used page; return the new size.

        Idle pages beyond the new end are evicted.
        """
        if pages < self.size:
            last_used = next((p for p in range(self.size - 1, -1, -1) if self._references[p]), -1)
            pages = max(pages, last_used + 1, 1)
            for page in [p for p in self._idle if p >= pages]:
                self._idle.remove(page)
                self._evict_page(page)
        self._free += pages - self.size
        self._map = self._map[:pages] + bytearray(max(0, pages - self.size))
        self._references = self._references[:pages] + [0] * max(0, pages - self.size)
        self.size = pages
        return pages

    def evict_idle(self) -> None:
        """Evict every idle page."""
        self._evict(self.size, self.size)

    def _has_neighbours(self, table: PageTable, count: int) -> bool:
        """Return whether the `count` pages behind the table's last one are free and not reserved by another table."""
        if not table.pages:
            return False
        start = table.pages[-1] + 1
        behind = range(start, start + count)
        return behind.stop <= self.size and all(
            self._map[page] == _FREE or (self._map[page] == _RESERVED and page in table.reserved) for page in behind
        )

    def _choose(self, table: PageTable, count: int, room: int) -> list[int]:
        if self._has_neighbours(table, count):
            start = table.pages[-1] + 1
            return list(range(start, start + count))
        self._unreserve(table)
        start = self._map.find(bytes(count + room))
        if start >= 0:
            table.reserved = range(start + count, start + count + room)
            self._map[table.reserved.start : table.reserved.stop] = bytes([_RESERVED]) * room
            return list(range(start, start + count))
        start = self._map.find(bytes(count))
        if start >= 0:
            return list(range(start, start + count))
        found: list[int] = []
        for state in (_FREE, _RESERVED):
            page = -1
            while len(found) < count and (page := self._map.find(state, page + 1)) >= 0:
                found.append(page)
        return sorted(found)

    def _evict(self, must: int, wanted: int) -> None:
        """Evict idle pages until `must` are free, and then up to `wanted` in the hope that some become adjacent."""
        if self._free >= must and self._map.find(bytes(must)) >= 0:
            return
        while self._idle and self._free < wanted:
            self._evict_page(self._idle.pop(self.now_ms))

    def _evict_page(self, page: int) -> None:
        del self._kept[page]
        self._map[page] = _FREE
        self._free += 1
        self._evicted(page)

    def _unreserve(self, table: PageTable) -> None:
        for page in table.reserved:
            if page < self.size and self._map[page] == _RESERVED:
                self._map[page] = _FREE
        table.reserved = range(0)

    def check(self, tables: list[PageTable]) -> None:
        """Raise RuntimeError unless the reference counts agree with `tables`, all existing tables."""
        counted = [0] * self.size
        for table in tables:
            for page in table.pages:
                counted[page] += 1
        if counted != self._references:
            wrong = [p for p in range(self.size) if counted[p] != self._references[p]]
            raise RuntimeError(f"reference counts of pages {wrong[:8]} disagree with the tables")
        taken = sum(state == _TAKEN for state in self._map)
        used = sum(count > 0 for count in counted)
        if taken != used + len(self._idle) or self._free != self.size - taken:
            counts = f"{used} used, {len(self._idle)} idle, {self._free} free"
            raise RuntimeError(f"{counts}, but {taken} taken of {self.size}")
        if any(counted[page] for page in self._idle) or not set(self._idle) <= set(self._kept):
            raise RuntimeError("an idle page is in a table, or was never kept")


@dataclass(frozen=True, slots=True)
class PrefixCounts:
    """Tokens of joined sequences, and how many of them were found in the cache."""

    asked_tokens: int
    hit_tokens: int


class PrefixCache:
    """Maps prefix keys to pages of `pool`. It holds no references: the pool calls it when a page is evicted."""

    def __init__(self, pages: int, page_tokens: int, enabled: bool = True) -> None:
        self.pool = PagePool(pages, page_tokens, self._on_evicted)
        self.enabled = enabled
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._asked = 0
        self._hit = 0

    def join(self, sequence: Sequence) -> None:
        """Add the cached pages of a sequence's prefix to its table; at least one token is left to compute."""
        if sequence.table.pages or sequence.computed:
            raise RuntimeError(f"sequence {sequence.id} joins with {len(sequence.table.pages)} pages; expected none")
        if not self.enabled or sequence.skips_prefix_cache:
            return
        for index in range((len(sequence.tokens) - 1) // self.pool.page_tokens):
            page = self._pages.get(self._key(sequence, index))
            if page is None:
                break
            self.pool.share(sequence.table, page)
            if sequence.retention:
                start = index * self.pool.page_tokens
                stop = start + self.pool.page_tokens
                self.pool.keep(page, page_priority(sequence.retention, start, stop, self.pool.now_ms))
        sequence.computed = len(sequence.table.pages) * self.pool.page_tokens

    def count(self, sequence: Sequence) -> None:
        """Count a sequence that has joined a round."""
        self._asked += len(sequence.tokens)
        self._hit += sequence.computed

    def publish(self, sequence: Sequence, before: int, now: int) -> None:
        """Register the pages that `sequence` filled between `before` and `now` computed tokens."""
        filled = range(before // self.pool.page_tokens, now // self.pool.page_tokens)
        if not self.enabled or not filled:
            return
        for index in filled:
            key, page = self._key(sequence, index), sequence.table.pages[index]
            if key not in self._pages and page not in self._keys:
                size = self.pool.page_tokens
                start = index * size
                self._pages[key] = page
                self._keys[page] = key
                self.pool.keep(page, page_priority(sequence.retention, start, start + size, self.pool.now_ms))

    def counts(self) -> PrefixCounts:
        return PrefixCounts(self._asked, self._hit)

    def clear(self) -> None:
        """Evict every page that no sequence holds."""
        self.pool.evict_idle()

    def _key(self, sequence: Sequence, index: int) -> bytes:
        while len(sequence.hashes) <= index:
            at = len(sequence.hashes) * self.pool.page_tokens
            before = sequence.hashes[-1] if sequence.hashes else hashlib.sha256(sequence.salt).digest()
            if sequence.own_salt and len(sequence.hashes) == sequence.shared // self.pool.page_tokens:
                before = hashlib.sha256(before + hashlib.sha256(sequence.own_salt).digest()).digest()
            tokens = array("q", sequence.tokens[at : at + self.pool.page_tokens])
            pictures = page_key(sequence.images, at, at + self.pool.page_tokens) if sequence.images else b""
            sequence.hashes.append(hashlib.sha256(before + tokens.tobytes() + pictures).digest())
        return sequence.hashes[index]

    def _on_evicted(self, page: int) -> None:
        del self._pages[self._keys.pop(page)]
