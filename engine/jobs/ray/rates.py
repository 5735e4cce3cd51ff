"""The account of the tokens' rates of a Ray service: one replica of a deployment of its own, for all engines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from weftline.engine.serving.auth.rates import TokenRates
from weftline.engine.serving.auth.tokens import TokenFile
from weftline.errors import Unavailable

TAKE_S = 5.0
"""Longest wait for the account; a restart of its replica takes about two seconds."""


class RateReplica:
    """Holds the account. tokens: path of the token file."""

    def __init__(self, tokens: str) -> None:
        self._rates = TokenRates(TokenFile(Path(tokens)))

    async def take(self, token: str) -> float:
        return self._rates.take_now(token)

    async def spend(self, token: str, cost: float) -> None:
        self._rates.spend(token, cost)


class RemoteRates:
    """Implements `RateAccount` over Ray Serve's handle of a RateReplica."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def take(self, token: str) -> float:
        from ray.exceptions import RayError

        try:
            async with asyncio.timeout(TAKE_S):
                return float(await self._handle.take.remote(token))
        except (RayError, TimeoutError):
            raise Unavailable("the account of the tokens' rates does not respond; retry in a moment") from None

    def spend(self, token: str, cost: float) -> None:
        if cost > 0:
            self._handle.spend.remote(token, cost)
