import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.jobs.sources.conftest import jsonl
from weftline.engine.jobs.output.folder import find
from weftline.engine.jobs.sources.formats import shown_url
from weftline.engine.jobs.sources.locations import origins
from weftline.engine.jobs.sources.source import open_source
from weftline.engine.jobs.spec import DataSpec
from weftline.errors import InputError


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:SECRET@host/x.jsonl?X-Amz-Signature=SECRET", "http://host/x.jsonl"),
        ("HTTPS://host/x?sig=SECRET#SECRET", "HTTPS://host/x"),
        ("s3://key:SECRET@bucket/a?b.jsonl", "s3://bucket/a?b.jsonl"),
        ("sftp://u:p@SECRET@host/a@b", "sftp://host/a@b"),
        ("simplecache::https://u:SECRET@host/x?SECRET", "simplecache::https://host/x"),
        ("https://h/x?SECRET, near line 3: cannot be read (url='https://h/x?SECRET')",
         "https://h/x, near line 3: cannot be read (url='https://h/x')"),
        ("in/a?b@c.jsonl", "in/a?b@c.jsonl"),
    ],
)  # fmt: skip
def test_secrets_are_not_shown_and_paths_stay(text: str, shown: str) -> None:
    assert shown_url(text) == shown


class _Signed(http.server.SimpleHTTPRequestHandler):
    """Serves rows to requests with the signature in the query."""

    def do_GET(self) -> None:
        there = "SECRET" in self.path
        self.send_response(200 if there else 403)
        self.send_header("Content-Length", str(len(jsonl(3)) if there else 0))
        self.end_headers()
        if there and self.command == "GET":
            self.wfile.write(jsonl(3))

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def host() -> Iterator[str]:
    pytest.importorskip("aiohttp")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Signed) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_signed_address_is_read_and_nowhere_repeated(host: str) -> None:
    signed = [f"{host}/in/a.jsonl?sig=SECRET{number}/x" for number in (1, 2)]
    source = open_source(DataSpec((signed[0],)))
    rows = next(iter(source.read()))
    assert (list(rows.ids), list(source.fingerprint())) == ([f"a.jsonl#{row}" for row in range(3)], ["a.jsonl"])
    assert source.folder == f"{host}/in"
    both = open_source(DataSpec(tuple(signed)))
    assert list(both.fingerprint()) == ["a.jsonl", "a.jsonl (2)"]
    assert len({id for one in both.read() for id in one.ids}) == 6


def test_errors_name_addresses_without_what_signs_them(host: str) -> None:
    for data in (f"{host}/a.jsonl?sig=HIDDEN", f"{host}/a?sig=SECRET", "what://u:SECRET@h/x"):
        with pytest.raises(InputError) as raised:
            list(open_source(DataSpec((data,))).read())
        assert not {"SECRET", "HIDDEN"} & set(re.split(r"\W", str(raised.value)))
    with pytest.raises(InputError) as raised:
        find("nowhere://u:SECRET@a/b", False, ".parquet", {})
    assert "SECRET" not in str(raised.value)


def test_results_are_named_without_a_password() -> None:
    place = find("memory://u:SECRET@a/x.jsonl", True, ".jsonl", {})
    assert (place.out, place.shown("x.jsonl")) == ("memory://a/x.jsonl", "memory://a/x.jsonl")


def test_origins_of_plain_files_are_their_names(tmp_path: Path) -> None:
    from weftline.engine.jobs.sources.locations import look

    (tmp_path / "a.jsonl").write_bytes(jsonl(1))
    assert [one.name for one in origins(look(str(tmp_path), {}).files)] == ["a.jsonl"]
