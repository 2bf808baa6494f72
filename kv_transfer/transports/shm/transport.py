"""The shared-memory transport: payloads in a memfd ring, headers over a Unix socket, same host and same user only.

Each side makes the ring it writes (a sealed memfd that has no name anywhere), hands it over with SCM_RIGHTS and maps
the peer's ring read-only. One copy per side: blocks to ring, ring to blocks. The peer is the same user (SO_PEERCRED),
yet every offset it names is checked. Wire format and state: `connection.py`.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import struct
import tempfile
from pathlib import Path

import structlog

from kv_transfer.transports.address import Address, host_token, parse_address
from kv_transfer.transports.handlers import HandlerTasks
from kv_transfer.transports.port import DEFAULT_CONNECT_TIMEOUT_S, Connection, ConnectionHandler
from kv_transfer.transports.shm.connection import DEFAULT_RING_BYTES
from kv_transfer.transports.shm.handshake import exchange_rings
from kvrelay.errors import EngineError, PeerUnavailable

HANDSHAKE_TIMEOUT_S = 5.0
_BACKLOG = 64
_MAX_PATH_BYTES = 107

_log = structlog.get_logger(__name__)


def _check_peer_user(sock: socket.socket) -> None:
    """Raise `PeerUnavailable` unless the process at the other end runs as this user."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    if uid != os.getuid():
        raise PeerUnavailable("the peer runs as another user")


def _socket_name(path: str) -> str:
    """Return what `bind` and `connect` take: a leading @ stands for the abstract namespace."""
    return "\0" + path[1:] if path.startswith("@") else "/" + path


class ShmListener:
    """Accepts connections on a Unix socket."""

    def __init__(self, sock: socket.socket, path: str, directory: Path | None, handler: ConnectionHandler) -> None:
        self._sock = sock
        self._path = path
        self._directory = directory
        self._tasks = HandlerTasks(handler)
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    @property
    def address(self) -> str:
        """`shm://<boot id>.<uid>/<path>`."""
        return str(Address("shm", f"{host_token()}/{self._path}"))

    async def close(self) -> None:
        """See `Listener.close`."""
        pending = [self._accepting, *self._handshakes]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        self._sock.close()
        await self._tasks.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._sock)
            except OSError as error:
                # Out of descriptors, most likely: those who are connected go on, newcomers are served later.
                _log.warning("kv_transfer.accept_failed", transport="shm", error=str(error))
                await asyncio.sleep(0.1)
                continue
            task = loop.create_task(self._shake_hands(sock))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            _check_peer_user(sock)
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                connection = await exchange_rings(sock, DEFAULT_RING_BYTES, is_peer_known=False)
        except (EngineError, OSError, TimeoutError) as error:
            _log.warning("kv_transfer.handshake_failed", transport="shm", error=str(error))
            sock.close()
        except asyncio.CancelledError:
            sock.close()
            raise
        else:
            self._tasks.start(connection)


class ShmTransport:
    """See the module."""

    scheme = "shm"

    def __init__(self, run_dir: Path | None = None, ring_bytes: int = DEFAULT_RING_BYTES) -> None:
        """Make a transport.

        Args:
            run_dir: Where listeners make a private directory (0700) for their socket, for workers that share a file
                system but not a network namespace; None = the abstract namespace, which leaves nothing behind.
            ring_bytes: Size of the ring of a connection made here. Memory is used only as far as payloads fill it.
        """
        self._run_dir = None if run_dir is None else run_dir.absolute()
        self._ring_bytes = ring_bytes

    def can_reach(self, address: str) -> bool:
        """Whether the address belongs to this kernel and user."""
        return parse_address(address).location.startswith(f"{host_token()}/")

    async def listen(self, handler: ConnectionHandler) -> ShmListener:
        """See `Transport.listen`."""
        directory: Path | None = None
        path = f"@kvrelay-{secrets.token_hex(12)}"
        if self._run_dir is not None:
            try:
                directory = Path(tempfile.mkdtemp(prefix="kv-", dir=self._run_dir))
            except OSError as error:
                raise PeerUnavailable(f"cannot listen in the run directory: {error}") from error
            path = str(directory / "socket")[1:]
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if len(path.encode()) > _MAX_PATH_BYTES:
                raise PeerUnavailable(f"the socket's path is over {_MAX_PATH_BYTES} bytes: choose a shorter run_dir")
            sock.setblocking(False)
            sock.bind(_socket_name(path))
            sock.listen(_BACKLOG)
        except (OSError, EngineError) as error:
            sock.close()
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)
            if isinstance(error, EngineError):
                raise
            raise PeerUnavailable(f"cannot listen on a Unix socket: {error}") from error
        return ShmListener(sock, path, directory, handler)

    async def connect(self, address: str, timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S) -> Connection:
        """See `Transport.connect`."""
        token, path = parse_address(address).host_and_path
        if token != host_token():
            raise PeerUnavailable(f"{address} is on another host, or of another user")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(sock.close)
            sock.setblocking(False)
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.get_running_loop().sock_connect(sock, _socket_name(path))
                    _check_peer_user(sock)
                    connection = await exchange_rings(sock, self._ring_bytes, is_peer_known=True)
            except TimeoutError as error:
                raise PeerUnavailable(f"nobody answered on {address} within {timeout_s:g} s") from error
            except OSError as error:
                raise PeerUnavailable(f"cannot connect to {address}: {error}") from error
            on_failure.pop_all()
        return connection
