"""`weftline chat`: an llm step alone, a conversation that grows, commands, and Ctrl-C at a terminal."""

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from weftline.cli.chat import COMMANDS, Chat, Terminal, changed, help_lines, parse_line
from weftline.cli.chat_conversation import AnswerStats, Conversation, summary
from weftline.cli.chat_step import ChatStep, chat_step
from weftline.engine.result import StreamedOutput
from weftline.engine.session import Session, load
from weftline.errors import InputError, StepError
from weftline.pipelines.spec.loader import load_file

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "examples/models/shapes-chat"
FLAGSHIP = ROOT / "examples/voice_photo_assistant.yaml"
PHOTO = "The photo shows: 2 red circles, 1 blue star.\\\nQuestion: "
TALK = """
inputs: {{question: text, photo: image}}
steps:
  say: {{node: llm, model: "{model}", prompt: "{{{{ question }}}}", context_max: 256}}
  keep: {{node: echo, type: image, inputs: {{value: photo}}}}
outputs: {{said: say.text, photo: keep.value}}
"""


PROMPT = b"\x1b[?2004h"
"""Sent to a terminal when the prompt is ready: bracketed paste on."""


class Tty(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Answers:
    """Answers like a session's stream, from a list: texts, errors, or ... for Ctrl-C after a first word."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []

    def __call__(self, **inputs: Any) -> "Answers":
        self.asked.append(inputs)
        return self

    def __enter__(self) -> Iterator[StreamedOutput]:
        return self._pieces(self.answers.pop(0))

    def __exit__(self, *_: object) -> None:
        pass

    def _pieces(self, answer: Any) -> Iterator[StreamedOutput]:
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, tuple):
            reasoning, answer = answer
            yield from (StreamedOutput("reasoning", word, False) for word in reasoning.split())
        words = ["Well,"] if answer is ... else re.findall(r"\S+\s*", answer)
        yield from (StreamedOutput("text", word, False) for word in words)
        if answer is ...:
            raise KeyboardInterrupt
        yield StreamedOutput("text", answer, True)
        usage = {"prompt_tokens": 30, "completion_tokens": 20, "cached_tokens": 15, "finish_reason": "length"}
        yield StreamedOutput("usage", usage, True)


class Typed(Terminal):
    """A terminal at which these lines are typed."""

    def __init__(self, lines: Sequence[str], err: io.StringIO) -> None:
        super().__init__(Tty(), Tty(), err)
        self.lines = list(lines)

    def read(self) -> str | None:
        return self.lines.pop(0) if self.lines else None


def talk(step: ChatStep, ask: Any, lines: str, conversation: Conversation | None = None) -> tuple[int, str, str]:
    """Return the exit code and what is written when `lines` come through a pipe."""
    out, err = io.StringIO(), io.StringIO()
    terminal = Terminal(io.StringIO(lines), out, err)
    code = Chat(step, conversation or Conversation(step.system), {}, ask, terminal).run()
    return code, out.getvalue(), err.getvalue()


def typed(step: ChatStep, ask: Any, *lines: str, conversation: Conversation | None = None) -> str:
    """Return the notes on standard error when `lines` are typed."""
    err = Tty()
    Chat(step, conversation or Conversation(), {}, ask, Typed(lines, err)).run()
    return re.sub(r"\x1b\[\dm", "", err.getvalue())


def test_reasoning_is_shown_on_a_terminal_and_never_kept(step: ChatStep) -> None:
    conversation = Conversation()
    assert "Hm,well." in typed(step, Answers(("Hm, well.", "Two.")), "How many?", conversation=conversation)
    assert [one["content"] for one in conversation.messages] == ["How many?", "Two."]
    code, out, err = talk(step, Answers(("Hm, well.", "Two.")), "How many?\n")
    assert (code, out) == (0, "Two.\n") and "Hm" not in err


@pytest.fixture(scope="module")
def step() -> ChatStep:
    return chat_step(load_file(FLAGSHIP))


@pytest.fixture(scope="module")
def session(step: ChatStep) -> Iterator[Session]:
    pytest.importorskip("torch")
    with load(step.pipeline).open() as session:
        yield session


# the step


def test_the_step_is_taken_out_with_its_options_and_without_its_prompt(step: ChatStep) -> None:
    assert (step.name, step.model, step.sampling.tokens_max) == ("answer", "models/shapes-chat", 64)
    assert [one.name for one in step.pipeline.steps] == ["answer"]
    assert set(step.pipeline.steps[0].options) == {"model", "sampling"}
    assert set(step.pipeline.steps[0].inputs) == {"messages", "prompt", "sampling"}


def test_an_llm_step_of_a_pipeline_inside_the_pipeline_can_be_chosen(write, tmp_path: Path) -> None:
    (tmp_path / "inner.yaml").write_text(
        "weftline: 1\nname: inner\ninputs: {q: text}\nsteps:\n  say: {node: llm, system: Be brief., "
        f"inputs: {{prompt: q}}, model: '{MODEL}'}}\noutputs: {{said: say.text}}\n"
    )
    outer = write(
        "inputs: {q: text}\nsteps:\n  deep: {pipeline: inner.yaml, inputs: {q: q}}\noutputs: {said: deep.said}\n"
    )
    found = chat_step(load_file(outer))
    assert (found.name, found.system) == ("deep/say", "Be brief.")


@pytest.mark.parametrize(
    ("steps", "wanted", "printed"),
    [
        ("a: {node: echo, inputs: {value: x}}", "", "the pipeline has no llm step that generates text"),
        ("a: {node: llm, model: M, prompt: '{{ x }}'}\n  b: {node: llm, model: M, prompt: '{{ x }}'}", "", "a, b"),
        ("a: {node: llm, model: M, prompt: '{{ x }}'}", "answer", "--step answer: is not in the pipeline"),
        ("a: {node: llm, model: M, prompt: '{{ x }}'}", "a_prompt", "--step a_prompt: is not an llm step"),
    ],
    ids=["none", "several", "unknown", "another kind"],
)
def test_without_one_llm_step_it_says_so(weft, write, steps: str, wanted: str, printed: str) -> None:
    outputs = ", ".join(f"{name}: {name}.text" for name in re.findall(r"(\w): {node: llm", steps)) or "a: a.value"
    file = write(f"inputs: {{x: text}}\nsteps:\n  {steps.replace('M', str(MODEL))}\noutputs: {{{outputs}}}\n")
    ended = weft("chat", file, "--once", "hello", *(("--step", wanted) if wanted else ()))
    assert (ended.code, ended.out) == (3, "")
    assert printed in ended.err and "fix: " in ended.err
    assert "loading" not in ended.err


def test_a_wrong_option_is_refused_before_a_model_is_loaded(weft, tmp_path: Path) -> None:
    for words, printed in (
        (("--set", "temprature=1"), "did you mean temperature?"),
        (("--set", "temperature"), "expected KEY=VALUE"),
        (("--load", str(tmp_path / "none.json")), "cannot be read"),
    ):
        ended = weft("chat", str(FLAGSHIP), "--once", "hello", *words)
        assert ended.code == 3 and printed in ended.err
        assert "loading" not in ended.err


# a conversation


def test_a_question_is_sent_with_all_messages_and_kept_when_answered() -> None:
    said = Conversation("Be brief.")
    asked = said.with_question("one?")
    assert [message["role"] for message in asked] == ["system", "user"]
    assert said.turns == 0
    said.add("one?", "One.")
    assert said.with_question("two?")[:3] == said.messages
    assert said.as_text("two?") == "Be brief.\none?\nOne.\ntwo?"
    said.reset()
    assert said.messages == [{"role": "system", "content": "Be brief."}]
    said.set_system("")
    assert said.messages == []


def test_a_conversation_is_saved_and_loaded_and_replaces_no_other_file(tmp_path: Path) -> None:
    said, file = Conversation("Be brief."), tmp_path / "chat.json"
    said.add("größe?", "Groß.")
    said.save(file, model="m")
    said.add("more?", "No.")
    said.save(file, model="m")
    assert Conversation.load(file).messages == said.messages
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="exists and is not a saved conversation"):
        said.save(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("{", "is not a saved conversation: not valid JSON at character 2"),
        ("[" * 100_000, "is not a saved conversation: "),
        ("{}", "missing required field `weftline_chat`"),
        ('{"weftline_chat": 2, "messages": []}', r"Invalid enum value 2 - at `\$.weftline_chat`"),
        ('[{"role": "user"}]', r"missing required field `content` - at `\$\[0\]`"),
        ('[{"role": "user", "content": "a", "name": "b"}]', r"unknown field `name` - at `\$\[0\]`"),
        ('[{"role": "tool", "content": "a"}]', r"Invalid enum value 'tool' - at `\$\[0\].role`"),
        (
            '[{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]',
            "only the first message may have the role system",
        ),
        ('[{"role": "user", "content": 5}]', r"Expected `str`, got `int` - at `\$\[0\].content`"),
    ],
)
def test_a_file_that_holds_no_conversation_is_refused(tmp_path: Path, text: str, printed: str) -> None:
    (tmp_path / "chat.json").write_text(text)
    with pytest.raises(InputError, match=printed):
        Conversation.load(tmp_path / "chat.json")


# commands


def test_a_line_is_a_command_a_text_or_a_mistake() -> None:
    assert parse_line("hello") == ("", "hello")
    assert parse_line("//etc is a folder") == ("", "/etc is a folder")
    assert parse_line("/system  Be brief. ") == ("/system", "Be brief.")
    for line, printed in (
        ("/rest", "did you mean /reset"),
        ("/save", "the name of a file is missing"),
        ("/reset now", "has no argument"),
    ):
        with pytest.raises(InputError, match=printed):
            parse_line(line)


def test_sampling_changes_are_json_or_text_and_can_be_taken_back() -> None:
    changes = changed({}, "temperature 0.7")
    assert changes == changed({}, "temperature=0.7") == {"temperature": 0.7}
    assert changed(changes, 'stop=["a=b"]') == {"temperature": 0.7, "stop": ["a=b"]}
    assert changed(changes, "regex [a-z]+=") == {"temperature": 0.7, "regex": "[a-z]+="}
    assert changed(changes, "temperature") == {}


def test_help_tells_of_every_command() -> None:
    assert [line.split()[0] for line in help_lines()[:-1]] == list(COMMANDS)


def test_commands_change_what_is_asked(step: ChatStep, tmp_path: Path) -> None:
    ask, file = Answers(*["Yes."] * 4), tmp_path / "chat.json"
    lines = (
        f"/system Be brief.\n/set temperature 0.7\none?\n/save {file}\n/reset\ntwo?\n/load {file}\n/set temperature\n3?"
    )
    code, out, err = talk(step, ask, lines)
    assert (code, out) == (0, "Yes.\n" * 3), err
    assert [[message["content"] for message in one["messages"]] for one in ask.asked] == [
        ["Be brief.", "one?"], ["Be brief.", "two?"], ["Be brief.", "one?", "Yes.", "3?"],
    ]  # fmt: skip
    assert [one.get("sampling") for one in ask.asked] == [{"temperature": 0.7}, {"temperature": 0.7}, None]
    assert json.loads(file.read_text())["sampling"] == {"temperature": 0.7}


def test_a_tilde_without_a_user_ends_no_chat(step: ChatStep) -> None:
    ask = Answers("Yes.")
    code, out, err = talk(step, ask, "/system ~no-such-user, be brief\n/load ~no-such-user/chat.json\none?")
    assert (code, out) == (1, "Yes.\n") and "~no-such-user/chat.json" in err
    assert ask.asked[0]["messages"][0]["content"] == "~no-such-user, be brief"


def test_a_mistake_changes_nothing_and_a_pipe_ends_with_1(step: ChatStep) -> None:
    ask = Answers("Yes.")
    code, out, err = talk(step, ask, "/set temperature 1000\n/set warmth 1\n/nope\n\none?\n/quit\nnever\n")
    assert (code, out) == (1, "Yes.\n")
    assert err.count("error: ") == 3 and "sampling.warmth: unknown key" in err
    assert "sampling" not in ask.asked[0] and len(ask.asked) == 1


def test_a_line_that_ends_with_a_backslash_goes_on(step: ChatStep) -> None:
    ask = Answers("Yes.", "Yes.")
    talk(step, ask, "a\\\nb\\\n c\nlast\\")
    assert [one["messages"][-1]["content"] for one in ask.asked] == ["a\nb\n c", "last"]


# answers


def test_a_question_that_fails_leaves_the_conversation_as_it_was(step: ChatStep) -> None:
    ask = Answers("Yes.", StepError("broken", "answer"), InputError("messages: too long"), "Yes.")
    code, out, err = talk(step, ask, "one?\ntwo?\nthree?\nfour?\n")
    assert (code, out) == (1, "Yes.\nYes.\n")
    assert "error: step answer: broken" in err and "the conversation is unchanged; /reset starts" in err
    assert [message["content"] for message in ask.asked[-1]["messages"]] == ["one?", "Yes.", "four?"]


def test_ctrl_c_keeps_the_part_so_far(step: ChatStep) -> None:
    ask = Answers(..., "Yes.")
    printed = typed(step, ask, "one?", "two?", "/stats")
    assert "stopped; the part so far stays" in printed and "stopped: 1 answer" in printed
    assert [message["content"] for message in ask.asked[-1]["messages"]] == ["one?", "Well,", "two?"]


def test_ctrl_c_in_a_pipe_ends_the_command(step: ChatStep) -> None:
    with pytest.raises(KeyboardInterrupt):
        talk(step, Answers(...), "one?\n")


def test_a_terminal_shows_figures_after_each_answer(step: ChatStep) -> None:
    printed = typed(step, Answers("Yes."), "one?")
    assert "models/shapes-chat, step answer; /help lists commands" in printed
    assert re.search(r"20 tokens at [\d.]+/s, first after \d+ ms, 15 of 30 prompt tokens cached \(50%\)", printed)
    assert "cut: the context is full" in printed, "20 of at most 64 tokens, and yet for its length"


def test_rates_count_tokens_after_the_first() -> None:
    unknown = {"completion_tokens": 3, "prompt_tokens": 4, "cached_tokens": None, "finish_reason": "stop"}
    assert "0 of 4 prompt tokens" in str(AnswerStats.from_usage(unknown, 1.0, 2.0))  # of an external engine
    one, two = AnswerStats(11, 20, 0, 500.0, 1500.0), AnswerStats(1, 40, 32, 100.0, 100.0)
    assert str(one) == "11 tokens at 10.0/s, first after 500 ms, 0 of 20 prompt tokens cached (0%)"
    assert str(two) == "1 token, first after 100 ms, 32 of 40 prompt tokens cached (80%)"
    assert summary([one, two], 2, 0) == [
        "conversation: 2 questions, 41 tokens at the last answer",
        "answers: 2 with 12 tokens at 10.0/s",
        "first token: after 500 ms (median)",
        "prefix cache: 32 of 60 prompt tokens cached (53%)",
    ]
    assert summary([], 0, 0) == ["conversation: 0 questions"]


def test_notes_are_dim_and_wrapped_on_a_terminal_and_plain_without_colour(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text, shown = "11 tokens at 10.0/s, first after 500 ms", {}
    for colour in ("", "1"):
        monkeypatch.setenv("NO_COLOR", colour)
        err = Tty()
        Terminal(Tty(), Tty(), err).note(text)
        shown[colour] = err.getvalue().splitlines()
    assert shown["1"] == ["11 tokens at 10.0/s, ", "first after 500 ms"]
    assert shown[""] == [f"\x1b[2m{line}\x1b[0m" for line in shown["1"]]
    err = io.StringIO()
    Terminal(io.StringIO(), io.StringIO(), err).note(text)
    assert err.getvalue() == f"{text}\n"


def test_terminal_escapes_of_a_model_are_shown_and_not_obeyed(step: ChatStep) -> None:
    assert talk(step, Answers("\x1b[2Jgone"), "one?\n")[1] == "\\x1b[2Jgone\n"


def test_the_tab_key_completes_commands_and_sampling_options(step: ChatStep) -> None:
    terminal = Typed([], Tty())
    Chat(step, Conversation(), {}, Answers(), terminal).run()
    assert terminal.completions("/s") == ["/system", "/set", "/save", "/stats"]
    assert terminal.completions("/set te") == ["/set temperature "]
    assert terminal.completions("") == terminal.completions("hello") == []


# a terminal


@pytest.fixture
def keys() -> Iterator[PipeInput]:
    with create_pipe_input() as pressed, create_app_session(input=pressed, output=DummyOutput()):
        yield pressed


def read_keys(pressed: PipeInput, keys: str, terminal: Terminal | None = None) -> str | None:
    """Return the question that these keys make at the prompt."""
    pressed.send_text(keys)
    return (terminal or Terminal(Tty(), Tty(), Tty())).read()


def test_a_line_that_ends_with_a_backslash_goes_on_at_the_prompt(keys: PipeInput) -> None:
    assert read_keys(keys, "a\\\rb\\\r c\r") == "a\nb\n c"


def test_the_arrow_keys_bring_back_what_was_typed(keys: PipeInput) -> None:
    terminal = Terminal(Tty(), Tty(), Tty())
    assert read_keys(keys, "one?\r", terminal) == "one?"
    assert read_keys(keys, "\x1b[A\x7f!\r", terminal) == "one!"


def test_the_prompt_replaces_what_is_typed_by_its_completion(step: ChatStep) -> None:
    terminal = Typed([], Tty())
    Chat(step, Conversation(), {}, Answers(), terminal).run()
    (found,) = terminal.get_completions(Document("/set tokens_mi"), CompleteEvent())
    assert (found.text, found.start_position) == ("/set tokens_min ", -14)


@pytest.mark.parametrize("key", ["\x03", "\x04"], ids=["Ctrl-C", "Ctrl-D"])
def test_ctrl_c_and_ctrl_d_leave_at_the_prompt(keys: PipeInput, key: str) -> None:
    assert read_keys(keys, key) is None


# with the model


@pytest.mark.slow
def test_each_question_finds_its_conversation_in_the_cache(session: Session, step: ChatStep) -> None:
    lines = f"{PHOTO}How many red circles are there?\n{PHOTO}How many blue stars are there?\n/stats\n"
    code, out, err = talk(step, session.stream, lines)
    assert (code, out) == (0, "There are 2 red circles.\nThere is 1 blue star.\n")
    cached = re.search(r"prefix cache: (\d+) of (\d+) prompt tokens cached", err)
    assert cached and int(cached[1]) >= 16, err


@pytest.mark.slow
def test_a_full_context_says_what_to_do_and_keeps_the_conversation(session: Session, step: ChatStep) -> None:
    talked, long = Conversation(), "circle " * 450 + "\n"
    code, out, err = talk(step, session.stream, long * 3, talked)
    assert code == 1
    assert re.search(r"error: the context is full: .* has \d+ tokens, and the model accepts at most 1023\n", err), err
    assert "fix: /reset starts a new conversation, /save FILE keeps this one" in err
    assert out and talked.turns in (1, 2)
    question = f"{PHOTO}How many red circles are there?\n"
    assert talk(step, session.stream, "/reset\n" + question, talked)[:2] == (0, "There are 2 red circles.\n")


@pytest.mark.slow
def test_a_model_without_a_chat_template_goes_on_with_plain_text(write, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    plain = tmp_path / "model"
    plain.mkdir()
    for file in MODEL.iterdir():
        if file.name != "chat_template.jinja":
            (plain / file.name).symlink_to(file)
    step = chat_step(load_file(write(TALK.format(model=plain))))
    with load(step.pipeline).open() as session:
        code, out, err = talk(step, session.stream, "/set tokens_max 5\nhello\nagain\n", Conversation("Be brief."))
        printed = talk(step, session.stream, "a\n/system b\n")
    assert code == 0, err
    assert err.count("no chat template: the conversation is sent as plain text") == 1
    assert "accepts no system message; it is removed" in err
    assert out.count("\n") >= 2
    assert printed[0] == 1 and "error: /system: the model has no chat template" in printed[2]


@pytest.mark.slow
def test_one_question_from_the_command_line_in_a_process_of_its_own() -> None:
    pytest.importorskip("torch")
    question = "The photo shows: 2 red circles.\nQuestion: How many red circles are there?"
    words = ["chat", str(FLAGSHIP), "--once", question, "--set", "tokens_max=3"]
    ended = subprocess.run([sys.executable, "-m", "weftline", *words], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "There are 2\n")
    assert "loading answer: ready\n" in ended.stderr


@pytest.mark.slow
def test_ctrl_c_at_a_terminal_stops_one_answer_and_ctrl_d_leaves() -> None:
    pytest.importorskip("torch")
    words = ["--set", "ignore_eos=true", "--set", "tokens_max=990", "--set", "tokens_min=990"]
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    command = [sys.executable, "-m", "weftline", "chat", str(FLAGSHIP), *words]
    chat = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, close_fds=True,
        preexec_fn=_take_terminal, env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "PROMPT_TOOLKIT_NO_CPR": "1"},
    )  # fmt: skip
    os.close(theirs)
    try:
        seen = _until(ours, b"Ctrl-D leaves", PROMPT)
        os.write(ours, b"hello\r")
        seen = _until(ours, b"shapes")
        os.write(ours, b"\x03")
        seen = _until(ours, b"the part so far stays in the conversation", PROMPT)
        os.write(ours, b"/set tokens_min 0\r/set tokens_max 4\rhello again\r")
        seen = _until(ours, b"cut after tokens_max, 4 tokens", PROMPT)
        assert re.search(rb"4 tokens at [\d.]+/s, first after \d+ ms, (\d+) of \d+ prompt tokens cached", seen), seen
        os.write(ours, b"/stats\r")
        assert b"conversation: 2 questions" in _until(ours, b"/stats", b"stopped: 1 answer", PROMPT)
        os.write(ours, b"\x04")
        assert chat.wait(20) == 0
    finally:
        chat.kill()
        chat.wait()
        os.close(ours)


def _take_terminal() -> None:
    """Make standard input the controlling terminal, whose Ctrl-C is then a signal."""
    import fcntl

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _until(terminal: int, *wanted: bytes) -> bytes:
    """Return what a terminal shows until all of `wanted` is there, one after the other, at most 60 s later.

    A key pressed before the prompt is there reaches a terminal that is not yet read key by key, where Ctrl-D is lost.
    """
    seen, until_s = b"", time.monotonic() + 60
    in_order = re.compile(b".*?".join(map(re.escape, wanted)), re.DOTALL)
    while not in_order.search(seen):
        ready, _, _ = select.select([terminal], [], [], max(0.0, until_s - time.monotonic()))
        assert ready, f"waited for {wanted}, seen: {seen[-2000:]!r}"
        seen += os.read(terminal, 65_536)
    return seen
