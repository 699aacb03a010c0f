"""The names of client certificates that do not count any more, in `revoked-certificates.json` in the coordinator's directory.

A certificate says who somebody is until it expires; its name can be revoked at once. A revoked name stays revoked, also for
certificates that are issued to it later: the next holder gets another name. Commands edit the file under a lock, the coordinator
reads it anew within a second.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from paceline.errors import Conflict, InvalidInput
from paceline.services.common.access.locked_json import locked, replace_whole

FILE_NAME = "revoked-certificates.json"
FORMAT = 1
MAX_NAME = 64
"""Characters of a common name in X.509."""
MAX_NAMES = 10_000


def read_revoked(path: Path) -> Mapping[str, float]:
    """Return the revoked names, with the time in seconds since 1970; none where there is no file. Raises Conflict for a file
    that is no list of them."""
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise Conflict(f"{path} has format {content['format']!r}, this version reads {FORMAT}; update it")
        return {str(row["name"]): float(row["revoked_s"]) for row in content["names"]}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as error:
        raise Conflict(
            f"{path} is damaged ({type(error).__name__}); restore it, or delete it and revoke the names again"
        ) from None
    except OSError as error:
        raise Conflict(f"{path} cannot be read: {error.strerror}") from None


def revoke(path: Path, name: str) -> None:
    """Revoke a name. Raises InvalidInput; Conflict for one that is revoked already."""
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise InvalidInput(f"the name {name[:80]!r} has to be 1 to {MAX_NAME} printable characters")
    with locked(path):
        names = dict(read_revoked(path))
        if name in names:
            raise Conflict(f"the certificates of {name} are revoked already")
        if len(names) >= MAX_NAMES:
            raise Conflict(f"{path} has {MAX_NAMES} names, which is the most; make a new authority instead")
        names[name] = time.time()
        rows = [{"name": each, "revoked_s": revoked_s} for each, revoked_s in names.items()]
        replace_whole(path, {"format": FORMAT, "names": rows})
