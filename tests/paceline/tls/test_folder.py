"""The folder of a process: required files, and files that change."""

from __future__ import annotations

from pathlib import Path

import pytest
from tls_folders import make_folders

from paceline.errors import InvalidInput
from paceline.tls.authority import renew
from paceline.tls.folder import VARIABLE, TlsFolder, tls_folder


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A process's folder."""
    return make_folders(tmp_path, a="worker")["a"]


def test_the_folder_is_read_again_only_if_it_changes(own: Path, tmp_path: Path) -> None:
    folder = TlsFolder(own)
    first = folder.read()
    assert folder.read() is first
    renew(tmp_path / "ca", "a")
    assert folder.read().certificate == (own / "tls.crt").read_bytes() != first.certificate


def test_files_that_do_not_fit_leave_the_ones_before_in_use(
    own: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = TlsFolder(own)
    first, certificate = folder.read(), (own / "tls.crt").read_bytes()
    renew(tmp_path / "ca", "a")
    renewed = (own / "tls.crt").read_bytes()
    (own / "tls.crt").write_bytes(certificate)  # the new key is there, its certificate is on its way
    assert folder.read() is first
    assert "do not match" in caplog.text
    (own / "tls.crt").write_bytes(renewed)
    assert folder.read().certificate == renewed


@pytest.mark.parametrize(
    ("missing", "fault"),
    [
        ("ca.crt", "certs issue"),
        ("tls.key", "has tls.crt and no tls.key"),
        ("tls.crt", "has tls.key and no tls.crt"),
    ],
)
def test_a_missing_file_is_named(own: Path, missing: str, fault: str) -> None:
    (own / missing).unlink()
    with pytest.raises(InvalidInput, match=fault):
        TlsFolder(own).read()


def test_a_person_has_the_authority_alone(own: Path) -> None:
    for name in ("tls.key", "tls.crt"):
        (own / name).unlink()
    material = TlsFolder(own).read()
    assert (material.certificate, material.key) == (b"", b"")
    assert material.authority


def test_without_the_variable_nothing_is_encrypted(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert tls_folder() is None
    monkeypatch.setenv(VARIABLE, str(own))
    found = tls_folder()
    assert found is not None
    assert found.path == own


def test_a_key_is_not_printed(own: Path) -> None:
    material = TlsFolder(own).read()
    assert "PRIVATE" not in repr(material)
