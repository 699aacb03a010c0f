"""`paceline certs`."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from paceline.services.cli.main import main
from paceline.tls.certificates import Identity, identity_of


def certs(*arguments: str, status: int = 0) -> str:
    done = CliRunner().invoke(main, ["certs", *arguments])
    assert done.exit_code == status, done.output
    return done.output


def test_an_authority_issues_renews_and_lists(tmp_path: Path) -> None:
    folder = tmp_path / "ca"
    certs("init", str(folder))
    own = Path(certs("issue", str(folder), "coordinator", "--role", "coordinator", "--host", "10.0.0.1").strip())
    certs("issue", str(folder), "rollout-0", "--role", "worker", "--days", "7")
    assert identity_of((own / "tls.crt").read_bytes()) == Identity("coordinator", "coordinator")
    assert certs("renew", str(folder)) == "no certificate is due\n"
    before = (own / "tls.crt").read_bytes()
    assert certs("renew", str(folder), "coordinator").strip() == str(own)
    assert (own / "tls.crt").read_bytes() != before
    table = certs("show", str(folder))
    assert "rollout-0" in table
    assert "10.0.0.1" in table
    lines = [json.loads(line) for line in certs("show", str(folder), "--json").splitlines()]
    assert [(line["name"], line["role"]) for line in lines[1:]] == [
        ("coordinator", "coordinator"),
        ("rollout-0", "worker"),
    ]
    assert len(certs("show", str(own), "--json").splitlines()) == 2


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    said = certs("issue", str(tmp_path), "a", "--role", "worker", status=1)
    assert said == f"Error: {tmp_path / 'ca.crt'} does not exist; `paceline certs init {tmp_path}` makes an authority\n"
    assert "'boss' is not one of" in certs("issue", str(tmp_path), "a", "--role", "boss", status=2)
