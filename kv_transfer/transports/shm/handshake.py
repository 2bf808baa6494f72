"""How a shared-memory connection begins: each side sends one greeting with its ring, and both are a connection then.

    greeting    magic 8 bytes | size of the ring u64, with the ring's descriptor (SCM_RIGHTS)

A ring is a memfd sealed to its size. What the peer sends is checked before it is mapped, read-only.
"""

import array
import asyncio
import fcntl
import mmap
import os
import socket
import struct

from kv_transfer.transports.shm.connection import ShmConnection
from kvrelay.errors import PeerUnavailable

MAX_RING_BYTES = 4 << 30

_GREETING = struct.Struct("<8sQ")
_GREETING_MAGIC = b"KVSHM\0\0\1"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


async def exchange_rings(sock: socket.socket, ring_bytes: int, *, is_peer_known: bool) -> ShmConnection:
    """Hand over this side's ring, take the peer's, and return the connection. The caller closes `sock` on failure.

    Args:
        sock: Connected.
        ring_bytes: Size of this side's ring. Memory is used only as far as payloads fill it.
        is_peer_known: Whether payloads of every size are taken before `Connection.trust_peer`.

    Raises:
        PeerUnavailable: The peer sent no valid ring.
        OSError: The socket failed, or memory for the ring could not be had.
    """
    descriptor = os.memfd_create("kvrelay-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, ring_bytes)
        # Sealed sizes mean that neither side can make the other fault by truncating the file under its mapping.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        own = mmap.mmap(descriptor, ring_bytes)
        # The greeting is far below any socket buffer: this neither blocks nor sends a part.
        socket.send_fds(sock, [_GREETING.pack(_GREETING_MAGIC, ring_bytes)], [descriptor])
    finally:
        os.close(descriptor)
    try:
        peer = await _receive_ring(sock)
    except BaseException:
        own.close()
        raise
    connection = ShmConnection(own, peer, is_peer_known=is_peer_known)
    try:
        await asyncio.get_running_loop().create_unix_connection(lambda: connection.protocol, sock=sock)
    except BaseException:
        connection.abort()
        raise
    return connection


async def _receive_ring(sock: socket.socket) -> mmap.mmap:
    await _readable(sock)
    data, ancillary, flags, _ = sock.recvmsg(_GREETING.size, socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    try:
        if len(data) != _GREETING.size or flags & socket.MSG_CTRUNC or len(descriptors) != 1:
            raise PeerUnavailable("the peer's greeting carries no ring")
        magic, ring_bytes = _GREETING.unpack(data)
        descriptor = descriptors[0]
        if magic != _GREETING_MAGIC or not mmap.PAGESIZE <= ring_bytes <= MAX_RING_BYTES:
            raise PeerUnavailable("the peer's greeting is not of this version")
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if seals & _SEALS != _SEALS or os.fstat(descriptor).st_size != ring_bytes:
                raise PeerUnavailable("the peer's ring is not sealed to its size")
            return mmap.mmap(descriptor, ring_bytes, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise PeerUnavailable(f"the peer's ring cannot be mapped: {error}") from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def on_readable() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(sock, on_readable)
    try:
        await ready
    finally:
        loop.remove_reader(sock)
