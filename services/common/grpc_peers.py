"""gRPC's names of peers, such as `ipv4:10.0.0.7:5432` and `ipv6:%5B::1%5D:5432`, taken apart."""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import unquote

MAX_CACHED = 8192
"""Names of peers whose parts are kept."""
MAX_HOST = 64

Peer = tuple[str, int]
"""Address and port of the other side."""


@lru_cache(MAX_CACHED)
def peer_of(name: str) -> Peer:
    """Return address and port by a peer's name; no address for another kind, such as `unix:/tmp/socket`, and port 0."""
    kind, _, rest = unquote(name).partition(":")
    address, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6"):
        return "", 0
    return plain(address.strip("[]")), int(port) if port.isascii() and port.isdigit() else 0


def address_of(name: str) -> str:
    """Return host:port by a peer's name; the name of another kind as it is."""
    kind, colon, address = unquote(name).partition(":")
    return address if colon and kind in ("ipv4", "ipv6") else name


def host_of(name: str) -> str:
    """Return the host by a peer's name; the beginning of the name of another kind."""
    return peer_of(name)[0] or name[:MAX_HOST]


def plain(address: str) -> str:
    """Return an address without scope, and that of IPv4 in its own form: a socket may take both kinds."""
    return address.partition("%")[0].removeprefix("::ffff:")
