"""gRPC's names of peers."""

from __future__ import annotations

import pytest

from paceline.services.common.access.tls import address_of, host_of


@pytest.mark.parametrize(
    ("name", "address", "host"),
    [
        ("ipv4:10.0.0.7:5432", "10.0.0.7:5432", "10.0.0.7"),
        ("ipv6:%5B::1%5D:5432", "[::1]:5432", "::1"),
        ("ipv6:[fe80::1]:1", "[fe80::1]:1", "fe80::1"),
        ("ipv6:[::ffff:10.0.0.7]:1", "[::ffff:10.0.0.7]:1", "10.0.0.7"),
        ("ipv6:[fe80::1%25eth0]:1", "[fe80::1%eth0]:1", "fe80::1"),
        ("unix:/tmp/socket", "unix:/tmp/socket", "unix:/tmp/socket"),
        ("unix:", "unix:", "unix:"),
        ("", "", ""),
    ],
)
def test_a_name_is_taken_apart(name: str, address: str, host: str) -> None:
    assert address_of(name) == address
    assert host_of(name) == host
