"""The client against a real server over real sessions: every kind of value, streams, deadlines, cancels, errors."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.engine.client.pipelines import OPTION_NAMES, plain
from tests.engine.client.test_encoder import FOUND, PNG, WAV
from tests.engine.serving.grpc.served import Served
from weftline import errors
from weftline.engine.client.client import Client
from weftline.engine.client.steps import Unavailable
from weftline.engine.request import RequestOptions
from weftline.nodes.detections import Detections
from weftline.nodes.media import to_value
from weftline.nodes.ports import PortType
from weftline.nodes.urgency import SequencePart


def eventually(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not true():
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.01)


@pytest.mark.slow
def test_every_kind_of_value_goes_there_and_comes_back(client: Client) -> None:
    facts = {"a": [1, 2.5, None, "ü"]}
    numbers = np.arange(6, dtype=np.float32).reshape(3, 2)
    pictures = [np.zeros((2, 2, 3), np.uint8), np.full((1, 4, 3), 9, np.uint8)]
    with Image.open(PNG) as photo:
        pixels = np.asarray(photo.convert("RGB"))
    result = client.run(
        "everything",
        words="héllo",
        facts=facts,
        blob=b"\x00\xff",
        photo=PNG,
        sound=WAV,
        numbers=numbers,
        bits=np.array([16256, 0], np.uint16),
        names=["a", "", "ß"],
        photos=pictures,
        found=FOUND,
    )
    assert result["words"] == "héllo" and result["facts"] == facts and result["blob"] == b"\x00\xff"
    assert np.array_equal(result["photo"], pixels)
    assert np.array_equal(result["sound"], to_value(PortType("audio"), WAV.read_bytes()))
    assert np.array_equal(result["numbers"], numbers) and result["numbers"].flags.writeable
    assert result["bits"].tolist() == [16256, 0]
    assert result["names"] == ["a", "", "ß"]
    assert all(np.array_equal(*pair) for pair in zip(result["photos"], pictures, strict=True))
    assert isinstance(result["found"], Detections) and result["found"].to_json() == FOUND.to_json()
    assert result.total_ms > 0


@pytest.mark.slow
def test_eight_megabytes_inline(client: Client) -> None:
    sent = np.random.default_rng(1).integers(0, 255, 8 << 20, np.uint8)
    assert np.array_equal(client.run("bytes", x=sent)["y"], sent)


@pytest.mark.slow
def test_only_the_wanted_outputs_come(client: Client) -> None:
    assert dict(client.run("everything", RequestOptions(outputs=["words", "facts"]), **plain())) == {
        "words": "a",
        "facts": 1,
    }


def test_numbers_that_json_lacks_go_there_and_back(client: Client) -> None:
    facts = {"a": [float("nan"), None, {"b": float("-inf")}]}
    numbers = np.array([[np.nan, np.inf]], np.float32)
    wanted = RequestOptions(outputs=["facts", "numbers"])
    result = client.run("everything", wanted, **plain() | {"facts": facts, "numbers": numbers})
    assert repr(result["facts"]) == repr(facts) and np.array_equal(result["numbers"], numbers, equal_nan=True)


def test_null_is_a_value_of_json_and_of_nothing_else(client: Client) -> None:
    assert client.run("everything", RequestOptions(outputs=["facts"]), **plain() | {"facts": None})["facts"] is None
    with pytest.raises(errors.InputError, match="input words: wants text"):
        client.run("everything", **plain() | {"words": None})


def test_a_model_is_described_with_its_types(client: Client) -> None:
    known = client.describe("everything")
    assert {name: str(port.type) for name, port in known.inputs.items()}["photos"] == "list[image]"
    assert known.version == "1" and not known.streams and client.describe("trickle").streams


def test_a_stream_gives_pieces_and_then_the_whole(client: Client) -> None:
    pieces = list(client.stream("trickle", x="go"))
    assert [(one.output, one.value, one.last) for one in pieces] == [
        *(("y", letter * 8, False) for letter in "abcd"),
        ("y", "a" * 8 + "b" * 8 + "c" * 8 + "d" * 8, True),
    ]


def test_a_model_without_pieces_streams_its_outputs(client: Client) -> None:
    assert [(one.output, one.value, one.last) for one in client.stream("fails", x="good")] == [("y", "good", True)]


def test_leaving_a_stream_cancels_the_request(server: Served, client: Client) -> None:
    with client.stream("endless", x="go") as stream:
        next(stream)
        assert server.open_requests("endless") == 1
        held = stream._call  # by the test: gRPC cancels unreferenced calls
    eventually(lambda: server.open_requests("endless") == 0)
    assert list(stream) == [] and held.cancelled()


def test_dropping_a_stream_cancels_the_request(server: Served, client: Client) -> None:
    stream = client.stream("endless", x="go")
    next(stream)
    del stream
    eventually(lambda: server.open_requests("endless") == 0)


def test_a_killed_client_frees_its_request(server: Served) -> None:
    script = (
        "import sys\nfrom weftline.engine.client.client import Client\n"
        f"stream = Client({server.address!r}).stream('endless', x='go')\n"
        "next(stream)\nprint('begun', flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        assert server.open_requests("endless") == 1
        process.kill()
    eventually(lambda: server.open_requests("endless") == 0)


def test_a_deadline_reaches_the_engine(server: Served, client: Client) -> None:
    client.describe("slow")
    with pytest.raises(errors.DeadlineExceeded):
        client.run("slow", RequestOptions(deadline_ms=100), x="a")
    eventually(lambda: server.open_requests("slow") == 0)
    # another test's request may be the last that was recorded, and this one's is recorded when it has ended
    eventually(
        lambda: any(one.model == "slow" and (one.ask.deadline_ms or 1000) <= 120 for one in list(server.records))
    )


def test_a_deadline_ends_a_stream(client: Client) -> None:
    with pytest.raises(errors.DeadlineExceeded):
        list(client.stream("endless", RequestOptions(deadline_ms=150), x="a"))


def test_closing_the_client_ends_a_request_that_waits(server: Served) -> None:
    client = Client(server.address)
    client.describe("slow")
    threading.Timer(0.1, client.close).start()
    with pytest.raises(errors.WeftlineError):
        client.run("slow", x="a")
    with pytest.raises(errors.SessionClosed):
        client.run("slow", x="a")
    client.close()


def test_priority_and_sequence_mean_what_they_mean_in_a_session(server: Served, client: Client) -> None:
    client.run("fails", RequestOptions(priority=-7), x="priority")
    eventually(lambda: any(one.model == "fails" and one.ask.priority == -7 for one in server.records))
    said = [
        client.run("remember", RequestOptions(sequence=SequencePart("s", start=text == "a", end=text == "c")), x=text)[
            "y"
        ]
        for text in "abc"
    ]
    assert said == ["a", "a b", "a b c"]


def test_a_row_of_a_job_says_so_and_brings_its_seed(server: Served, client: Client) -> None:
    client.run("fails", RequestOptions(job=True, seed=7), x="job")
    list(client.stream("fails", RequestOptions(job=True, seed=8), x="jobs"))
    client.run("fails", x="none")
    eventually(lambda: [(one.ask.job, one.ask.seed) for one in server.records[-3:]]
               == [(True, 7), (True, 8), (False, None)])  # fmt: skip
    assert {one.ask.priority for one in server.records[-3:]} == {-100, 0}, "a job's rows go last"


@pytest.mark.parametrize(
    ("inputs", "kind", "text"),
    [
        ({"x": "bad"}, errors.StepError, "step only: RuntimeError: failed on purpose"),
        ({"x": 5}, errors.InputError, "input x: wants text"),
        ({}, errors.InputError, "missing: x; the inputs of fails are x (text)"),
        ({"x": "a", "z": 1}, errors.InputError, "unknown: z"),
        (
            {"x": "a", "deadline_ms": 1},
            errors.InputError,
            "fix: pass options in one value: RequestOptions(deadline_ms=",
        ),
    ],
)
def test_errors_are_those_of_a_session(client: Client, inputs: dict, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as refused:
        client.run("fails", **inputs)
    assert text in str(refused.value)


def test_inputs_may_have_the_names_of_options(client: Client) -> None:
    inputs = {name: name.upper() for name in OPTION_NAMES}
    wanted = {f"{name}_out": name.upper() for name in OPTION_NAMES}
    assert dict(client.run("named", **inputs)) == wanted
    assert dict(client.run("named", RequestOptions(outputs=["seed_out"]), **inputs)) == {"seed_out": "SEED"}
    assert {one.output: one.value for one in client.stream("named", **inputs)} == wanted


def test_an_output_that_the_model_does_not_have_is_named(client: Client) -> None:
    with pytest.raises(errors.InputError, match="no output is called z; outputs: y"):
        client.run("fails", RequestOptions(outputs=["z"]), x="a")


@pytest.mark.parametrize("model", [RequestOptions(), None, ["small"]])
def test_a_model_that_is_no_name_is_refused(client: Client, model: object) -> None:
    with pytest.raises(errors.InputError, match=f"model: found {type(model).__name__}, expected the name of a model"):
        client.run(model, text="x")  # type: ignore[arg-type]


def test_options_of_another_type_are_refused(client: Client) -> None:
    with pytest.raises(errors.InputError, match=r"options: found dict, expected weftline\.RequestOptions"):
        client.run("fails", {"deadline_ms": 1}, x="a")  # type: ignore[arg-type]


def test_a_failed_step_is_named_in_a_stream_too(client: Client) -> None:
    with pytest.raises(errors.WeftlineError, match="step only: RuntimeError: failed on purpose"):
        list(client.stream("fails", x="bad"))


def test_a_model_that_is_not_served_is_unknown(client: Client) -> None:
    with pytest.raises(errors.UnknownModel):
        client.run("missing", x="a")


def test_a_request_over_the_servers_limit_says_so(client: Client) -> None:
    with pytest.raises(errors.LimitReached, match="the request is a message of"):
        client.run("bytes", x=np.zeros(80 << 20, np.uint8))


def test_an_answer_over_the_clients_limit_says_so(server: Served) -> None:
    too_large = pytest.raises(errors.LimitReached, match="the answer is a message of")
    with Client(server.address, message_bytes_max=1 << 20) as client, too_large:
        client.run("bytes", x=np.zeros(2 << 20, np.uint8))


def test_where_no_server_is_the_address_is_named() -> None:
    with Client("localhost:1", retries=0) as client:
        with pytest.raises(Unavailable, match="cannot reach a server at localhost:1"):
            client.run("a", RequestOptions(deadline_ms=5000), x=1)
        assert not client.live() and not client.ready()


def test_many_threads_share_a_client(client: Client) -> None:
    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda i=i: answers.append(client.run("fails", x=f"t{i}")["y"])) for i in range(16)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join(30)
    assert sorted(answers) == sorted(f"t{i}" for i in range(16))


def test_importing_weftline_imports_no_grpc() -> None:
    script = "import sys, weftline; print('grpc' in sys.modules, 'tritonclient' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["False", "False"]


def test_a_path_is_read_here_and_never_sent(server: Served, client: Client, tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    file.write_text(json.dumps({"a": 1}))
    result = client.run("everything", **plain() | {"facts": file, "blob": file})
    assert result["facts"] == {"a": 1} and result["blob"] == file.read_bytes()
