"""The check that a learner has the coordinator's storage key, before it reads or writes a file of the run."""

from __future__ import annotations

from paceline.encryption.encrypted_file import WrongKey
from paceline.encryption.storage_key import FILE_VARIABLE, KEY_VARIABLE, storage_key
from paceline.errors import InvalidInput
from paceline.v1 import worker_pb2


def check_key(assignment: worker_pb2.RunAssignment) -> None:
    """Raise WrongKey unless this process has the key that the coordinator names, or both have none."""
    try:
        key = storage_key()
    except InvalidInput as error:
        raise WrongKey(f"the learner: {error}, then `paceline resume {assignment.run_id}`") from None
    own = "" if key is None else key.name.hex()
    if own == assignment.storage_key:
        return
    raise WrongKey(
        f"the learner has {_named(own)}, and the coordinator has {_named(assignment.storage_key)}; start both with the same "
        f"{FILE_VARIABLE} or {KEY_VARIABLE}, then `paceline resume {assignment.run_id}`"
    )


def _named(name: str) -> str:
    return f"the storage key {name}" if name else "no storage key"
