"""`weftline status`, `load` and `unload` against a real server: what they print and how they end."""

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.engine.serving.grpc.served import ECHO, FAILS, Served, served_in_thread
from weftline import errors
from weftline.cli.main import app
from weftline.cli.remote import NOT_READY, Remote, load_model, show_status, unload_model
from weftline.engine.client.client import Client
from weftline.engine.client.steps import Unavailable
from weftline.engine.serving.auth.tokens import digest


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens.yaml"
    tokens.write_text(
        f"tokens:\n  - {{name: ops, sha256: {digest('wl_ops')}, admin: true}}\n"
        f"  - {{name: web, sha256: {digest('wl_web')}}}\n"
    )
    tokens.chmod(0o600)
    with served_in_thread({"echo": ECHO, "fails": FAILS}, tokens=tokens) as one:
        yield one


@pytest.fixture
def remote(server: Served, tmp_path: Path) -> Remote:
    return Remote(server.address, token(tmp_path, "wl_ops"))


def token(folder: Path, text: str) -> Path:
    file = folder / text.strip()
    file.write_text(f"{text}\n")
    file.chmod(0o600)
    return file


def status(remote: Remote, **options: bool) -> tuple[int, str]:
    out = io.StringIO()
    return show_status(remote, out, **options), out.getvalue()


def test_status_is_a_table_of_models(server: Served, remote: Remote) -> None:
    with Client(server.address, token="wl_web") as client:
        client.run("fails", x="a")
        with pytest.raises(errors.StepError):
            client.run("fails", x="bad")
    code, text = status(remote)
    first, head, echo, fails = text.splitlines()
    assert code == 0 and first == f"{server.address}: ready"
    assert head.split()[:5] == ["model", "state", "version", "requests", "failed"]
    assert echo.split() == ["echo", "ready", "1"]
    assert fails.split()[:5] == ["fails", "ready", "1", "1", "1"]
    assert len({len(line) for line in (head, fails)}) == 1


def test_status_as_json_is_one_object(remote: Remote) -> None:
    code, text = status(remote, as_json=True)
    parsed = json.loads(text)
    assert code == 0 and parsed["ready"] is True
    echo = parsed["models"][0]
    assert (echo["name"], echo["state"], echo["version"]) == ("echo", "ready", 1)
    assert parsed["models"][1]["requests"] >= 0


def test_unload_and_load_change_what_serves(remote: Remote) -> None:
    out = io.StringIO()
    unload_model(remote, "echo", out)
    text = status(remote)[1]
    assert "echo   unavailable" in text
    load_model(remote, "echo", out)
    unloaded, loaded = out.getvalue().splitlines()
    assert unloaded == "echo: unloaded" and loaded.startswith("echo: version ") and loaded.endswith(" serves")
    assert status(remote)[0] == 0


def test_a_server_that_is_not_ready_is_an_exit_code(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "ready", lambda self: False)
    code, text = status(remote)
    assert code == NOT_READY and ": not ready\n" in text


def test_a_server_that_drains_is_unavailable(server: Served, remote: Remote) -> None:
    assert server.loop is not None
    server.loop.call_soon_threadsafe(server.server.set_serving, False)
    try:
        with pytest.raises(Unavailable):
            status(remote)
    finally:
        server.loop.call_soon_threadsafe(server.server.set_serving, True)


def test_a_watched_status_is_printed_again_until_ctrl_c(remote: Remote) -> None:
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    out = io.StringIO()
    assert show_status(remote, out, watch=True, pause=pause) == 0
    assert out.getvalue().count(": ready\n") == 3 and "\x1b" not in out.getvalue()


def test_without_the_right_to_load_nothing_is_loaded(server: Served, tmp_path: Path) -> None:
    with pytest.raises(errors.AccessDenied) as denied:
        load_model(Remote(server.address, token(tmp_path, "wl_web")), "echo", io.StringIO())
    assert denied.value.exit_code == 9
    with pytest.raises(errors.AccessDenied):
        status(Remote(server.address))


def test_a_model_outside_the_configuration_is_unknown(remote: Remote) -> None:
    with pytest.raises(errors.UnknownModel) as unknown:
        load_model(remote, "missing", io.StringIO())
    assert unknown.value.exit_code == 3


def test_where_no_server_is_the_error_says_so_at_once() -> None:
    started_s = time.monotonic()
    with pytest.raises(Unavailable, match="cannot reach a server at localhost:1") as unavailable:
        status(Remote("localhost:1"))
    assert unavailable.value.exit_code == 6 and time.monotonic() - started_s < 20


@pytest.mark.parametrize("text", ["", "\n", "two tokens", "x" * 5000, "é"])
def test_a_token_file_holds_one_token(tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(errors.InputError, match="one token"):
        Remote("localhost:1", file).open()


def test_a_token_file_that_others_can_read_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = token(tmp_path, "wl_ops")
    file.chmod(0o644)
    Remote("localhost:1", file).open().close()
    assert "chmod 600" in capsys.readouterr().err
    with pytest.raises(errors.InputError, match="cannot read"):
        Remote("localhost:1", tmp_path / "none").open()


def test_a_token_does_not_leave_this_machine_in_the_clear(tmp_path: Path) -> None:
    with pytest.raises(errors.InputError, match="unencrypted"):
        Remote("example.org:8001", token(tmp_path, "wl_ops")).open()
    Remote("example.org:8001", token(tmp_path, "wl_ops"), insecure=True).open().close()
    Remote("example.org:8001", token(tmp_path, "wl_ops"), tls=True).open().close()


def test_what_a_server_says_moves_no_cursor(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    from weftline.engine.serving.model_info import ModelState

    monkeypatch.setattr(Client, "models", lambda self: (ModelState("evil\x1b[2J", 1, "ready", "why\r\x1b[H"),))
    assert "\x1b" not in status(remote)[1]


def test_the_commands_have_their_options_and_end_with_their_codes(server: Served, remote: Remote) -> None:
    options = ["--url", server.address, "--token-file", str(remote.token_file)]
    runner = CliRunner()
    shown = runner.invoke(app, ["status", "--json", *options])
    assert shown.exit_code == 0 and json.loads(shown.stdout)["ready"] is True
    assert runner.invoke(app, ["unload", "echo", *options]).stdout == "echo: unloaded\n"
    assert runner.invoke(app, ["load", "echo", *options]).stdout.startswith("echo: version ")
    denied = runner.invoke(app, ["status", "--url", server.address])
    assert isinstance(denied.exception, errors.AccessDenied)
