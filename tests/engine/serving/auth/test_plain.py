import time
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.serving.auth.plain import one_line, redacted, scrubbed
from weftline.engine.serving.auth.tokens import new_token


@given(st.text(max_size=300), st.integers(10, 200))
def test_a_line_has_nothing_that_a_terminal_or_a_log_reader_obeys(text: str, most: int) -> None:
    line = one_line(text, most)
    assert not any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in line)
    assert not set(line) & set("\u202e\u2066\u200b\ufeff")
    assert len(line) <= most * 2
    line.encode()  # lone surrogates are escaped too


def test_plain_text_stays_as_it_is() -> None:
    for text in ("step see: found 3 items, expected 4", "ein Bild, größer als 16 Mpx", "画像"):
        assert one_line(text, 100) == text == scrubbed(text, 100)


def test_a_long_line_is_cut_and_says_so() -> None:
    assert one_line("x" * 1000, 10) == "xxxxxxx..."
    assert one_line("ü" * 1000, 10) == "üüüüüüü..."


def test_controls_are_shown_as_escapes() -> None:
    assert one_line("a\r\nERROR fake\x1b[2J\u202e", 100) == "a\\x0d\\x0aERROR fake\\x1b[2J\\u202e"


def test_paths_of_every_kind_are_scrubbed() -> None:
    for path in (
        "/etc/passwd", "/", "/boot", "//srv//x", "../secret", "../../a/b", "./run.sh", "~/x.pt", "~ana/x.pt",
        "models/best.pt", "a/b/c.onnx", "'/home/my user/a file.txt'", '"/with space/x"', "C:\\Users\\x.txt",
        "\\\\server\\share\\x", "file:///etc/hosts", "/dev/shm/psm_1f", "/proc/self/fd/7", "/tmp/ü/x", "=/opt/x",
    ):  # fmt: skip
        left = scrubbed(f"cannot open {path}: no such file", 200)
        assert left.startswith("cannot open ") and left.endswith(": no such file"), left
        assert not set(left) & set("\\~") and (path == "/" or "/" not in left), left


def test_what_only_looks_a_little_like_a_path_stays() -> None:
    for text in (
        "expected image/png or image/jpeg", "float32/float16", "and/or", "3 / 4", "1/2", "</think>", "<b>x</b>",
        "uint8[N, H, W, 3]", "Qwen/Qwen2.5-0.5B-Instruct", "step see: 0.25 s", "kept 4 MiB/s",
        "limits.arena_bytes is 7",
    ):  # fmt: skip
        assert scrubbed(text, 200) == text


def test_the_end_of_a_traceback_goes_with_it() -> None:
    text = 'ValueError: bad\nTraceback (most recent call last):\n  File "x.py", line 3, in f\n    secret = 1\n'
    assert scrubbed(text, 200) == "ValueError: bad; (more)"
    assert scrubbed('at File "/a/b.py", line 3, in f: no', 200) == "at (code): no"


def test_addresses_digests_and_names_inside_are_scrubbed() -> None:
    assert scrubbed("<Node object at 0x7f3a5c1d2e80>", 200) == "<Node object at (address)>"
    assert scrubbed("no answer from 10.0.0.3:5432 and http://u:p@db/x?k=1", 200) == (
        "no answer from (address) and (address)"
    )
    assert scrubbed(f"found {'ab12' * 16}", 200) == "found (digest)"
    assert scrubbed("in weftline.engine.worker, pid 4242", 200) == "in (internal), a process"


@given(st.integers(0, 20))
def test_tokens_are_scrubbed_and_redacted(_: int) -> None:
    token = new_token()
    for text in (token, f"bad token {token}!", f"Authorization: Bearer {token}", f"token={token}"):
        assert token not in scrubbed(text, 500)
        assert token not in redacted(text)
    assert "hunter2" not in redacted("authorization: bearer hunter2") + scrubbed("Bearer hunter2", 99)


def test_long_and_hostile_text_is_scrubbed_quickly() -> None:
    for text in (
        "/" * 100_000,
        "a/" * 50_000,
        "a." * 50_000,
        "'/" * 50_000,
        "." * 100_000,
        "0x" * 50_000,
        "C:\\" * 30_000,
    ):
        started = time.perf_counter()
        assert len(scrubbed(text, 1000)) <= 1000
        assert time.perf_counter() - started < 1.0


def test_the_text_of_a_refusal_is_scrubbed_once() -> None:
    text = "the deadline passed; unfinished steps: /home/user/model.py"
    started_s = time.thread_time()
    shown = {scrubbed(text, 200) for _ in range(20_000)}
    assert shown == {"the deadline passed; unfinished steps: (path)"}
    assert time.thread_time() - started_s < 0.2  # 20 000 times 50 us otherwise
