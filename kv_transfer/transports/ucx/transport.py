"""The UCX transport: tagged messages of ucxx between workers, over whatever fast network UCX finds, else TCP.

Each frame is one control message (fixed size, with small payloads inside) and, for larger payloads, one payload
message. UCX itself bounds nothing and checks nobody: the bytes in flight are bounded here by acknowledgements, and what
arrives is trusted only after digest and ticket have been checked. UCX listens on all interfaces: use it on a network of
your own. Needs the extra `ucx`; `is_available` says whether it is there. Progress: `progress.py`; a connection:
`connection.py`; payloads in device memory: `kv_transfer/device.py`.
"""

import asyncio
import socket
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

import structlog

from kv_transfer.device import DeviceMemory
from kv_transfer.transports.address import Address, parse_address
from kv_transfer.transports.handlers import HandlerTasks
from kv_transfer.transports.port import DEFAULT_CONNECT_TIMEOUT_S, Connection, ConnectionHandler
from kvrelay.errors import EngineError, PeerUnavailable

if TYPE_CHECKING:
    from kv_transfer.transports.ucx.connection import UcxConnection
    from kv_transfer.transports.ucx.progress import UcxEngine, ucx

HANDSHAKE_TIMEOUT_S = 5.0

_log = structlog.get_logger(__name__)


def is_available() -> bool:
    """Whether ucxx is installed. Loads nothing."""
    return find_spec("ucxx") is not None


class UcxTransport:
    """See the module.

    One UCX worker per transport, started with its first listener or connection and stopped with the last.
    """

    scheme = "ucx"

    def __init__(
        self, host: str = "127.0.0.1", config: Mapping[str, str] | None = None, device: DeviceMemory | None = None
    ) -> None:
        """Make a transport; UCX is loaded when it is first used.

        Args:
            host: The address under which peers reach this worker.
            config: UCX settings beside the tuned defaults, without their `UCX_` prefix; the environment wins.
            device: Memory of the device that the KV cache is on; None = payloads go through host memory.
        """
        self.device = device
        self._host = host
        self._config = config
        self._engine: UcxEngine | None = None
        self._num_users = 0

    def can_reach(self, address: str) -> bool:
        """Whether ucxx is here and the address has the right form."""
        try:
            return is_available() and bool(parse_address(address).host_and_port)
        except EngineError:
            return False

    async def listen(self, handler: ConnectionHandler) -> "UcxListener":
        """See `Transport.listen`."""
        engine = self._acquire()
        try:
            return UcxListener(self, engine, self._host, handler)
        except BaseException:
            self.release()
            raise

    async def connect(self, address: str, timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S) -> Connection:
        """See `Transport.connect`."""
        from kv_transfer.transports.ucx.handshake import connect

        host, port = parse_address(address).host_and_port
        try:
            infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise PeerUnavailable(f"{host} has no address: {error}") from error
        engine = self._acquire()
        try:
            async with asyncio.timeout(timeout_s):
                return await connect(engine, str(infos[0][4][0]), port, self.release, self.device)
        except TimeoutError as error:
            self.release()
            raise PeerUnavailable(f"nobody answered on {address} within {timeout_s:g} s") from error
        except BaseException:
            self.release()
            raise

    def _acquire(self) -> "UcxEngine":
        if not is_available():
            raise PeerUnavailable("ucxx is not installed: pip install 'kvrelay-server[ucx]'")
        from kv_transfer.transports.ucx.progress import UcxEngine

        if self._engine is None:
            self._engine = UcxEngine(self._config)
        self._num_users += 1
        return self._engine

    def release(self) -> None:
        """Note that a listener or connection is gone."""
        self._num_users -= 1
        if self._num_users == 0 and self._engine is not None:
            engine, self._engine = self._engine, None
            engine.close()


class UcxListener:
    """Accepts connections on a TCP port of UCX's choice."""

    def __init__(self, transport: UcxTransport, engine: "UcxEngine", host: str, handler: ConnectionHandler) -> None:
        from kv_transfer.transports.ucx.progress import ucx

        self._transport = transport
        self._engine = engine
        self._tasks = HandlerTasks(handler)
        self._handshakes: set[asyncio.Task[None]] = set()
        try:
            self._listener: ucx.UCXListener | None = ucx.UCXListener.create(
                worker=engine.worker, port=0, cb_func=self._on_endpoint, cb_args=(), deliver_endpoint=True
            )
        except ucx.UCXError as error:
            raise PeerUnavailable(f"UCX cannot listen: {error}") from error
        self._address = str(Address("ucx", f"{host}:{self._listener.port}"))

    @property
    def address(self) -> str:
        """`ucx://<host>:<port>`."""
        return self._address

    async def close(self) -> None:
        """See `Listener.close`."""
        if self._listener is None:
            return
        self._listener = None
        for task in self._handshakes:
            task.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)
        await self._tasks.close()
        self._transport.release()

    def _on_endpoint(self, endpoint: "ucx.UCXEndpoint") -> None:
        """Called by UCX while it is being progressed: nothing of UCX may be called from here."""
        task = asyncio.get_running_loop().create_task(self._shake_hands(endpoint))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, endpoint: "ucx.UCXEndpoint") -> None:
        from kv_transfer.transports.ucx.handshake import accept

        transport = self._transport
        transport._num_users += 1
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                connection: UcxConnection = await accept(self._engine, endpoint, transport.release, transport.device)
        except (EngineError, TimeoutError) as error:
            _log.warning("kv_transfer.handshake_failed", transport="ucx", error=str(error))
            transport.release()
        except BaseException:
            transport.release()
            raise
        else:
            self._tasks.start(connection)
