"""The address of a server, as people write it and as gRPC dials it.

Owns which forms are accepted, whether a proxy may stand in between, and the words for both. Never opens anything; the
channels that dial it take their arguments from `kvrelay/channel.py`.
"""

import ipaddress
import os
import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from kvrelay.channel import ChannelOptions
from kvrelay.errors import InvalidRequest

DEFAULT_HOST: Final = "127.0.0.1"
_GRPC_SCHEMES: Final = ("dns:", "unix:", "unix-abstract:", "ipv4:", "ipv6:", "vsock:", "xds:")
"""Names of gRPC's own resolvers; what follows them is theirs to judge."""
_HOST_AND_PORT: Final = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[\w.-]+):(?P<port>[0-9]{1,5})")
_EXPECTED: Final = "must be host:port, for instance 127.0.0.1:50051"

PROXY_VARIABLE: Final = "grpc_proxy"
"""The variable that asks for a proxy for gRPC alone."""
_WEB_PROXY_VARIABLES: Final = ("https_proxy", "http_proxy")
"""Those that gRPC would take otherwise."""


def parse_target(text: str, field: str = "target") -> str:
    """Return an address as gRPC takes it: `host:port`, or a name of one of gRPC's own resolvers.

    Beside `host:port`, `http://host:port` and a bare port of this machine are understood.

    Args:
        text: What was given.
        field: Its name in errors.

    Raises:
        InvalidRequest: It is none of these; names `field`.
    """
    given = text.strip()
    if given.startswith(_GRPC_SCHEMES):
        return given
    if given.lower().startswith("https://"):
        raise InvalidRequest(field, f"{_EXPECTED}, not {text!r}: connections are not encrypted here")
    if given.lower().startswith("http://"):
        given = given[len("http://") :].removesuffix("/")
    if given.isdecimal() and given.isascii():
        given = f"{DEFAULT_HOST}:{given}"
    if match := _HOST_AND_PORT.fullmatch(given):
        if 0 < int(match["port"]) < 65536:
            return given
        raise InvalidRequest(field, f"the port must be from 1 to 65535, not {match['port']}")
    hint = ""
    if _is_ip6(given):
        hint = f"; write [{given}]:PORT"
    elif re.fullmatch(r"[\w.-]+", given):
        hint = f"; the port is missing: {given}:PORT"
    raise InvalidRequest(field, f"{_EXPECTED}, not {text!r}{hint}")


def _is_ip6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def is_on_this_machine(target: str) -> bool:
    """Whether a target is a loopback address or a socket of this machine's own."""
    if target.startswith(("unix:", "unix-abstract:", "vsock:")):
        return True
    host = urlsplit(f"//{target.rpartition('/')[2].removeprefix('dns:')}").hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def proxy_options(target: str, env: Mapping[str, str] | None = None) -> ChannelOptions:
    """Return the arguments that let a channel to `target` go through a proxy; none where it must not.

    A variable for web traffic (`http_proxy`) does not count: it is set on whole machines, and a proxy for the web
    seldom knows the way to a server beside it. Only `grpc_proxy` does, and never for this machine itself.

    Args:
        target: As `parse_target` returns it.
        env: The environment; None: the process's.
    """
    env = os.environ if env is None else env
    return (("grpc.enable_http_proxy", 1),) if env.get(PROXY_VARIABLE) and not is_on_this_machine(target) else ()


def proxy_note(target: str, env: Mapping[str, str] | None = None) -> str:
    """Return what to tell of proxies when nobody answers at `target`; empty where the environment names none."""
    env = os.environ if env is None else env
    if proxy_options(target, env):
        return f"the way there is the proxy of {PROXY_VARIABLE}, which no_grpc_proxy makes exceptions from"
    found = next((name for name in (PROXY_VARIABLE, *_WEB_PROXY_VARIABLES) if env.get(name)), "")
    return f"{found} is set, and not used for this connection" if found else ""
