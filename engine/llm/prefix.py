"""Prefix cache: lookup of pages by chained hash.

Every full page has a key: the SHA-256 of the page before it and of its own tokens, so equal keys mean equal tokens from
the very first one on. The first page that holds anything of the caller's chains to the caller's salt as well: two
callers share the pages that the operator wrote, and no others, so neither can learn from timing what the other asked.

    key(0) = H(H(salt) + tokens 0..15)    key(1) = H(key(0) + tokens 16..31)    ...
    of the first page after the `shared` tokens, k:    key(k) = H(H(key(k - 1) + H(own salt)) + tokens)
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass

from weftline.engine.llm.events import KvLog
from weftline.engine.llm.pages import PagePool
from weftline.engine.llm.retention import worth
from weftline.engine.llm.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PrefixCounts:
    """Tokens asked for when sequences joined, and how many of them were found computed."""

    asked_tokens: int
    hit_tokens: int


class PrefixCache:
    """Knows which page of `pool` holds which beginning. It holds no page: it learns from the pool when one is lost."""

    def __init__(self, pages: int, page_tokens: int, enabled: bool = True) -> None:
        self.pool = PagePool(pages, page_tokens, self._lost)
        self.enabled = enabled
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self.log = KvLog()
        self._asked = 0
        self._hit = 0

    def join(self, sequence: Sequence) -> None:
        """Give a sequence without pages those that hold its beginning; at least one token is left to compute."""
        if sequence.table.pages or sequence.computed:
            raise RuntimeError(f"sequence {sequence.id} joins with {len(sequence.table.pages)} pages; expected none")
        if not self.enabled or sequence.whole:
            return
        for index in range((len(sequence.tokens) - 1) // self.pool.page_tokens):
            page = self._pages.get(self._key(sequence, index))
            if page is None:
                break
            self.pool.share(sequence.table, page)
            if sequence.retention:
                start = index * self.pool.page_tokens
                what = worth(sequence.retention, start, start + self.pool.page_tokens, self.pool.now_ms)
                self.pool.keep(page, what)
        sequence.computed = len(sequence.table.pages) * self.pool.page_tokens

    def count(self, sequence: Sequence) -> None:
        """Note in the counts that `sequence` has just joined for good."""
        self._asked += len(sequence.tokens)
        self._hit += sequence.computed

    def publish(self, sequence: Sequence, before: int, now: int) -> None:
        """Make findable what pages `sequence` filled between `before` and `now` computed tokens, all of them known."""
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
                self.pool.keep(page, worth(sequence.retention, start, start + size, self.pool.now_ms))
                before_it = sequence.hashes[index - 1] if index else None
                self.log.stored(key, before_it, sequence.tokens[start : start + size], sequence.adapter)

    def counts(self) -> PrefixCounts:
        return PrefixCounts(self._asked, self._hit)

    def clear(self) -> None:
        """Forget every page that no sequence holds."""
        self.pool.forget_idle()
        if not self._pages:
            self.log.cleared()

    def _key(self, sequence: Sequence, index: int) -> bytes:
        while len(sequence.hashes) <= index:
            at = len(sequence.hashes) * self.pool.page_tokens
            before = sequence.hashes[-1] if sequence.hashes else hashlib.sha256(sequence.salt).digest()
            if sequence.own_salt and len(sequence.hashes) == sequence.shared // self.pool.page_tokens:
                before = hashlib.sha256(before + hashlib.sha256(sequence.own_salt).digest()).digest()
            tokens = array("q", sequence.tokens[at : at + self.pool.page_tokens])
            sequence.hashes.append(hashlib.sha256(before + tokens.tobytes()).digest())
        return sequence.hashes[index]

    def _lost(self, page: int) -> None:
        key = self._keys.pop(page)
        del self._pages[key]
        self.log.removed(key)
