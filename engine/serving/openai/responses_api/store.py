"""Store of responses, which requests continue by `previous_response_id`. Pure: time is an argument.

A response is kept with the items of its request and a reference to the response that it continued. A conversation is
therefore stored once, however many of its responses are kept. Each response belongs to one caller: an id of another
caller is not found, like one that never was.

The store is bounded in bytes, in responses, and in the time since a response was last used. Beyond a bound, the caller
with the largest share loses the response that it has not used for the longest time, so that one caller cannot evict
the responses of all others. A response that is evicted or deleted has no id any more; its items stay for as long as a
later response of the conversation is kept.

    store = ResponseStore(bytes_max=64 << 20, responses_max=10_000, age_max_s=86_400)
    store.put("alice", StoredResponse("resp_1", items, response, ("msg_1", "msg_2")), now_s)
    store.get("alice", "resp_1", now_s)
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

OVERHEAD_BYTES, ID_BYTES = 1 << 10, 256
"""Memory of a kept response besides its items and its JSON, and of each of its items' ids; measured by a test."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredResponse:
    """A response and the items of its request.

    items:    list of the input items of its request, each with an id, as MessagePack, whose texts are not escaped.
    response: the response object, as JSON; its `output` has the further items.
    item_ids: ids of both, those of `items` first.
    previous: the response that it continued.
    """

    id: str
    items: bytes
    response: bytes
    item_ids: tuple[str, ...]
    previous: StoredResponse | None = None

    @property
    def size_bytes(self) -> int:
        """Memory of this response, without those that it continued."""
        return len(self.items) + len(self.response) + OVERHEAD_BYTES + ID_BYTES * len(self.item_ids)

    def conversation(self) -> list[StoredResponse]:
        """Return the responses that led to this one, and itself, oldest first."""
        found: list[StoredResponse] = []
        one: StoredResponse | None = self
        while one is not None:
            found.append(one)
            one = one.previous
        return found[::-1]


@dataclass(slots=True)
class _Share:
    """The responses of one caller.

    kept:     by id, with the time of the last use; the one unused for the longest time comes first.
    by_item:  response with an item.
    bytes:    of responses in `kept` and of those that they continued.
    """

    kept: OrderedDict[str, tuple[StoredResponse, float]] = field(default_factory=OrderedDict)
    by_item: dict[str, StoredResponse] = field(default_factory=dict)
    bytes: int = 0


class ResponseStore:
    """Responses by caller and id.

    bytes_max:     most bytes of all responses; 0: none are kept.
    responses_max: most responses.
    age_max_s:     longest time since the last use of a response.
    """

    def __init__(self, bytes_max: int, responses_max: int, age_max_s: float) -> None:
        self._bytes_max, self._responses_max, self._age_max_s = bytes_max, responses_max, age_max_s
        self._shares: dict[str, _Share] = {}
        self._references: Counter[StoredResponse] = Counter()
        self.size_bytes = 0

    @property
    def on(self) -> bool:
        """True if responses are kept at all."""
        return self._bytes_max > 0

    def __len__(self) -> int:
        return sum(len(share.kept) for share in self._shares.values())

    def fits(self, response: StoredResponse) -> bool:
        """Return True if a response and those that it continued can be kept together."""
        return self.on and sum(one.size_bytes for one in response.conversation()) <= self._bytes_max

    def put(self, caller: str, response: StoredResponse, now_s: float) -> bool:
        """Keep a response, and evict others for it; False if it is larger than the store or than its caller's share."""
        self.expire(now_s)
        if not self.fits(response):
            return False
        share = self._shares.setdefault(caller, _Share())
        share.kept[response.id] = response, now_s
        share.by_item |= dict.fromkeys(response.item_ids, response)
        self._retain(share, response)
        while len(self) > self._responses_max:
            self._evict_oldest(max(self._shares, key=lambda one: len(self._shares[one].kept)))
        while self.size_bytes > self._bytes_max:
            self._evict_oldest(max(self._shares, key=lambda one: self._shares[one].bytes))
        return response.id in share.kept

    def get(self, caller: str, id: str, now_s: float) -> StoredResponse | None:
        """Return a response of a caller, which counts as its use; None if the caller has none of that id."""
        self.expire(now_s)
        share = self._shares.get(caller)
        if share is None or id not in share.kept:
            return None
        response, _ = share.kept.pop(id)
        share.kept[id] = response, now_s
        return response

    def with_item(self, caller: str, item_id: str, now_s: float) -> StoredResponse | None:
        """Return the newest response of a caller that has an item, which counts as its use."""
        share = self._shares.get(caller)
        found = None if share is None else share.by_item.get(item_id)
        return None if found is None else self.get(caller, found.id, now_s)

    def delete(self, caller: str, id: str, now_s: float) -> bool:
        """Delete a response of a caller; False if the caller has none of that id."""
        if self.get(caller, id, now_s) is None:
            return False
        self._remove(caller, id)
        return True

    def expire(self, now_s: float) -> float | None:
        """Remove responses that are too old; return when the next one will be, None if none is kept."""
        due: float | None = None
        for caller in list(self._shares):
            while caller in self._shares:
                id, (_, used_s) = next(iter(self._shares[caller].kept.items()))
                if used_s + self._age_max_s > now_s:
                    due = min(used_s + self._age_max_s, due if due is not None else float("inf"))
                    break
                self._remove(caller, id)
        return due

    def kept(self) -> Iterator[StoredResponse]:
        """Yield every response that has an id."""
        for share in self._shares.values():
            yield from (response for response, _ in share.kept.values())

    def _evict_oldest(self, caller: str) -> None:
        self._remove(caller, next(iter(self._shares[caller].kept)))

    def _remove(self, caller: str, id: str) -> None:
        share = self._shares[caller]
        response, _ = share.kept.pop(id)
        for item in response.item_ids:
            if share.by_item.get(item) is response:
                del share.by_item[item]
        self._release(share, response)
        if not share.kept:
            del self._shares[caller]

    def _retain(self, share: _Share, response: StoredResponse) -> None:
        """Count a reference to a response; the first one also counts as a reference to the response before it."""
        one: StoredResponse | None = response
        while one is not None:
            self._references[one] += 1
            if self._references[one] > 1:
                return
            share.bytes += one.size_bytes
            self.size_bytes += one.size_bytes
            one = one.previous

    def _release(self, share: _Share, response: StoredResponse) -> None:
        one: StoredResponse | None = response
        while one is not None:
            self._references[one] -= 1
            if self._references[one] > 0:
                return
            del self._references[one]
            share.bytes -= one.size_bytes
            self.size_bytes -= one.size_bytes
            one = one.previous
