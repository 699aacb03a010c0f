"""Folders with certificates for tests."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

from paceline.tls import authority
from paceline.tls.authority import LOCAL, issue, make_authority
from paceline.tls.certificates import WORKER, WORKER_HOST


def make_folders(root: Path, **roles: str) -> dict[str, Path]:
    """Make an authority and a folder for each name and role; `person` has the authority's certificate alone."""
    make_authority(root / "ca")
    folders = {name: issue(root / "ca", name, role) for name, role in roles.items()}
    folders["person"] = root / "person"
    folders["person"].mkdir()
    (folders["person"] / "ca.crt").write_bytes((root / "ca" / "ca.crt").read_bytes())
    return folders


def old_certificate(folder: Path, name: str, role: str) -> Path:
    """Issue a certificate as version 0.1.0 did: valid for this host, whatever its role, without a coordinator's name."""
    with patch.object(authority, "ROLE_HOSTS", {WORKER: (WORKER_HOST,)}):
        return authority._issue(folder, name, role, LOCAL, 30.0)
