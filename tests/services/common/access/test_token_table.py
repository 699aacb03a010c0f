"""Named tokens: the content of the file, its readers, and the time when a token becomes invalid."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.errors import AccessDenied, Conflict, InvalidInput, NotFound
from paceline.services.cli.main import main
from paceline.services.common.access.callers import CHECK_S, TokenCallers
from paceline.services.common.access.rights import CallerRole
from paceline.services.common.access.token_table import BOOTSTRAP, create, digest_of, read_table, revoke


def test_the_file_has_digests_alone_and_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    token = create(path, "ann", CallerRole.SUBMITTER, 60.0)
    assert len(bytes.fromhex(token.removeprefix("plt_"))) == 32
    assert token.removeprefix("plt_") not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    (row,) = read_table(path).values()
    assert (row.name, row.role, row.sha256) == ("ann", "submitter", digest_of(token))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["tokens.json", "tokens.json.copy", "tokens.json.lock"]
    assert (tmp_path / "tokens.json.copy").stat().st_mode & 0o777 == 0o600


def test_names_are_checked_and_a_valid_one_is_not_taken_twice(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    for name in ("", "a b", "x" * 65, BOOTSTRAP, "a\nb"):
        with pytest.raises(InvalidInput, match="must be"):
            create(path, name, CallerRole.VIEWER, 0.0)
    create(path, "ann", CallerRole.VIEWER, 0.0)
    with pytest.raises(Conflict, match="a valid token named ann exists already"):
        create(path, "ann", CallerRole.VIEWER, 0.0)
    assert revoke(path, "ann") == 1
    with pytest.raises(NotFound, match="no valid token 'ann'"):
        revoke(path, "ann")
    create(path, "ann", CallerRole.VIEWER, 0.0)


ROW = '{"format": 1, "tokens": [{"name": "ann", "role": "operator", "sha256": "ab", "created_s": 1, "expires_s": %s}]}'
DAMAGED = (
    "",
    "\0" * 300,
    "[]",
    "{",
    "[" * 100_000,
    '{"format": 1, "tokens": [{}]}',
    ROW % "NaN",
    ROW % '"x"',
    ROW % "[]",
)


def damage(path: Path, kind: str) -> None:
    """Replace a file by a text, or by something that is no file."""
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "zeros":
        path.symlink_to("/dev/zero")
    else:
        path.write_text(kind)


@pytest.mark.parametrize("kind", [*DAMAGED, "folder", "pipe", "zeros"])
async def test_after_damage_and_a_restart_the_copy_decides(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokens.json"
    kept, revoked = (create(path, name, CallerRole.WORKER, 0.0) for name in ("kept", "revoked"))
    revoke(path, "revoked")
    damage(path, kind)
    callers = TokenCallers(lambda: "boot", tmp_path / "token", path)
    assert "is in effect" in caplog.text
    assert (await callers.caller(kept)).name == "kept"
    assert (await callers.caller("boot")).name == BOOTSTRAP
    with pytest.raises(AccessDenied, match="was revoked"):
        await callers.caller(revoked)
    if not path.is_dir():
        later = create(path, "later", CallerRole.WORKER, 0.0)  # repairs it
        assert read_table(path).keys() == {digest_of(token) for token in (kept, revoked, later)}


@pytest.mark.parametrize("kind", ['{"format": 2, "tokens": []}', *DAMAGED, "folder", "pipe"])
async def test_without_a_copy_damage_does_not_bring_a_revoked_bootstrap_token_back(tmp_path: Path, kind: str) -> None:
    path, copy = tmp_path / "tokens.json", tmp_path / "tokens.json.copy"
    revoke(path, BOOTSTRAP, "boot")
    copy.unlink()  # as in a directory of an older version
    whole = path.read_text()
    damage(path, kind)
    with pytest.raises(Conflict, match=r"tokens\.json"):
        TokenCallers(lambda: "boot", tmp_path / "token", path)
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.write_text(whole)
    TokenCallers(lambda: "boot", tmp_path / "token", path)
    damage(path, kind)
    with pytest.raises(AccessDenied, match="was revoked"):
        await TokenCallers(lambda: "boot", tmp_path / "token", path).caller("boot")
    damage(copy, kind)
    if not path.is_dir():
        path.unlink()
    with pytest.raises(Conflict, match=r"tokens\.json"):  # the copy may have revoked it
        TokenCallers(lambda: "boot", tmp_path / "token", path)


async def test_no_way_of_removal_is_undone_by_later_damage(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    removed, deleted = (create(path, name, CallerRole.OPERATOR, 0.0) for name in ("removed", "deleted"))
    revoke(path, BOOTSTRAP, "boot")
    content = json.loads(path.read_text())
    content["tokens"] = [row for row in content["tokens"] if row["name"] != "removed"]
    path.write_text(json.dumps(content))  # by hand
    TokenCallers(lambda: "boot", tmp_path / "token", path)
    for way in (lambda: path.write_text("{"), path.unlink, lambda: path.write_text("{")):
        way()
        callers = TokenCallers(lambda: "boot", tmp_path / "token", path)
        for token in ("boot", removed):
            with pytest.raises(AccessDenied):
                await callers.caller(token)
    with pytest.raises(AccessDenied):
        await callers.caller(deleted)
    path.write_text("{")
    (tmp_path / "tokens.json.copy").write_text("{")
    with pytest.raises(Conflict, match="restore it"):
        TokenCallers(lambda: "boot", tmp_path / "token", path)


async def test_a_token_counts_until_it_is_revoked_or_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, now_s = tmp_path / "tokens.json", [0.0]
    monkeypatch.setattr("paceline.services.common.access.callers.time.monotonic", lambda: now_s[0])
    late_s = [0.0]
    callers = TokenCallers(lambda: "boot", tmp_path / "token", path, clock=lambda: late_s[0])
    with pytest.raises(AccessDenied, match="another token"):
        await callers.caller("plt_none")
    token = create(path, "ann", CallerRole.VIEWER, 60.0)
    now_s[0] += CHECK_S
    ann = await callers.caller(token)
    assert (ann.name, ann.roles) == ("ann", {CallerRole.VIEWER})
    late_s[0] = read_table(path)[digest_of(token)].expires_s
    with pytest.raises(AccessDenied, match="the token ann expired at"):
        await callers.caller(token)
    late_s[0] = 0.0
    assert callers.refusal(ann) == ""
    revoke(path, "ann")
    now_s[0] += CHECK_S
    assert "was revoked" in callers.refusal(ann)
    path.write_text("{")  # damage neither admits anyone nor excludes the others
    now_s[0] += CHECK_S
    assert "was revoked" in callers.refusal(ann)
    assert (await callers.caller("boot")).steers_all


async def test_the_bootstrap_token_can_be_retired(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    revoke(path, BOOTSTRAP, "boot")
    with pytest.raises(AccessDenied, match="the token bootstrap was revoked"):
        await TokenCallers(lambda: "boot", tmp_path / "token", path).caller("boot")
    fresh = TokenCallers(lambda: "another", tmp_path / "token", path)
    assert (await fresh.caller("another")).roles == set(CallerRole)


def test_the_commands_make_list_and_revoke(tmp_path: Path) -> None:
    def run(*arguments: str, status: int = 0) -> str:
        done = CliRunner().invoke(main, ["token", *arguments, "--directory", str(tmp_path)])
        assert done.exit_code == status, done.output
        return done.output

    printed = run("create", "ann", "--role", "submitter").strip()
    assert digest_of(printed) in read_table(tmp_path / "tokens.json")
    out = tmp_path / "worker-token"
    run("create", "pool", "--role", "worker", "--days", "0", "--out", str(out))
    assert out.stat().st_mode & 0o777 == 0o600
    assert out.read_text().strip() not in run("list")
    assert "exists already" in run("create", "ann", "--role", "viewer", status=1)
    run("revoke", "ann")
    listed = json.loads(run("list", "--json"))["tokens"]
    assert [(row["name"], row["role"], row["valid"]) for row in listed] == [
        ("ann", "submitter", False),
        ("pool", "worker", True),
    ]
    assert "no valid token" in run("revoke", "ann", status=1)
