"""Addresses as people write them: HOST:PORT."""

from __future__ import annotations

import ipaddress
import re

from paceline.errors import InvalidInput

FORM = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5})")


def checked_address(text: str, what: str = "--coordinator") -> str:
    """The address as it came. Raises InvalidInput unless it is HOST:PORT (an IPv6 host in brackets)."""
    found = FORM.fullmatch(text)
    if not found or not 0 < int(found[2]) < 65536:
        raise InvalidInput(
            f"{what} {text!r} is malformed: it has to be HOST:PORT, such as 127.0.0.1:7070 or [::1]:7070"
        )
    return text


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
