"""Valid and invalid addresses."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from paceline.calls.connection import checked_address
from paceline.errors import InvalidInput
from paceline.services.cli.main import main


@pytest.mark.parametrize("text", ["127.0.0.1:7070", "coordinator:1", "[::1]:65535", "a-b.c:7070"])
def test_host_and_port_are_an_address(text: str) -> None:
    assert checked_address(text) == text


@pytest.mark.parametrize(
    "text", ["nonsense", "", ":7070", "host:", "host:port", "host:0", "host:65536", "http://a:1", "::1:70"]
)
def test_anything_else_is_called_malformed(text: str) -> None:
    with pytest.raises(InvalidInput, match="malformed"):
        checked_address(text)


def test_a_command_says_so_instead_of_looking_for_it() -> None:
    result = CliRunner().invoke(main, ["runs", "--coordinator", "nonsense"])
    assert result.exit_code == 1
    assert "--coordinator 'nonsense' is malformed" in result.stderr
