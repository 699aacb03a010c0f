"""Regular files are read, others refused at once."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from paceline.apps.tracking.track import FOLDER
from paceline.calls.token import TOKEN_NAME, make_token
from paceline.files import names
from paceline.files.bounded_cache import BoundedCache, CacheKind
from paceline.host import regular_file
from paceline.host.regular_file import OF_COORDINATOR, check_named, read_named, read_regular
from paceline.services.common.access.rights import CallerRole
from paceline.services.common.access.token_table import FILE_NAME, REVOKED_NAME, create
from paceline.services.coordinator.records.files import LOGS
from paceline.services.local.cluster import LOCK_NAME
from paceline.tls.authority import issue, make_authority


def test_a_file_and_a_link_to_it_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "file") == read_regular(tmp_path / "link") == b"content"


def test_other_kinds_of_files_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    faults = {
        "pipe": "not a file",
        "device": "not a file",
        "loop": "symbolic links",
        "folder": "Is a directory",
        "none": "No such file",
    }
    for name, fault in faults.items():
        with pytest.raises(OSError, match=fault):
            read_regular(tmp_path / name)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        with pytest.raises(OSError, match="No such device or address"):
            read_regular(tmp_path / "socket")


@pytest.fixture
def secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Secrets of a coordinator's host, by their kind."""
    runs, ca, cache, key = tmp_path / "runs", tmp_path / "ca", tmp_path / "cache", tmp_path / "keys" / "storage"
    make_token(runs / "token")
    (tmp_path / "ann.txt").write_text(create(runs / "tokens.json", "ann", CallerRole.SUBMITTER, 0.0))
    make_authority(ca)
    certificate = issue(ca, "coordinator", "coordinator")
    named = {
        "PACELINE_STORAGE_KEY_FILE": key,
        "PACELINE_WEBHOOK_SECRET_FILE": tmp_path / "hook" / "secret",
        "PACELINE_BUNDLE_CACHE": cache / "bundles",
        "PACELINE_SPOOL": cache / "spool",
        "PACELINE_TLS_DIR": certificate,
    }
    for variable, path in named.items():
        monkeypatch.setenv(variable, str(path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    found = {
        "token": runs / "token",
        "tokens": runs / "tokens.json",
        "ledger": runs / "ledger.sqlite",
        "segment": runs / "ledger.sqlite-segments" / "1",
        "blob": runs / "blobs" / "ab" / "abc",
        "audit": runs / "audit" / "000001.jsonl",
        "log": runs / "logs" / "reward.log",
        "samples of a run": runs / "a" / "extra.jsonl",
        "spec of a run": runs / "a" / "spec.yaml",
        "storage key": key,
        "webhook": named["PACELINE_WEBHOOK_SECRET_FILE"],
        "bundle": cache / "bundles" / "x" / "data.jsonl",
        "spool": cache / "spool" / "x.bin",
        "usual cache": tmp_path / "home" / ".cache" / "paceline" / "answers" / "a.sqlite",
        "ssh": tmp_path / "home" / ".ssh" / "id",
    }
    for path in found.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text("not for a run\n")
    copied = tmp_path / "copied.jsonl"
    copied.write_bytes((ca / "ca.key").read_bytes())
    return found | {
        "named token": tmp_path / "ann.txt",
        "authority's key": ca / "ca.key",
        "authority": ca / "ca.crt",
        "certificate": certificate / "tls.crt",
        "key": certificate / "tls.key",
        "copied key": copied,
        "environment": Path("/proc/self/environ"),
        "kernel": Path("/sys/kernel/mm/transparent_hugepage/enabled"),
    }


def test_a_secret_is_withheld_by_its_name_a_link_and_a_folder_that_is_a_link(
    secrets: dict[str, Path], tmp_path: Path
) -> None:
    for number, (kind, path) in enumerate(secrets.items()):
        if not path.exists():  # of another kernel
            continue
        folder = tmp_path / f"named-{number}"
        folder.mkdir()
        (folder / "train.jsonl").symlink_to(path)
        (folder / "linked").symlink_to(path.parent)
        for name in (path, folder / "train.jsonl", folder / "linked" / path.name):
            with pytest.raises(PermissionError, match=r"no run may name|private key|belongs to the kernel") as caught:
                read_named(name)
            assert "not for a run" not in str(caught.value), kind
        for name in (path, folder / "train.jsonl", folder):
            with pytest.raises(PermissionError):
                check_named(name)


def fill(folder: Path) -> None:
    (folder / "f").write_text("{}")


def test_what_runs_need_is_read(secrets: dict[str, Path], tmp_path: Path) -> None:
    """Data in a folder that is a link, a model of the hub's cache, an export of another run, data beside the ledger, and
    a cached bundle while it is held."""
    kept, home, runs = tmp_path / "disk" / "rows.jsonl", tmp_path / "home", tmp_path / "runs"
    blob = home / ".cache" / "huggingface" / "hub" / "models--a--b" / "blobs" / "abc"
    export = runs / "a" / "export" / "config.json"
    for path in (kept, blob, export, runs / "data" / "train.jsonl", runs / "train.jsonl"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    (tmp_path / "data").symlink_to(kept.parent)
    (runs / "a" / "ledger.sqlite").symlink_to(secrets["ledger"])
    snapshot = blob.parents[1] / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to(Path("..", "..", "blobs", "abc"))
    for path in (tmp_path / "data" / "rows.jsonl", snapshot / "config.json", export, runs / "data" / "train.jsonl"):
        assert read_named(path) == b"{}"
        check_named(path.parent)
    assert read_named(runs / "train.jsonl") == b"{}"
    cache = BoundedCache(tmp_path / "cache" / "bundles", 1 << 20, CacheKind("bundle", 1, 1.0))
    with cache.open("e", 1, lambda _: False, fill) as held:
        assert read_named(held.root / "f") == b"{}"
    with pytest.raises(PermissionError):
        read_named(held.root / "f")


def test_what_no_library_reads_as_data_does_not_refuse_a_folder(tmp_path: Path, secrets: dict[str, Path]) -> None:
    """A digest beside the data, a pipe, a socket, links that lead nowhere or back, and a file of somebody else."""
    folder = tmp_path / "data"
    (folder / "below").mkdir(parents=True)
    (folder / "train.jsonl").write_text("{}")
    (folder / "train.sha256").write_text("ab" * 32 + "\n")
    os.mkfifo(folder / "pipe")
    for name, target in {"self": ".", "below/up": "..", "loop": "loop", "nowhere": "none"}.items():
        (folder / name).symlink_to(target)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket"))
        check_named(folder)
    assert read_named(folder / "train.sha256") == b"ab" * 32 + b"\n"
    with pytest.raises(OSError, match="not a file"):
        check_named(folder / "pipe")
    (folder / "below" / "copy.jsonl").write_bytes(secrets["token"].read_bytes().upper())
    with pytest.raises(PermissionError, match="holds a private key or a token"):
        check_named(folder)


def test_unreadable_files_are_skipped_and_unforeseen_errors_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    raised = PermissionError(errno.EACCES, "denied", "x")

    def refused(path: str) -> None:
        raise raised

    monkeypatch.setattr(regular_file, "open_regular", refused)
    check_named(tmp_path)
    raised = OSError(errno.EMFILE, "too many open files", "x")
    with pytest.raises(OSError, match="too many open files"):
        check_named(tmp_path)


@pytest.mark.parametrize(
    "before",
    [
        "-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----\n",
        "Bag Attributes\r\n    localKeyID: 01 02\r\nKey Attributes: <No Attributes>\r\n",
        "\ufeff",
        "-----BEGIN CERTIFICATE-----\n" + "A" * 30_000 + "\n-----END CERTIFICATE-----\n",
        "users:\n- key: |\n    ",
        '{"type": "service_account", "private_key": "',
    ],
)
def test_a_private_key_is_found_anywhere_in_the_first_part_of_a_file(tmp_path: Path, before: str) -> None:
    path = tmp_path / "train.jsonl"
    for kind in ("", "EC ", "ENCRYPTED ", "OPENSSH "):
        path.write_text(f"{before}-----BEGIN {kind}PRIVATE KEY-----\nMIIE\n", encoding="utf-8")
        with pytest.raises(PermissionError, match="holds a private key"):
            read_named(path)


def test_a_row_about_private_keys_is_data(tmp_path: Path) -> None:
    text = '{"prompt": "What begins with -----BEGIN PRIVATE KEY-----?"}\n{"prompt": "\\n-----BEGIN RSA PRIVATE KEY-----"}\n'
    (tmp_path / "train.jsonl").write_text(text)
    assert read_named(tmp_path / "train.jsonl").decode() == text


def test_a_folder_with_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regular_file, "MAX_ENTRIES", 4)
    (tmp_path / "a").mkdir()
    for number in range(2):
        (tmp_path / "a" / str(number)).write_text("{}")
    check_named(tmp_path)
    (tmp_path / "b").mkdir()
    monkeypatch.setattr(regular_file, "open_named", lambda path: pytest.fail(f"{path} was opened"))
    with pytest.raises(OSError, match="more than 4 files and folders; name the folder of the data or the model alone"):
        check_named(tmp_path)


def test_the_error_for_a_file_in_the_folder_of_a_cache_has_the_variable(
    secrets: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "cache" / "spool" / "mine.jsonl").write_text("{}")
    with pytest.raises(PermissionError, match="or give PACELINE_SPOOL its own folder"):
        read_named(tmp_path / "cache" / "spool" / "mine.jsonl")


def test_a_coordinators_names_are_those_that_it_uses() -> None:
    used = (
        names.LEDGER_NAME,
        names.BLOBS_NAME,
        names.AUDIT_NAME,
        TOKEN_NAME,
        FILE_NAME,
        REVOKED_NAME,
        LOCK_NAME,
        LOGS,
        FOLDER,
    )
    assert [name for name in used if not OF_COORDINATOR.fullmatch(name)] == []
