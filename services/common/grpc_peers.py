"""gRPC's names of peers, such as `ipv4:10.0.0.7:5432` and `ipv6:%5B::1%5D:5432`, taken apart."""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import unquote

MAX_CACHED = 8192
"""Names of peers whose parts are kept."""
MAX_HOST = 64


def address_of(name: str) -> str:
    """Return host:port by a peer's name; the name of another kind as it is."""
    kind, colon, address = unquote(name).partition(":")
    return address if colon and kind in ("ipv4", "ipv6") else name


@lru_cache(MAX_CACHED)
def host_of(name: str) -> str:
    """Return the host by a peer's name, without scope, and that of IPv4 in its own form, because a socket may take both kinds; the
    beginning of the name of another kind, such as `unix:/tmp/socket`."""
    kind, _, rest = unquote(name).partition(":")
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0].removeprefix("::ffff:")
    return host if host and kind in ("ipv4", "ipv6") else name[:MAX_HOST]
