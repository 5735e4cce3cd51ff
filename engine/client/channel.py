"""gRPC channel of a client: its options, its credentials, and the conversion of its errors.

Beside the two clients, only this file uses gRPC's classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from weftline.engine.client.options import ClientOptions, ClientTls
from weftline.engine.client.steps import Refused, refusal_of
from weftline.errors import InputError

FIRST_RECONNECT_MS, LONGEST_RECONNECT_MS = 100, 2_000
"""Reconnect back-off: gRPC's default of 1 s to 120 s is longer than most deadlines."""

KEEPALIVE_MS, KEEPALIVE_WAIT_MS = 20_000, 10_000
"""Keepalive interval and timeout while calls are open. After the timeout the calls fail with UNAVAILABLE. Weftline's
servers accept intervals from 10 s."""

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"

Metadata = tuple[tuple[str, str], ...]


def open_channel(options: ClientOptions) -> grpc.Channel:
    """Return a channel for threads. It connects on first use."""
    if options.tls is None:
        return grpc.insecure_channel(options.url, _arguments(options))
    return grpc.secure_channel(options.url, _credentials(options.tls), _arguments(options))


def open_aio_channel(options: ClientOptions) -> grpc.aio.Channel:
    """Return a channel for the running event loop. It connects on first use."""
    if options.tls is None:
        return grpc.aio.insecure_channel(options.url, _arguments(options))
    return grpc.aio.secure_channel(options.url, _credentials(options.tls), _arguments(options))


def metadata_of(options: ClientOptions) -> Metadata | None:
    """Return the metadata of every call."""
    return (("authorization", f"Bearer {options.token}"),) if options.token is not None else None


def refused(error: grpc.RpcError) -> Refused:
    """Return the refusal of a failed call, of either kind of channel."""
    call: Any = error
    pairs: Sequence[tuple[str, str | bytes]] = tuple(call.trailing_metadata() or ())
    return Refused(refusal_of(call.code().name, call.details(), pairs))


def _arguments(options: ClientOptions) -> list[tuple[str, Any]]:
    arguments: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", options.message_bytes_max),
        ("grpc.max_send_message_length", -1),  # the server's limit counts
        ("grpc.enable_retries", 0),  # retries have a budget here
        ("grpc.enable_http_proxy", 0),  # no environment variable decides where a token goes
        ("grpc.use_local_subchannel_pool", 1),  # a connection of its own, which ends with this client
        ("grpc.initial_reconnect_backoff_ms", FIRST_RECONNECT_MS),
        ("grpc.min_reconnect_backoff_ms", FIRST_RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", LONGEST_RECONNECT_MS),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_WAIT_MS),
        ("grpc.http2.ping_timeout_ms", 3 * KEEPALIVE_WAIT_MS),  # of a server whose machine lives, and which does not
        ("grpc.http2.max_pings_without_data", 0),  # a call may be silent for long
    ]
    if options.tls is not None and options.tls.server_name:
        arguments.append(("grpc.ssl_target_name_override", options.tls.server_name))
    return arguments


def _credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    try:
        read = [path.read_bytes() if path is not None else None for path in (tls.ca, tls.key, tls.certificate)]
    except OSError as error:
        raise InputError(f"tls: cannot read {error.filename}: {error.strerror}") from None
    return grpc.ssl_channel_credentials(*read)
