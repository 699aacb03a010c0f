"""The run that exported files: read from their manifest, absent in older ones, and compared with the records of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.errors import Conflict, DataError
from paceline.files.names import EXPORT_MANIFEST
from paceline.files.storage import Folder
from paceline.models.export_origin import Origin, check_origin, origin_of

ORIGIN = Origin(run_id="sums-1", session=2, step=7, chain="c", spec_sha256="s")


def test_an_export_names_its_run_and_older_ones_do_not(tmp_path: Path) -> None:
    assert origin_of(Folder(tmp_path / "nowhere")) is None
    for manifest, expected in (
        ({"files": []}, None),
        ({"run": ORIGIN.model_dump(), "files": []}, ORIGIN),
        ({"run": ORIGIN.model_dump() | {"host": "of a later version"}, "files": []}, ORIGIN),
    ):
        (tmp_path / EXPORT_MANIFEST).write_text(json.dumps(manifest))
        assert origin_of(Folder(tmp_path)) == expected


@pytest.mark.parametrize("text", ["", "[]", "{", '{"run": 1}', '{"run": {"run_id": "sums-1"}}', "7"])
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / EXPORT_MANIFEST).write_text(text)
    with pytest.raises(DataError, match=rf"{EXPORT_MANIFEST} does not say which run"):
        origin_of(Folder(tmp_path))


def test_another_run_step_chain_or_spec_is_refused_with_both_values() -> None:
    check_origin(ORIGIN, "sums-1", 7, "c", {"s", "t"})
    for arguments, words in (
        (("sums-2", 7, "c", {"s"}), "say run_id 'sums-1' .* run sums-2 say 'sums-2'"),
        (("sums-1", 8, "c", {"s"}), "say step 7 .* say 8"),
        (("sums-1", 7, "d", {"s"}), "say chain 'c' .* say 'd'"),
        (("sums-1", 7, "c", {"t"}), "a spec with the SHA-256 s .*, but the spec of run .* has another"),
    ):
        with pytest.raises(Conflict, match=words):
            check_origin(ORIGIN, *arguments)
