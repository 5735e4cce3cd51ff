"""HTTP request errors with status and offending field."""

from __future__ import annotations

from weftline.errors import InputError


class HttpError(InputError):
    """A request that the HTTP server itself refuses.

    code:  the HTTP status of the answer.
    name:  OpenAI's code of the error; '' for that of the status.
    allow: methods that the path accepts, of an error 405.
    close: close the connection after the answer, since the bytes that follow cannot be attributed to a request.
    """

    def __init__(
        self, message: str, *, code: int = 400, param: str = "", close: bool = False, name: str = "", allow: str = ""
    ) -> None:
        super().__init__(message, param=param)
        self.code = code
        self.name = name
        self.allow = allow
        self.close = close


def unknown_path() -> HttpError:
    return HttpError("there is nothing at this path", code=404, name="unknown_url")


def wrong_method(allowed: set[str]) -> HttpError:
    methods = ", ".join(sorted(allowed))
    return HttpError(f"this path accepts {methods}", code=405, name="method_not_supported", allow=methods)


def too_large(bytes_max: int) -> HttpError:
    return HttpError(f"the body is larger than {bytes_max} bytes, limits.message_bytes_max; send less", code=413)


def unsupported(field: str, why: str) -> HttpError:
    """Return the error of a field that would change the answer if it were implemented."""
    return HttpError(f"{field}: {why}", param=field, name="unsupported_parameter")
