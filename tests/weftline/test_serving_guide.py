"""What the guide to serving shows works: its pipeline is served, and each of its clients gets an answer."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.weftline.served import Served, serving

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/guides/serving.md").read_text("utf-8")
FILES = dict(re.findall(r"^```(?:python|yaml)\n# (\w+\.(?:py|yaml))\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE))
CURL = re.findall(r"^```sh\n(curl .*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("guide")
    (folder / "shout.yaml").write_text(FILES["shout.yaml"])
    with serving(folder, "shout.yaml", "--port", "0", "--http-port", "0") as it:
        yield it.wait_up()


def here(text: str, server: Served) -> str:
    """Return the text with the addresses of this server."""
    return text.replace("http://127.0.0.1:8000", server.http).replace("127.0.0.1:8001", server.grpc)


@pytest.mark.slow
def test_what_is_printed_is_what_the_guide_says(server: Served) -> None:
    shown = re.search(r"^```text\n(grpc .*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
    assert shown
    assert server.lines == here(shown[1], server).splitlines()


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".py")])
def test_every_client_of_the_guide_gets_an_answer(server: Served, name: str) -> None:
    script = here(FILES[name], server)
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.stdout == "hello\n", ended.stderr


@pytest.mark.parametrize("command", CURL)
def test_curl_gets_an_answer(server: Served, command: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    words = shlex.split(here(command, server), comments=True)
    ended = subprocess.run([words[0], "--silent", *words[1:]], capture_output=True, text=True, timeout=60)
    answer = ended.stdout.replace(" ", "")
    assert '"data":["hello"]' in answer or answer == '{"said":"hello"}', ended.stdout


def test_the_guide_has_a_client_of_each_kind() -> None:
    assert sorted(name for name in FILES if name.endswith(".py")) == [
        "ask_openai.py",
        "ask_triton.py",
        "ask_weftline.py",
    ]
    assert len(CURL) == 2
