"""Which transports exist in this process and which one two workers use.

Capabilities are what a decode worker announces (its addresses) and what this process can reach. `auto` takes the
fastest common one; if it does not connect, the next. Next: `port.py`.
"""

from collections.abc import Iterable, Sequence

import structlog

from kv_transfer.transports.address import AddressError, parse_address
from kv_transfer.transports.port import DEFAULT_CONNECT_TIMEOUT_S, Connection, Transport
from kvrelay.errors import PeerUnavailable

PREFERENCE = ("inproc", "shm", "ucx", "grpc")
"""Fastest first. Schemes not named here come last."""

_log = structlog.get_logger(__name__)


def _rank(scheme: str) -> int:
    return PREFERENCE.index(scheme) if scheme in PREFERENCE else len(PREFERENCE)


class TransportRegistry:
    """The transports of this process by scheme."""

    def __init__(self, transports: Iterable[Transport] = ()) -> None:
        self._transports: dict[str, Transport] = {}
        for transport in transports:
            self.register(transport)

    @property
    def schemes(self) -> tuple[str, ...]:
        """Registered schemes, fastest first."""
        return tuple(sorted(self._transports, key=_rank))

    def register(self, transport: Transport) -> None:
        """Add a transport; a scheme registered before is replaced."""
        self._transports[transport.scheme] = transport

    def get(self, scheme: str) -> Transport:
        """Return the transport of a scheme.

        Raises:
            PeerUnavailable: This process has none of that scheme.
        """
        try:
            return self._transports[scheme]
        except KeyError:
            raise PeerUnavailable(f"no transport for {scheme}:// here, only {', '.join(self.schemes)}") from None

    def rank(self, addresses: Sequence[str], only: str | None = None) -> list[str]:
        """Return the addresses that can be tried from here, best first.

        Args:
            addresses: What a peer announces; malformed ones are left out.
            only: A scheme to restrict the choice to; None = every one (`auto`).
        """
        usable = []
        for address in addresses:
            try:
                scheme = parse_address(address).scheme
            except AddressError:
                continue
            transport = self._transports.get(scheme)
            if transport is not None and only in (None, scheme) and transport.can_reach(address):
                usable.append((_rank(scheme), address))
        return [address for _, address in sorted(usable, key=lambda item: item[0])]

    async def connect(
        self, addresses: Sequence[str], only: str | None = None, timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S
    ) -> Connection:
        """Connect over the best common transport, falling back to the next one when it fails.

        Raises:
            PeerUnavailable: There is no common transport, or none connects. `timeout_s` holds for each attempt.
        """
        failures = []
        for address in self.rank(addresses, only):
            try:
                return await self.get(parse_address(address).scheme).connect(address, timeout_s)
            except PeerUnavailable as error:
                _log.warning("kv_transfer.connect_failed", address=address, error=str(error))
                failures.append(f"{address}: {error}")
        if failures:
            raise PeerUnavailable("; ".join(failures))
        wanted = "any of " + ", ".join(self.schemes) if only is None else only
        raise PeerUnavailable(f"no common transport: peer offers {list(addresses)}, this worker speaks {wanted}")
