"""Pictures are taken out of messages and prompts, and marks are left in their places."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from weftline.engine.llm.vision import messages
from weftline.engine.llm.vision.messages import (
    Marks,
    Video,
    free_marks,
    has_media,
    mark_messages,
    mark_prompt,
    with_parts,
)
from weftline.errors import InputError
from weftline.nodes.template import PICTURE, VIDEO

MARK, CLIP = "\ue000", "\ue001"
MARKS = Marks(MARK, CLIP)
A, B = (np.full((2, 3, 3), value, np.uint8) for value in (10, 20))


def url(image: np.ndarray, kind: str = "png") -> str:
    data = io.BytesIO()
    Image.fromarray(image).save(data, kind)
    return f"data:image/{kind};base64," + base64.b64encode(data.getvalue()).decode()


def part(link: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": link}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


IMAGE = {"type": "image"}


def test_data_urls_are_decoded_where_they_stand():
    said = [user(text("a"), part(url(A)), text("b")), {"role": "assistant", "content": "c"}, user(part(url(B)))]
    marked, found = mark_messages(said, [], [], MARKS)
    assert [one["content"] for one in marked] == [f"a{MARK}b", "c", MARK]
    assert [image.tolist() for image in found] == [A.tolist(), B.tolist()]
    assert said[0]["content"][1] == part(url(A))  # what was given is not changed


def test_image_parts_show_the_pictures_of_the_input_in_order():
    marked, found = mark_messages([user(IMAGE, part(url(B)), IMAGE)], [A, A + 1], [], MARKS)
    assert marked[0]["content"] == MARK * 3
    assert [int(image[0, 0, 0]) for image in found] == [10, 20, 11]
    with pytest.raises(InputError, match="show 1 pictures, and input images has 2"):
        mark_messages([user(IMAGE)], [A, B], [], MARKS)


@pytest.mark.parametrize("content", ["what?", [text("what?")]])
def test_pictures_without_a_part_are_put_before_the_last_user_text(content):
    said = [user(part(url(A + 5))), {"role": "user", "content": content}, {"role": "assistant", "content": "x"}]
    marked, found = mark_messages(said, [A, B], [], MARKS)
    last = marked[1]["content"]
    assert (last if isinstance(last, str) else "".join(one["text"] for one in last)) == f"{MARK * 2}what?"
    assert [int(image[0, 0, 0]) for image in found] == [15, 10, 20]
    with pytest.raises(InputError, match="no user message"):
        mark_messages([{"role": "system", "content": "x"}], [A], [], MARKS)


def test_marks_become_parts_for_the_template():
    turns = [{"role": "user", "content": f"a{MARK}{MARK}b"}, {"role": "assistant", "content": "", "tool_calls": []}]
    assert with_parts(turns, MARKS) == [
        {"role": "user", "content": [text("a"), IMAGE, IMAGE, text("b")]},
        {"role": "assistant", "content": "", "tool_calls": []},
    ]
    assert with_parts(turns[:1], Marks()) == [{"role": "user", "content": [text(f"a{MARK}{MARK}b")]}]


def test_a_mark_occurs_in_no_text_of_the_request():
    assert free_marks(["\ue000", [{"role": "user", "content": [text("\ue001")]}]]) == Marks("\ue002", "\ue003")
    assert free_marks([None, [user(part("data:\ue000"))]]) == Marks("\ue000", "\ue001")  # addresses are no texts


def test_a_text_of_all_private_characters_is_refused():
    with pytest.raises(InputError, match="two that are free"):
        free_marks("".join(map(chr, range(0xE000, 0xF8FF))))


def test_characters_of_what_a_request_does_not_have_are_text():
    assert mark_prompt(f"a{VIDEO}", 1, 0, MARKS) == f"{MARK}a{VIDEO}"
    assert mark_prompt(f"a{PICTURE}{VIDEO}", 0, 1, MARKS) == f"a{PICTURE}{CLIP}"


def test_videos_are_shown_in_order_between_pictures():
    videos = [Video(np.full((2, 2, 3, 3), value, np.uint8), 24.0) for value in (1, 2)]
    clip = {"type": "video"}
    said = [user(clip, part(url(A)), IMAGE, {**clip, "fps": 2}), {"role": "assistant", "content": "x"}]
    marked, found = mark_messages(said, [B], videos, MARKS)
    assert marked[0]["content"] == f"{CLIP}{MARK}{MARK}{CLIP}"
    shown = [(one.frames[0, 0, 0, 0], one.fps) if isinstance(one, Video) else one[0, 0, 0] for one in found]
    assert shown == [(1, 24.0), 10, 20, (2, 2.0)]
    assert with_parts([{"role": "user", "content": f"{CLIP}a{MARK}"}], MARKS) == [user(clip, text("a"), IMAGE)]


def test_a_prompt_shows_its_pictures_at_object_characters_or_before_it():
    assert mark_prompt(f"a{PICTURE}b{PICTURE}", 2, 0, MARKS) == f"a{MARK}b{MARK}"
    assert mark_prompt("ab", 2, 0, MARKS) == f"{MARK}{MARK}ab"
    with pytest.raises(InputError, match="shows 1 pictures"):
        mark_prompt(f"a{PICTURE}", 2, 0, MARKS)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ([user(part("https://example.org/a.png"))], "found an address, expected a data: URL"),
        ([user(part("file:///etc/passwd"))], "found an address"),
        ([user(part(None))], "found NoneType"),
        ([user(part("data:image/png,plain"))], "expected data:image/...;base64"),
        ([user(part("data:image/png;base64,%%%"))], "no valid base64"),
        ([user(part("data:image/png;base64,aGVsbG8="))], r"content\[0\].image_url"),
        ([user(text("a"), part(url(A)), {"type": "input_audio"})], r"content\[2\]"),
        ([user(*[part(url(A))] * 33)], "at most 32"),
    ],
)
def test_what_is_no_picture_is_refused_with_its_place(said, named):
    with pytest.raises(InputError, match=named) as refused:
        mark_messages(said, [], [], MARKS)
    assert refused.value.param == "messages"


def test_pictures_have_limits(monkeypatch):
    monkeypatch.setattr(messages, "REQUEST_PIXELS_MAX", 15)
    mark_messages([user(part(url(A)), part(url(A)))], [], [], MARKS)
    with pytest.raises(InputError, match="pixels"):
        mark_messages([user(*[part(url(A))] * 3)], [], [], MARKS)
    monkeypatch.setattr(messages, "MESSAGE_IMAGE_BYTES_MAX", 10)
    with pytest.raises(InputError, match="expected at most 10"):
        mark_messages([user(part(url(A)))], [], [], MARKS)


@pytest.mark.parametrize("value", [None, 3, [], ["x"], [user(text("a"))], [{"role": "user", "content": "image_url"}]])
def test_other_messages_have_no_pictures(value):
    assert not has_media(value)


def test_pictures_are_found_in_messages():
    assert has_media([user(text("a")), user(part("x"))])
    assert has_media([user(IMAGE)])
