"""What both ends of a connection agree on."""

from kvrelay.channel import (
    CHANNEL_OPTIONS,
    MIN_PING_INTERVAL_MS,
    PUBLIC_MAX_MESSAGE_BYTES,
    SERVER_OPTIONS,
    channel_options,
    server_options,
)


def test_clients_never_ping_more_often_than_servers_allow() -> None:
    client, server = dict(CHANNEL_OPTIONS), dict(SERVER_OPTIONS)
    assert int(client["grpc.keepalive_time_ms"]) > int(server["grpc.http2.min_recv_ping_interval_without_data_ms"])
    assert server["grpc.http2.min_recv_ping_interval_without_data_ms"] == MIN_PING_INTERVAL_MS
    for options in (client, server):
        assert options["grpc.keepalive_permit_without_calls"] == 1


def test_both_directions_have_the_same_limit() -> None:
    for options in (server_options(PUBLIC_MAX_MESSAGE_BYTES), channel_options(PUBLIC_MAX_MESSAGE_BYTES)):
        assert dict(options)["grpc.max_receive_message_length"] == PUBLIC_MAX_MESSAGE_BYTES
        assert dict(options)["grpc.max_send_message_length"] == PUBLIC_MAX_MESSAGE_BYTES


def test_servers_never_share_a_port() -> None:
    assert dict(SERVER_OPTIONS)["grpc.so_reuseport"] == 0
