"""What the ingress costs beside its peers: stock clients against our server and others, in alternating rounds.

    python -m benchmarks.ingress                                    # every row, three rounds, about 12 minutes
    python -m benchmarks.ingress --quick                            # one short round, 2 minutes
    python -m benchmarks.ingress --only weftline triton "8 MB"      # these servers, rows with these words
    python -m benchmarks.ingress --transport grpcio nghttp2         # ours once with each transport

Client and servers share the machine. In each round every server is measured once, in turn, and ratios are those of a
round; printed are medians over the rounds with their spread, then the memory of each server. Processor time is that of
all processes of a server, for a call.

    weftline         beside the engine; the steps of a pipeline share a process
    weftline-apart   the same, each step in a process of its own, as the peers have it
    echo             an empty grpcio server, the floor of any in Python: one step, and no shared memory
    triton           ensembles of Python steps
    mosec, ray       HTTP in, raw bytes: no shared memory

Further names, for --only: weftline-N and weftline-N-apart, N ingress processes; echo-sync. `make bench-peers` builds
the peers' environments first; a peer that is missing or fails is printed as NOT MEASURED.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.conditions import conditions
from benchmarks.ingress_servers import HTTP_PEERS, Running, running

CLIENT = Path(__file__).resolve().parent / "ingress_client.py"
KIB, MIB = 1 << 10, 1 << 20
SERVERS = ("weftline", "weftline-apart", "triton", "echo", "mosec", "ray")
MORE_SERVERS = ("weftline-1", "weftline-1-apart", "weftline-2", "weftline-2-apart", "echo-sync", "echo-plain")


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of request: `steps` is 'one' or 'three', the name of the model."""

    steps: str
    size: int
    callers: int
    shared: bool = False

    @property
    def name(self) -> str:
        steps = "1 step" if self.steps == "one" else "3 steps"
        size = "1 KB" if self.size == KIB else f"8 MB {'shared memory' if self.shared else 'inline'}"
        return f"{steps}, {size}, {self.callers} caller{'s' if self.callers > 1 else ''}"

    def concerns(self, server: str) -> bool:
        """Return whether the server can answer such a request."""
        if server.startswith("echo"):
            return self.steps == "one" and not self.shared
        if server.startswith("weftline") and "apart" in server:
            return self.steps == "three"
        return not (self.shared and (server in HTTP_PEERS or server.startswith("weftline-2")))


ROWS = tuple(
    Row(steps, size, callers, shared)
    for size, shared in ((KIB, False), (8 * MIB, False), (8 * MIB, True))
    for steps in ("one", "three")
    for callers in (1, 8)
)


def measure(server: Running, row: Row, seconds: float) -> dict[str, float] | str:
    """Return rate, p50_ms, p99_ms and the server's processor time for a call, in us; or why there are none."""
    command = [sys.executable, str(CLIENT), server.url, row.steps, str(row.size), "--callers", str(row.callers)]
    command += ["--seconds", str(seconds)] + (["--shared-memory"] if row.shared else [])
    before = server.cpu_s()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds * 10 + 30, check=False)
    except subprocess.TimeoutExpired:
        return "the client did not end in time"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason printed"]
        return next((line for line in reversed(lines) if "rror" in line or "xception" in line), lines[-1])[:200]
    found: dict[str, float] = json.loads(done.stdout)
    found["cpu_us"] = 1e6 * (server.cpu_s() - before) / found["calls"]
    return found


def median_of(values: Sequence[float], form: str) -> str:
    """Return a median with its spread."""
    spread = f" [{form.format(min(values))}-{form.format(max(values))}]" if len(values) > 1 else ""
    return form.format(statistics.median(values)) + spread


def line_of(name: str, rounds: Sequence[dict[str, float]], ours: Sequence[dict[str, float]]) -> str:
    """Return the figures of one server in one row; ratios are ours to theirs, round by round."""

    def figure(key: str, form: str) -> str:
        return median_of([one[key] for one in rounds], form)

    line = f"  {name:16} {figure('rate', '{:.0f}')}/s  p50 {figure('p50_ms', '{:.2f}')} ms"
    line += f"  p99 {figure('p99_ms', '{:.2f}')} ms  {figure('cpu_us', '{:.0f}')} us of processor"
    if ours and rounds is not ours and len(rounds) == len(ours):
        pairs = list(zip(ours, rounds, strict=True))
        line += f"  ours/this: rate {median_of([a['rate'] / b['rate'] for a, b in pairs], '{:.2f}')}"
        line += f", p50 {median_of([a['p50_ms'] / b['p50_ms'] for a, b in pairs], '{:.2f}')}"
    return line


def print_row(row: Row, servers: Mapping[str, Running], rounds: int, seconds: float) -> None:
    """Measure a row in alternating rounds and print it; a server that fails is not asked again."""
    print(row.name)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in servers if row.concerns(name)}
    failed: dict[str, str] = {}
    for _ in range(rounds):
        for name, one in found.items():
            if name not in failed:
                figures = measure(servers[name], row, seconds)
                if isinstance(figures, str):
                    failed[name] = figures
                else:
                    one.append(figures)
    ours = next((one for name, one in found.items() if name.startswith("weftline")), [])
    for name, one in found.items():
        print(f"  {name:16} NOT MEASURED: {failed[name]}" if name in failed else line_of(name, one, ours), flush=True)


def chosen(only: Sequence[str], transports: Sequence[str]) -> tuple[list[str], list[Row]]:
    """Return the servers and the rows to measure: words that name no server select rows that have all of them."""
    servers = [word for word in only if word in SERVERS + MORE_SERVERS] or list(SERVERS)
    words = [word for word in only if word not in servers]
    rows = [row for row in ROWS if all(word in row.name for word in words)]
    if not rows:
        raise SystemExit(f"--only: no row has {' and '.join(words)}; rows: {'; '.join(row.name for row in ROWS)}")
    named = []
    for name in servers:
        ours = name.startswith("weftline") and transports
        named += [f"{name}@{way}" for way in transports] if ours else [name]
    return named, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="3, or 1 with --quick")
    parser.add_argument("--seconds", type=float, default=1.5, help="for each figure")
    parser.add_argument("--quick", action="store_true", help="0.3 s for each figure")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="servers, and words of rows")
    parser.add_argument("--transport", nargs="+", default=[], help="grpc.transport of ours; the default when left out")
    options = parser.parse_args()
    seconds, rounds = (0.3, options.rounds or 1) if options.quick else (options.seconds, options.rounds or 3)
    names, rows = chosen(options.only, options.transport)
    started = time.monotonic()
    print(conditions())
    print(f"rounds {rounds}, {seconds:g} s for each figure; client and servers on the same cores\n")
    with running(names) as servers:
        idle = {name: server.memory_bytes() for name, server in servers.items()}
        for row in rows:
            print_row(row, servers, rounds, seconds)
        print("\nmemory of all processes (PSS), before and after:")
        for name, server in servers.items():
            now = server.memory_bytes()
            print(f"  {name:16} {idle[name] / MIB:.0f} -> {now / MIB:.0f} MiB, processes: {len(server.in_tree)}")
    print(f"took {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
