"""Records every secret that a process makes: `install` writes a `sitecustomize.py`, which Python runs at its start."""

from __future__ import annotations

from pathlib import Path

PUBLIC = {
    "paceline.weights.hosts.relay",  # a relay's id
    "paceline.weights.hosts.sending",  # a nonce
    "paceline.apps.sweeps.study",
    "paceline.reward.code.grading",
    "paceline.reward.sandbox.launching",
    "paceline.reward.sandbox.workspace",
}
"""Modules whose random numbers are no secrets."""
SOURCE = """
import os, secrets, sys

def recorded(make):
    def made(*given):
        value = make(*given)
        private = value[1] if isinstance(value, tuple) else value
        text = private.hex() if isinstance(private, bytes) else private.encode().hex()
        with open({path!r}, "a") as file:
            file.write(sys._getframe(1).f_globals.get("__name__", "?") + " " + text + "\\n")
        return value
    return made

for name in ("token_bytes", "token_hex", "token_urlsafe"):
    setattr(secrets, name, recorded(getattr(secrets, name)))
try:
    import zmq
    zmq.curve_keypair = recorded(zmq.curve_keypair)
except ImportError:
    pass
"""


def install(folder: Path) -> Path:
    """Write the module into a folder for PYTHONPATH; return the path of the record."""
    folder.mkdir()
    record = folder / "record"
    record.touch()
    (folder / "sitecustomize.py").write_text(SOURCE.format(path=str(record)))
    return record


def recorded(record: Path) -> dict[str, set[bytes]]:
    """Return the secrets that processes have made, by module."""
    found: dict[str, set[bytes]] = {}
    for line in record.read_text().splitlines():
        module, text = line.split()
        if module not in PUBLIC and module.startswith("paceline."):
            found.setdefault(module, set()).add(bytes.fromhex(text))
    return found
