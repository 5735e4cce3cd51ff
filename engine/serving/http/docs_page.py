"""/docs: a page with the models of a caller, their inputs and outputs, a command for each, and all routes.

One HTML document without scripts, images or anything from another host. Its Content-Security-Policy allows its own
style sheet, by digest, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import jinja2
import numpy as np
from starlette.responses import Response

from weftline.engine.serving.http.openapi import document
from weftline.engine.serving.model_info import ModelInfo, PortInfo

VALUES_SHOWN_MAX = 64
"""Most numbers of a tensor in a command."""

_STYLE = """\
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
table{border-collapse:collapse;width:100%;margin:.5rem 0}
td,th{border:1px solid #ccc;padding:.3rem .6rem;text-align:left}
pre{background:#f4f4f4;padding:.6rem;overflow-x:auto}h2{border-top:1px solid #ccc;padding-top:1rem}code{font-size:.95em}
"""

_PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Weftline</title>
<meta name="viewport" content="width=device-width"><style>{{ style }}</style></head><body>
<h1>Weftline</h1>
<p>The models of this server, and its routes. <a href="openapi.json">openapi.json</a> has the same for generators.</p>
{% for info in models %}<h2 id="{{ info.name }}">{{ info.name }}</h2>
<p>{{ info.about }} Version {{ info.version }}{% if info.streams %}; streams{% endif %}.</p>
<table><tr><th>input</th><th>type</th><th></th></tr>
{% for port in info.inputs %}<tr><td><code>{{ port.name }}</code></td><td><code>{{ port.type }}</code></td>
<td>{{ port.about }}{% if port.optional %} May be left out.{% endif %}</td></tr>
{% endfor %}</table>
<table><tr><th>output</th><th>type</th><th></th></tr>
{% for port in info.outputs %}<tr><td><code>{{ port.name }}</code></td><td><code>{{ port.type }}</code></td>
<td>{{ port.about }}{% if port.optional %} May be absent.{% endif %}{% if port.pieces %} Streams.{% endif %}</td></tr>
{% endfor %}</table>
<pre>{{ command(info) }}</pre>
{% endfor %}<h2>Routes</h2>
<table>{% for path, item in routes.items() %}{% for method, operation in item.items() %}
<tr><td>{{ method.upper() }}</td><td><code>{{ path }}</code></td><td>{{ operation.summary }}</td></tr>
{%- endfor %}{% endfor %}</table></body></html>
"""

_EXAMPLES = {"text": "text", "image": "@picture.png", "audio": "@recording.wav", "bytes": "@file", "json": "{}"}


def docs_response(models: Sequence[ModelInfo], origin: str) -> Response:
    """Return the page. origin: of this server, for the commands."""

    def command(info: ModelInfo) -> str:
        return _command(info, origin)

    page = _template().render(style=_STYLE, models=models, command=command, routes=document()["paths"])
    return Response(page, 200, {"content-security-policy": POLICY}, "text/html; charset=utf-8")


POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    f"style-src 'sha256-{base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'"
)


@cache
def _template() -> jinja2.Template:
    return jinja2.Environment(autoescape=True).from_string(_PAGE)


def _command(info: ModelInfo, origin: str) -> str:
    """Return a curl command with an example of every required input."""
    required = [port for port in info.inputs if not port.optional]
    url = f"curl {origin}/run/{info.name}"
    if any(port.type in ("image", "audio", "bytes") for port in required):
        return " ".join([url, *(f"-F {port.name}={_EXAMPLES.get(port.type, _json(port))}" for port in required)])
    return f"{url} -d '{json.dumps({port.name: _value(port) for port in required})}'"


def _json(port: PortInfo) -> str:
    return f"'{json.dumps(_value(port))}'"


def _value(port: PortInfo) -> Any:
    type = port.port_type
    if type.kind == "text":
        return "text"
    if type.kind == "tensor":
        sizes = [dim if isinstance(dim, int) else 2 for dim in type.dims or ()]
        return np.zeros(sizes, np.int8).tolist() if math.prod(sizes) <= VALUES_SHOWN_MAX else ["..."]
    return [] if type.kind in ("list", "detections") else {}
