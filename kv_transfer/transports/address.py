"""Transfer addresses: `scheme://location`, and the identity of this host.

    inproc://<process token>/<name>            same process
    shm://<boot id>.<uid>/@<name>              same host, abstract Unix socket
    shm://<boot id>.<uid>/<path>               same host, Unix socket in a private directory
    ucx://<host>:<port>    grpc://<host>:<port>

Parsing only; nothing is opened here. Addresses come from the registry, never from a request.
"""

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kvrelay.errors import PeerUnavailable


class AddressError(PeerUnavailable):
    """The text is not a transfer address of the expected form."""

    is_retryable = False


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed address."""

    scheme: str
    location: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.location}"

    @property
    def host_and_path(self) -> tuple[str, str]:
        """The location split at its first slash; the slash is dropped."""
        host, slash, path = self.location.partition("/")
        if not (host and slash and path):
            raise AddressError(f"{self} has no <host>/<path>")
        return host, path

    @property
    def host_and_port(self) -> tuple[str, int]:
        """The location split at its last colon; IPv6 hosts are in brackets, which are dropped."""
        host, colon, port = self.location.rpartition(":")
        if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise AddressError(f"{self} has no <host>:<port>")
        return host.removeprefix("[").removesuffix("]"), int(port)


def parse_address(text: str) -> Address:
    """Split an address.

    Raises:
        AddressError: It has no scheme or no location.
    """
    scheme, separator, location = text.partition("://")
    if not (separator and location and scheme.isalnum() and scheme.islower()):
        raise AddressError(f"not a transfer address: {text[:200]!r}")
    return Address(scheme, location)


@lru_cache(maxsize=1)
def host_token() -> str:
    """Return `<boot id>.<uid>`: equal for processes that may share memory (same kernel, same user)."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot_id}.{os.getuid()}"
