"""In-memory parser of multipart/form-data with limits."""

from __future__ import annotations

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from weftline.engine.serving.http.refusal import HttpError

FIELDS_MAX, FIELD_BYTES_MAX = 64, 64 << 10
"""Most fields of a form beside its file, and the longest of them."""


class _InMemory(MultiPartParser):
    spool_max_size = 1 << 62  # the body's limit has been applied before


async def form_of(request: Request) -> FormData:
    """Return the fields of a form with at most one file."""
    kind = request.headers.get("content-type", "")
    if not kind.lower().startswith("multipart/form-data"):
        raise HttpError("content-type: expected multipart/form-data", code=415)
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpError("content-encoding: a form is taken as it is, without compression", code=415)
    parser = _InMemory(
        request.headers, request.stream(), max_files=1, max_fields=FIELDS_MAX, max_part_size=FIELD_BYTES_MAX
    )
    try:
        return await parser.parse()
    except MultiPartException as error:
        raise HttpError(f"the form: {error.message}") from None
    except (ValueError, KeyError, AssertionError):
        raise HttpError("the form cannot be read") from None


def text_field(form: FormData, field: str) -> str | None:
    """Return a field that occurs at most once; None when it is absent or empty."""
    values = form.getlist(field)
    if len(values) > 1 or any(not isinstance(one, str) for one in values):
        raise HttpError(f"{field}: expected one text", param=field)
    return str(values[0]) if values and values[0] else None


async def file_field(form: FormData, field: str) -> bytes:
    """Return the bytes of the form's file. Its name means nothing here."""
    found = form.get(field)
    if not isinstance(found, UploadFile):
        raise HttpError(f"{field}: expected a file", param=field)
    return await found.read()
