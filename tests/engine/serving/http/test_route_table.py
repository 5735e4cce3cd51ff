from __future__ import annotations

import pytest
from starlette.requests import Request
from starlette.types import ASGIApp

from weftline.engine.serving.http.route_table import Route, RouteTable


async def endpoint(request: Request) -> ASGIApp:
    raise AssertionError("not called here")


async def other(request: Request) -> ASGIApp:
    raise AssertionError("not called here")


def table(*templates: str, methods: tuple[str, ...] = ("GET",)) -> RouteTable:
    return RouteTable([Route(one, endpoint, frozenset(methods)) for one in templates])


TABLE = table("/", "/models", "/models/stats", "/models/{model}", "/models/{model}/ready", "/files/{name:path}")


@pytest.mark.parametrize(
    ("path", "template", "parameters"),
    [
        ("/", "/", {}),
        ("/models", "/models", {}),
        ("/models/stats", "/models/stats", {}),
        ("/models/a", "/models/{model}", {"model": "a"}),
        ("/models/stats/ready", "/models/{model}/ready", {"model": "stats"}),
        ("/files/a/b/", "/files/{name:path}", {"name": "a/b/"}),
        ("/files/", "/files/{name:path}", {"name": ""}),
        ("", "", {}),
        ("*", "", {}),
        ("xmodels/a", "", {}),
        ("/models/", "", {}),
        ("/models//ready", "", {}),
        ("/models/a/", "", {}),
        ("/models/a/ready/", "", {}),
        ("/models/a/ready/more", "", {}),
        ("/models/a/other", "", {}),
        ("/files", "", {}),
        ("/Models/a", "", {}),
        ("/models\n", "", {}),
    ],
)
def test_a_path_leads_to_one_template(path: str, template: str, parameters: dict[str, str]) -> None:
    found = TABLE.find(path)
    assert (found.template, bool(found.endpoints)) == (template, bool(template))
    assert found.parameters == (parameters if template else {})


def test_methods_of_one_template_may_have_endpoints_of_their_own() -> None:
    routes = [Route("/a/{b}", endpoint, frozenset({"GET"})), Route("/a/{b}", other, frozenset({"DELETE"}))]
    assert RouteTable(routes).find("/a/1").endpoints == {"GET": endpoint, "DELETE": other}


def test_templates_that_are_ambiguous_are_refused() -> None:
    with pytest.raises(ValueError, match="another segment in place"):
        table("/a/{b}/c", "/a/fixed/{b}")
    with pytest.raises(ValueError, match="two endpoints"):
        RouteTable([Route("/a", endpoint, frozenset({"GET"})), Route("/a", other, frozenset({"GET"}))])
