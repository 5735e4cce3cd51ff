"""Authorisation of every call by method and token; denies unknown methods.

    caller = gate.admit("/inference.GRPCInferenceService/ModelInfer", authorization_values)
    await gate.charge(caller)           # a request of the caller's rate
    caller.check("ocr")                 # once the request is read and its model known

`methods.py` lists the methods; every other method is denied. Without a token file callers are not identified, and
each may do everything, which `exposure.py` allows on loopback only.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from weftline.engine.serving.auth.methods import ADMIN, INFER, MEMORY, METHODS, METRICS, OPEN, READ
from weftline.engine.serving.auth.plain import one_line, redacted
from weftline.engine.serving.auth.rates import RateAccount, TokenRates
from weftline.engine.serving.auth.token_entries import Token
from weftline.engine.serving.auth.tokens import TOKEN_CHARS_MAX, TokenFile
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.v2.messages import InferRequest
from weftline.engine.token_bucket import RateLimit
from weftline.errors import AccessDenied, LimitReached

DENIALS_LOGGED_PER_S, DENIALS_LOGGED_AT_ONCE = 1.0, 10.0
"""Rate of logged denials, so that guessing tokens does not fill a disk."""

NO_TOKEN = "this server wants a token: send the header `authorization: Bearer TOKEN`"
BAD_TOKEN = "the token is not valid here"
BAD_HEADER = "the authorization header is not `Bearer TOKEN`, sent once"
BAD_KEY = "the x-api-key header is not a token, sent once"
TWO_TOKENS = "the headers authorization and x-api-key have different tokens; send one of them"
NOT_ALLOWED = "the token does not allow this method"
NOT_THIS_MODEL = "the token does not allow this model"
NO_MEMORY = "the token does not allow shared memory"
NO_METHOD = "there is no such method"

DEFAULT_LIMITS = ServeLimits()

_BEARER = re.compile(r"[ \t]*+bearer [ \t]*+([!-~]++)[ \t]*+", re.IGNORECASE | re.ASCII)

_KEY = re.compile(r"[!-~]++", re.ASCII)

_log = logging.getLogger("weftline.access")


def _spend_nothing(cost: float) -> None:
    """Spend nothing: without tokens there are no rates."""


def _log_nothing(why: str) -> None:
    """Log nothing: callers without a token are denied before they reach a model."""


@dataclass(frozen=True, slots=True)
class Caller:
    """An identified caller.

    name:   as in the token file; '' without one.
    admin:  has every right, among them load, unload and the reason why a model is not ready.
    models: names of the models it may call and see; None: every one.
    memory: may use shared memory.
    limited: its token has a rate, so that its requests are charged.
    sha256: digest of its token, so that a stream ends when the token is replaced under the same name.
    deny:   logs a denied model or region, with the reason.
    spend:  counts what an admitted request costs in its rate beyond one request: a batch of 256 costs 255 more.
    """

    name: str
    admin: bool
    models: frozenset[str] | None = None
    memory: bool = False
    limited: bool = field(default=False, compare=False)
    sha256: bytes = field(default=b"", repr=False)
    deny: Callable[[str], None] = field(default=_log_nothing, repr=False, compare=False)
    spend: Callable[[float], None] = field(default=_spend_nothing, repr=False, compare=False)

    def may_use_model(self, model: str) -> bool:
        """Return True if the caller may call and see this model."""
        return self.models is None or self.admin or model in self.models

    def check(self, model: str) -> None:
        """Raise AccessDenied unless the caller may call the model, known or not, so that names stay secret."""
        if self.models is not None and not self.may_use_model(model):
            self.deny(NOT_THIS_MODEL)
            raise AccessDenied(NOT_THIS_MODEL)

    def check_regions(self, request: InferRequest) -> None:
        """Raise AccessDenied when a request names a region and its caller may not use them."""
        if not self.memory and (
            any(one.region is not None for one in request.inputs)
            or any(one.region is not None for one in request.outputs)
        ):
            self.deny(NO_MEMORY)
            raise AccessDenied(NO_MEMORY)


UNRESTRICTED = Caller("", True, memory=True)
"""Caller of a server without a token file."""

ANONYMOUS = Caller("", False, frozenset())
"""Caller without a token, of a method that requires none."""


class Gate:
    """Admit calls or refuse them. Used from one event loop; only `charge` may wait.

    tokens: None: no token is required.
    clock:  seconds, for rates.
    rates:  account of the tokens' rates, shared by the gates of a server's processes; None: this gate's own.
    """

    def __init__(
        self,
        tokens: TokenFile | None,
        limits: ServeLimits = DEFAULT_LIMITS,
        clock: Callable[[], float] = time.monotonic,
        *,
        rates: RateAccount | None = None,
    ) -> None:
        self._tokens = tokens
        self._chars_max = min(TOKEN_CHARS_MAX, limits.metadata_bytes_max)
        self._clock = clock
        self._rates = rates if rates is not None else TokenRates(tokens, clock)
        self._refused_until_s: dict[str, float] = {}  # by token: when the account has its next permit
        self._denials = RateLimit(DENIALS_LOGGED_PER_S, DENIALS_LOGGED_AT_ONCE)
        self._unlogged = 0

    @property
    def asks_tokens(self) -> bool:
        """True if callers must present a token."""
        return self._tokens is not None

    def admit(self, method: str, authorization: Sequence[str | bytes], keys: Sequence[str] = ()) -> Caller:
        """`enter`, with every value of the call's `authorization` header or metadata, as received.

        keys: values of the header `x-api-key`, in which Anthropic's clients send the token.
        """
        if self._tokens is None:
            return self.enter(method, None)
        try:
            token = presented(bearer(authorization), keys)
        except AccessDenied as denied:
            if METHODS.get(method) is OPEN:
                return ANONYMOUS
            self._log_denial(method, "", str(denied))
            raise
        return self.enter(method, token)

    def enter(self, method: str, token: str | None) -> Caller:
        """Return the caller of `method`; `Caller.check` decides about models, once the request is read.

        method: `/inference.GRPCInferenceService/ModelInfer`, or `HTTP POST /v1/chat/completions`.
        AccessDenied without the right; LimitReached, with a retry time, for a request of a caller whose rate is known
        to be used up.
        """
        kind = METHODS.get(method)
        if self._tokens is None:
            if kind is None:
                raise AccessDenied(NO_METHOD)
            return UNRESTRICTED
        entry = self._tokens.find(token) if token and len(token) <= self._chars_max else None
        if kind is OPEN:  # a probe needs no token; with a token, it also lists the models that are not ready
            return ANONYMOUS if entry is None else self._caller(entry, method)
        if entry is None:
            self._log_denial(method, "", BAD_TOKEN if token else NO_TOKEN)
            raise AccessDenied(BAD_TOKEN if token else NO_TOKEN, known=False)
        if kind is None or not _allows(entry, kind):
            self._log_denial(method, entry.name, NOT_ALLOWED)
            raise AccessDenied(NO_METHOD if kind is None else NOT_ALLOWED)
        if kind is INFER:
            self._check_refused(entry)
        return self._caller(entry, method)

    async def charge(self, caller: Caller) -> None:
        """Count one request of an admitted caller: an inference call, or a message of a stream.

        LimitReached, with a retry time, above the caller's rate; AccessDenied once its token is gone or replaced, or
        has other rights than when it was admitted.
        """
        if self._tokens is None:
            return
        entry = self._tokens.named(caller.name)
        if entry is None or self._caller(entry, "") != caller:
            raise AccessDenied(BAD_TOKEN, known=False)
        if entry.requests_per_s is None:
            return
        self._check_refused(entry)
        wait_s = await self._rates.take(entry.name)
        if wait_s > 0:
            self._refused_until_s[entry.name] = self._clock() + wait_s
            raise _above_rate(entry, wait_s)

    def _check_refused(self, entry: Token) -> None:
        """Raise LimitReached while the account is known to have no permit, without asking it again."""
        until_s = self._refused_until_s.get(entry.name)
        if until_s is None:
            return
        wait_s = until_s - self._clock()
        if wait_s > 0 and entry.requests_per_s is not None:
            raise _above_rate(entry, wait_s)
        del self._refused_until_s[entry.name]

    def _caller(self, entry: Token, method: str) -> Caller:
        memory = entry.memory or entry.admin
        deny = partial(self._log_denial, method, entry.name)
        limited = entry.requests_per_s is not None
        spend = partial(self._rates.spend, entry.name) if limited else _spend_nothing
        return Caller(entry.name, entry.admin, entry.models, memory, limited, entry.sha256, deny, spend)

    def _log_denial(self, method: str, name: str, why: str) -> None:
        if self._denials.try_take(self._clock()) > 0:
            self._unlogged += 1
            return
        more = f" ({self._unlogged} more were not logged)" if self._unlogged else ""
        self._unlogged = 0
        who = f"token {name}" if name else "a caller"
        _log.warning("denied %s to %s: %s%s", redacted(one_line(method, 200)), who, why, more)


def bearer(values: Sequence[str | bytes]) -> str | None:
    """Return the token of an `authorization` header, None when there is none; AccessDenied when it is anything else.

    The scheme is case-insensitive (RFC 9110, 11.1). A second header is refused: a proxy could check the other one.
    """
    if not values:
        return None
    value = values[0] if len(values) == 1 else ""
    found = _BEARER.fullmatch(value.decode("latin-1") if isinstance(value, bytes) else value)
    if found is None:
        raise AccessDenied(BAD_HEADER, known=False)
    return found[1]


def presented(token: str | None, keys: Sequence[str]) -> str | None:
    """Return the token of a call: that of `authorization`, or the value of `x-api-key`; AccessDenied for two."""
    if not keys:
        return token
    if len(keys) != 1 or _KEY.fullmatch(keys[0]) is None:
        raise AccessDenied(BAD_KEY, known=False)
    if token not in (None, keys[0]):
        raise AccessDenied(TWO_TOKENS, known=False)
    return keys[0]


def _above_rate(entry: Token, wait_s: float) -> LimitReached:
    rate = f"{entry.requests_per_s:g} requests a second, {entry.burst_calls:g} at once"
    return LimitReached(f"the token allows {rate}; the next is possible in {wait_s:.3g} s", wait_s)


def _allows(entry: Token, kind: str) -> bool:
    if entry.admin:
        return kind in (READ, INFER, MEMORY, METRICS, ADMIN)
    if kind == MEMORY:
        return entry.memory
    if kind == METRICS:
        return entry.metrics
    return kind in (READ, INFER)
