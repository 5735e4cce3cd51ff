"""What the gRPC ingress costs: stock tritonclient against our server, an empty Python echo, and Triton, in one run.

    python -m benchmarks.ingress                    # every row, three rounds
    python -m benchmarks.ingress --quick --rounds 1
    python -m benchmarks.ingress --servers echo weftline weftline-1 triton

Client and servers share the machine. In each round every server is measured once, in turn, and ratios are those of a
round; printed are medians over the rounds with their spread. `weftline` answers beside the engine, `weftline-1` through
one ingress process. `make bench-peers` builds Triton's environment first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.conditions import conditions
from benchmarks.ingress_servers import Running, running

CLIENT = Path(__file__).resolve().parent / "ingress_client.py"
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that is measured: `floor` runs the echo beside it, which knows no shared memory."""

    name: str
    model: str
    size: int
    callers: int
    shared: bool = False


ROWS = (
    Row("1 step, 1 KB, 1 caller", "one", KIB, 1),
    Row("3 steps, 1 KB, 1 caller", "three", KIB, 1),
    Row("3 steps, 1 KB, 8 callers", "three", KIB, 8),
    Row("3 steps, 8 MB shared, 8 callers", "three", 8 * MIB, 8, True),
    Row("3 steps, 8 MB inline, 8 callers", "three", 8 * MIB, 8),
    Row("3 steps, 8 MB shared, 1 caller", "three", 8 * MIB, 1, True),
)


def measure(server: Running, row: Row, seconds: float) -> dict[str, float]:
    """Return rate, p50_ms, p99_ms and the server's processor time for a call, in us."""
    command = [sys.executable, str(CLIENT), server.url, row.model, str(row.size), "--callers", str(row.callers)]
    command += ["--seconds", str(seconds)] + (["--shared-memory"] if row.shared else [])
    before = server.cpu_s()
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds * 10 + 60, check=False)
    if done.returncode:
        raise SystemExit(f"{server.name}, {row.name}: {done.stderr[-400:]}")
    found: dict[str, float] = json.loads(done.stdout)
    found["cpu_us"] = 1e6 * (server.cpu_s() - before) / found["calls"]
    return found


def median_of(values: list[float], form: str) -> str:
    """Return a median with its spread."""
    spread = f" [{form.format(min(values))}-{form.format(max(values))}]" if len(values) > 1 else ""
    return form.format(statistics.median(values)) + spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--quick", action="store_true", help="a second for each figure")
    parser.add_argument("--servers", nargs="+", default=["echo", "weftline", "weftline-1", "triton"])
    parser.add_argument("--rows", nargs="+", type=int, help="only these, counted from 0")
    options = parser.parse_args()
    seconds = 1.0 if options.quick else options.seconds
    rows = [ROWS[at] for at in options.rows] if options.rows else list(ROWS)
    print(conditions())
    print(f"rounds {options.rounds}, {seconds:g} s for each figure; client and servers on the same cores\n")
    with running(options.servers) as servers:
        for row in rows:
            print(f"{row.name}")
            found: dict[str, list[dict[str, float]]] = {}
            for _ in range(options.rounds):
                for name, server in servers.items():
                    if not (row.shared and name.startswith("echo")):
                        found.setdefault(name, []).append(measure(server, row, seconds))
            echo = found.get("echo")
            for name, rounds in found.items():
                line = f"  {name:12} {median_of([one['rate'] for one in rounds], '{:.0f}')}/s"
                line += f"  p50 {median_of([one['p50_ms'] for one in rounds], '{:.2f}')} ms"
                line += f"  p99 {median_of([one['p99_ms'] for one in rounds], '{:.2f}')} ms"
                line += f"  {median_of([one['cpu_us'] for one in rounds], '{:.0f}')} us of processor"
                if echo is not None and name != "echo":
                    pairs = list(zip(rounds, echo, strict=True))
                    line += f"  rate/echo {median_of([a['rate'] / b['rate'] for a, b in pairs], '{:.2f}')}"
                    line += f"  p50 over echo {median_of([a['p50_ms'] - b['p50_ms'] for a, b in pairs], '{:+.2f}')} ms"
                print(line, flush=True)
        print("\nmemory of all processes (PSS) after this:")
        for name, server in servers.items():
            print(f"  {name:12} {server.memory_bytes() / MIB:.0f} MiB")


if __name__ == "__main__":
    main()
