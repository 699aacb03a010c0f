"""Signatures of registered folders, by `model-signing` with a key pair: no network, no certificate.

Promise: the signature covers every file of the folder but itself; a file that was changed, added or removed is refused with its
name. Keys are elliptic (P-256) in PEM.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from paceline.errors import Conflict, DataError, InvalidInput, NotFound
from paceline.files.names import SIGNATURE

MISMATCH = re.compile(r"Hash mismatch for \\?'(.+?)\\?':")
"""Name of a file in model-signing's message, whose quotes depend on the digests beside it."""
REMEDY = "pip install 'paceline[registry]'"


def make_key(path: Path) -> Path:
    """Write a new private key to `path`, readable by its owner alone, and return the file of its public key. Raises Conflict
    when either is there."""
    from cryptography.hazmat.primitives import serialization as pem
    from cryptography.hazmat.primitives.asymmetric import ec

    public = path.with_name(f"{path.name}.pub")
    for each in (path, public):
        if each.exists():
            raise Conflict(f"{each} exists, and a key is never overwritten; name another file")
    key = ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption())
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(private)
    public.write_bytes(key.public_key().public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo))
    return public


def sign(folder: Path, private_key: Path) -> None:
    """Sign all files of a folder. Raises InvalidInput without the package or for a key that is none, NotFound."""
    signing, _, hashing = _packages()
    _check_file(private_key, "--signing-key")
    try:
        config = signing.Config().use_elliptic_key_signer(private_key=private_key)
    except (ValueError, TypeError) as error:
        raise InvalidInput(
            f"{private_key} is no private elliptic key ({error}); `paceline models key` makes one"
        ) from None
    config.set_hashing_config(hashing.Config().set_ignored_paths(paths=[SIGNATURE]))
    config.sign(folder, folder / SIGNATURE)


def verify(folder: Path, public_key: Path) -> None:
    """Raise DataError unless the folder is as the owner of a key has signed it; InvalidInput without the package or for a key that
    is none, NotFound."""
    _, verifying, hashing = _packages()
    _check_file(public_key, "--public-key")
    if not (folder / SIGNATURE).is_file():
        raise DataError(f"{folder.name} has no signature ({SIGNATURE}); register the model again")
    try:
        config = verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    except (ValueError, TypeError) as error:
        raise InvalidInput(
            f"{public_key} is no public elliptic key ({error}); it is the file that `paceline models key` has written beside the "
            "private one"
        ) from None
    config.set_hashing_config(hashing.Config().set_ignored_paths(paths=[SIGNATURE]))
    try:
        config.verify(folder, folder / SIGNATURE)
    except Exception as error:  # model-signing and cryptography raise errors without a common base
        names = MISMATCH.findall(str(error))
        if names:
            raise DataError(f"{', '.join(names)} is not as it was signed; register the model again") from None
        raise DataError(
            f"the signature {SIGNATURE} does not fit ({type(error).__name__}: {error}); it was changed, or was made with another "
            f"key than that of {public_key}"
        ) from None


def _check_file(path: Path, option: str) -> None:
    if not path.is_file():
        raise NotFound(f"{option}: there is no file {path}; `paceline models key` makes a key pair")


def _packages() -> tuple[Any, Any, Any]:
    """Return model-signing's modules signing, verifying and hashing. Raises InvalidInput where it is not installed."""
    try:
        from model_signing import hashing, signing, verifying
    except ImportError as error:
        raise InvalidInput(f"signatures need the package model-signing ({error}); {REMEDY}") from None
    return signing, verifying, hashing
