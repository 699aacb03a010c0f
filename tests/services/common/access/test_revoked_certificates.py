"""Certificates whose name was revoked, by the command and at the callers of a coordinator."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.errors import AccessDenied, Conflict, InvalidInput
from paceline.services.cli.main import main
from paceline.services.common.access.callers import CHECK_S, TokenCallers
from paceline.services.common.access.rights import CallerRole
from paceline.services.common.access.token_table import (
    REVOKED_NAME,
    create,
    read_revoked,
    revoke_certificate,
)
from paceline.services.common.access.token_table import revoke as revoke_token


def test_a_name_is_revoked_once_and_for_good(tmp_path: Path) -> None:
    path = tmp_path / REVOKED_NAME
    assert read_revoked(path) == {}
    revoke_certificate(path, "rollout")
    revoke_certificate(path, "Jürgen's laptop")
    assert list(read_revoked(path)) == ["rollout", "Jürgen's laptop"]
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(Conflict, match="rollout are revoked already"):
        revoke_certificate(path, "rollout")
    for name in ("", "x" * 65, "a\nb"):
        with pytest.raises(InvalidInput, match="1 to 64 printable characters"):
            revoke_certificate(path, name)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 2, "names": []}', '{"format": 1, "names": [{}]}'])
def test_a_damaged_file_says_so(tmp_path: Path, text: str) -> None:
    (tmp_path / REVOKED_NAME).write_text(text)
    with pytest.raises(Conflict, match=REVOKED_NAME):
        TokenCallers(lambda: "boot", tmp_path / "token", tmp_path / "tokens.json")


@pytest.mark.parametrize("damaged", ["", "{", '{"format": 1, "names": [{"name": "rollout", "revoked_s": "x"}]}', None])
async def test_damage_and_deletion_restore_no_certificate(tmp_path: Path, damaged: str | None) -> None:
    path = tmp_path / REVOKED_NAME
    revoke_certificate(path, "rollout")
    path.unlink()
    if damaged is not None:
        path.write_text(damaged)
    callers = TokenCallers(lambda: "boot", tmp_path / "token", tmp_path / "tokens.json")
    with pytest.raises(AccessDenied, match="the certificates of rollout were revoked"):
        await callers.caller("boot", "rollout")


async def test_a_revoked_certificate_takes_the_rights_of_every_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, noted = [0.0], list[tuple[str, str]]()
    monkeypatch.setattr("paceline.services.common.access.callers.time.monotonic", lambda: now_s[0])
    table = tmp_path / "tokens.json"
    callers = TokenCallers(
        lambda: "boot", tmp_path / "token", table, note=lambda what, name: noted.append((what, name))
    )
    before = await callers.caller("boot", "rollout")
    assert (before.name, before.certificate, callers.refusal(before)) == ("bootstrap", "rollout", "")
    done = CliRunner().invoke(main, ["certs", "revoke", "rollout", "--directory", str(tmp_path)])
    assert done.output == "the certificates of rollout are revoked\n"
    now_s[0] += CHECK_S
    with pytest.raises(AccessDenied, match="the certificates of rollout were revoked"):
        await callers.caller("boot", "rollout")
    assert "the certificates of rollout were revoked" in callers.refusal(before)
    for certificate in ("", "reward"):
        assert (await callers.caller("boot", certificate)).name == "bootstrap"
    create(table, "ann", CallerRole.VIEWER, 0.0)
    now_s[0] += CHECK_S
    await callers.caller("boot")
    revoke_token(table, "ann")
    now_s[0] += CHECK_S
    await callers.caller("boot")
    changes = [("certificates/revoked", "rollout"), ("tokens/created", "ann"), ("tokens/revoked", "ann")]
    assert noted == changes
