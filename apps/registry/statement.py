"""Makes the in-toto statement of a registered model (the digest of every file, the model's origin), and its signature.

The layout is in-toto's Statement v1 (https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md): `subject`
lists the files of the folder, `predicate` holds Paceline's facts.

`model-signing` signs with a key pair (P-256, in PEM): no network, no certificate. Promise: the signature covers every
file of the folder except itself; a file that was changed, added or removed is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import Conflict, DataError, InvalidInput, NotFound
from paceline.files.names import SIGNATURE, STATEMENT

TYPE = "https://in-toto.io/Statement/v1"
PREDICATE = "urn:paceline:registered-model:v1"

Json = dict[str, Any]


@dataclass(frozen=True)
class Lineage:
    """Origin of a model. Every field is empty or 0 for a model that no run of this coordinator has trained."""

    run_id: str = ""
    session: int = 0
    step: int = 0
    """Number of trained steps."""
    chain: str = ""
    """Hash chain over the run's batches up to this step; empty for a run on examples."""
    spec_sha256: str = ""
    """Digest of the resolved spec's YAML text."""
    data: str = ""
    """Fingerprint of the run's data set."""
    code: str = ""
    """Digest of the bundle with the run's files, or the digests of its reward functions as JSON."""
    batches: tuple[Mapping[str, Any], ...] = ()
    """Step, digest and chain of every batch."""
    named_by_files: bool = False
    """True if the exported files name the run, else it was named at registration."""


def files_digest(files: Mapping[str, str]) -> str:
    """Return the SHA-256 over names and SHA-256 of files, ordered by name; for a folder's files it equals
    `paceline.models.evaluation_results.folder_digest`."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{files[name]}\n".encode())
    return digest.hexdigest()


def make_statement(
    name: str, version: int, lineage: Lineage, parent: str, export: Mapping[str, str], files: Mapping[str, str]
) -> Json:
    """Return the statement on a folder. `export` and `files` map the name of each exported file, and of each file in
    the folder, to its SHA-256."""
    run = {key: value for key, value in vars(lineage).items() if key != "batches"}
    return {
        "_type": TYPE,
        "subject": [{"name": each, "digest": {"sha256": files[each]}} for each in sorted(files)],
        "predicateType": PREDICATE,
        "predicate": {
            "name": name,
            "version": version,
            "parent": parent,
            "run": run | {"batches": [dict(batch) for batch in lineage.batches]},
            "export": {"sha256": files_digest(export), "files": dict(sorted(export.items()))},
        },
    }


def read_statement(text: bytes) -> Json:
    """Return a statement. Raises DataError for a text that is not a statement of this version."""
    try:
        found = json.loads(text)
        sound = found["_type"] == TYPE and found["predicateType"] == PREDICATE
        subjects(found), found["predicate"]["export"]["files"], found["predicate"]["run"]["batches"]
    except (ValueError, LookupError, TypeError):
        sound = False
    if not sound:
        raise DataError(f"{STATEMENT} is not a statement on a registered model ({PREDICATE}); register the model again")
    return dict(found)


def subjects(statement: Json) -> dict[str, str]:
    """Return a mapping from the name of each file to its SHA-256."""
    return {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}


MISMATCH = re.compile(r"Hash mismatch for \\?'(.+?)\\?':")
"""Pattern of a file's name in model-signing's message, whose quotes depend on the digests."""
REMEDY = "pip install 'paceline[registry]'"


def make_key(path: Path) -> Path:
    """Write a new private key to `path`, readable by its owner only, and return the file of its public key. Raises
    Conflict if either exists."""
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
    """Sign all files of a folder. Raises InvalidInput if the package is missing or the key is invalid, NotFound if
    there is no key file."""
    signing, _, hashing = _packages()
    _check_file(private_key, "--signing-key")
    try:
        config = signing.Config().use_elliptic_key_signer(private_key=private_key)
    except (ValueError, TypeError) as error:
        raise InvalidInput(
            f"{private_key} is not a private elliptic key ({error}); `paceline models key` makes one"
        ) from None
    config.set_hashing_config(hashing.Config().set_ignored_paths(paths=[SIGNATURE]))
    config.sign(folder, folder / SIGNATURE)


def verify(folder: Path, public_key: Path) -> None:
    """Verify that the folder is as the key's owner signed it. Raises DataError if it is not, InvalidInput if the
    package is missing or the key is invalid, and NotFound if there is no key file."""
    _, verifying, hashing = _packages()
    _check_file(public_key, "--public-key")
    if not (folder / SIGNATURE).is_file():
        raise DataError(f"{folder.name} has no signature ({SIGNATURE}); register the model again")
    try:
        config = verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    except (ValueError, TypeError) as error:
        raise InvalidInput(
            f"{public_key} is not a public elliptic key ({error}); use the .pub file that `paceline models key` wrote beside the "
            "private key"
        ) from None
    config.set_hashing_config(hashing.Config().set_ignored_paths(paths=[SIGNATURE]))
    try:
        config.verify(folder, folder / SIGNATURE)
    except Exception as error:  # model-signing and cryptography raise errors without a common base
        names = MISMATCH.findall(str(error))
        if names:
            raise DataError(f"changed since signing: {', '.join(names)}; register the model again") from None
        raise DataError(
            f"the signature {SIGNATURE} does not fit ({type(error).__name__}: {error}); it was changed, or was made with another "
            f"key than that of {public_key}"
        ) from None


def _check_file(path: Path, option: str) -> None:
    if not path.is_file():
        raise NotFound(f"{option}: no file {path}; `paceline models key` makes a key pair")


def _packages() -> tuple[Any, Any, Any]:
    try:
        from model_signing import hashing, signing, verifying
    except ImportError as error:
        raise InvalidInput(f"signatures need the package model-signing ({error}); {REMEDY}") from None
    return signing, verifying, hashing
