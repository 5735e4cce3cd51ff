"""`weftline run`: one request, its answer for people, for programs and piece by piece."""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from weftline.cli.run import timing_rows
from weftline.engine.scheduler.request import StepTiming

CHAIN = """
inputs: {x: text, n: json}
steps:
  a: {node: echo, inputs: {value: x}}
  b: {node: echo, inputs: {value: a.value}}
  c: {node: echo, type: json, inputs: {value: n}}
outputs: {y: b.value, m: c.value}
"""
ONE = """
inputs: {{x: "{0}"}}
steps:
  a: {{node: echo, type: "{0}", inputs: {{value: x}}}}
outputs: {{y: a.value}}
"""
FINDER = """
import numpy as np
from weftline.node import Detections

def find(image: "image") -> "detections":
    height, width = image.shape[:2]
    box = np.array([[2, 3, width - 4, height - 5]], np.float32)
    return Detections(box, np.array([0.9], np.float32), np.array([0], np.int32), ("red circle",))
"""
FIND = """
inputs: {photo: image}
steps:
  see: {node: function, function: "finder.py:find", inputs: {image: photo}}
outputs: {found: see.output}
"""
SPEAKER = """
from weftline.node import Piece, Ports, StreamNode, port

class Speaker(StreamNode):
    'Says its text word by word, and in the end the whole of it, shouted when it begins with a !.'

    @classmethod
    def ports(cls, config, step):
        return Ports((port("text", "text"),), (port("text", "text", pieces=True),))

    def open(self, context):
        self.items = {}

    def submit(self, item, inputs):
        self.items[item] = (inputs["text"], inputs["text"].split())

    def cancel(self, item):
        self.items.pop(item, None)

    @property
    def busy(self):
        return bool(self.items)

    def round(self):
        item, (text, words) = next(iter(self.items.items()))
        if words:
            return [Piece(item, {"text": words.pop(0) + " "})]
        del self.items[item]
        return [Piece(item, {"text": text.upper() if text[0] == "!" else text}, last=True)]
"""
SPEAK = """
inputs: {x: text}
steps:
  say: {node: "speaker.py:Speaker", inputs: {text: x}}
outputs: {said: say.text}
"""


def test_an_input_without_its_option_is_refused_with_the_remedy(weft, write) -> None:
    ended = weft("run", write(CHAIN), "x=hello")
    assert ended.code == 2 and "x=hello: one pipeline FILE is expected; pass inputs with -i" in ended.err


def test_outputs_come_under_their_names_with_a_table_of_steps(weft, write) -> None:
    ended = weft("run", write(CHAIN), "--input", "x=hello", "--input", 'n={"a": [1, 2.5]}')
    assert ended.code == 0
    assert ended.out.startswith('y: hello\nm:\n  {\n    "a": [\n')
    assert "queued" not in ended.out
    table = [line.split() for line in ended.err.splitlines()]
    assert ["step", "queued", "ms", "run", "ms", "batch"] in table
    assert {row[0] for row in table if len(row) == 4} >= {"a", "b", "c"}
    assert ended.err.rstrip().endswith("ms in all")


@pytest.mark.slow
def test_a_quiet_run_prints_outputs_and_nothing_else(weft, write) -> None:
    ended = weft("run", write(CHAIN), "--input", "x=hello", "--input", "n=1", "-q")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == "y: hello\nm: 1\n"


def test_the_table_has_one_row_for_a_list_and_marks_skipped_and_failed() -> None:
    timings = [
        StepTiming("a", 0.0, 1.0, 1),
        StepTiming("cut", 1.0, 2.0, 4, element=0),
        StepTiming("b", 0.0, 0.0, 0, outcome="skipped"),
        StepTiming("cut", 3.0, 1.0, 8, element=1),
        StepTiming("c", 0.0, 5.0, 1, outcome="failed"),
        StepTiming("c", 0.5, 5.0, 1, attempts=2),
    ]
    assert timing_rows(timings) == [
        ("a", "0.0", "1.0", "1"),
        ("cut x 2", "3.0", "2.0", "8"),
        ("b", "", "", "skipped"),
        ("c", "0.0", "5.0", "failed"),
        ("c", "0.5", "5.0", "1"),
    ]


@pytest.mark.slow
def test_progress_goes_to_standard_error(weft, write) -> None:
    ended = weft("run", write(CHAIN), "-i", "x=hello", "-i", "n=1", "--json")
    assert all(f"loading {step}: ready\n" in ended.err for step in "abc")
    assert "loading" not in ended.out


@pytest.mark.slow
def test_json_is_one_object_with_outputs_by_name(weft, write) -> None:
    ended = weft("run", write(CHAIN), "-i", "x=héllo = @you", "-i", "n=[1, null]", "--json")
    assert list(json.loads(ended.out).items()) == [("y", "héllo = @you"), ("m", [1, None])]
    assert ended.out.count("\n") == 1


@pytest.mark.slow
def test_numbers_that_json_lacks_are_read_and_printed(weft, write) -> None:
    ended = weft("run", write(CHAIN), "-i", "x=a", "-i", 'n={"a": [NaN, -Infinity, 1e300]}', "--json", "--quiet")
    assert (ended.code, ended.out) == (0, '{"y": "a", "m": {"a": [NaN, -Infinity, 1e+300]}}\n')


def test_only_the_wanted_output_is_computed(weft, write) -> None:
    ended = weft("run", write(CHAIN), "-i", "x=hello", "-i", "n=1", "--output", "m")
    assert ended.out.startswith("m: 1\n")
    assert "y:" not in ended.out
    assert "\n a " not in ended.out


def test_streaming_prints_each_output_once(weft, write) -> None:
    ended = weft("run", write(CHAIN), "-i", "x=hello", "-i", "n=1", "--stream")
    assert sorted(ended.out.splitlines()) == ["m: 1", "y: hello"]


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("one two three ", "said: one two three \n"),
        ("!one two", "said: !one two \nsaid: !ONE TWO\n"),
    ],
    ids=["pieces make the whole", "the whole is another"],
)
def test_text_grows_piece_by_piece(weft, write, tmp_path: Path, text: str, printed: str) -> None:
    (tmp_path / "speaker.py").write_text(SPEAKER)
    assert weft("run", write(SPEAK), "-i", f"x={text}", "--stream").out == printed


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize(("text", "answer"), [("@@name", "@name"), ("@@@name", "@@name"), ("", ""), ("a=b", "a=b")])
def test_text_may_begin_with_an_at_sign(weft, write, text: str, answer: str) -> None:
    assert json.loads(weft("run", write(ONE.format("text")), "-i", f"x={text}", "--json").out) == {"y": answer}


@pytest.mark.slow
def test_a_file_is_read_as_the_type_of_its_input(weft, write, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("from a file")
    (tmp_path / "x.json").write_text('{"a": 1}')
    np.save(tmp_path / "x.npy", np.arange(3, dtype=np.float32))
    for kind, name, answer in (
        ("text", "x.txt", "from a file"),
        ("json", "x.json", {"a": 1}),
        ("bytes", "x.txt", {"base64": "ZnJvbSBhIGZpbGU="}),
        ("float32[3]", "x.npy", {"dtype": "float32", "shape": [3], "data": [0.0, 1.0, 2.0]}),
    ):
        ended = weft("run", write(ONE.format(kind)), "-i", f"x=@{tmp_path / name}", "--json")
        assert json.loads(ended.out) == {"y": answer}, kind


@pytest.mark.slow
def test_standard_input_is_an_input(write) -> None:
    command = [sys.executable, "-m", "weftline", "run", write(ONE.format("text")), "-i", "x=@-", "--json"]
    ended = subprocess.run(command, input="piped", capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout) == {"y": "piped"}


def test_a_tensor_is_written_as_numbers(weft, write) -> None:
    file = write(ONE.format("float32[2, 2]"))
    ended = weft("run", file, "-i", "x=[[1, 2], [3, 4.5]]")
    assert ended.out.startswith("y: float32[2, 2] [[1.0, 2.0], [3.0, 4.5]]\n")


@pytest.mark.slow
def test_a_tensor_too_large_for_json_is_refused_with_a_hint_to_save_it(weft, write, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((300, 300), np.float32))
    words = ("run", write(ONE.format("float32[A, B]")), "-i", f"x=@{tmp_path / 'x.npy'}", "--json")
    refused = weft(*words)
    assert (refused.code, refused.out) == (7, "")
    assert "fix: add --save DIR" in refused.err
    saved = weft(*words, "--save", str(tmp_path / "out"))
    assert json.loads(saved.out)["y"] == {
        "dtype": "float32", "shape": [300, 300], "file": str(tmp_path / "out" / "y.npy"),
    }  # fmt: skip
    assert np.load(tmp_path / "out" / "y.npy").sum() == 90_000


@pytest.mark.slow
def test_detections_are_listed_and_drawn_into_their_picture(weft, write, tmp_path: Path) -> None:
    (tmp_path / "finder.py").write_text(FINDER)
    Image.new("RGB", (120, 90), (255, 255, 255)).save(tmp_path / "photo.png")
    words = ("run", write(FIND), "-i", f"photo=@{tmp_path / 'photo.png'}", "--save", str(tmp_path / "out"))
    shown = weft(*words)
    assert "found: 1 red circle\n  red circle  0.90  [2, 3, 116, 85]\n" in shown.out
    with Image.open(tmp_path / "out" / "found.png") as drawn:
        assert drawn.size == (120, 90)
        assert drawn.getpixel((116, 50)) == (230, 60, 60)
        assert drawn.getpixel((60, 50)) == (255, 255, 255)
    found = [{"name": "red circle", "score": 0.9, "box": [2.0, 3.0, 116.0, 85.0]}]
    assert json.loads((tmp_path / "out" / "found.json").read_text()) == found
    assert json.loads(weft(*words, "--json").out) == {"found": found}


def test_pictures_and_sound_are_written_as_files(weft, write, tmp_path: Path) -> None:
    picture = np.random.default_rng(0).integers(0, 255, (20, 30, 3), np.uint8)
    Image.fromarray(picture).save(tmp_path / "x.png")
    out = tmp_path / "out"
    ended = weft("run", write(ONE.format("image")), "-i", f"x=@{tmp_path / 'x.png'}", "--save", str(out))
    assert ended.out.startswith("y: picture of 30 x 20 pixels")
    assert f"wrote {out / 'y.png'}\n" in ended.err
    with Image.open(out / "y.png") as saved:
        assert np.array_equal(np.asarray(saved), picture)


def test_terminal_escapes_of_a_model_are_shown_and_not_obeyed(weft, write) -> None:
    ended = weft("run", write(ONE.format("text")), "-i", "x=\x1b[2Jgone\u202e")
    assert ended.out.startswith("y: \\x1b[2Jgone\\u202e\n")


def test_the_whole_command_runs_in_a_process_of_its_own(write) -> None:
    command = [sys.executable, "-m", "weftline", "run", write(CHAIN), "-i", "x=a", "-i", "n=2", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.load(io.StringIO(ended.stdout)) == {"y": "a", "m": 2}


@pytest.mark.slow
def test_an_exception_of_a_step_is_printed_with_its_traceback(weft, write, tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text("def fails(x: str) -> str:\n    return {}[x]\n")
    steps = "{a: {node: function, function: 'steps.py:fails', inputs: {x: x}}}"
    file = write(f"inputs: {{x: text}}\nsteps: {steps}\noutputs: {{y: a.output}}\n")
    for words in ((), ("--json",), ("--stream",)):
        ended = weft("run", file, "-i", "x=a", *words)
        assert ended.code == 5
        assert 'steps.py", line 2, in fails' in ended.err
        assert ended.err.endswith("\nKeyError: 'a'\nerror: step a: KeyError: 'a'\n")


@pytest.mark.parametrize(
    ("type", "words", "expected"),
    [
        ("list[text]", ["x=a", "x=b"], ["a", "b"]),
        ("list[text]", ["x=only"], ["only"]),
        ("list[text]", ['x=["a", "b"]'], ["a", "b"]),
        ("list[json]", ["x=1", 'x={"k": 2}'], [1, {"k": 2}]),
    ],
)
def test_repeated_inputs_make_a_list(weft, write, type: str, words: list[str], expected: list[object]) -> None:
    given = [word for one in words for word in ("-i", one)]
    ended = weft("run", write(ONE.format(type)), "--json", *given)
    assert json.loads(ended.out)["y"] == expected, ended.err


def test_repeated_files_make_a_list_of_pictures(weft, write, tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        Image.new("RGB", (4, 3)).save(tmp_path / name)
    given = ["-i", f"x=@{tmp_path}/a.png", "-i", f"x=@{tmp_path}/b.png", "--save", str(tmp_path / "out")]
    ended = weft("run", write(ONE.format("list[image]")), *given)
    assert ended.code == 0 and len(list((tmp_path / "out").iterdir())) == 2, ended.err
