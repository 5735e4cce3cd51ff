"""mosec with identity steps, for a Python that has mosec: HTTP in, a process for each step.

    python benchmarks/peers/mosec_server.py FOLDER PORT

`/one` has one step, `/three` three in a row. Bodies are raw bytes; between steps mosec pickles them,
its default. Prints `ready` when it answers.
"""

import pathlib
import sys
import threading
import time
import urllib.request

from mosec import Runtime, Server, Worker


class Step(Worker):
    def deserialize(self, data):
        return bytes(data)

    def serialize(self, data):
        return data

    def forward(self, data):
        return data


class One(Step):
    pass


class First(Step):
    pass


class Second(Step):
    pass


class Third(Step):
    pass


def announce(port):
    """Print `ready` once every step answers."""
    for path in ("one", "three"):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", data=b"x")
        for _ in range(300):
            try:
                urllib.request.urlopen(request, timeout=5).read()
                break
            except OSError:
                time.sleep(0.2)
    print("ready", flush=True)


def main():
    folder, port = pathlib.Path(sys.argv[1]).absolute(), sys.argv[2]
    sys.argv = [sys.argv[0], "--path", str(folder / "mosec"), "--address", "127.0.0.1", "--port", port]
    sys.argv += ["--timeout", "60000", "--log-level", "error"]
    server = Server()
    server.register_runtime({"/one": [Runtime(One)], "/three": [Runtime(First), Runtime(Second), Runtime(Third)]})
    threading.Thread(target=announce, args=(port,), daemon=True).start()
    server.run()


if __name__ == "__main__":
    main()
