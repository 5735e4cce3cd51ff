"""The client side of `benchmarks.ingress`, in a process of its own: stock tritonclient calls, or HTTP, closed loop.

    python benchmarks/ingress_client.py URL MODEL SIZE_BYTES --callers 8 --seconds 4 [--shared-memory]

URL is HOST:PORT for gRPC. For a peer without gRPC it is http://HOST:PORT: the tensor's bytes are then posted to /MODEL.
Prints one line of JSON: calls, seconds, p50_ms, p99_ms. It needs tritonclient and numpy only, so that it runs in a
peer's environment too. Callers are threads with the synchronous client. The first calls are not counted; then each
makes at least one.
"""

import argparse
import http.client
import json
import threading
import time

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException


class Caller:
    """One caller with its own tensors, in its own memory region when `shared`."""

    def __init__(self, client, model, size, shared, name):
        self.client, self.model, self.shared, self.name, self.handles = client, model, shared, name, []
        data = np.arange(size, dtype=np.uint8)
        self.input = grpcclient.InferInput("x", [size], "UINT8")
        self.outputs = None
        if shared:
            for role in ("in", "out"):
                region = f"{name}-{role}"
                handle = shm.create_shared_memory_region(region, f"/{region}", size)
                client.register_system_shared_memory(region, f"/{region}", size)
                self.handles.append((region, handle))
            shm.set_shared_memory_region(self.handles[0][1], [data])
            self.input.set_shared_memory(f"{name}-in", size)
            output = grpcclient.InferRequestedOutput("y")
            output.set_shared_memory(f"{name}-out", size)
            self.outputs = [output]
        else:
            self.input.set_data_from_numpy(data)

    def call(self):
        return self.client.infer(self.model, [self.input], outputs=self.outputs)

    def check(self, size):
        """See once that the answer is the input."""
        answer = self.call()
        if self.shared:
            got = shm.get_contents_as_numpy(self.handles[1][1], np.uint8, [size])
        else:
            got = answer.as_numpy("y")
        if not np.array_equal(got.reshape(-1), np.arange(size, dtype=np.uint8)):
            raise SystemExit("the answer is not the input")

    def close(self):
        for region, handle in self.handles:
            self.unregister(region)
            shm.destroy_shared_memory_region(handle)

    def unregister(self, region):
        """Unregister a region; Triton still holds it for a moment after its last answer."""
        for attempt in range(50):
            try:
                return self.client.unregister_system_shared_memory(region)
            except InferenceServerException:
                if attempt == 49:
                    raise
                time.sleep(0.05)


class HttpCaller:
    """One caller with a connection of its own."""

    def __init__(self, address, model, size):
        self.connection, self.path = http.client.HTTPConnection(address, timeout=60), f"/{model}"
        self.body = np.arange(size, dtype=np.uint8).tobytes()

    def call(self):
        self.connection.request("POST", self.path, self.body)
        answer = self.connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise SystemExit(f"{answer.status}: {body[:200]!r}")
        return body

    def check(self, size):
        if self.call() != self.body:
            raise SystemExit("the answer is not the input")

    def close(self):
        self.connection.close()


def callers_of(url, model, size, callers, shared):
    if url.startswith("http://"):
        return [HttpCaller(url.removeprefix("http://"), model, size) for _ in range(callers)]
    client = grpcclient.InferenceServerClient(url)
    return [Caller(client, model, size, shared, f"weftline-bench-{time.time_ns()}-{at}") for at in range(callers)]


def measure(url, model, size, callers, seconds, shared, warm):
    them = callers_of(url, model, size, callers, shared)
    times: list[float] = []
    start = threading.Barrier(callers + 1, timeout=60)

    def go(caller):
        mine = []
        for _ in range(warm if size < 1 << 20 else 2):
            caller.call()
        start.wait()
        began = time.perf_counter()
        stop = began + seconds
        while not mine or began < stop:
            caller.call()
            ended = time.perf_counter()
            mine.append(ended - began)
            began = ended
        times.extend(mine)

    try:
        them[0].check(size)
        threads = [threading.Thread(target=go, args=(caller,)) for caller in them]
        for thread in threads:
            thread.start()
        start.wait()
        began = time.perf_counter()
        for thread in threads:
            thread.join()
        took = time.perf_counter() - began
    finally:
        for caller in them:
            caller.close()
    times.sort()
    at = lambda share: round(1000 * times[min(len(times) - 1, int(len(times) * share))], 4)  # noqa: E731
    return {"calls": len(times), "seconds": took, "rate": len(times) / took, "p50_ms": at(0.5), "p99_ms": at(0.99)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("size", type=int)
    parser.add_argument("--callers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--shared-memory", action="store_true")
    parser.add_argument("--warm", type=int, default=20)
    o = parser.parse_args()
    print(json.dumps(measure(o.url, o.model, o.size, o.callers, o.seconds, o.shared_memory, o.warm)))


if __name__ == "__main__":
    main()
