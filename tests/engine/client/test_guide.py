"""The guide's programs print the documented output, against a server of its pipelines."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.serving.grpc.served import Served, served_in_thread

GUIDE = (Path(__file__).parents[3] / "docs/guides/client.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
PROGRAMS = {
    body.partition("\n")[0].removeprefix("# "): (body, BLOCKS[place + 1][1])
    for place, (kind, body) in enumerate(BLOCKS)
    if kind == "python" and body.startswith("# ")
}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    files = [body for kind, body in BLOCKS if kind == "yaml"]
    with served_in_thread({re.findall(r"^name: (\w+)$", body, re.M)[0]: body for body in files}) as one:
        yield one


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_what_is_shown(server: Served, name: str) -> None:
    program, shown = PROGRAMS[name]
    program = program.replace("localhost:8001", server.address)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr) == (shown, "")
