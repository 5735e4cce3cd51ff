"""Bad input to the command line: a clear error, the right exit code, no traceback, nothing left running."""

import struct
import subprocess
import sys
import zlib
from pathlib import Path

import psutil
import pytest

ECHO = 'inputs: {{x: {0}}}\nsteps:\n  a: {{node: echo, type: "{0}", inputs: {{value: x}}}}\noutputs: {{y: a.value}}\n'
FAIL = "inputs: {{x: text}}\nsteps:\n  a: {{node: fail, {0}, inputs: {{value: x}}}}\noutputs: {{y: a.value}}\n"
ONNX = "inputs: {x: 'float32[3]'}\nsteps:\n  a: {node: onnx, model: model.onnx, inputs: {x: x}}\noutputs: {y: a.y}\n"

MALFORMED = {
    "not closed": ("inputs: {x: text\n", "line"),
    "a tab": ("inputs:\n\tx: text\n", "not YAML"),
    "a key twice": ("inputs: {x: text}\ninputs: {x: text}\n", "inputs"),
    "no mapping": ("- a\n- b\n", ""),
    "an alias bomb": ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "alias"),
    "a tag": ("inputs: !!python/object:os.system {}\n", "tag"),
    "deep nesting": ("a: " + "[" * 100_000 + "\n", "deep"),
    "a number for a text": ("inputs: 5\nsteps: []\noutputs: {}\n", "inputs"),
}


def wav_header(seconds: int, hz: int = 8_000) -> bytes:
    """Return the header of a WAV file of so many seconds of sound, one byte a sample."""
    size = seconds * hz
    head = b"RIFF" + struct.pack("<I", 36 + size) + b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, hz, hz, 1, 8)
    return head + b"data" + struct.pack("<I", size)


def png_header(width: int, height: int) -> bytes:
    """Return a PNG file that claims such a size, with no picture in it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_yaml_is_refused_with_its_line(weft, tmp_path: Path, what: str) -> None:
    text, expected = MALFORMED[what]
    (tmp_path / "bad.yaml").write_text(f"weftline: 1\nname: bad\n{text}")
    ended = weft("run", str(tmp_path / "bad.yaml"))
    assert (ended.code, ended.out) == (2, "")
    assert f"{tmp_path / 'bad.yaml'}:" in ended.err
    assert expected in ended.err
    assert "nothing was started" in ended.err


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ([], "--input x is missing"),
        (["x=1", "z=2"], "--input z: the pipeline has no such input\n    the pipeline's inputs: x (text)"),
        (["x=1", "x=2"], "given 2 times"),
        (["x"], "--input 'x': expected NAME=VALUE"),
        (["x=@nowhere.txt"], "input x: there is no file nowhere.txt"),
        (["x=@"], "input x: there is no file"),
        (["x=@/"], "input x: there is no file"),
    ],
)
def test_wrong_inputs_are_named_before_anything_starts(weft, write, inputs: list[str], expected: str) -> None:
    words = [word for one in inputs for word in ("--input", one)]
    ended = weft("run", write(ECHO.format("text")), *words)
    assert (ended.code, ended.out) == (3, "")
    assert expected in ended.err
    assert "loading" not in ended.err


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("json", "{1}", "input x: not valid JSON at character 2"),
        ("json", "[" * 100_000, "input x: nested deeper than 64"),
        ("image", "photo.png", "fix: --input x=@FILE reads a file"),
        ("float32[3]", "[1, 2]", "input x: wants float32[3], got"),
        ("float32[3]", '"abc"', "input x: wants float32[3], got"),
        ("int8[1]", "[1000]", "int8 does not hold exactly"),
        ("int64[]", "18446744073709551615", "int64 does not hold exactly"),
        ("float16[]", "70000", "float16 does not hold exactly"),
        ("float32[1]", "[16777217]", "float32 does not hold exactly"),
        ("int32[1]", "[1.5]", "int32 does not hold exactly"),
        ("json", "[1, 1e400]", "a number that no double holds"),
        ("float64[1]", "[1e400]", "a number that no double holds"),
        ("detections", '[{"name": "a", "score": 1, "box": [0, 0, 1e300, 1]}]', "float32 does not hold exactly"),
        ("detections", "[{}]", 'wants detections, as json: [{"name": "cup"'),
    ],
)
def test_values_of_the_wrong_type_are_refused(weft, write, kind: str, text: str, expected: str) -> None:
    ended = weft("run", write(ECHO.format(f'"{kind}"').replace('""', '"')), "-i", f"x={text}")
    assert (ended.code, ended.out) == (3, "")
    assert expected in ended.err


@pytest.mark.parametrize(
    ("kind", "content", "expected"),
    [
        ("image", b"\x89PNG\r\n\x1a\n" + bytes(100), "input x: "),
        ("image", png_header(8, 8), "input x: the picture is corrupt or truncated"),
        ("image", png_header(60_000, 60_000), "the limit pixels_max is 25000000"),
        ("image", b"", "input x: "),
        ("audio", wav_header(3600) + bytes(3200), "input x: the recording is truncated"),
        ("audio", wav_header(3600)[:50], "input x: "),
        ("audio", b"RIFF\xff\xff\xff\xffWAVE" + bytes(9), "input x: "),
        ("text", b"\xff\xfe\x00", "input x: text that is not UTF-8"),
        ("json", b'{"a": ', "input x: not valid JSON at character 7"),
        ("float32[3]", b"\x93NUMPY\x01\x00\xff\xff", "input x: bytes that are no .npy file"),
    ],
)
def test_corrupt_files_are_refused_before_anything_starts(
    weft, write, tmp_path: Path, kind: str, content: bytes, expected: str
) -> None:
    (tmp_path / "x").write_bytes(content)
    ended = weft("run", write(ECHO.format(f'"{kind}"').replace('""', '"')), "-i", f"x=@{tmp_path / 'x'}")
    assert (ended.code, ended.out) == (3, "")
    assert expected in ended.err
    assert "loading" not in ended.err


def test_an_hour_of_sound_is_refused_by_its_header(weft, write, tmp_path: Path) -> None:
    with (tmp_path / "hour.wav").open("wb") as file:
        file.write(wav_header(3600))
        file.truncate(file.tell() + 3600 * 8_000)
    ended = weft("run", write(ECHO.format("audio")), "-i", f"x=@{tmp_path / 'hour.wav'}")
    assert (ended.code, ended.out) == (3, "")
    assert "3600" in ended.err
    assert "120" in ended.err
    assert "loading" not in ended.err


@pytest.mark.slow
def test_a_folder_for_a_file_and_an_unknown_output_are_refused(weft, write, tmp_path: Path) -> None:
    file = write(ECHO.format("text"))
    assert weft("run", file, "-i", f"x=@{tmp_path}").code == 3
    ended = weft("run", file, "-i", "x=1", "-o", "z")
    assert ended.code == 3
    assert "--output z: the pipeline has no such output; it has y" in ended.err
    assert weft("run", str(tmp_path)).code == 2


@pytest.mark.slow
def test_a_model_that_cannot_be_opened_is_named(weft, write) -> None:
    ended = weft("run", write(FAIL.format("fail_open: true, message: 'bad weights'")), "-i", "x=1")
    assert (ended.code, ended.out) == (4, "")
    assert ended.err.endswith("error: step a: bad weights\n")


@pytest.mark.slow
def test_one_broken_model_closes_the_others(weft, write) -> None:
    body = (
        "inputs: {x: text}\nsteps:\n  a: {node: echo, inputs: {value: x}}\n"
        "  b: {node: fail, fail_open: true, inputs: {value: a.value}}\noutputs: {y: b.value}\n"
    )
    assert weft("run", write(body), "-i", "x=1").code == 4


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x08\x07" + bytes(1000)])
def test_a_file_that_is_no_onnx_model_is_refused(weft, write, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    ended = weft("run", write(ONNX), "-i", "x=[1, 2, 3]")
    assert ended.code in (2, 4)
    assert "model.onnx" in ended.err
    assert ended.out == ""


def test_a_missing_model_is_a_problem_of_the_pipeline(weft, write) -> None:
    ended = weft("run", write(ONNX), "-i", "x=[1, 2, 3]")
    assert ended.code == 2
    assert "model.onnx" in ended.err


@pytest.mark.slow
def test_a_step_that_fails_names_itself(weft, write) -> None:
    ended = weft("run", write(FAIL.format("equals: bad, message: 'not today'")), "-i", "x=bad", "--json")
    assert (ended.code, ended.out) == (5, "")
    assert "error: step a: " in ended.err
    assert "not today" in ended.err


@pytest.mark.slow
def test_a_worker_that_dies_is_a_code_of_its_own(weft, write) -> None:
    ended = weft("run", write(FAIL.format("equals: bad, kill: true")), "-i", "x=bad")
    assert (ended.code, ended.out) == (6, "")
    assert "step a" in ended.err


@pytest.mark.slow
def test_a_deadline_that_passes_is_a_code_of_its_own(weft, write) -> None:
    slow = ECHO.format("text").replace("node: echo,", "node: echo, delay_ms: 20000,")
    ended = weft("run", write(slow), "-i", "x=1", "--deadline-ms", "100")
    assert (ended.code, ended.out) == (8, "")


@pytest.mark.slow
def test_nothing_is_left_when_the_whole_command_fails(write) -> None:
    command = [sys.executable, "-m", "weftline", "run", write(FAIL.format("fail_open: true")), "-i", "x=1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (4, "")
    assert "Traceback" not in err
    left = [
        one.cmdline() for one in psutil.process_iter(["cmdline"]) if str(process.pid) in (one.info["cmdline"] or [])
    ]
    assert left == []
