"""The processes of a check are as a worker is: what a driver refuses a hardened process fails the check too."""

from __future__ import annotations

from pathlib import Path

from weftline.gpu_check.processes import ProcessGroup


def test_a_process_of_the_check_is_hardened_as_a_worker_is() -> None:
    with ProcessGroup("fake:0") as group:
        process = group.start("one")
        process.ask("open")
        status = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
        assert status["NoNewPrivs"].strip() == "1"
        limits = Path(f"/proc/{process.pid}/limits").read_text()
        core = next(line for line in limits.splitlines() if line.startswith("Max core file size"))
        assert core.split()[4:6] == ["0", "0"]
