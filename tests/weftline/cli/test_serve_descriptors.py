"""`weftline serve` when strangers' connections take every descriptor that its processes may have."""

import http.client
import resource
import socket
from pathlib import Path

import psutil
import pytest

from tests.weftline.served import ask, serving, wait_until

PIPELINE = """weftline: 1
name: shout
inputs: {words: text}
steps: {say: {node: echo, inputs: {value: words}}}
outputs: {said: say.value}
"""
SPARE = 8
"""How many descriptors are left to a process when the flood begins."""

FLOOD = 40


def taken(pid: int) -> set[int]:
    return {int(one.name) for one in Path(f"/proc/{pid}/fd").iterdir()}


@pytest.mark.slow
def test_open_connections_are_served_while_a_flood_uses_every_descriptor(tmp_path: Path) -> None:
    (tmp_path / "shout.yaml").write_text(PIPELINE)
    with serving(tmp_path, "shout.yaml", "--port", "0", "--http-port", "0") as it:
        it.wait_up()
        engine = psutil.Process(it.process.pid)
        (worker,) = [one for one in engine.children() if "weftline.engine.worker" in one.cmdline()]
        (ingress,) = set(engine.children()) - {worker}
        web = http.client.HTTPConnection("127.0.0.1", int(it.http.rpartition(":")[2]), timeout=20)

        def status() -> int:
            web.request("GET", "/readyz")
            with web.getresponse() as answer:
                answer.read()
                return answer.status

        with it.client() as client:
            assert (ask(client, "before"), status()) == ("before", 200)
            floods = []
            for endpoint, pid in ((it.http, ingress.pid), (it.grpc, engine.pid)):
                most = max(taken(pid)) + 1 + SPARE
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, 4096))
                address = "127.0.0.1", int(endpoint.rpartition(":")[2])
                floods += [socket.create_connection(address) for _ in range(FLOOD)]
                wait_until(lambda pid=pid, most=most: taken(pid) >= set(range(most)), "no descriptor left")  # type: ignore[misc]
            assert (ask(client, "during"), status()) == ("during", 200)
            assert it.status("/readyz") == 0, "there is no room for another connection"
            worker.kill()  # what is kept back for another one may be taken by connections that wait to be accepted
            worker.wait(20)
            for one in floods:
                one.close()
            assert ask(client, "again") == "again"
            wait_until(lambda: it.status("/readyz") == 200, "room for new connections")
            with it.client() as another:
                assert ask(another, "after") == "after"
        it.signal()
        assert it.wait_end() == 0 and it.left() == []
        assert "Traceback" not in it.err
