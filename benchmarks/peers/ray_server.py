"""Ray Serve with identity steps, for a Python that has ray[serve]: HTTP in, a replica in its own process for each step.

    python benchmarks/peers/ray_server.py PORT

`/one` has one step, `/three` a step that calls two others through handles. Prints `ready` when it answers.
"""

import os
import signal
import sys

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

REPLICA = {"max_ongoing_requests": 64, "ray_actor_options": {"num_cpus": 0}}


@serve.deployment(**REPLICA)
class Step:
    async def __call__(self, data: bytes) -> bytes:
        return data


@serve.deployment(**REPLICA)
class First:
    """The first step; `others` are the next ones."""

    def __init__(self, *others):
        self.others = others

    async def __call__(self, request: Request) -> Response:
        data = await request.body()
        for other in self.others:
            data = other.remote(data)
        return Response(data if isinstance(data, bytes) else await data, media_type="application/octet-stream")


def main():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=512 << 20)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    serve.run(First.options(name="one").bind(), name="one", route_prefix="/one")
    others = [Step.options(name=name).bind() for name in ("second", "third")]
    serve.run(First.options(name="first").bind(*others), name="three", route_prefix="/three")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    print("ready", flush=True)
    try:
        signal.pause()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
