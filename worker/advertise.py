"""Under which address others reach this worker, when it listens on every interface and was not told.

Looks at the route to the gateway; sends nothing.
"""

import ipaddress
import socket

import structlog

_log = structlog.get_logger(__name__)


def advertised_host(advertise_host: str, host: str, gateway: str) -> str:
    """Return the host to announce.

    Args:
        advertise_host: What the operator says; empty = not said.
        host: Where the worker listens.
        gateway: The gateway's address, host:port.
    """
    if advertise_host:
        return advertise_host
    if not _is_every_interface(host):
        return host
    return _local_address_towards(gateway) or socket.gethostname()


def _is_every_interface(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return not host  # a name


def _local_address_towards(gateway: str) -> str | None:
    """Return this host's address on the route to the gateway; None = there is no route, or no such name yet."""
    name, _, port = gateway.rpartition(":")
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            name.strip("[]"), int(port), type=socket.SOCK_DGRAM
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # of a datagram socket: only chooses the route
                return str(probe.getsockname()[0])
    except OSError as error:
        _log.warning("worker.address_unknown", gateway=gateway, error=str(error), fallback=socket.gethostname())
    return None
