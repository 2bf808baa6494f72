"""Addresses as people write them, and proxies that must not stand between two of our processes."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import grpc.aio
import pytest

from kv_transfer.transports.grpc.transport import DEFAULT_OPTIONS
from kvrelay.channel import channel_options
from kvrelay.errors import InvalidRequest
from kvrelay.serving.server import ServiceServer
from kvrelay.target import is_on_this_machine, parse_target, proxy_note, proxy_options


@pytest.mark.parametrize(
    ("given", "target"),
    [
        ("127.0.0.1:50051", "127.0.0.1:50051"),
        (" gateway.example:1 ", "gateway.example:1"),
        ("[::1]:50051", "[::1]:50051"),
        ("http://gateway:50051/", "gateway:50051"),
        ("50051", "127.0.0.1:50051"),
        ("unix:/run/x.sock", "unix:/run/x.sock"),
        ("dns:///gateway:1", "dns:///gateway:1"),
    ],
)
def test_address_is_taken_as_it_is_meant(given: str, target: str) -> None:
    assert parse_target(given) == target


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", "must be host:port"),
        ("gateway", "the port is missing: gateway:PORT"),
        ("::1", r"write \[::1\]:PORT"),
        ("gateway:0", "from 1 to 65535, not 0"),
        ("70000", "from 1 to 65535, not 70000"),
        ("gateway:http", "must be host:port"),
        ("http://gateway:1/v1", "must be host:port"),
        ("https://gateway:1", "not encrypted"),
        ("a b:1", "must be host:port"),
        ("\udcff:1\n", "must be host:port"),
    ],
)
def test_what_is_no_address_is_refused_with_the_form_that_is_one(given: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        parse_target(given, "gateway")
    assert caught.value.field == "gateway"


@pytest.mark.parametrize(
    ("target", "is_near"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("dns:///localhost:1", True),
        ("http://127.0.0.1:4317", True),
        ("unix:/run/x.sock", True),
        ("10.0.0.1:1", False),
        ("localhost.example:1", False),
    ],
)
def test_this_machine_is_told_from_others(target: str, is_near: bool) -> None:
    assert is_on_this_machine(target) is is_near


def test_only_a_proxy_that_was_asked_for_counts() -> None:
    web, asked = {"http_proxy": "http://p:1", "https_proxy": "http://p:1"}, {"grpc_proxy": "http://p:1"}
    assert proxy_options("10.0.0.1:1", web) == ()
    assert proxy_options("10.0.0.1:1", asked) == (("grpc.enable_http_proxy", 1),)
    assert proxy_options("127.0.0.1:1", asked) == ()
    assert proxy_note("10.0.0.1:1", {}) == ""
    assert "https_proxy is set, and not used" in proxy_note("127.0.0.1:1", web)
    assert "the proxy of grpc_proxy" in proxy_note("10.0.0.1:1", asked)


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """A proxy that takes connections and never answers; yields what it was asked."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    asked.append(connection.recv(100))

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        for name in ("http_proxy", "https_proxy", "no_proxy", "no_grpc_proxy", "grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{listener.getsockname()[1]}")
        yield asked
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


@pytest.mark.parametrize("options", [channel_options(), DEFAULT_OPTIONS], ids=["cluster", "kv"])
async def test_channels_of_a_cluster_pass_the_web_s_proxy_by(
    proxy: list[bytes], options: tuple[tuple[str, int | str], ...]
) -> None:
    async with ServiceServer() as server:
        await server.start()
        async with grpc.aio.insecure_channel(server.address, options=options) as channel:
            check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
            await check(b"", timeout=10)
    assert proxy == []
