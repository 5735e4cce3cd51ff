import random
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.models import language
from weftline.errors import StepError
from weftline.nodes.contract import Batch, ConfigError, OpenContext, StepContext
from weftline.nodes.detections import Detections
from weftline.nodes.template import Template, TemplateConfig


def render(source: str, values: dict[str, Any] | None = None, **options: Any) -> Any:
    node = Template(TemplateConfig(source, **options))
    node.open(OpenContext(Path()))
    return node.run(Batch({name: [value] for name, value in (values or {"x": 1}).items()}))["text"][0]


def detections(*names: str) -> Detections:
    known = tuple(sorted(set(names)))
    count = len(names)
    return Detections(
        np.zeros((count, 4), np.float32),
        np.ones(count, np.float32),
        np.array([known.index(name) for name in names], np.int32),
        known,
    )


def test_a_port_named_with_two_underscores_is_a_steps_output() -> None:
    values = {
        "see__detections": detections("red circle", "blue star", "red circle"),
        "hear__text": "what?",
        "name": "Ann",
    }
    assert render("{{ see.detections | describe }}; {{ hear.text }} {{ name }}", values) == (
        "2 red circles, 1 blue star; what? Ann"
    )


def test_describe_says_what_the_language_model_was_trained_on() -> None:
    rng = random.Random(0)
    for _ in range(50):
        things = language.scene(rng)
        found = detections(*(thing.name for thing in things))
        assert render("{{ see.detections | describe }}", {"see__detections": found}) == language.describe(things)
    assert render("{{ d | describe }}", {"d": detections()}) == language.describe([]) == "nothing"


def test_detections_can_be_looped_over() -> None:
    values = {"d": detections("red circle", "blue star")}
    line = "{{ loop.index }}/{{ loop.length }} {{ o.name | upper }} {{ o.box[0] }};"
    source = "{% for o in d if o.score > 0.5 %}" + line + "{% endfor %}"
    assert render(source, values) == "1/2 RED CIRCLE 0.0;2/2 BLUE STAR 0.0;"


@pytest.mark.parametrize(
    ("source", "value", "text"),
    [
        ("{{ x | tojson }}", {"a": [1, None, "é"]}, '{"a": [1, null, "é"]}'),
        ("{{ x.a }} {{ x['b'] }}", {"a": 1, "b": "<&>"}, "1 <&>"),
        ("{% if x %}yes{% else %}no{% endif %}", [], "no"),
        ("{% set n = namespace(t=0) %}{% for i in x %}{% set n.t = n.t + i %}{% endfor %}{{ n.t }}", [1, 2, 3], "6"),
        ("{{ x | map('upper') | join(', ') }}", ["a", "b"], "A, B"),
        ("{{ x.strip().split(',')[1] ~ '!' }}", " a,b ", "b!"),
        ("{{ x }}", None, ""),
        ("{{ x }}", [1, "a"], '[1, "a"]'),
        ("{{ x | length }} {{ x }}", np.arange(3), "3 [0, 1, 2]"),
        ("{{ x }}", np.zeros((300, 300, 3), np.uint8), "uint8[300, 300, 3]"),
        ("{{ x | round(1) }} {{ x | int }} {{ 2 ** 10 }}", 2.55, "2.5 2 1024"),
        ("{{ x | replace('a', 'b') | indent(2) }}\n", "a\na", "b\n  b\n"),
    ],
)
def test_ordinary_templates_render(source: str, value: Any, text: str) -> None:
    assert render(source, {"x": value}) == text


def test_one_items_error_fails_it_alone() -> None:
    node = Template(TemplateConfig("{{ x.name }}"))
    node.open(OpenContext(Path()))
    good, bad = node.run(Batch({"x": [{"name": "a"}, {}]}))["text"]
    assert good == "a" and isinstance(bad, StepError) and "name" in str(bad)


HOSTILE = [
    "{% for i in range(9000000) %}{% endfor %}",
    "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 300000000 }}",
    "{{ [1] * 100000000 }}",
    "{{ 'a'.center(1000000000) }}",
    "{{ 'a'.ljust(1000000000) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ 'a'.zfill(1000000000) }}",
    "{{ 10 ** 1000000000 }}",
    "{{ 9999 ** 9999 ** 9999 }}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=2) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "{{ 1 | round(1000000000) }}",
    "{{ ('a' * 1000000) | replace('', 'b' * 1000000) | length }}",
    "{{ range(90000) | map('string') | join('x' * 100000) }}",
    "{% for i in range(100000) %}{{ 'a' * 1000 }}{% endfor %}",
    "{% set y = 'a' * 500000 %}{% for i in range(90000) %}{% set z = y ~ 'b' %}{% endfor %}",
    "{% for i in range(90000) %}{% set q = range(99999) | list %}{% endfor %}",
    "{{ range(10 ** 12) | list }}",
    "{{ x | tojson(indent=1000000000) }}",
    "{% set a = ['x' * 1000000] * 10000 %}{{ a | join }}",
    "{% set a = ['x' * 1000000] * 10000 %}{{ a }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ x.__class__.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ (1).to_bytes(1000000000, 'big') }}",
    "{{ undefined_name }}",
    "{% set a = ('f' * 1000000) | int(0, 16) %}{% set b = ('f' * 500000) | int(0, 16) %}{{ a // b }}",
    "{% set a = ('f' * 1000000) | int(0, 16) %}{% set b = ('f' * 500000) | int(0, 16) %}{{ a % b }}",
    "{% set a = ('7' * 1000000) | int(base=8) %}{{ a / a }}",
    "{{ ('1' * 1000000) | float }}",
    "{{ ('1' * 1000000) | round }}",
]
REFUSED = [
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% set x %}{% endset %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "{{ x | attr('__class__') }}",
    "{{ x | center(1000000000) }}",
    "{{ x | format(1) }}",
    "{{ x | pprint }}",
    "{% if %}",
    "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
    "{{ " + "-" * 4000 + "1 }}",
    "{{ " + "+".join(["1"] * 3000) + " }}",
    "{{ x }}" * 10_000,
    "a" * 100_000,
]


@pytest.mark.parametrize("source", HOSTILE)
def test_hostile_templates_end_at_once_in_little_memory(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    assert isinstance(render(source), StepError)
    assert time.process_time() - started < 0.9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # kilobytes


@pytest.mark.parametrize("operator", ["+", "-", "*", "/", "//", "%", "**"])
def test_numbers_of_too_many_bits_are_refused_before_any_operator(operator: str) -> None:
    long = 1 << 100_000
    for x, y in ((long, 3), (3, long), (-long, 3)):
        assert "a number of more than 4096 bits" in str(render(f"{{{{ x {operator} y }}}}", {"x": x, "y": y}))


@pytest.mark.slow
def test_letters_that_grow_when_their_case_changes_grow_to_three_at_most() -> None:
    letters = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    changes = [getattr(str, name) for name in ("upper", "lower", "title", "capitalize", "swapcase")]
    growing = [letter for letter in letters if any(len(change(letter)) > 1 for change in changes)]
    assert max(len(second(first(letter))) for letter in growing for first in changes for second in changes) == 3
    assert render("{{ x.upper() }} {{ x | upper | upper | length }}", {"x": "\u0390"}) == "\u0399\u0308\u0301 3"


@pytest.mark.parametrize("source", REFUSED, ids=range(len(REFUSED)))
def test_what_a_template_must_not_hold_is_refused_when_checked(source: str) -> None:
    started = time.process_time()
    with pytest.raises(ConfigError) as caught:
        Template.ports(TemplateConfig(source), StepContext(Path(), ("x",)))
    assert caught.value.option == "template"
    assert time.process_time() - started < 0.9


def test_limits_are_options_and_are_named_when_they_are_reached() -> None:
    assert "output_chars_max" in str(render("{{ 'a' * 200 }}", output_chars_max=100))
    assert "render_max_ms" in str(render("{% for i in range(99999) %}{% endfor %}", render_max_ms=1))


def test_ports_are_what_is_wired_and_unknown_names_are_refused() -> None:
    step = StepContext(Path(), ("see__detections", "name"))
    ports = Template.ports(TemplateConfig("{{ see.detections }} {{ name }} {{ range(2) }}"), step)
    assert [(port.name, str(port.type)) for port in ports.inputs] == [("see__detections", "any"), ("name", "any")]
    with pytest.raises(ConfigError, match="sea") as caught:
        Template.ports(TemplateConfig("{{ sea.detections }}"), step)
    assert "see.detections" in caught.value.expected


def test_a_syntax_error_names_its_line() -> None:
    with pytest.raises(ConfigError, match="line 3"):
        Template.ports(TemplateConfig("a\nb\n{% endif %}"), StepContext(Path()))


def show(source: str, values: dict[str, Any]) -> tuple[Any, Any]:
    node = Template(TemplateConfig(source, images=True))
    node.open(OpenContext(Path()))
    found = node.run(Batch({name: [value] for name, value in values.items()}))
    return found["text"][0], found["images"][0]


def picture(value: int) -> np.ndarray:
    return np.full((2, 3, 3), value, np.uint8)


@pytest.mark.parametrize(
    ("source", "text", "shown"),
    [
        ("look at {{ a }}!", "look at \ufffc!", [1]),
        ("{{ b }} or {{ a }} or {{ b }}", "\ufffc or \ufffc or \ufffc", [2, 1, 2]),
        ("{{ many }}", "\ufffc\ufffc", [3, 4]),
        ("{% for one in many %}{{ loop.index }}{{ one }}{% endfor %}", "1\ufffc2\ufffc", [3, 4]),
        ("{% if no %}{{ a }}{% endif %}{{ 'x' ~ b | upper }}", "x\ufffc", [2]),
        ("{{ words }}{{ cut.image }}", "a \U0001f600b\ufffc", [5]),  # what others write is no picture
        ("none", "none", []),
    ],
)
def test_pictures_are_shown_in_order(source: str, text: str, shown: list[int]) -> None:
    values = {
        "a": picture(1), "b": picture(2), "many": [picture(3), picture(4)], "cut__image": picture(5), "no": False,
        "words": "a \U0001f600\ufffcb",
    }  # fmt: skip
    found, images = show(source, values)
    assert found == text
    assert [int(image[0, 0, 0]) for image in images] == shown


def clip(value: int) -> np.ndarray:
    return np.full((2, 4, 3, 3), value, np.uint8)


@pytest.mark.parametrize(
    ("source", "text", "images", "videos"),
    [
        ("{{ a }}{{ c }}{{ words }}", "\ufffc\ufffbab", [1], [7]),
        ("{{ videos }} {{ c }}", "\ufffb \ufffb", [], [3, 7]),  # frames in input videos are one video
        ("{{ frames }}", "\ufffc\ufffc", [3, 4], []),
        ("{{ clips }}", "\ufffb\ufffb", [], [8, 9]),
        ("{{ clips[1] }}{{ frames[0] }}", "\ufffb\ufffc", [3], [9]),
    ],
)
def test_videos_are_shown_in_order(source: str, text: str, images: list[int], videos: list[int]) -> None:
    frames = [picture(3), picture(4)]
    values = {
        "a": picture(1), "c": clip(7), "clips": [clip(8), clip(9)], "videos": frames, "frames": frames,
        "words": "a\ufffbb",
    }  # fmt: skip
    node = Template(TemplateConfig(source, images=True, videos=True))
    node.open(OpenContext(Path()))
    found = node.run(Batch({name: [value] for name, value in values.items()}))
    assert found["text"] == [text]
    assert [int(one[0, 0, 0]) for one in found["images"][0]] == images
    assert [int(one[0, 0, 0, 0]) for one in found["videos"][0]] == videos
    assert all(one.ndim == 4 for one in found["videos"][0])


def test_frames_of_a_video_have_one_size() -> None:
    node = Template(TemplateConfig("{{ videos }}", videos=True))
    node.open(OpenContext(Path()))
    found = node.run(Batch({"videos": [[picture(1), np.zeros((5, 6, 3), np.uint8)]]}))
    assert "frames of 3 x 2, 6 x 5 pixels in one video" in str(found["text"][0])
    ports = Template.ports(TemplateConfig("", videos=True), StepContext(Path())).outputs
    assert [(port.name, str(port.type)) for port in ports][1:] == [("videos", "list[uint8[?, ?, ?, 3]]")]
    assert Template.light_output_bytes(TemplateConfig("", videos=True)) is None


def test_a_failed_rendering_has_no_pictures() -> None:
    text, images = show("{{ a }}{{ 1 / 0 }}", {"a": picture(1)})
    assert isinstance(text, StepError)
    assert isinstance(images, StepError)


def test_pictures_are_an_output_only_on_request() -> None:
    context = StepContext(Path(), ("a",))
    plain, shows = (Template.ports(TemplateConfig("{{ a }}", images=on), context).outputs for on in (False, True))
    assert [port.name for port in plain] == ["text"]
    assert [(port.name, str(port.type)) for port in shows] == [("text", "text"), ("images", "list[image]")]
    assert Template.light_output_bytes(TemplateConfig("", images=True)) is None
