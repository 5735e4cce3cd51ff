import base64
from typing import Any

import pytest

from tests.engine.serving.http.backends import info
from weftline.engine.llm.tokens import check_messages
from weftline.engine.serving.http.errors import HttpError
from weftline.engine.serving.openai.bodies import ChatBody
from weftline.engine.serving.openai.messages import chat_inputs, read_conversation
from weftline.engine.serving.openai.ports import chat_ports

LLM = chat_ports(info("m", {"messages": "json", "tools": "json?", "photo": "image?"}, {"text": "text"}))
CHOOSES = chat_ports(
    info(
        "m",
        {"messages": "json", "tools": "json?", "tool_choice": "json?", "parallel_tool_calls": "json?"},
        {"text": "text"},
    )
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "f"}}
SAID = [{"role": "user", "content": "x"}]
PLAIN = chat_ports(info("m", {"question": "text"}, {"text": "text"}))
PNG = b"\x89PNG picture"
URL = "data:image/png;base64," + base64.b64encode(PNG).decode()


def body(fields: dict[str, Any]) -> ChatBody:
    return ChatBody.parse({"model": "m"} | fields)


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def picture(url: str = URL) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def test_a_conversation_with_tool_calls_reaches_the_llm_step_as_it_is_said() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    said = [
        {"role": "developer", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "what "}, {"type": "text", "text": "now?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": [], "audio": None},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    inputs = chat_inputs(body({"messages": said, "tools": [TOOL]}), LLM)
    assert inputs["messages"] == [
        {"role": "developer", "content": "be short"},
        {"role": "user", "content": "what now?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    assert inputs["tools"] == [TOOL]
    check_messages(inputs["messages"])


def test_a_model_with_a_text_input_gets_the_last_user_message() -> None:
    said = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "3"},
    ]
    assert chat_inputs(body({"messages": said}), PLAIN) == {"question": "3"}
    with pytest.raises(HttpError, match="no user message"):
        chat_inputs(body({"messages": said[1:2]}), PLAIN)


def test_pictures_of_the_last_message_with_any_go_to_the_image_inputs() -> None:
    said = [user(picture("data:image/png;base64,b2xk")), user({"type": "text", "text": "hm"}, picture())]
    inputs = chat_inputs(body({"messages": said}), LLM)
    assert inputs["photo"] == PNG
    assert inputs["messages"][1] == {"role": "user", "content": "hm"}


def test_a_list_of_images_takes_all_that_are_left() -> None:
    ports = chat_ports(info("m", {"q": "text", "first": "image", "rest": "list[image]"}, {"text": "text"}))
    parts = [{"type": "text", "text": "?"}, picture(), picture(), picture()]
    inputs = chat_inputs(body({"messages": [user(*parts)]}), ports)
    assert (inputs["first"], inputs["rest"]) == (PNG, [PNG, PNG])


def test_recordings_go_to_the_audio_inputs() -> None:
    ports = chat_ports(info("m", {"question": "audio"}, {"text": "text"}))
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(b"RIFF").decode(), "format": "wav"}}
    assert chat_inputs(body({"messages": [user(part)]}), ports) == {"question": b"RIFF"}
    with pytest.raises(HttpError, match="its input question got none"):
        chat_inputs(body({"messages": [user({"type": "text", "text": "?"})]}), ports)


@pytest.mark.parametrize("url", ["http://10.0.0.1/x.png", "https://host/x.png", "file:///etc/passwd", "ftp://x/y", "x"])
def test_nothing_is_ever_fetched(url: str) -> None:
    with pytest.raises(HttpError, match="fetches no URLs"):
        chat_inputs(body({"messages": [user(picture(url))]}), LLM)


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        ["hi"],
        [{"content": "hi"}],
        [{"role": "root", "content": "hi"}],
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [3]}],
        [{"role": "user", "content": [{"type": "video"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 3}]}],
        [{"role": "assistant", "content": "", "tool_calls": {"name": "f"}}],
        [{"role": "assistant", "content": "", "tool_calls": [{"type": "custom", "custom": {"name": "f"}}]}],
        [user(picture("data:image/png,plain"))],
        [user(picture("data:image/png;base64,%%%"))],
        [user({"type": "image_url", "image_url": 3})],
        [user({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "exe"}})],
        [user({"type": "input_audio"})],
        [{"role": "user", "content": "x"}] * 1025,
    ],
)
def test_a_message_that_is_none_is_refused_with_its_place(messages: Any) -> None:
    with pytest.raises(HttpError) as refused:
        read_conversation(messages)
    assert refused.value.param == "messages"
    assert str(refused.value).startswith("messages")


def test_too_many_pictures_are_refused_rather_than_forgotten() -> None:
    with pytest.raises(HttpError, match="found 2 pictures"):
        chat_inputs(body({"messages": [user(picture(), picture())]}), LLM)


def test_tools_are_passed_with_their_choice() -> None:
    for fields in ({"tool_choice": "required"}, {"tool_choice": NAMED}, {"parallel_tool_calls": False}):
        inputs = chat_inputs(body({"messages": SAID, "tools": [TOOL]} | fields), CHOOSES)
        assert inputs == {"messages": SAID, "tools": [TOOL]} | fields
    for fields in ({}, {"tool_choice": "auto"}, {"parallel_tool_calls": True}):
        assert chat_inputs(body({"messages": SAID, "tools": [TOOL]} | fields), LLM) == {
            "messages": SAID,
            "tools": [TOOL],
        }
    for fields in ({"tools": [TOOL], "tool_choice": "none"}, {"tools": []}, {"parallel_tool_calls": False}):
        assert chat_inputs(body({"messages": SAID} | fields), CHOOSES) == {"messages": SAID}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": "x"}, "tools", "a list"),
        ({"tools": [TOOL] * 129}, "tools", "at most 128"),
        ({"tools": ["x"]}, "tools", r"tools\[0\].function.name"),
        (
            {"tools": [TOOL, {"type": "function", "function": {"name": "n" * 257}}]},
            "tools",
            r"tools\[1\].function.name",
        ),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools", "only function is supported"),
        ({"tools": [{"function": {"name": "f", "parameters": "x"}}]}, "tools", "a JSON schema"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "expected none, auto, required"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "expected none, auto, required"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "found 'g'"),
        ({"tools": [TOOL], "parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
    ],
)
def test_wrong_tools_are_refused_by_the_name_of_their_field(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(HttpError, match=message) as refused:
        chat_inputs(body({"messages": SAID} | fields), CHOOSES)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ],
)
def test_tools_are_refused_where_the_model_has_no_input_for_them(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpError, match=f"add an input `{param}: json`") as refused:
        chat_inputs(body({"messages": SAID, "tools": [TOOL]} | fields), LLM if fields else PLAIN)
    assert refused.value.param == param


SEES = chat_ports(info("m", {"messages": "json", "images": "list[image]?"}, {"text": "text"}))


def test_pictures_stay_in_the_messages_of_a_model_without_inputs_for_them() -> None:
    first = {"role": "user", "content": [picture(), {"type": "text", "text": "what?"}]}
    said = [first, {"role": "assistant", "content": "a dog"}, user({"type": "text", "text": "sure?"})]
    for ports in (SEES, chat_ports(info("m", {"messages": "json"}, {"text": "text"}))):
        assert chat_inputs(body({"messages": said}), ports) == {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}, first["content"][1]]},
                {"role": "assistant", "content": "a dog"},
                {"role": "user", "content": "sure?"},
            ]
        }


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ([picture("https://example.org/a.png")], "fetches no URLs"),
        ([picture("data:image/png,plain")], "base64"),
        ([picture(), {"type": "input_audio"}], r"content\[1\]: expected a part of type text or image_url"),
        ([picture()] * 33, "found 33 pictures, expected at most 32"),
        ([picture("data:image/png;base64," + "A" * (28 << 20))], "expected at most 20971520"),
    ],
)
def test_pictures_that_stay_have_limits(parts: list[Any], named: str) -> None:
    with pytest.raises(HttpError, match=named) as refused:
        chat_inputs(body({"messages": [user(*parts)]}), SEES)
    assert refused.value.param == "messages"
