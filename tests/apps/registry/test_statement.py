"""The statement: the same digest as an evaluation's, in-toto's layout, and other texts refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from paceline.apps.registry.statement import Lineage, files_digest, make_statement, read_statement, subjects
from paceline.errors import DataError
from paceline.models.evaluation_results import folder_digest

BATCHES = ({"step": 0, "digest": "d", "chain": "c"},)


def test_the_digest_of_files_is_that_of_their_folder(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    contents = {"b.txt": b"two", "a.txt": b"one", "sub/c": b""}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    files = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    assert files_digest(files) == folder_digest(tmp_path)


def test_a_statement_has_the_layout_of_in_toto() -> None:
    lineage = Lineage("run-1", 1, 2, "c", "s", "data", "code", BATCHES)
    statement = make_statement("sums", 3, lineage, "sums:2", {"w": "1"}, {"w": "1", "README.md": "2"})
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"][0] == {"name": "README.md", "digest": {"sha256": "2"}}
    assert statement["predicate"]["run"]["batches"] == list(BATCHES)
    read = read_statement(json.dumps(statement).encode())
    assert read == statement
    assert subjects(read) == {"w": "1", "README.md": "2"}


@pytest.mark.parametrize("text", [b"", b"[]", b'{"_type": "x"}', b"\xff", b'{"predicateType": 1, "subject": 2}'])
def test_other_texts_are_refused(text: bytes) -> None:
    with pytest.raises(DataError, match=r"paceline\.json is not a statement"):
        read_statement(text)
