"""The trained groups of a run at a coordinator, for an export.

The columns of a file depend on all groups, so they are received once, into a temporary file here.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.records import Records
from paceline.spec import RunSpec
from paceline.spec.reading import spec_of_run

KINDS = {bool: "", int: "integer", float: "real", str: "text", list: "array", dict: "object"}
"""Kinds of JSON values, as SQLite's json_type names them; of a bool it is its value."""


class RemoteSamples:
    """A `SampleSource` that asks a coordinator."""

    def __init__(self, records: Records, run_id: str):
        self._records, self.run_id = records, run_id
        self._file: Any = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  # closed by __exit__
        self._places: dict[int, list[int]] = {}
        """Positions of the groups in the file, by step."""
        self._kinds: dict[str, set[str]] = {}
        self._prompt_kinds: set[str] = set()
        self._message_keys: set[str] = set()

    def __enter__(self) -> RemoteSamples:
        trained = {batch.step for batch in self._records.batches(self.run_id) if batch.trained}
        for group in self._records.groups(self.run_id) if trained else ():
            if group["step"] in trained:
                self._places.setdefault(group["step"], []).append(self._file.tell())
                self._file.write(json.dumps(group) + "\n")
                self._note(group)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def steps(self) -> Sequence[int]:
        """Return the trained steps."""
        return sorted(self._places)

    def groups(self, step: int) -> Iterable[dict[str, Any]]:
        """Return the groups of a step."""
        for place in self._places[step]:
            self._file.seek(place)
            yield json.loads(self._file.readline())

    def spec(self) -> RunSpec:
        """Return the run's spec."""
        return spec_of_run(self.run_id, self._records.spec_yaml(self.run_id))[0]

    def column_kinds(self) -> dict[str, set[str]]:
        """Return the columns of the data set with the kinds of their values, in alphabetical order."""
        return dict(sorted(self._kinds.items()))

    def prompt_kinds(self) -> tuple[set[str], set[str]]:
        """Return the kinds of the prompts, and the keys of messages of prompts that are chats."""
        return self._prompt_kinds, self._message_keys

    def _note(self, group: dict[str, Any]) -> None:
        for name, value in group["columns"].items():
            self._kinds.setdefault(name, set()).add(_kind(value))
        self._prompt_kinds.add(_kind(group["prompt"]))
        if isinstance(group["prompt"], list):
            self._message_keys.update(key for message in group["prompt"] for key in message)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else KINDS[type(value)]
