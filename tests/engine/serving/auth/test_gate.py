import asyncio
import base64
import logging
from pathlib import Path

import pytest

from weftline.engine.serving.auth.gate import ANONYMOUS, DENIALS_LOGGED_AT_ONCE, UNRESTRICTED, Caller, Gate, bearer
from weftline.engine.serving.auth.methods import ADMIN, INFER, MEMORY, METHODS, METRICS, OPEN, READ
from weftline.engine.serving.auth.rates import TokenRates
from weftline.engine.serving.auth.tokens import TOKEN_CHARS_MAX, TokenFile, digest
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.replies import to_status
from weftline.engine.serving.v2.messages import InferRequest, Region, Tensor, WantedOutput
from weftline.errors import AccessDenied, LimitReached

INFER_RPC = "/inference.GRPCInferenceService/ModelInfer"
LOAD_RPC = "/inference.GRPCInferenceService/RepositoryModelLoad"
TOKENS = {
    "all": "tok-all",
    "web": "tok-web",
    "ops": "tok-ops",
    "mem": "tok-mem",
    "prom": "tok-prom",
    "slow": "tok-slow",
}
ENTRIES = {
    "all": "", "web": ", models: [ocr]", "ops": ", admin: true", "mem": ", memory: true",
    "prom": ", metrics: true, models: []", "slow": ", requests_per_s: 2, burst: 2",
}  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(tmp_path: Path, clock: Clock) -> TokenFile:
    path = tmp_path / "tokens.yaml"
    path.touch(mode=0o600)
    lines = [f"  - {{name: {name}, sha256: '{digest(TOKENS[name])}'{more}}}\n" for name, more in ENTRIES.items()]
    path.write_text("tokens:\n" + "".join(lines))
    return TokenFile(path, clock)


@pytest.fixture
def gate(file: TokenFile, clock: Clock) -> Gate:
    return Gate(file, ServeLimits(), clock)


def charge(gate: Gate, caller: Caller) -> None:
    asyncio.run(gate.charge(caller))


def requests(gate: Gate, token: str, count: int = 1) -> None:
    """Send requests: each is admitted and charged."""
    for _ in range(count):
        charge(gate, gate.enter(INFER_RPC, token))


def status_of(gate: Gate, method: str, token: str | None, model: str | None = None) -> str:
    try:
        caller = gate.enter(method, token)
        if model is not None:
            caller.check(model)
    except AccessDenied as denied:
        assert str(denied) and not any(word in str(denied) for word in TOKENS.values())
        return to_status(denied).status
    return "OK"


def test_without_a_token_file_everybody_may_do_everything_that_there_is() -> None:
    gate = Gate(None)
    assert not gate.asks_tokens
    for method in METHODS:
        assert gate.enter(method, None) is UNRESTRICTED
        assert gate.admit(method, ["Basic nonsense", "twice"]) is UNRESTRICTED
    assert UNRESTRICTED.admin and UNRESTRICTED.may_use_model("anything")
    with pytest.raises(AccessDenied):
        gate.enter("/inference.GRPCInferenceService/Nothing", None)


@pytest.mark.parametrize("method", METHODS)
def test_no_method_but_probes_can_be_called_without_a_valid_token(gate: Gate, method: str) -> None:
    expected = "OK" if METHODS[method] == OPEN else "UNAUTHENTICATED"
    near = TOKENS["ops"]
    for token in (None, "", "x", near[:-1], near + " ", near.upper(), digest(near), "\0", "x" * 100_000, "\ud800"):
        assert status_of(gate, method, token) == expected


@pytest.mark.parametrize("method", METHODS)
def test_each_right_opens_its_methods_and_no_other(gate: Gate, method: str) -> None:
    kind = METHODS[method]
    allowed = {
        "all": {OPEN, READ, INFER},
        "web": {OPEN, READ, INFER},
        "mem": {OPEN, READ, INFER, MEMORY},
        "prom": {OPEN, READ, INFER, METRICS},
        "ops": {OPEN, READ, INFER, MEMORY, METRICS, ADMIN},
    }
    for name, kinds in allowed.items():
        assert status_of(gate, method, TOKENS[name]) == ("OK" if kind in kinds else "PERMISSION_DENIED"), name


@pytest.mark.parametrize(
    "method",
    [
        "", "/", "ModelInfer", INFER_RPC.lower(), INFER_RPC + "/", INFER_RPC + "\0", " " + INFER_RPC,
        "/inference.GRPCInferenceService/../ModelInfer", "HTTP GET /v1/models/", "HTTP get /livez", "HTTP GET /redoc",
        "HTTP OPTIONS /v1/models", "HTTP POST /livez", "/grpc.channelz.v1.Channelz/GetServers",
    ],
)  # fmt: skip
def test_a_method_that_is_not_in_the_table_is_denied_to_everybody(gate: Gate, method: str) -> None:
    assert status_of(gate, method, None) == "UNAUTHENTICATED"
    assert status_of(gate, method, TOKENS["ops"]) == "PERMISSION_DENIED"
    assert status_of(Gate(None), method, None) == "PERMISSION_DENIED"


def test_a_token_reaches_its_models_and_does_not_learn_of_others(gate: Gate) -> None:
    assert status_of(gate, INFER_RPC, TOKENS["web"], "ocr") == "OK"
    for other in ("assistant", "no such model", "ocr.detect", "OCR", "ocr\0", "", "../ocr"):
        assert status_of(gate, INFER_RPC, TOKENS["web"], other) == "PERMISSION_DENIED"
        assert status_of(gate, INFER_RPC, TOKENS["all"], other) == "OK"
        assert status_of(gate, INFER_RPC, TOKENS["ops"], other) == "OK"
    assert status_of(gate, INFER_RPC, TOKENS["prom"], "ocr") == "PERMISSION_DENIED"


def test_a_caller_checks_models_that_are_known_only_later(gate: Gate) -> None:
    caller = gate.enter(INFER_RPC, TOKENS["web"])
    assert (caller.name, caller.admin) == ("web", False)
    caller.check("ocr")
    with pytest.raises(AccessDenied):
        caller.check("assistant")
    assert not ANONYMOUS.may_use_model("ocr") and not ANONYMOUS.admin


def test_a_token_that_calls_too_often_gets_a_retry_time(gate: Gate, clock: Clock) -> None:
    requests(gate, TOKENS["slow"], 2)
    with pytest.raises(LimitReached, match="allows 2 requests a second, 2 at once; the next is possible") as caught:
        requests(gate, TOKENS["slow"])
    reply = to_status(caught.value)
    assert reply.status == "RESOURCE_EXHAUSTED"
    assert reply.retry_after_s == pytest.approx(0.5)
    requests(gate, TOKENS["web"])  # others are not affected
    clock.now_s += 0.51
    requests(gate, TOKENS["slow"])


def test_messages_of_a_stream_count_like_calls(gate: Gate) -> None:
    caller = gate.enter(INFER_RPC, TOKENS["slow"])
    charge(gate, caller)
    charge(gate, caller)
    with pytest.raises(LimitReached):
        charge(gate, caller)
    requests(gate, TOKENS["web"], 5)


def test_a_stream_ends_with_its_token_and_when_its_rights_change(gate: Gate, file: TokenFile, clock: Clock) -> None:
    everything, ocr = gate.enter(INFER_RPC, TOKENS["all"]), gate.enter(INFER_RPC, TOKENS["web"])
    charge(gate, everything)
    text = file._path.read_text()
    kept = [line for line in text.splitlines() if "name: all" not in line]
    file._path.write_text("\n".join(kept).replace("models: [ocr]", "models: [speech]") + "\n")
    clock.now_s += 60
    for caller in (everything, ocr):
        with pytest.raises(AccessDenied) as denied:
            charge(gate, caller)
        assert denied.value.status == "UNAUTHENTICATED"


def test_a_stream_ends_when_its_token_is_replaced_under_the_same_name(
    gate: Gate, file: TokenFile, clock: Clock
) -> None:
    caller = gate.enter(INFER_RPC, TOKENS["web"])
    text = file._path.read_text()
    file._path.write_text(text.replace(digest(TOKENS["web"]), digest("another token")))
    clock.now_s += 60
    with pytest.raises(AccessDenied):
        charge(gate, caller)
    requests(gate, "another token")


def test_denied_models_and_regions_are_logged_with_the_token_name(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    caller = gate.enter(INFER_RPC, TOKENS["web"])
    region = Tensor("x", "UINT8", (4,), region=Region("alices", 0, 4))
    with pytest.raises(AccessDenied):
        caller.check("assistant")
    with pytest.raises(AccessDenied):
        caller.check_regions(InferRequest("ocr", (region,)))
    texts = [record.getMessage() for record in caplog.records]
    assert [("token web" in text, "ModelInfer" in text) for text in texts] == [(True, True)] * 2
    assert "model" in texts[0] and "shared memory" in texts[1]


def test_a_request_names_regions_only_for_who_may_use_them(gate: Gate) -> None:
    region = Region("alices", 0, 4)
    reads = InferRequest("ocr", (Tensor("x", "UINT8", (4,), region=region),))
    writes = InferRequest("ocr", (), (WantedOutput("y", region),))
    for name in ("all", "web"):
        caller = gate.enter(INFER_RPC, TOKENS[name])
        caller.check_regions(InferRequest("ocr", (Tensor("x", "UINT8", (4,), b"1234"),)))
        for request in (reads, writes):
            with pytest.raises(AccessDenied):
                caller.check_regions(request)
    for name in ("mem", "ops"):
        gate.enter(INFER_RPC, TOKENS[name]).check_regions(reads)
    UNRESTRICTED.check_regions(writes)


def test_denied_calls_probes_and_reads_take_nothing_from_the_rate(gate: Gate) -> None:
    for _ in range(10):
        assert status_of(gate, LOAD_RPC, TOKENS["slow"]) == "PERMISSION_DENIED"
    requests(gate, TOKENS["slow"], 2)
    with pytest.raises(LimitReached):
        requests(gate, TOKENS["slow"])
    for method in (name for name, kind in METHODS.items() if kind in (OPEN, READ)):
        assert status_of(gate, method, TOKENS["slow"]) == "OK", method


def test_gates_of_several_processes_share_one_account(file: TokenFile, clock: Clock) -> None:
    account = TokenRates(file, clock)
    gates = [Gate(file, ServeLimits(), clock, rates=account) for _ in range(4)]
    requests(gates[3], TOKENS["slow"], 2)
    for gate in gates:
        with pytest.raises(LimitReached) as caught:
            requests(gate, TOKENS["slow"])
        assert caught.value.retry_after_s == pytest.approx(0.5)
    clock.now_s += 0.5
    requests(gates[0], TOKENS["slow"])
    with pytest.raises(LimitReached):
        requests(gates[1], TOKENS["slow"])


def test_a_refused_caller_is_refused_again_without_the_account(file: TokenFile, clock: Clock) -> None:
    asked: list[str] = []

    class Counting(TokenRates):
        async def take(self, token: str) -> float:
            asked.append(token)
            return await super().take(token)

    gate = Gate(file, ServeLimits(), clock, rates=Counting(file, clock))
    requests(gate, TOKENS["slow"], 2)
    for passed_s in (0.0, 0.2, 0.2):
        clock.now_s += passed_s
        with pytest.raises(LimitReached):
            requests(gate, TOKENS["slow"])
    assert len(asked) == 3
    clock.now_s += 0.11
    requests(gate, TOKENS["slow"])
    requests(gate, TOKENS["web"], 3)
    assert asked == ["slow"] * 4


def test_denials_are_logged_without_the_token_and_not_endlessly(
    gate: Gate, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(1000):
        status_of(gate, INFER_RPC, "a-guess")
        status_of(gate, "HTTP GET /\r\nfake\x1b[2J", "a-guess")
    assert len(caplog.records) == DENIALS_LOGGED_AT_ONCE
    assert "a-guess" not in caplog.text
    assert "\x1b" not in caplog.text and "\r\n" not in caplog.text
    clock.now_s += 1
    status_of(gate, INFER_RPC, "a-guess")
    assert "1990 more were not logged" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    "value",
    ["Bearer abc", "bearer abc", "BEARER abc", "bEaReR  abc", "  Bearer\tabc".replace("\t", " "), b"Bearer abc"],
)
def test_the_scheme_is_read_in_any_case(value: str | bytes) -> None:
    assert bearer([value]) == "abc"


def test_no_header_is_no_token() -> None:
    assert bearer([]) is None


@pytest.mark.parametrize(
    "values",
    [
        [""], ["Bearer"], ["Bearer "], ["Bearer  "], ["abc"], ["Basic " + base64.b64encode(b"a:b").decode()],
        ["Bearerabc"], ["Bearer a b"], ["Bearer a,b c"], ["Bearer a\0"], ["Bearer a\r\nb"], ["Bearer \u00e9"],
        [b"Bearer \xff"], ["Bearer abc", "Bearer abc"], ["Bearer abc", ""], ["Token abc"],
    ],
)  # fmt: skip
def test_any_other_header_is_refused(gate: Gate, values: list[str | bytes]) -> None:
    with pytest.raises(AccessDenied) as caught:
        bearer(values)
    assert caught.value.status == "UNAUTHENTICATED"
    with pytest.raises(AccessDenied):
        gate.admit(INFER_RPC, values)


def test_admit_takes_the_header_as_it_came(gate: Gate) -> None:
    assert gate.admit(INFER_RPC, [f"Bearer {TOKENS['ops']}"]).name == "ops"
    assert gate.admit(INFER_RPC, [f"bearer {TOKENS['web']}".encode()]).name == "web"
    assert gate.admit("HTTP GET /livez", ["nonsense"]) is ANONYMOUS
    assert gate.admit("HTTP GET /livez", ["Bearer wrong"]) is ANONYMOUS
    assert gate.admit("HTTP GET /livez", []) is ANONYMOUS
    assert gate.admit("/grpc.health.v1.Health/Check", [f"Bearer {TOKENS['web']}"]).may_use_model("ocr")
    with pytest.raises(AccessDenied):
        gate.admit(INFER_RPC, [])
    with pytest.raises(AccessDenied):
        gate.admit(INFER_RPC, ["Bearer " + "x" * (TOKEN_CHARS_MAX + 1)])


def test_a_batch_costs_as_many_requests_as_it_has_items(gate: Gate, clock: Clock) -> None:
    caller = gate.enter(INFER_RPC, TOKENS["slow"])
    charge(gate, caller)
    caller.spend(0)
    caller.spend(255)
    with pytest.raises(LimitReached) as refused:
        charge(gate, caller)
    with pytest.raises(LimitReached):
        gate.enter(INFER_RPC, TOKENS["slow"])
    assert refused.value.retry_after_s > 100
    clock.now_s += refused.value.retry_after_s + 0.001
    charge(gate, gate.enter(INFER_RPC, TOKENS["slow"]))
