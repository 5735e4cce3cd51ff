"""Exposure check: listening beyond this machine requires TLS and tokens, or an explicit opt-out.

Pure: no name is looked up. An address that is not certainly loopback counts as exposed.
"""

from __future__ import annotations

from collections.abc import Iterator

from weftline.engine.serving.config import ServeConfig
from weftline.errors import PipelineError, Problem
from weftline.nodes.loopback import is_loopback

SOURCE = "weftline serve"


def check_exposure(config: ServeConfig, source: str = SOURCE) -> None:
    """Raise PipelineError, with every problem, when an address is more exposed than it is protected.

    source: file name in the problems: a configuration file, or the command.
    """
    problems = list(_problems(config, source))
    if problems:
        raise PipelineError(problems)


def _problems(config: ServeConfig, source: str) -> Iterator[Problem]:
    if config.insecure:
        return
    exposed = [] if config.grpc.socket is not None else [("grpc.host", config.grpc.host)]
    exposed += [("http.host", config.http.host)] if config.http is not None else []
    for key, host in exposed:
        if is_loopback(host):
            continue
        lacks = []
        if config.tls is None:
            lacks.append("tls: {certificate: ..., key: ...} (--tls-cert, --tls-key)")
        if config.tokens is None:
            lacks.append("tokens: tokens.yaml (--tokens)")
        if lacks:
            found = f"{host!r:.80} can be reached from other machines, and {_lacking(config)}"
            fix = f"add {' and '.join(lacks)}; or listen on 127.0.0.1; or set insecure: true (--insecure)"
            yield Problem(key, found, "127.0.0.1, ::1 or localhost without them", fix, file=source)


def _lacking(config: ServeConfig) -> str:
    if config.tls is None and config.tokens is None:
        return "there is neither TLS nor a token file"
    return "there is no TLS" if config.tls is None else "there is no token file"
