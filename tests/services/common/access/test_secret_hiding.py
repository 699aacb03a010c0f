"""A worker beyond loopback hides secrets from user code unless an option says otherwise, and warns if it cannot."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import click
import pytest

from paceline.services.common import user_code_options as secret_hiding
from paceline.services.common.user_code_options import choose_isolation
from paceline.user_code.surroundings import VARIABLE

KERNEL = "this kernel has no Landlock"


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setenv("PACELINE_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("PACELINE_TLS_DIR", str(tmp_path / "tls"))


@pytest.mark.parametrize(
    ("coordinator", "host", "given", "why", "chosen", "line"),
    [
        ("127.0.0.1:7070", "127.0.0.1", "", "", "", "coordinator and worker are on loopback"),
        ("[::1]:7070", "localhost", "", KERNEL, "", "coordinator and worker are on loopback"),
        ("10.0.0.1:7070", "10.0.0.2", "", "", "secrets", "secrets are hidden from user code: /"),
        ("coordinator:7070", "0.0.0.0", "", "", "secrets", "secrets are hidden from user code: /"),
        ("127.0.0.1:7070", "10.0.0.2", "", "", "secrets", "secrets are hidden from user code: /"),
        (
            "10.0.0.1:7070",
            "10.0.0.2",
            "0",
            "",
            "0",
            "user code can read the token, because of --no-isolation",
        ),
        (
            "10.0.0.1:7070",
            "10.0.0.2",
            "0",
            KERNEL,
            "0",
            "user code can read the token, because of --no-isolation",
        ),
        ("127.0.0.1:7070", "127.0.0.1", "1", "", "1", "(--require-isolation)"),
        ("10.0.0.1:7070", "10.0.0.2", "1", "", "1", "(--require-isolation)"),
    ],
)
def test_beyond_loopback_secrets_are_hidden_unless_an_option_says_otherwise(
    coordinator: str,
    host: str,
    given: str,
    why: str,
    chosen: str,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(VARIABLE, given)
    monkeypatch.setattr(secret_hiding, "why_no_isolation", lambda: why)
    with caplog.at_level(logging.INFO):
        assert choose_isolation(coordinator, host) == ""
    assert os.environ[VARIABLE] == chosen
    (record,) = caplog.records
    assert line in record.getMessage()


def test_a_worker_that_cannot_hide_them_warns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(secret_hiding, "why_no_isolation", lambda: KERNEL)
    warning = choose_isolation("10.0.0.1:7070", "10.0.0.2")
    assert os.environ[VARIABLE] == ""
    for part in (
        f"USER CODE CAN READ SECRETS: {tmp_path}/token, {tmp_path}/tls and other runs' bundles in /",
        f"because {KERNEL}",
        "--no-isolation accepts the risk (docs/operate/security_setup.md)",
    ):
        assert part in warning


def test_a_worker_that_does_not_know_the_folder_of_bundles_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_BUNDLE_CACHE_MB", "many")
    monkeypatch.setattr(secret_hiding, "why_no_isolation", lambda: "")
    with pytest.raises(click.ClickException, match="PACELINE_BUNDLE_CACHE_MB is 'many'"):
        choose_isolation("10.0.0.1:7070", "10.0.0.2")
