"""Addresses and the choice of the best common transport."""

import pytest

from kv_transfer.transports.address import AddressError, host_token, parse_address
from kv_transfer.transports.grpc.transport import GrpcTransport
from kv_transfer.transports.inproc import InprocTransport
from kv_transfer.transports.port import Connection
from kv_transfer.transports.registry import TransportRegistry
from kv_transfer.transports.shm.transport import ShmTransport
from kvrelay.errors import PeerUnavailable

pytestmark = pytest.mark.usefixtures("no_leaks")

HERE = f"shm://{host_token()}/@kvrelay-test"


@pytest.fixture
def registry() -> TransportRegistry:
    return TransportRegistry([GrpcTransport(), ShmTransport(), InprocTransport()])


@pytest.mark.parametrize(
    "text", ["", "grpc", "grpc:/x", "://x", "grpc://", "GRPC://x:1", "gr pc://x:1", "grpc//host:1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(AddressError):
        parse_address(text)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("grpc://10.0.0.1:5", "10.0.0.1", 5), ("ucx://worker:65535", "worker", 65535), ("grpc://[::1]:80", "::1", 80)],
)
def test_host_and_port(text: str, host: str, port: int) -> None:
    assert parse_address(text).host_and_port == (host, port)
    assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    "text", ["grpc://host", "grpc://:5", "grpc://host:", "grpc://host:0", "grpc://host:65536", "grpc://host:٣"]
)
def test_a_bad_port_is_refused(text: str) -> None:
    with pytest.raises(AddressError):
        _ = parse_address(text).host_and_port


def test_the_fastest_reachable_transport_comes_first(registry: TransportRegistry) -> None:
    offered = ["grpc://10.0.0.1:5000", HERE, "ucx://10.0.0.1:6000", "quic://x", "nonsense"]
    assert registry.rank(offered) == [HERE, "grpc://10.0.0.1:5000"]
    assert registry.rank(offered, only="grpc") == ["grpc://10.0.0.1:5000"]
    assert registry.rank(offered, only="ucx") == []
    assert registry.schemes == ("inproc", "shm", "grpc")


def test_shared_memory_of_another_host_or_user_is_not_tried(registry: TransportRegistry) -> None:
    boot_id, uid = host_token().rsplit(".", 1)
    elsewhere = [f"shm://00000000-0000-0000-0000-000000000000.{uid}/@x", f"shm://{boot_id}.{int(uid) + 1}/@x"]
    assert registry.rank([*elsewhere, "inproc://0123456789abcdef/1"]) == []


async def test_the_next_transport_is_used_when_the_best_does_not_connect(registry: TransportRegistry) -> None:
    async def wait(connection: Connection) -> None:
        await connection.recv()

    listener = await GrpcTransport().listen(wait)
    connection = await registry.connect([HERE, listener.address], timeout_s=5.0)
    assert connection.scheme == "grpc"
    await connection.close()
    await listener.close()


async def test_no_common_transport_says_what_there_is(registry: TransportRegistry) -> None:
    with pytest.raises(PeerUnavailable, match=r"no common transport.*ucx://h:1.*inproc, shm, grpc"):
        await registry.connect(["ucx://h:1"])
    with pytest.raises(PeerUnavailable, match="this worker speaks ucx"):
        await registry.connect([HERE], only="ucx")
    with pytest.raises(PeerUnavailable, match="kvrelay-test"):
        await registry.connect([HERE], timeout_s=1.0)
    with pytest.raises(PeerUnavailable, match="no transport for ucx"):
        registry.get("ucx")
