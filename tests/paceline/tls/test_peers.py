"""TLS between workers: the newest certificates, and workers only."""

from __future__ import annotations

from pathlib import Path

import pytest
from tls_folders import make_folders

from paceline.errors import InvalidInput
from paceline.tls.authority import renew
from paceline.tls.folder import TlsFolder
from paceline.tls.peers import PeerTls


def test_contexts_are_kept_until_the_certificate_changes(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, worker="worker")
    peers = PeerTls(TlsFolder(folders["worker"]))
    first = peers.context(server=True)
    assert peers.context(server=True) is first
    assert peers.context(server=False) is not first
    renew(tmp_path / "ca", "worker")
    assert peers.context(server=True) is not first


def test_a_folder_of_a_person_serves_no_worker(tmp_path: Path) -> None:
    folders = make_folders(tmp_path)
    with pytest.raises(InvalidInput, match=r"lacks tls\.crt and tls\.key, the worker's certificate"):
        PeerTls(TlsFolder(folders["person"]))
