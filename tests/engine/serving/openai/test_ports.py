import pytest

from tests.engine.serving.http.backends import info
from weftline.engine.serving.http.errors import HttpError
from weftline.engine.serving.openai.ports import (
    chat_ports,
    completion_ports,
    embedding_ports,
    rerank_ports,
    speech_ports,
    transcription_ports,
    translation_ports,
    vector_length,
)


def test_a_model_with_messages_chats_and_its_other_ports_are_found_by_name() -> None:
    ports = chat_ports(
        info(
            "m",
            {"prompt": "text?", "messages": "json?", "sampling": "json?", "tools": "json?", "photo": "image?"},
            {"text": "text", "usage": "json", "answers": "json"},
        )
    )
    assert (ports.messages, ports.prompt, ports.output) == ("messages", "prompt", "text")
    assert (ports.sampling, ports.tools, ports.usage, ports.answers) == ("sampling", "tools", "usage", "answers")
    assert [one.name for one in ports.images] == ["photo"]


def test_a_model_with_one_text_input_chats_with_the_last_question() -> None:
    ports = chat_ports(info("m", {"question": "text", "language": "text?"}, {"reply": "text"}))
    assert (ports.prompt, ports.output, ports.sampling) == ("question", "reply", None)


def test_the_one_text_input_that_is_needed_is_the_question() -> None:
    assert chat_ports(info("m", {"question": "text", "style": "text?"}, {"answer": "text"})).prompt == "question"


def test_a_model_that_hears_and_sees_chats_too() -> None:
    ports = chat_ports(info("m", {"question": "audio", "photo": "image"}, {"answer": "text", "transcript": "text"}))
    assert (ports.prompt, ports.output) == (None, "answer")


@pytest.mark.parametrize(
    ("inputs", "outputs", "why"),
    [
        ({"x": "float32[3]"}, {"text": "text"}, "no input `messages`"),
        ({"one": "text", "two": "text"}, {"text": "text"}, "no input `messages`"),
        ({"prompt": "text", "x": "float32[3]"}, {"text": "text"}, "its input x"),
        ({"prompt": "text"}, {"y": "float32[3]"}, "no text output"),
        ({"prompt": "text"}, {"one": "text", "two": "text"}, "none is called"),
    ],
)
def test_a_model_that_cannot_chat_says_why(inputs: dict[str, str], outputs: dict[str, str], why: str) -> None:
    with pytest.raises(HttpError, match=why) as refused:
        chat_ports(info("m", inputs, outputs))
    assert (refused.value.code, refused.value.param) == (400, "model")


def test_embeddings_come_from_the_one_float_vector() -> None:
    ports = embedding_ports(info("m", {"text": "text"}, {"v": "float32[D]", "usage": "json", "ids": "int64[N]"}))
    assert (ports.prompt, ports.output, ports.usage) == ("text", "v", "usage")
    with pytest.raises(HttpError, match="float vectors are none"):
        embedding_ports(info("m", {"text": "text"}, {"v": "float32[3, H]"}))
    with pytest.raises(HttpError, match="float vectors are a, b"):
        embedding_ports(info("m", {"text": "text"}, {"a": "float32[D]", "b": "float32[D]"}))


def test_the_length_of_vectors_is_known_where_their_type_states_it() -> None:
    model = info("m", {"text": "text"}, {"three": "float32[3]", "free": "float32[D]", "words": "text"})
    assert [vector_length(model, name) for name in ("three", "free", "words", "absent")] == [3, None, None, None]


def test_rerank_wants_a_query_a_list_of_texts_and_one_vector() -> None:
    inputs = {"query": "text", "found": "list[text]", "tenant": "text?"}
    ports = rerank_ports(info("m", inputs, {"scores": "float32[N]", "other": "float32[N]", "usage": "json"}))
    assert (ports.query, ports.documents, ports.output) == ("query", "found", "scores")
    assert (ports.tenant, ports.usage) == ("tenant", "usage")
    assert rerank_ports(info("m", inputs, {"relevance": "float32[N]"})).output == "relevance"
    for wrong, outputs, why in (
        ({"text": "text", "found": "list[text]"}, {"scores": "float32[N]"}, "an input `query`"),
        ({"query": "text"}, {"scores": "float32[N]"}, "a list of texts"),
        ({"query": "text", "a": "list[text]", "b": "list[text]"}, {"scores": "float32[N]"}, "a list of texts"),
        ({**inputs, "style": "text"}, {"scores": "float32[N]"}, "its input style"),
        (inputs, {"a": "float32[N]", "b": "float32[N]"}, "or one called `scores`"),
        (inputs, {"scores": "int64[N]"}, "float vectors are none"),
    ):
        with pytest.raises(HttpError, match=why) as refused:
            rerank_ports(info("m", wrong, outputs))
        assert (refused.value.code, refused.value.param) == (400, "model")


def test_completions_want_a_prompt_and_not_messages_alone() -> None:
    assert completion_ports(info("m", {"prompt": "text"}, {"text": "text"})).output == "text"
    with pytest.raises(HttpError):
        completion_ports(info("m", {"messages": "json"}, {"text": "text"}))


def test_transcription_wants_one_audio_input() -> None:
    ports = transcription_ports(
        info("m", {"speech": "audio", "language": "text?"}, {"transcript": "text", "words": "text"})
    )
    assert (ports.audio, ports.output, ports.language, ports.prompt) == ("speech", "transcript", "language", None)
    for inputs in ({"text": "text"}, {"a": "audio", "b": "audio"}):
        with pytest.raises(HttpError, match="one is needed"):
            transcription_ports(info("m", inputs, {"text": "text"}))


def test_times_and_tasks_of_a_transcription_are_optional() -> None:
    inputs = {"speech": "audio", "task": "text?"}
    outputs = {"text": "text", "segments": "json", "language": "text", "srt": "text", "vtt": "text"}
    ports = translation_ports(info("m", inputs, outputs))
    assert (ports.output, ports.task, ports.segments, ports.detected) == ("text", "task", "segments", "language")
    plain = transcription_ports(info("m", {"speech": "audio"}, {"text": "text", "segments": "text"}))
    assert (plain.task, plain.segments, plain.detected) == (None, None, None)
    with pytest.raises(HttpError, match="cannot translate recordings"):
        translation_ports(info("m", {"speech": "audio"}, {"text": "text"}))


def test_an_optional_task_is_not_what_the_user_says() -> None:
    ports = chat_ports(info("m", {"speech": "audio", "task": "text?"}, {"text": "text"}))
    assert (ports.prompt, [one.name for one in ports.audio]) == (None, ["speech"])
    assert completion_ports(info("m", {"task": "text"}, {"text": "text"})).prompt == "task"


def test_speech_wants_a_text_and_one_recording() -> None:
    inputs = {"words": "text", "voice": "text?", "speed": "json?"}
    ports = speech_ports(info("m", inputs, {"sound": "audio", "usage": "json"}))
    assert (ports.text, ports.output, ports.speed, ports.voice) == ("words", "sound", "speed", "voice")
    for outputs in ({"text": "text"}, {"one": "audio", "two": "audio"}):
        with pytest.raises(HttpError, match="cannot speak"):
            speech_ports(info("m", inputs, outputs))
    with pytest.raises(HttpError, match="photo"):
        speech_ports(info("m", {"words": "text", "photo": "image"}, {"sound": "audio"}))
