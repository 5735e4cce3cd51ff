"""Request routing of a Ray service: any replica of the cluster, the less loaded of two random ones.

Ray Serve's default routes all requests of a proxy to replicas of the proxy's own machine, until these have
`ONGOING_MAX` requests. Clients that know one address would then use the replicas of one machine. The additional hop
over the network costs less than a request that waits. Ray sends this module to its proxies by value: it may import
Ray and the standard library only.
"""

from __future__ import annotations

import random

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica


class SpreadRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]  # Ray's classes have no types
    """Offer two random replicas for each request; Ray Serve sends it to the one with the shorter queue."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # while both are full; else Ray Serve retries at once
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
