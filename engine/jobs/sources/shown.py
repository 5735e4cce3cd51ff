"""Redaction of passwords and signatures in URLs."""

from __future__ import annotations

import re

_URL = re.compile(r"""\b([a-z][a-z0-9+.-]*)://(?:[^\s/?#'"<>@]*@)*([^\s'"<>]*)""", re.IGNORECASE)
_QUERY = re.compile(r"[?#].*?(?=[:,;)]*$)")
_WEB = re.compile(r"https?://", re.IGNORECASE)


def shown_url(text: str) -> str:
    """Return a text in which no URL has a user, a password or, of http and https, a query; a path stays as it is."""
    return _URL.sub(_told, text)


def without_query(url: str) -> str:
    """Return an address on the web without its query; every other address and path as it is."""
    return re.split(r"[?#]", url, maxsplit=1)[0] if _WEB.match(url) else url


def _told(found: re.Match[str]) -> str:
    url = f"{found[1]}://{found[2]}"
    return _QUERY.sub("", url) if _WEB.match(url) else url
