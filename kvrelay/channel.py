"""Channel arguments for every gRPC server and channel of the project.

Owns sizes, keepalive, compression and proxies so that both sides of a connection agree. Never opens anything itself;
see `kvrelay/serving/server.py` for the server that uses them.
"""

from typing import Final, TypeAlias

ChannelOptions: TypeAlias = tuple[tuple[str, int | str], ...]

MEBIBYTE: Final = 1024 * 1024
PUBLIC_MAX_MESSAGE_BYTES: Final = 32 * MEBIBYTE
"""Largest message that the gateway's public service takes: beyond it gRPC itself refuses, below it validation names
the field."""
INTERNAL_MAX_MESSAGE_BYTES: Final = 8 * MEBIBYTE
"""Largest message between gateway and workers; KV frames are far smaller."""

NO_PROXY: Final = ("grpc.enable_http_proxy", 0)
"""The argument of a channel that dials its peer itself, whatever `http_proxy` says."""

KEEPALIVE_INTERVAL_MS: Final = 20_000
"""How often a client pings an otherwise silent connection."""
KEEPALIVE_TIMEOUT_MS: Final = 10_000
"""How long a ping may stay unanswered before the connection counts as lost."""
MIN_PING_INTERVAL_MS: Final = 5_000
"""Pings closer together than this count as abuse. gRPC's own default of 300 s would end connections during a long
prefill."""


def _common_options(max_message_bytes: int) -> ChannelOptions:
    return (
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        # 0 = as many pings as keepalive wants, also while no data flows.
        ("grpc.http2.max_pings_without_data", 0),
        # Token streams are tiny and KV does not compress: compression would only cost CPU.
        ("grpc.default_compression_algorithm", 0),
        # A proxy of the environment is for the web: it would stand between two processes of one machine or cluster.
        NO_PROXY,
    )


def server_options(max_message_bytes: int = INTERNAL_MAX_MESSAGE_BYTES) -> ChannelOptions:
    """Return the arguments of a server that takes messages of up to `max_message_bytes`."""
    return (
        *_common_options(max_message_bytes),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        # Without this a second server on the same port starts happily and steals half of the connections.
        ("grpc.so_reuseport", 0),
    )


def channel_options(max_message_bytes: int = INTERNAL_MAX_MESSAGE_BYTES) -> ChannelOptions:
    """Return the arguments of a channel whose peer sends messages of up to `max_message_bytes`."""
    return (
        *_common_options(max_message_bytes),
        # A restarted peer is found again within a second, not after gRPC's default of up to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Also how long one attempt to connect may take: a busy peer needs more than the first back-off.
        ("grpc.min_reconnect_backoff_ms", 5_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
    )


SERVER_OPTIONS: Final = server_options()
CHANNEL_OPTIONS: Final = channel_options()
