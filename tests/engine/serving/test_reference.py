"""The reference page of serve files is the one the code writes, and its example is one."""

import re
from dataclasses import fields
from pathlib import Path

from weftline.engine.serving.config import GrpcConfig, HttpConfig, Logs, ServeConfig, ServedPipeline, ServeLimits, Tls
from weftline.engine.serving.reference import COMMAND, PAGE, serve_reference
from weftline.engine.serving.serve_file import parse_serve_file
from weftline.pipelines.spec.document import read_document

ROOT = Path(__file__).parents[3]


def test_the_committed_page_is_up_to_date() -> None:
    assert (ROOT / PAGE).read_text(encoding="utf-8") == serve_reference(), f"run `{COMMAND}`"


def test_every_key_is_on_the_page_and_says_what_it_means() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", serve_reference(), re.MULTILINE)
    for kind in (ServeConfig, ServedPipeline, GrpcConfig, HttpConfig, Tls, ServeLimits, Logs):
        for one in fields(kind):
            assert [about for key, about in rows if key == one.name and about], f"{kind.__name__}.{one.name}"


def test_the_example_is_a_serve_file() -> None:
    block = re.search(r"```yaml\n(.*?)```", serve_reference(), re.DOTALL)
    assert block
    parsed = parse_serve_file(read_document(block[1], "page"), "page", ROOT)
    assert list(parsed.config.pipelines) == ["assistant", "ocr"]
