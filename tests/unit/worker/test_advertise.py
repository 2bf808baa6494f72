"""The address that a worker announces is one that others can reach."""

import socket

import pytest

from worker.advertise import advertised_host


def test_what_the_operator_says_is_announced() -> None:
    assert advertised_host("decode.example", "0.0.0.0", "127.0.0.1:1") == "decode.example"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "worker-3"])
def test_a_host_of_its_own_is_announced(host: str) -> None:
    assert advertised_host("", host, "127.0.0.1:1") == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]"])
def test_every_interface_becomes_the_address_on_the_way_to_the_gateway(host: str) -> None:
    assert advertised_host("", host, "127.0.0.1:50051") == "127.0.0.1"


def test_a_gateway_whose_name_is_unknown_yet_leaves_the_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert advertised_host("", "0.0.0.0", "gateway:50051") == socket.gethostname()
