import hashlib
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.serving.auth.token_entries import TOKENS_MAX, read_tokens
from weftline.engine.serving.auth.tokens import CHECK_S, TOKEN_CHARS_MAX, TokenFile, digest, new_token
from weftline.errors import PipelineError

TOO_MANY = [f"{{name: t{i}, sha256: '{i:064x}'}}" for i in range(TOKENS_MAX + 1)]
WEB, OPS = "token-of-web", "token-of-ops"


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def entry(name: str, token: str, more: str = "") -> str:
    return f"  - {{name: {name}, sha256: {digest(token)!r}{more}}}\n"


def written(folder: Path, *entries: str) -> Path:
    path = folder / "tokens.yaml"
    path.touch(mode=0o600)
    path.write_text("tokens:\n" + "".join(entries))
    return path


def problems_of(text: str) -> list[str]:
    with pytest.raises(PipelineError) as caught:
        read_tokens(text, "tokens.yaml")
    return [str(problem) for problem in caught.value.problems]


def test_a_new_token_has_256_bits_and_only_its_digest_goes_into_the_file() -> None:
    token = new_token()
    assert token.startswith("wl_") and len(token) == 46
    assert token != new_token()
    assert digest(token) == hashlib.sha256(token.encode()).hexdigest()


def test_entries_say_which_models_and_how_often(tmp_path: Path) -> None:
    more = ", models: [assistant, ocr.detect], requests_per_s: 100, burst: 200, metrics: true"
    file = TokenFile(written(tmp_path, entry("web", WEB, more), entry("ops", OPS, ", admin: true")))
    web, ops = file.find(WEB), file.find(OPS)
    assert web is not None and ops is not None
    assert (web.name, web.models, web.admin) == ("web", frozenset({"assistant", "ocr.detect"}), False)
    assert (web.requests_per_s, web.burst, web.metrics, web.memory) == (100.0, 200.0, True, False)
    assert (ops.name, ops.models, ops.admin, ops.requests_per_s) == ("ops", None, True, None)


def test_no_other_token_is_found(tmp_path: Path) -> None:
    file = TokenFile(written(tmp_path, entry("web", WEB)))
    for near in ("", WEB[:-1], WEB + "x", WEB.upper(), WEB + "\0", digest(WEB), "\ud800", "x" * (TOKEN_CHARS_MAX + 1)):
        assert file.find(near) is None


def test_every_entry_is_compared_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = TokenFile(written(tmp_path, *(entry(f"t{i}", f"token {i}") for i in range(20))))
    compared = []

    def counted(one: bytes, other: bytes) -> bool:
        compared.append(len(one))
        return one == other

    monkeypatch.setattr("hmac.compare_digest", counted)
    for token in ("token 0", "token 19", "none of them"):
        compared.clear()
        file.find(token)
        assert compared == [32] * 20


def test_all_problems_of_a_file_come_at_once_each_with_its_line() -> None:
    sha = digest("x")
    found = problems_of(
        f"tokens:\n  - {{name: 'a b', sha256: 'secret-token', admin: 'yes'}}\n"
        f"  - {{name: web, sha256: {sha!r}, model: [x], requests_per_s: 0}}\n"
        f"  - {{name: web, sha256: {sha!r}, models: ocr, burst: 0.5}}\n"
        "  - just text\nmore: 1\n"
    )
    assert [one.partition(":")[2].split("  ")[0] for one in found] == [
        "2",
        "2",
        "2",
        "3",
        "3",
        "4",
        "4",
        "4",
        "4",
        "4",
        "5",
        "6",
    ]
    said = "\n".join(found)
    for part in (
        "tokens.0.name: 'a b'", "tokens.0.sha256: no digest", "tokens.0.admin: 'yes'", "tokens.1.model: unknown key",
        "did you mean models", "tokens.1.requests_per_s: 0", "tokens.2.name: a second web",
        "tokens.2.sha256: the digest of an earlier entry", "tokens.2.models: 'ocr'", "tokens.2.burst: 0.5",
        "written without requests_per_s", "tokens.3: a single value", "more: unknown key",
    ):  # fmt: skip
        assert part in said
    assert "secret-token" not in said


@pytest.mark.parametrize(
    "text", ["tokens: {}", "tokens: [{}]", "tokens: [[{}]]", "tokens: [{{name: a, sha256: {}}}]", "{}"]
)
@pytest.mark.parametrize("secret", ["secret", '"sec\'ret"', "{x: secret}", "[secret]"])
def test_a_token_in_the_place_of_an_entry_is_never_quoted(text: str, secret: str) -> None:
    assert "ret" not in "\n".join(problems_of(text.format(secret)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "missing"), ("tokens: {}", "expected: a list"), ("tokens: []", "an empty list"), ("- a", "missing"),
        ("tokens: [", "not YAML"),
        ("tokens: [{name: a}]", "sha256: missing"), (f"tokens: [{{sha256: '{'a' * 64}'}}]", "name: missing"),
        (f"tokens: [{{name: a, sha256: '{hashlib.sha256(b'').hexdigest()}'}}]", "empty token"),
        (f"tokens: [{{name: a, sha256: '{'a' * 64}', requests_per_s: .nan}}]", "nan"),
        (f"tokens: [{{name: a, sha256: '{'a' * 64}', requests_per_s: .inf}}]", "inf"),
        (f"tokens: [{{name: a, sha256: '{'a' * 64}', requests_per_s: true}}]", "true"),
        (f"tokens: [{{name: a, sha256: {'1' * 64}}}]", "quotes"),
        ("tokens: &a [*a]", "alias"), ("tokens: [!!python/name:os.system ]", "tag"), ("a: \0", "NUL"),
        ("[" * 60_000, "nested deeper"), ("tokens: [" + ", ".join(TOO_MANY) + "]", f"at most {TOKENS_MAX}"),
    ],
)  # fmt: skip
def test_what_is_no_token_file_is_refused_with_a_reason(text: str, said: str) -> None:
    assert said in "\n".join(problems_of(text))


@given(
    st.text(max_size=200)
    | st.lists(st.sampled_from(["tokens:", "- ", "{name: a,", "sha256: ", "}", "\n", " ", "true"])).map("".join)
)
def test_any_text_is_a_token_file_or_a_pipeline_error(text: str) -> None:
    try:
        read_tokens(text, "tokens.yaml")
    except PipelineError as error:
        assert error.problems


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o620, 0o602, 0o666])
def test_a_file_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path, entry("web", WEB))
    path.chmod(mode)
    with pytest.raises(PipelineError, match="others may read or write it"):
        TokenFile(path)


def test_a_file_its_group_may_read_is_taken_as_mounted_secrets_are(tmp_path: Path) -> None:
    path = written(tmp_path, entry("web", WEB))
    path.chmod(0o640)
    assert TokenFile(path).find(WEB) is not None


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(PipelineError, match="is no regular file"):
            TokenFile(path)
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(PipelineError, match="cannot be read"):
            TokenFile(path)


def test_a_changed_file_is_read_again_within_a_second(tmp_path: Path) -> None:
    clock = Clock()
    path = written(tmp_path, entry("web", WEB))
    file = TokenFile(path, clock)
    written(tmp_path, entry("ops", OPS, ", admin: true"))
    assert file.find(OPS) is None  # looked at a moment ago
    clock.now_s += CHECK_S
    assert file.find(OPS) is not None
    assert file.find(WEB) is None  # revoked


def test_a_file_that_was_swapped_for_another_is_noticed(tmp_path: Path) -> None:
    clock = Clock()
    path = written(tmp_path, entry("web", WEB))
    other = tmp_path / "other"
    other.mkdir()
    os.utime(written(other, entry("ops", WEB)), ns=(path.stat().st_mtime_ns,) * 2)  # same size, same time
    file = TokenFile(path, clock)
    (other / "tokens.yaml").replace(path)
    clock.now_s += CHECK_S
    found = file.find(WEB)
    assert found is not None and found.name == "ops"


@pytest.mark.parametrize("how", ["broken", "gone", "readable"])
def test_a_broken_new_file_leaves_the_old_one_in_force_and_is_logged_once(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    path = written(tmp_path, entry("web", WEB))
    file = TokenFile(path, clock)
    if how == "broken":
        path.write_text("tokens: [{name: web, sha256: zzz}]")
    elif how == "gone":
        path.unlink()
    else:
        path.chmod(0o644)
    for _ in range(3):
        clock.now_s += CHECK_S
        assert file.find(WEB) is not None
    assert len([one for one in caplog.records if one.levelno == logging.ERROR]) == 1
    written(tmp_path, entry("ops", OPS))
    path.chmod(0o600)
    clock.now_s += CHECK_S
    assert file.find(OPS) is not None and file.find(WEB) is None
