"""Folders with certificates for tests."""

from __future__ import annotations

from pathlib import Path

from paceline.tls.authority import issue, make_authority


def make_folders(root: Path, **roles: str) -> dict[str, Path]:
    """Make an authority and a folder for each name and role; `person` has the authority's certificate alone."""
    make_authority(root / "ca")
    folders = {name: issue(root / "ca", name, role) for name, role in roles.items()}
    folders["person"] = root / "person"
    folders["person"].mkdir()
    (folders["person"] / "ca.crt").write_bytes((root / "ca" / "ca.crt").read_bytes())
    return folders
