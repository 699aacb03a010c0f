"""Further columns of a group that reward functions log by `log_extra`, on the wire and in the run's folder.

They are for people: a line of `extra.jsonl` for each group, written when its scores are committed, encrypted with the storage key where
there is one. The ledger does not have
them, so a line may be missing after a crash, and nothing depends on one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from paceline.encryption.encrypted_file import WrongKey
from paceline.encryption.storage_key import storage_key
from paceline.files.line_file import LineReader

EXTRA_NAME = "extra.jsonl"
MAX_BYTES = 256 << 10
"""Size of one group's columns on the wire."""


def extra_json(columns: Mapping[str, list[Any]]) -> str:
    """Return the columns as a JSON object, without the last ones where it would be longer than MAX_BYTES; empty for none."""
    kept = dict(columns)
    while kept:
        text = json.dumps(kept)
        if len(text) <= MAX_BYTES:
            return text
        kept.popitem()
    return ""


def extra_line(group_id: int, digest: str, text: str, num_completions: int) -> str:
    """Return the line of a group whose text has this digest; empty unless `text` is a JSON object with a list of that many
    values for each name."""
    if not text or len(text) > MAX_BYTES:
        return ""
    try:
        columns = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(columns, dict) or not all(
        isinstance(values, list) and len(values) == num_completions for values in columns.values()
    ):
        return ""
    return json.dumps({"group_id": group_id, "digest": digest, "extra": columns}) + "\n"


def read_extra(folder: Path, digests: Collection[str]) -> dict[str, dict[str, list[Any]]]:
    """Return the columns of groups by the digest of their text; the newest line of each counts. Lines that cannot be read are
    left out. Raises WrongKey for a file that is encrypted with another storage key than this process has."""
    found: dict[str, dict[str, list[Any]]] = {}
    try:
        lines = LineReader(folder / EXTRA_NAME, storage_key())
    except OSError:
        return found
    with lines:
        for start, _, line in lines.stored():
            try:
                row = json.loads(lines.opened(line, start).decode(errors="replace"))
            except (ValueError, RecursionError, WrongKey):
                continue
            if isinstance(row, dict) and row.get("digest") in digests and isinstance(row.get("extra"), dict):
                found[row["digest"]] = row["extra"]
    return found
