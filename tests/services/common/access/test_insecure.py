"""Addresses beyond this host need explicit consent."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from tls_folders import make_folders

from paceline.services.cli.main import main
from paceline.services.common.access.insecure import VARIABLE, insecurity
from paceline.tls.folder import VARIABLE as TLS_VARIABLE


@pytest.fixture(autouse=True)
def without_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable, also after the test: the option sets it for child processes."""
    monkeypatch.setenv(VARIABLE, "")


@pytest.mark.parametrize(
    "command",
    [
        ("members", "--coordinator", "10.255.255.1:7070"),
        ("serve", "coordinator", "--host", "0.0.0.0"),
        ("serve", "reward", "--host", "::"),
        ("serve", "rollout", "--coordinator", "head:7070"),
        ("up", "spec.yaml", "--host", "192.168.0.1"),
        ("sft", "spec.yaml", "--coordinator", "head:7070"),
    ],
)
def test_an_address_beyond_this_host_is_refused_with_the_remedy(command: tuple[str, ...]) -> None:
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 2
    assert "is beyond this host" in done.output
    assert "add --insecure, or set PACELINE_INSECURE=1" in done.output


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "localhost:1", "127.8.8.8:1"])
def test_this_host_needs_no_consent(address: str) -> None:
    done = CliRunner().invoke(main, ["members", "--coordinator", address])
    assert "start one with" in done.output, done.output
    assert "beyond this host" not in done.output


@pytest.mark.parametrize("consent", [("--insecure",), ()])
def test_consent_is_an_option_or_a_variable(consent: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    if not consent:
        monkeypatch.setenv(VARIABLE, "1")
    done = CliRunner().invoke(main, ["submit", "no.yaml", "--coordinator", "10.255.255.1:7070", *consent])
    assert "beyond this host" not in done.output
    assert "no.yaml" in done.output


def test_certificates_need_no_consent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TLS_VARIABLE, "")  # the option sets it, also after the command
    own = make_folders(tmp_path, a="operator")["a"]
    command = ["submit", "no.yaml", "--coordinator", "10.255.255.1:7070", "--tls-dir", str(own)]
    done = CliRunner().invoke(main, command)
    assert "beyond this host" not in done.output
    assert "no.yaml" in done.output


def test_a_process_that_is_not_encrypted_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TLS_VARIABLE, "")
    assert insecurity("127.0.0.1") == ""
    assert "NOT ENCRYPTED: --insecure listens on 0.0.0.0 without TLS" in insecurity("0.0.0.0")


def test_a_malformed_address_is_called_that() -> None:
    done = CliRunner().invoke(main, ["members", "--coordinator", "nonsense"])
    assert "malformed" in done.output
