"""HTTP request errors with status and offending field."""

from __future__ import annotations

from weftline.errors import InputError


class HttpError(InputError):
    """A request that the HTTP server itself refuses.

    code:  the HTTP status of the answer.
    close: close the connection after the answer, since the bytes that follow cannot be attributed to a request.
    """

    def __init__(self, message: str, *, code: int = 400, param: str = "", close: bool = False) -> None:
        super().__init__(message, param=param)
        self.code = code
        self.close = close


def unknown_path() -> HttpError:
    return HttpError("there is nothing at this path", code=404)


def wrong_method(allowed: set[str]) -> HttpError:
    return HttpError(f"this path accepts {', '.join(sorted(allowed))}", code=405)


def too_large(bytes_max: int) -> HttpError:
    return HttpError(f"the body is larger than {bytes_max} bytes, limits.message_bytes_max; send less", code=413)


def unsupported(field: str, why: str) -> HttpError:
    """Return the error of a field that would change the answer if it were implemented."""
    return HttpError(f"{field}: {why}", param=field)
