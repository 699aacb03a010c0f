"""The cache of answers: it survives restarts, is bounded, and never stands in the way."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.encryption.storage_key import StorageKey
from paceline.errors import InvalidInput
from paceline.reward.endpoints.cache import FILE, AnswerCache, digest_of

ROOM = 64 << 20


def test_answers_survive_a_restart_and_are_shared_by_processes(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path / "new" / "folder", ROOM)
    assert cache.get("a") is None
    cache.put("a", "first")
    cache.put("a", "second")
    cache.close()
    code = (
        "import sys; from pathlib import Path; from paceline.reward.endpoints.cache import AnswerCache; "
        "c = AnswerCache(Path(sys.argv[1]), 1 << 26); print(c.get('a')); c.put('b', 'other')"
    )
    child = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "new" / "folder")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert child.stdout.strip() == "second"
    again = AnswerCache(tmp_path / "new" / "folder", ROOM)
    assert again.get("b") == "other"
    again.close()


def test_the_digest_is_of_the_content_and_not_of_the_order() -> None:
    assert digest_of({"a": 1, "b": [1, 2]}) == digest_of({"b": [1, 2], "a": 1})
    assert digest_of({"a": 1, "b": [1, 2]}) != digest_of({"a": 1, "b": [2, 1]})


def test_the_oldest_answers_go_when_the_file_is_full(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path, 1 << 20)
    for number in range(1000):
        cache.put(str(number), "x" * 8192)
    assert cache.get("999") == "x" * 8192
    assert cache.get("0") is None
    cache.close()
    with sqlite3.connect(tmp_path / FILE) as db:
        (rows,) = db.execute("SELECT COUNT(*) FROM answers").fetchone()
    db.close()
    assert rows * 8192 < 3 << 20


def test_a_file_that_is_no_database_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"not a database at all" * 1000)
    cache = AnswerCache(tmp_path, ROOM)
    cache.put("a", "answer")
    assert cache.get("a") == "answer"
    cache.close()
    assert list(tmp_path.glob("*.damaged"))


def test_a_folder_that_cannot_be_made_means_no_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    cache = AnswerCache(tmp_path / "file" / "folder", ROOM)
    cache.put("a", "answer")
    assert cache.get("a") is None
    assert len([record for record in caplog.records if "cannot be used" in record.message]) == 1


def test_a_file_damaged_while_it_is_open_means_no_cache(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path, ROOM)
    cache.put("a", "answer")
    assert cache._db is not None
    cache._db.execute("DROP TABLE answers")
    assert cache.get("a") is None
    cache.put("a", "answer")
    assert cache.get("a") is None


def test_the_environment_names_folder_and_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_ANSWER_CACHE", str(tmp_path / "here"))
    monkeypatch.setenv("PACELINE_ANSWER_CACHE_MB", "3")
    cache = AnswerCache.of_user()
    assert cache is not None
    cache.put("a", "answer")
    cache.close()
    assert (tmp_path / "here" / FILE).is_file()
    assert cache._max_bytes == 3 << 20
    monkeypatch.setenv("PACELINE_ANSWER_CACHE_MB", "0")
    assert AnswerCache.of_user() is None
    monkeypatch.setenv("PACELINE_ANSWER_CACHE_MB", "9" * 5000)
    with pytest.raises(InvalidInput, match="PACELINE_ANSWER_CACHE_MB is '9"):
        AnswerCache.of_user()


def test_with_a_storage_key_answers_are_not_kept(given_key: StorageKey) -> None:
    assert AnswerCache.of_user() is None
