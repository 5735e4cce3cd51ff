"""Options of an llm step with `engine: openai`, and checks that contact no server."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated
from urllib.parse import SplitResult, urlsplit

from weftline.engine.llm.external.servers import SERVERS, readers_of
from weftline.engine.llm.options import LlmConfig, checked_sampling
from weftline.engine.llm.params import SamplingParams
from weftline.fields import REQUEST
from weftline.nodes.contract import ConfigError
from weftline.nodes.loopback import is_loopback

SEQUENCES_MAX = 4096
"""Most connections of a step; each running request has one."""
STALL_MAX_S = 86_400.0
MODEL_CHARS_MAX = 256
URL_CHARS_MAX = 2048
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


@dataclass(frozen=True, slots=True)
class ExternalLlmConfig:
    """Options of an llm step whose answers come from a server with OpenAI's API."""

    model: str
    """Name of the model at the server."""
    url: str
    """Base URL of the server's API, such as https://host/v1; https, or http on this machine."""
    engine: str = "openai"
    """Engine: openai, a server with OpenAI's API."""
    server: str = "openai"
    """Kind of server: openai (OpenAI's documented fields only), vllm, sglang, tensorrt-llm, ollama or weftline."""
    key: str = ""
    """Name of the environment variable with the server's key; only this step's process inherits it."""
    ca: str = ""
    """File (PEM) of a private certificate authority, the only one that is trusted then; by default the system's."""
    insecure: bool = False
    """Allow http to another machine: prompts, answers and the key can be read on the way."""
    system: Annotated[str, REQUEST] = ""
    """System message before every `prompt`."""
    sampling: Annotated[SamplingParams, REQUEST] = field(default_factory=SamplingParams)
    """Sampling options and stop conditions; a request's `sampling` input changes single keys."""
    sequences_max: int = 256
    """Most requests at the server at a time; others wait inside the step."""
    stall_max_s: float = 120.0
    """Most seconds without a byte from the server, before the first token too; the request fails then."""
    probe: bool = False
    """Check the server's list of models when the step opens; fail without an answer or without this model."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampling", checked_sampling(self.sampling))


ONLY_EXTERNAL = frozenset(one.name for one in fields(ExternalLlmConfig)) - {one.name for one in fields(LlmConfig)}
ONLY_OWN = frozenset(one.name for one in fields(LlmConfig)) - {one.name for one in fields(ExternalLlmConfig)}
"""Options that only one of the engines has."""


def check_external(config: ExternalLlmConfig, base_dir: Path, environment: Mapping[str, str]) -> None:
    """Raise ConfigError for an invalid option."""
    if not 0 < len(config.model) <= MODEL_CHARS_MAX:
        found = f"found {len(config.model)} characters"
        raise ConfigError("model", found, f"the name of a model at the server, 1 to {MODEL_CHARS_MAX} characters")
    if config.engine != "openai":
        raise ConfigError("engine", f"found {config.engine!r:.40}", "openai")
    if config.server not in SERVERS:
        raise ConfigError("server", f"found {config.server!r:.40}", f"one of {', '.join(SERVERS)}")
    url = _check_url(config)
    _check_key(config.key, environment)
    if config.ca:
        _check_ca(config.ca, url, base_dir)
    if type(config.sequences_max) is not int or not 1 <= config.sequences_max <= SEQUENCES_MAX:
        found = f"found {config.sequences_max!r:.40}"
        raise ConfigError("sequences_max", found, f"a whole number from 1 to {SEQUENCES_MAX}")
    if not 0 < config.stall_max_s <= STALL_MAX_S:
        raise ConfigError("stall_max_s", f"found {config.stall_max_s:g}", f"more than 0, at most {STALL_MAX_S:g}")
    _check_sampling(config)


def ca_file(ca: str, base_dir: Path) -> Path:
    """Return the path of the option `ca`."""
    return base_dir / posixpath.expanduser(ca)


def _check_url(config: ExternalLlmConfig) -> SplitResult:
    expected = "a base URL such as https://host/v1"
    try:
        url = urlsplit(config.url)
        host, _ = url.hostname, url.port
    except ValueError:
        raise ConfigError("url", "found no valid URL", expected) from None
    if len(config.url) > URL_CHARS_MAX or not config.url.isascii() or not config.url.isprintable() or " " in config.url:
        raise ConfigError("url", "found no valid URL", f"{expected}, at most {URL_CHARS_MAX} ASCII characters")
    if url.scheme not in ("http", "https") or not host:
        raise ConfigError("url", f"found {url.scheme or 'no scheme'!r:.40} and host {host or 'none'!r:.80}", expected)
    if url.username is not None or url.password is not None:
        fix = "remove it; name an environment variable with the key as `key`"
        raise ConfigError("url", "found a user or password in it", expected, fix)
    if url.query or url.fragment:
        raise ConfigError("url", "found a query or fragment", expected, "remove what follows ? or #")
    if url.scheme == "http" and not (config.insecure or is_loopback(host)):
        found = f"found http to {host!r:.80}, which is not this machine"
        raise ConfigError("url", found, "https", "use https; or add insecure: true, in a network with other protection")
    return url


def _check_key(key: str, environment: Mapping[str, str]) -> None:
    """Check the name of the variable with the key; a wrong value is not shown, because it may be the key itself."""
    expected = "the name of an environment variable that holds the key, such as VLLM_API_KEY"
    if not key:
        return
    if not _VARIABLE.fullmatch(key):
        raise ConfigError("key", "found a text that is not the name of a variable", expected, "set it outside the file")
    value = environment.get(key, "")
    if not value:
        raise ConfigError("key", "the environment variable that it names is not set", expected, "set the variable")
    if not value.isascii() or not value.isprintable() or value != value.strip():
        found = "the environment variable that it names has spaces around it, or characters that no header can have"
        raise ConfigError("key", found, "printable ASCII")


def _check_ca(ca: str, url: SplitResult, base_dir: Path) -> None:
    import ssl

    if url.scheme != "https":
        raise ConfigError("ca", "found beside a URL with http", "https", "change the URL, or remove `ca`")
    try:
        ssl.create_default_context(cafile=str(ca_file(ca, base_dir)))
    except OSError as error:  # also of a file without certificates
        reason = error.strerror if error.strerror and not isinstance(error, ssl.SSLError) else "it has no certificate"
        raise ConfigError("ca", f"{ca:.200}: {reason}", "a file with certificates in PEM form") from None


def _check_sampling(config: ExternalLlmConfig) -> None:
    unread = SERVERS[config.server].unsupported(config.sampling)
    if unread:
        found = f"not an option of a server of kind {config.server}"
        raise ConfigError(f"sampling.{unread[0]}", found, "", _remedy(unread))


def _remedy(keys: list[str]) -> str:
    kinds = readers_of(keys)
    return f"remove it, or set `server` if it is one of {', '.join(kinds)}" if kinds else "remove it"
