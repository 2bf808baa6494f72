"""How a UCX connection begins: each side sends one greeting over the endpoint's stream, and both are a connection then.

    greeting    magic 8 bytes | tag u64 | has device memory u8 | 7 zero

The tag is what the peer is to put on what it sends here. Payloads stay in device memory only if both sides have some.
"""

import secrets
import struct
from collections.abc import Callable

from kv_transfer.device import DeviceMemory
from kv_transfer.transports.ucx.connection import UcxConnection
from kv_transfer.transports.ucx.progress import Array, UcxEngine, ucx
from kvrelay.errors import PeerUnavailable

_GREETING = struct.Struct("<8sQ?7x")
_MAGIC = b"KVUCX\0\0\2"


async def connect(
    engine: UcxEngine, host: str, port: int, on_gone: Callable[[], None], device: DeviceMemory | None = None
) -> UcxConnection:
    """Open a connection. `on_gone` is called once it has ended, not when this raises.

    Raises:
        PeerUnavailable: The peer cannot be reached or does not speak this protocol.
    """
    try:
        endpoint = ucx.UCXEndpoint.create(engine.worker, host, port, endpoint_error_handling=True)
    except ucx.UCXError as error:
        raise PeerUnavailable(f"UCX: {error}") from error
    return await _greet(engine, endpoint, on_gone, device, is_listener=False)


async def accept(
    engine: UcxEngine, endpoint: "ucx.UCXEndpoint", on_gone: Callable[[], None], device: DeviceMemory | None = None
) -> UcxConnection:
    """Finish an incoming connection; like `connect`."""
    return await _greet(engine, endpoint, on_gone, device, is_listener=True)


async def _greet(
    engine: UcxEngine,
    endpoint: "ucx.UCXEndpoint",
    on_gone: Callable[[], None],
    device: DeviceMemory | None,
    *,
    is_listener: bool,
) -> UcxConnection:
    own_tag = secrets.randbits(63) << 1
    mine, theirs = bytearray(_GREETING.pack(_MAGIC, own_tag, device is not None)), bytearray(_GREETING.size)
    try:
        # One after the other: UCX can lose the first stream message of an endpoint when both sides send at once.
        if is_listener:
            await engine.wait(endpoint.stream_send(Array(mine)))
            await engine.wait(endpoint.stream_recv(Array(theirs)))
        else:
            await engine.wait(endpoint.stream_recv(Array(theirs)))
            await engine.wait(endpoint.stream_send(Array(mine)))
        magic, peer_tag, has_device = _GREETING.unpack(theirs)
        if magic != _MAGIC:
            raise PeerUnavailable("the peer does not speak this protocol")
        return UcxConnection(
            engine, endpoint, own_tag, peer_tag, on_gone, device if has_device else None, is_peer_known=not is_listener
        )
    except ucx.UCXError as error:
        engine.close_endpoint(endpoint)
        raise PeerUnavailable(f"UCX: {error}") from error
    except BaseException:
        engine.close_endpoint(endpoint)
        raise
