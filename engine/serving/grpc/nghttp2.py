"""HTTP/2 server connections on libnghttp2, without I/O: bytes in, events out, bytes to send.

    connection = Http2Connection(limits)
    for event, stream in connection.receive(data):      # data: bytes from the socket
        ...
        connection.respond(stream, [b"hello"], [(b"grpc-status", b"0")])
    for part in connection.data_to_send():              # to the socket

libnghttp2 does framing, HPACK, flow control and the limits on floods (RFC 9113, RFC 7541). It is called through cffi
in ABI mode: the shared library is opened at run time and nothing is compiled. Importing this module raises ImportError
when the library, one of the needed symbols or executable memory for callbacks is missing. Symbols are checked, not a
version, because distributions add the limits to older releases.

Lifetimes across the C boundary, all in this file:

- The callbacks and the static header blocks live as long as the process.
- A connection's `nghttp2_session` is freed by `close`, or with the object. Its user data is a handle that the object
  owns. No method may be called from a callback; a callback may call `nghttp2_submit_*`, never `mem_recv` or `mem_send`.
- Bytes passed to a callback are valid during the call and are copied there. Header blocks given to `nghttp2_submit_*`
  are copied by the library unless they are static. Bodies are read through `_on_read`, from memory of the stream.
- An exception in a callback is kept and raised by the method that called the library.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import _cffi_backend as _c  # the functions behind methods of cffi.FFI, of which callbacks call dozens for each request
import cffi

LIBRARY = "libnghttp2.so.14"

_CDEF = """
typedef struct nghttp2_session nghttp2_session;
typedef struct nghttp2_session_callbacks nghttp2_session_callbacks;
typedef struct nghttp2_option nghttp2_option;
typedef struct { size_t length; int32_t stream_id; uint8_t type; uint8_t flags; uint8_t reserved; } nghttp2_frame_hd;
typedef union { int fd; void *ptr; } nghttp2_data_source;
typedef struct { char *name; char *value; size_t namelen; size_t valuelen; uint8_t flags; } nghttp2_nv;
typedef struct { int32_t settings_id; uint32_t value; } nghttp2_settings_entry;
typedef ssize_t (*read_callback)(nghttp2_session *, int32_t, char *, size_t, uint32_t *, nghttp2_data_source *, void *);
typedef struct { nghttp2_data_source source; read_callback read; } nghttp2_data_provider;
typedef int (*frame_callback)(nghttp2_session *, const nghttp2_frame_hd *, void *);
typedef int (*invalid_callback)(nghttp2_session *, const nghttp2_frame_hd *, int, void *);
typedef int (*header_callback)(nghttp2_session *, const nghttp2_frame_hd *, const char *, size_t, const char *, size_t,
                               uint8_t, void *);
typedef int (*chunk_callback)(nghttp2_session *, uint8_t, int32_t, const char *, size_t, void *);
typedef int (*close_callback)(nghttp2_session *, int32_t, uint32_t, void *);
typedef int (*send_data_callback)(nghttp2_session *, nghttp2_frame_hd *, const char *, size_t, nghttp2_data_source *,
                                  void *);
typedef ssize_t (*read_length_callback)(nghttp2_session *, uint8_t, int32_t, int32_t, int32_t, uint32_t, void *);

int nghttp2_session_callbacks_new(nghttp2_session_callbacks **);
void nghttp2_session_callbacks_set_on_begin_headers_callback(nghttp2_session_callbacks *, frame_callback);
void nghttp2_session_callbacks_set_on_header_callback(nghttp2_session_callbacks *, header_callback);
void nghttp2_session_callbacks_set_on_frame_recv_callback(nghttp2_session_callbacks *, frame_callback);
void nghttp2_session_callbacks_set_on_data_chunk_recv_callback(nghttp2_session_callbacks *, chunk_callback);
void nghttp2_session_callbacks_set_on_invalid_frame_recv_callback(nghttp2_session_callbacks *, invalid_callback);
void nghttp2_session_callbacks_set_on_stream_close_callback(nghttp2_session_callbacks *, close_callback);
void nghttp2_session_callbacks_set_send_data_callback(nghttp2_session_callbacks *, send_data_callback);
void nghttp2_session_callbacks_set_data_source_read_length_callback(nghttp2_session_callbacks *, read_length_callback);
int nghttp2_option_new(nghttp2_option **);
void nghttp2_option_set_no_auto_window_update(nghttp2_option *, int);
void nghttp2_option_set_no_closed_streams(nghttp2_option *, int);
void nghttp2_option_set_no_rfc9113_leading_and_trailing_ws_validation(nghttp2_option *, int);
void nghttp2_option_set_max_continuations(nghttp2_option *, size_t);
void nghttp2_option_set_max_outbound_ack(nghttp2_option *, size_t);
void nghttp2_option_set_max_settings(nghttp2_option *, size_t);
void nghttp2_option_set_stream_reset_rate_limit(nghttp2_option *, uint64_t, uint64_t);
int nghttp2_session_server_new2(nghttp2_session **, const nghttp2_session_callbacks *, void *, const nghttp2_option *);
void nghttp2_session_del(nghttp2_session *);
ssize_t nghttp2_session_mem_recv(nghttp2_session *, const char *, size_t);
ssize_t nghttp2_session_mem_send(nghttp2_session *, const char **);
int nghttp2_session_want_read(nghttp2_session *);
int nghttp2_session_want_write(nghttp2_session *);
int nghttp2_session_consume_connection(nghttp2_session *, size_t);
int nghttp2_submit_window_update(nghttp2_session *, uint8_t, int32_t, int32_t);
int nghttp2_session_set_local_window_size(nghttp2_session *, uint8_t, int32_t, int32_t);
int32_t nghttp2_session_get_stream_local_window_size(nghttp2_session *, int32_t);
int nghttp2_session_resume_data(nghttp2_session *, int32_t);
int nghttp2_session_terminate_session(nghttp2_session *, uint32_t);
int32_t nghttp2_session_get_last_proc_stream_id(nghttp2_session *);
int nghttp2_submit_settings(nghttp2_session *, uint8_t, const nghttp2_settings_entry *, size_t);
int nghttp2_submit_response(nghttp2_session *, int32_t, const nghttp2_nv *, size_t, const nghttp2_data_provider *);
int nghttp2_submit_trailer(nghttp2_session *, int32_t, const nghttp2_nv *, size_t);
int nghttp2_submit_rst_stream(nghttp2_session *, uint8_t, int32_t, uint32_t);
int nghttp2_submit_ping(nghttp2_session *, uint8_t, const char *);
int nghttp2_submit_shutdown_notice(nghttp2_session *);
int nghttp2_submit_goaway(nghttp2_session *, uint8_t, int32_t, uint32_t, const char *, size_t);
const char *nghttp2_strerror(int);
"""

# frame types and flags (RFC 9113, section 6)
DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
END_STREAM = ACK = 1

# error codes (RFC 9113, section 7)
NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, CANCEL, ENHANCE_YOUR_CALM = 0, 1, 2, 8, 11

# settings (RFC 9113, section 6.5.2)
_MAX_CONCURRENT_STREAMS, _INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE, _MAX_HEADER_LIST_SIZE = 3, 4, 5, 6

# nghttp2
_PAUSE = -526
_DEFERRED, _TEMPORAL_FAILURE, _CALLBACK_FAILURE, _NO_MEMORY = -508, -521, -902, -901
_EOF, _NO_END_STREAM, _NO_COPY = 1, 2, 4
_NO_COPY_NAME_AND_VALUE = 2 | 4

STREAM_WINDOW_BYTES = (64 << 10) - 1
"""Receive window of a stream until `expect` raises it, the protocol's default: what an unchecked call may fill."""

CONNECTION_WINDOW_BYTES = 16 << 20
"""Receive window of a connection. Its bytes are consumed as they arrive, so it bounds nothing but the rate."""

CONSUMED_BYTES = 64 << 10
"""Received bytes after which the window of a connection is opened again; it stays that much below its size."""

FRAME_BYTES_IN = 64 << 10
"""Largest frame a client may send."""

FRAME_BYTES_OUT = 256 << 10
"""Largest DATA frame sent, where the client accepts it."""

COPY_BYTES_MAX = 8 << 10
"""DATA of up to this size is copied into its frame; larger parts are sent from their own memory."""

CONTINUATIONS_MAX, SETTINGS_MAX, ACKS_MAX = 8, 32, 1000
"""CONTINUATION frames of one header block, entries of one SETTINGS frame, acknowledgements that wait to be sent."""

RESETS_BURST, RESETS_PER_S = 1000, 33
"""Streams a client may reset: at once, and per second (CVE-2023-44487)."""

FIELDS_MAX = 256
"""Most fields of one header block; its stream is reset. (gRPC's clients report that as RESOURCE_EXHAUSTED.)"""

EXCESS = 4
"""A header block of more than EXCESS times `header_bytes_max` ends the connection: one byte of HPACK can mean 4 KB."""

CONTROL_FRAMES_MAX = 10_000
"""Frames without content (PING, SETTINGS, PRIORITY, WINDOW_UPDATE, empty DATA, resets) between two calls of
`allow_control`, beyond those that go with data."""

BYTES_PER_CONTROL = 1024
"""Received or sent bytes that permit one more frame without content."""

IDLE_PINGS_MAX = 4
"""Pings of a client without a call in between, beyond those that `allow_ping` grants."""

# events
REQUEST, BODY, END, CLOSED = "request", "body", "end", "closed"
"""REQUEST: the header block is complete. BODY: `body` has grown. END: the client has sent everything.
CLOSED: the stream is over; `error` has the code of a reset, NO_ERROR after a response."""

Field = tuple[bytes, bytes]

KEPT = frozenset(
    {b":method", b":path", b"content-type", b"grpc-timeout", b"grpc-encoding", b"authorization", b"traceparent"}
)
"""Header fields that a stream keeps; the others only count against the limit."""

_KEPT_SIZES = frozenset(map(len, KEPT))


class Http2Error(Exception):
    """The connection cannot go on; nothing more is read. `data_to_send` still has what is to be sent before closing."""


@dataclass(frozen=True, slots=True)
class Http2Limits:
    """Limits of one connection. header_bytes_max: as SETTINGS_MAX_HEADER_LIST_SIZE counts, 32 bytes a field extra."""

    streams_max: int = 256
    header_bytes_max: int = 16 << 10


class Http2Stream:
    """One request and its response.

    fields:         kept header fields, in order of arrival; trailers of the client are discarded.
    too_large:      the header block exceeds `header_bytes_max`.
    body:           received bytes, taken by the owner.
    block:          memory that received bytes fill before `body` grows again, set by `fill`; None: there is none.
    filled_bytes:   how much of it they have filled.
    received_bytes: length of the body so far.
    allowed_bytes:  length of the body that the client may send.
    error:          code of the reset that ended it.
    unsent_bytes:   queued bytes of the response that have not been handed to the socket.
    call:           for the owner.
    """

    __slots__ = (
        "_deferred",
        "_finished",
        "_offset",
        "_out",
        "_responded",
        "_trailers",
        "allowed_bytes",
        "block",
        "body",
        "call",
        "closed",
        "discard",
        "error",
        "fields",
        "filled_bytes",
        "id",
        "received_bytes",
        "remote_ended",
        "too_large",
        "unsent_bytes",
    )

    def __init__(self, stream_id: int) -> None:
        self.id = stream_id
        self.fields: list[Field] = []
        self.too_large = False
        self.body = bytearray()
        self.block: memoryview | None = None
        self.filled_bytes = 0
        self.allowed_bytes = STREAM_WINDOW_BYTES
        self.discard = False
        self.remote_ended = False
        self.received_bytes = 0
        self.closed = False
        self.error = NO_ERROR
        self.unsent_bytes = 0
        self.call: Any = None
        self._out: deque[bytes | memoryview] = deque()
        self._offset = 0
        self._responded = False
        self._deferred = False
        self._finished = False
        self._trailers: Sequence[Field] | None = None

    def fill(self, block: memoryview) -> None:
        """Let `block` receive the bytes of `body` and those that follow, without a copy in between.

        The owner sets `block` to None once `filled_bytes` has reached its length.
        """
        size = min(len(self.body), len(block))
        block[:size] = self.body[:size]
        del self.body[:size]
        self.block, self.filled_bytes = block, size

    def receive(self, data: memoryview) -> None:
        """Append bytes to `block`, as far as they fit, and then to `body`."""
        if self.block is not None:
            begin = self.filled_bytes
            size = min(len(data), len(self.block) - begin)
            self.block[begin : begin + size] = data[:size]
            self.filled_bytes, data = begin + size, data[size:]
        self.body += data


Event = tuple[str, Http2Stream]

MANY_BLOCKS = 1 << 30
"""More header blocks than any data has."""


def _open() -> tuple[Any, Any]:
    """Return cffi's interface and the library; ImportError if it cannot be used."""
    ffi = cffi.FFI()
    ffi.cdef(_CDEF)
    try:
        lib = ffi.dlopen(LIBRARY)
        missing = [name for name in re.findall(r"(nghttp2_\w+)\(", _CDEF) if not hasattr(lib, name)]
    except OSError:
        raise ImportError(f"{LIBRARY} is not installed") from None
    if missing:
        raise ImportError(f"{LIBRARY} is too old: it has no {missing[0]}")
    return ffi, lib


_ffi, _lib = _open()
_CHARS = _ffi.typeof("char[]")


# callbacks: called by `mem_recv` and `mem_send` alone


def _keep(kind: type[BaseException], error: BaseException, traceback: TracebackType) -> None:
    """Keep the exception of a callback for the method that called the library."""
    user = traceback.tb_frame.f_locals.get("user")
    if user is not None:
        _c.from_handle(user)._failure = error


def _callback(kind: str) -> Callable[[Callable[..., int]], Any]:
    try:
        made: Callable[[Callable[..., int]], Any] = _ffi.callback(kind, error=_CALLBACK_FAILURE, onerror=_keep)
        return made
    except (MemoryError, OSError, SystemError) as error:  # a system without writable and executable memory
        raise ImportError(f"{LIBRARY} cannot call back: {error}") from None


@_callback("frame_callback")
def _on_begin_headers(session: Any, frame: Any, user: Any) -> int:
    connection = _c.from_handle(user)
    stream_id = frame.stream_id
    connection._idle_pings = 0
    if stream_id in connection._streams:  # trailers
        connection._reading = None
    else:
        connection._reading = connection._streams[stream_id] = Http2Stream(stream_id)
    connection._field_bytes = connection._field_count = 0
    connection._blocks_left -= 1
    return 0


@_callback("header_callback")
def _on_header(
    session: Any, frame: Any, name: Any, name_size: int, value: Any, value_size: int, flags: int, user: Any
) -> int:
    connection = _c.from_handle(user)
    connection._field_bytes = size = connection._field_bytes + name_size + value_size + 32
    connection._field_count = count = connection._field_count + 1
    if size > connection._field_bytes_max or count > FIELDS_MAX:
        connection._excessive |= size > EXCESS * connection._field_bytes_max
        if connection._excessive or count > FIELDS_MAX:
            _lib.nghttp2_submit_rst_stream(session, 0, frame.stream_id, ENHANCE_YOUR_CALM)
            return _TEMPORAL_FAILURE  # the rest of this block is not passed on
        if connection._reading is not None:
            connection._reading.too_large = True
        return 0
    stream = connection._reading
    if stream is not None and name_size in _KEPT_SIZES:
        key = _c.unpack(name, name_size)
        if key in KEPT:
            stream.fields.append((key, _c.unpack(value, value_size)))
    if connection._blocks_left < 0:
        connection._blocks_left = 0  # once for this block
        return _PAUSE
    return 0


@_callback("frame_callback")
def _on_frame(session: Any, frame: Any, user: Any) -> int:
    connection = _c.from_handle(user)
    kind, flags = frame.type, frame.flags
    if kind <= HEADERS:  # or DATA
        stream = connection._streams.get(frame.stream_id)
        if kind == HEADERS:
            if stream is not None and stream is connection._reading:
                connection._events.append((REQUEST, stream))
            connection._reading = None
        elif not frame.length:
            connection._control += 1
        if flags & END_STREAM and stream is not None:
            stream.remote_ended = True
            connection._events.append((END, stream))
        return 0
    connection._control += 1
    if kind == PING:
        if flags & ACK:
            connection.pings_acknowledged += 1
        else:
            connection._idle_pings += 1
    elif kind == SETTINGS and flags & ACK:
        connection.settings_acknowledged = True
    return 0


@_callback("invalid_callback")
def _on_invalid(session: Any, frame: Any, code: int, user: Any) -> int:
    """Count a frame that the library refuses by itself: each queues a reset."""
    _c.from_handle(user)._control += 1
    return 0


@_callback("chunk_callback")
def _on_chunk(session: Any, flags: int, stream_id: int, data: Any, size: int, user: Any) -> int:
    connection = _c.from_handle(user)
    connection._received += size
    connection._idle_pings = 0
    stream = connection._streams.get(stream_id)
    if stream is not None:
        stream.received_bytes += size
    if stream is not None and not stream.discard:
        if stream.block is None:
            stream.body += _c.buffer(data, size)
        else:
            stream.receive(memoryview(_c.buffer(data, size)))
        connection._events.append((BODY, stream))
    return 0


@_callback("close_callback")
def _on_close(session: Any, stream_id: int, error: int, user: Any) -> int:
    connection = _c.from_handle(user)
    stream = connection._streams.pop(stream_id, None)
    if stream is not None:
        stream.closed, stream.error = True, error
        connection.unsent_bytes -= stream.unsent_bytes
        stream.unsent_bytes = 0
        stream._out.clear()
        connection._events.append((CLOSED, stream))
    return 0


@_callback("read_callback")
def _on_read(session: Any, stream_id: int, buffer: Any, size: int, flags: Any, source: Any, user: Any) -> int:
    """Fill a DATA frame, or announce its bytes for `_on_send_data`; at the end submit the trailers."""
    connection = _c.from_handle(user)
    connection._idle_pings = 0
    stream = connection._streams[stream_id]
    out, offset, filled = stream._out, stream._offset, 0
    while out and filled < size:
        part = out[0]
        left = len(part) - offset
        if left > COPY_BYTES_MAX:
            if filled:
                break
            stream._offset = offset
            flags[0] = _NO_COPY
            return int(min(left, size))
        taken = min(left, size - filled)
        _c.memmove(buffer + filled, part if taken == len(part) else memoryview(part)[offset : offset + taken], taken)
        filled += taken
        offset += taken
        if offset == len(part):
            out.popleft()
            offset = 0
    stream._offset = offset
    stream.unsent_bytes -= filled
    connection.unsent_bytes -= filled
    if not out:
        if stream._trailers is not None:
            flags[0] = _EOF | _NO_END_STREAM
            connection._submit_trailers(stream)
        elif not filled:
            stream._deferred = True
            return _DEFERRED
    return filled


@_callback("send_data_callback")
def _on_send_data(session: Any, frame: Any, head: Any, size: int, source: Any, user: Any) -> int:
    """Append a DATA frame whose payload is a part of the stream's own memory."""
    connection = _c.from_handle(user)
    stream = connection._streams[frame.stream_id]
    part, offset = stream._out[0], stream._offset
    connection._parts += (_c.unpack(head, 9), memoryview(part)[offset : offset + size])
    connection._parts_bytes += size + 9
    stream._offset = offset + size
    if stream._offset == len(part):
        stream._out.popleft()
        stream._offset = 0
    stream.unsent_bytes -= size
    connection.unsent_bytes -= size
    return _PAUSE if connection._parts_bytes >= connection._limit_bytes else 0


@_callback("read_length_callback")
def _on_read_length(
    session: Any, kind: int, stream_id: int, window: int, stream_window: int, frame_bytes_max: int, user: Any
) -> int:
    return min(FRAME_BYTES_OUT, frame_bytes_max)


# header blocks


class _Block:
    """A header block in C memory, with the bytes it points to."""

    __slots__ = ("_kept", "fields", "size")

    def __init__(self, fields: Sequence[Field], flags: int = 0) -> None:
        self.size = len(fields)
        self.fields = _ffi.new("nghttp2_nv[]", self.size)
        self._kept = []
        for one, (name, value) in zip(self.fields, fields, strict=True):
            pointers = _ffi.from_buffer(name), _ffi.from_buffer(value)
            self._kept.append(pointers)
            one.name, one.value = pointers
            one.namelen, one.valuelen, one.flags = len(name), len(value), flags


_STATUS_OK: Sequence[Field] = ((b":status", b"200"), (b"content-type", b"application/grpc"))
OK_TRAILERS: Sequence[Field] = ((b"grpc-status", b"0"),)
"""Trailers of a call that succeeded."""

_OK_HEADERS_BLOCK, _OK_TRAILERS_BLOCK = (_Block(one, _NO_COPY_NAME_AND_VALUE) for one in (_STATUS_OK, OK_TRAILERS))


def _provider() -> Any:
    provider = _ffi.new("nghttp2_data_provider *")
    provider.read = _on_read
    return provider


_PROVIDER = _provider()


def _session_callbacks() -> Any:
    made = _ffi.new("nghttp2_session_callbacks **")
    _check(_lib.nghttp2_session_callbacks_new(made))
    callbacks = made[0]
    _lib.nghttp2_session_callbacks_set_on_begin_headers_callback(callbacks, _on_begin_headers)
    _lib.nghttp2_session_callbacks_set_on_header_callback(callbacks, _on_header)
    _lib.nghttp2_session_callbacks_set_on_frame_recv_callback(callbacks, _on_frame)
    _lib.nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, _on_chunk)
    _lib.nghttp2_session_callbacks_set_on_invalid_frame_recv_callback(callbacks, _on_invalid)
    _lib.nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, _on_close)
    _lib.nghttp2_session_callbacks_set_send_data_callback(callbacks, _on_send_data)
    _lib.nghttp2_session_callbacks_set_data_source_read_length_callback(callbacks, _on_read_length)
    return callbacks


def _session_options() -> Any:
    made = _ffi.new("nghttp2_option **")
    _check(_lib.nghttp2_option_new(made))
    option = made[0]
    _lib.nghttp2_option_set_no_auto_window_update(option, 1)
    _lib.nghttp2_option_set_no_closed_streams(option, 1)
    _lib.nghttp2_option_set_no_rfc9113_leading_and_trailing_ws_validation(option, 1)  # a token with a space after it
    _lib.nghttp2_option_set_max_continuations(option, CONTINUATIONS_MAX)
    _lib.nghttp2_option_set_max_outbound_ack(option, ACKS_MAX)
    _lib.nghttp2_option_set_max_settings(option, SETTINGS_MAX)
    _lib.nghttp2_option_set_stream_reset_rate_limit(option, RESETS_BURST, RESETS_PER_S)
    return option


def _check(code: int) -> int:
    """Return a result of the library; raises MemoryError or Http2Error if it is an error."""
    if code >= 0:
        return code
    if code == _NO_MEMORY:
        raise MemoryError
    raise Http2Error(_ffi.string(_lib.nghttp2_strerror(code)).decode())


_CALLBACKS, _OPTIONS = _session_callbacks(), _session_options()


class Http2Connection:
    """The server's end of one HTTP/2 connection.

    unsent_bytes:          queued bytes of all responses that have not been handed to the socket.
    processed_bytes:       bytes that the last `receive` has processed.
    sent_bytes:            bytes that the last `data_to_send` has returned.
    settings_acknowledged: the client has acknowledged the server's settings.
    pings_acknowledged:    number of acknowledged pings.

    Raises MemoryError, or Http2Error where a method says so. Not thread-safe.
    """

    def __init__(self, limits: Http2Limits) -> None:
        self._streams: dict[int, Http2Stream] = {}
        self._events: list[Event] = []
        self._parts: list[bytes | memoryview] = []
        self._parts_bytes = self._limit_bytes = 0
        self._received = 0
        self._blocks_left = 0  # header blocks until `receive` returns
        self._stopping: list[Http2Stream] = []  # reset once their responses have been sent
        self._control = 0
        self._credit = CONTROL_FRAMES_MAX
        self._idle_pings = 0
        self._excessive = False
        self._failure: BaseException | None = None
        self._reading: Http2Stream | None = None
        self._field_bytes = self._field_count = 0
        self._field_bytes_max = limits.header_bytes_max
        self.unsent_bytes = 0
        self.processed_bytes = self.sent_bytes = 0
        self.settings_acknowledged = False
        self.pings_acknowledged = 0
        self._out = _ffi.new("const char **")
        self._handle = _ffi.new_handle(self)
        made = _ffi.new("nghttp2_session **")
        _check(_lib.nghttp2_session_server_new2(made, _CALLBACKS, self._handle, _OPTIONS))
        self._session = _ffi.gc(made[0], _lib.nghttp2_session_del)
        settings = {
            _MAX_CONCURRENT_STREAMS: limits.streams_max,
            _INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
            _MAX_FRAME_SIZE: FRAME_BYTES_IN,
            _MAX_HEADER_LIST_SIZE: limits.header_bytes_max,
        }
        entries = _ffi.new("nghttp2_settings_entry[]", list(settings.items()))
        _check(_lib.nghttp2_submit_settings(self._session, 0, entries, len(settings)))
        _check(_lib.nghttp2_session_set_local_window_size(self._session, 0, 0, CONNECTION_WINDOW_BYTES))

    # receiving

    def receive(self, data: bytes | bytearray | memoryview, blocks_max: int = MANY_BLOCKS) -> list[Event]:
        """Process bytes from the socket, up to `blocks_max` header blocks, and return the events in order.

        `processed_bytes` of the bytes have been processed; the next call begins with the rest.
        Http2Error: the peer does not speak HTTP/2, or sent a flood. A protocol error ends the connection with GOAWAY
        instead, see `ended`.
        """
        source = _c.from_buffer(_CHARS, data)
        self._blocks_left = blocks_max
        self.processed_bytes = code = _lib.nghttp2_session_mem_recv(self._session, source, len(data))
        if self._failure is not None:
            self._raise_failure()
        if code < 0:
            _check(code)
        if self._received >= CONSUMED_BYTES:
            received, self._received = self._received, 0
            self._credit += received // BYTES_PER_CONTROL
            _check(_lib.nghttp2_session_consume_connection(self._session, received))
        if self._excessive or self._control > self._credit or self._idle_pings > IDLE_PINGS_MAX:
            self.terminate(ENHANCE_YOUR_CALM)
        return self.take_events()

    def allow(self, stream: Http2Stream, size_bytes: int) -> None:
        """Let the client send `size_bytes` of body since the beginning of the stream, or more if that was allowed."""
        if stream.closed or stream.remote_ended:
            return
        stream.allowed_bytes = max(stream.allowed_bytes, size_bytes)
        window = _lib.nghttp2_session_get_stream_local_window_size(self._session, stream.id)
        more = stream.allowed_bytes - stream.received_bytes - window
        if more > 0:
            _check(_lib.nghttp2_submit_window_update(self._session, 0, stream.id, more))

    def allow_control(self) -> None:
        """Grant CONTROL_FRAMES_MAX more frames without content. Call it once a second."""
        self._control, self._credit = 0, CONTROL_FRAMES_MAX

    def allow_ping(self) -> None:
        """Grant one more ping on a connection without calls. Call it once per permitted interval."""
        self._idle_pings = max(0, self._idle_pings - 1)

    # responding: without effect on a closed stream

    def respond(
        self, stream: Http2Stream, parts: Iterable[bytes | memoryview], trailers: Sequence[Field] = OK_TRAILERS
    ) -> None:
        """Queue a whole response: headers, a body and trailers."""
        if stream._responded:
            return
        self._queue(stream, parts)
        stream._trailers = trailers
        self.begin(stream)

    def begin(self, stream: Http2Stream) -> None:
        """Queue the headers of a response whose body follows by `write` and `finish`."""
        if stream.closed or stream._responded:
            return
        stream._responded = True
        block = _OK_HEADERS_BLOCK
        code = _lib.nghttp2_submit_response(self._session, stream.id, block.fields, block.size, _PROVIDER)
        if code:
            _check(code)

    def write(self, stream: Http2Stream, parts: Iterable[bytes | memoryview]) -> None:
        """Queue bytes of a response's body."""
        self._queue(stream, parts)
        self._resume(stream)

    def finish(self, stream: Http2Stream, trailers: Sequence[Field]) -> None:
        """Queue the trailers after the body."""
        if not stream.closed:
            stream._trailers = trailers
            self._resume(stream)

    def refuse(self, stream: Http2Stream, fields: Sequence[Field]) -> None:
        """Queue a response of headers alone, and stop the client from sending more."""
        if stream.closed or stream._responded:
            return
        stream._responded = True
        stream.discard = True
        stream.body, stream.block = bytearray(), None
        block = _Block(fields)
        _check(_lib.nghttp2_submit_response(self._session, stream.id, block.fields, block.size, _ffi.NULL))
        self._stop_reading(stream)

    def reset(self, stream: Http2Stream, code: int) -> None:
        """Queue a reset; queued bytes of the response are dropped."""
        if not stream.closed:
            _check(_lib.nghttp2_submit_rst_stream(self._session, 0, stream.id, code))

    # connection

    def ping(self) -> None:
        _check(_lib.nghttp2_submit_ping(self._session, 0, _ffi.NULL))

    def shutdown_notice(self) -> None:
        """Queue a GOAWAY that asks the client to open no more streams; those that it opens meanwhile are served."""
        _check(_lib.nghttp2_submit_shutdown_notice(self._session))

    def terminate(self, code: int = NO_ERROR) -> None:
        """Queue a GOAWAY after which nothing is read or sent."""
        _check(_lib.nghttp2_session_terminate_session(self._session, code))

    @property
    def wants_write(self) -> bool:
        """True if frames are queued that windows permit."""
        return bool(_lib.nghttp2_session_want_write(self._session))

    @property
    def ended(self) -> bool:
        """True if there is nothing more to read or to send: the socket can be closed."""
        return not (_lib.nghttp2_session_want_read(self._session) or _lib.nghttp2_session_want_write(self._session))

    def data_to_send(self, limit_bytes: int) -> list[bytes | memoryview]:
        """Return queued bytes in order, about `limit_bytes` at most; empty if there are none or windows are closed.

        Memoryviews are of the memory given to `respond` and `write`.
        """
        self._parts, self._parts_bytes = [], 0
        self._limit_bytes = limit_bytes
        out = self._out
        while self._parts_bytes < limit_bytes:
            size = _lib.nghttp2_session_mem_send(self._session, out)
            if size <= 0:
                if self._failure is not None:
                    self._raise_failure()
                if size:
                    _check(size)
                if not self._stopping or self._parts_bytes >= limit_bytes:
                    break
                self._reset_stopping()
                continue
            self._parts.append(_c.unpack(out[0], size))
            self._parts_bytes += size
        if self._parts:
            self._credit += self._parts_bytes // BYTES_PER_CONTROL
        self.sent_bytes = self._parts_bytes
        parts, self._parts = self._parts, []
        return parts

    def take_events(self) -> list[Event]:
        """Return events since the last call: after `data_to_send`, streams that closed with their last frame."""
        events, self._events = self._events, []
        return events

    def close(self) -> list[Http2Stream]:
        """Free the session and return the streams whose CLOSED has not been returned.

        Nothing else may be called afterwards.
        """
        streams = [stream for event, stream in self.take_events() if event is CLOSED]
        for stream in self._streams.values():
            stream.closed, stream.error = True, CANCEL
            streams.append(stream)
        self._streams.clear()
        _ffi.release(self._session)
        return streams

    # inside

    def _queue(self, stream: Http2Stream, parts: Iterable[bytes | memoryview]) -> None:
        if stream.closed:
            return
        for part in parts:
            if size := len(part):
                stream._out.append(part)
                stream.unsent_bytes += size
                self.unsent_bytes += size

    def _resume(self, stream: Http2Stream) -> None:
        if stream._deferred and not stream.closed:
            stream._deferred = False
            _check(_lib.nghttp2_session_resume_data(self._session, stream.id))

    def _submit_trailers(self, stream: Http2Stream) -> None:
        trailers = stream._trailers
        block = _OK_TRAILERS_BLOCK if trailers is OK_TRAILERS else _Block(trailers or ())
        code = _lib.nghttp2_submit_trailer(self._session, stream.id, block.fields, block.size)
        if code:
            _check(code)
        if not stream.remote_ended:
            self._stop_reading(stream)

    def _stop_reading(self, stream: Http2Stream) -> None:
        """Reset a stream without an error after its response, if the client is still sending (RFC 9113, 8.1)."""
        if not stream.remote_ended:
            stream.discard = True
            self._stopping.append(stream)

    def _reset_stopping(self) -> None:
        """Queue resets of streams whose response has been sent; earlier ones would cancel the response."""
        for stream in self._stopping:
            if not (stream.closed or stream.remote_ended):
                _check(_lib.nghttp2_submit_rst_stream(self._session, 0, stream.id, NO_ERROR))
        self._stopping.clear()

    def _raise_failure(self) -> None:
        """Raise the exception of a callback, if there is one."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
