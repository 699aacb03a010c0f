"""The traces of a served model: rows that training reads, feedback that counts once, a folder below its bound, restarts."""

from __future__ import annotations

import errno
import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paceline.apps.model_server.trace_log import PARTS, TraceLog
from paceline.data.rows import open_rows
from paceline.data.traces import Trace, TraceKeys, read_trace
from paceline.encryption.encrypted_file import WrongKey
from paceline.encryption.storage_key import KEY_VARIABLE, StorageKey
from paceline.errors import Conflict, NotFound, Unavailable
from paceline.services.rollout.openai.server import FeedbackAsk

ROW = {"prompt": [{"role": "user", "content": "1+1="}], "completion": "2", "finish_reason": "stop"}


def opened(folder: Path, max_bytes: int = 1 << 20) -> Any:
    return closing(TraceLog(folder, "sums:1", max_bytes, clock=lambda: 5.0))


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    paths = sorted(folder.glob(f"{kind}-*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def stored(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir())


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def feedback(score: float, name: str = "a", index: int = 0) -> FeedbackAsk:
    return FeedbackAsk(completion_id=name, index=index, score=score)


async def test_feedback_makes_a_row_that_training_reads(tmp_path: Path) -> None:
    with opened(tmp_path) as log:
        await log.record("a", [ROW, ROW | {"completion": "3"}])
        answer = await log.rate(feedback(0.25, index=1))
    assert answer == {
        "object": "feedback",
        "completion_id": "a",
        "index": 1,
        "score": 0.25,
        "duplicate": False,
    }
    assert [row["final_reward"] for row in rows(tmp_path, "requests")] == [None, None]
    (rated,) = rows(tmp_path, "rated")
    assert (rated["model"], rated["time_s"], rated["id"], rated["choice"]) == ("sums:1", 5.0, "a", 1)
    completion = [{"role": "assistant", "content": "3"}]
    assert read_trace(rated, TraceKeys()) == Trace(ROW["prompt"], completion, 0.25, None, finish_reason="stop")


async def test_feedback_counts_once(tmp_path: Path) -> None:
    with opened(tmp_path) as log:
        await log.record("a", [ROW])
        await log.rate(feedback(1.0))
        assert (await log.rate(feedback(1.0)))["duplicate"]
        with pytest.raises(Conflict, match="has the score 1 already"):
            await log.rate(feedback(0.0))
        for unknown in (feedback(1.0, "b"), feedback(1.0, "a", 1)):
            with pytest.raises(NotFound, match="is recorded"):
                await log.rate(unknown)
    assert [row["final_reward"] for row in rows(tmp_path, "rated")] == [1.0]


async def test_feedback_on_an_empty_completion_makes_no_row(tmp_path: Path) -> None:
    with opened(tmp_path) as log:
        await log.record("a", [ROW | {"completion": ""}])
        assert not (await log.rate(feedback(0.0)))["duplicate"]
        assert (await log.rate(feedback(0.0)))["duplicate"]
    assert rows(tmp_path, "rated") == []


async def test_a_process_that_was_killed_loses_nothing_that_it_confirmed(tmp_path: Path) -> None:
    with opened(tmp_path) as log:
        for name in ("a", "b"):
            await log.record(name, [ROW])
        await log.rate(feedback(1.0))
    path = tmp_path / "requests-000001.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"id": "c", "cho')  # it was killed while it wrote
    with opened(tmp_path) as log:
        assert path.read_bytes() == whole
        assert (await log.rate(feedback(1.0)))["duplicate"]
        assert not (await log.rate(feedback(0.0, "b")))["duplicate"]
        await log.record("d", [ROW])
    assert [row["id"] for row in rows(tmp_path, "requests")] == ["a", "b", "d"]
    assert [(row["id"], row["final_reward"]) for row in rows(tmp_path, "rated")] == [("a", 1.0), ("b", 0.0)]


FOREIGN = (
    b'{"event": "start"}',
    b"\xff\xfe\x00no text",
    b"[1, 2]",
    b"",
    b"[" * 100_000,
    b'{"id": ["a"], "choice": 0, "completion": "2", "final_reward": null}',
    b'{"id": "b", "choice": 0, "completion": "2", "final_reward": NaN}',
    b'{"id": "b", "choice": 0, "completion": "2", "final_reward": 1e999}',
    b'{"id": "b", "choice": 0, "completion": "2", "final_reward": ' + b"9" * 400 + b"}",
    b'{"id": "b", "choice": 0, "completion": "2", "final_reward": "good"}',
)


async def test_lines_of_another_kind_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as log:
        await log.record("a", [ROW, ROW])
        await log.rate(feedback(0.5))
    for kind in ("requests", "rated"):
        path = tmp_path / f"{kind}-000001.jsonl"
        path.write_bytes(b"".join(line + b"\n" for line in (*FOREIGN, *path.read_bytes().splitlines(), *FOREIGN)))
    with opened(tmp_path) as log:
        assert f"{4 * len(FOREIGN)} lines" in caplog.text
        assert (await log.rate(feedback(0.5)))["duplicate"]
        assert not (await log.rate(feedback(1.0, index=1)))["duplicate"]
        with pytest.raises(NotFound):
            await log.rate(feedback(1.0, "b"))


async def test_folders_links_and_devices_are_left_out(tmp_path: Path) -> None:
    folder, other = tmp_path / "traces", tmp_path / "other"
    folder.mkdir()
    other.write_text("half a line")
    (folder / "requests-000001.jsonl").mkdir()
    (folder / "requests-000002.jsonl").symlink_to(other)
    (folder / "rated-000001.jsonl").symlink_to("/dev/zero")
    (folder / f"rated-{'9' * 200}.jsonl").write_text("{}")
    os.mkfifo(folder / "rated-000003.jsonl")
    with opened(folder, PARTS * 400) as log:
        for number in range(60):
            await log.record(f"{number}", [ROW])
        assert not (await log.rate(feedback(1.0, "59")))["duplicate"]
    assert other.read_text() == "half a line"
    assert (folder / "rated-000004.jsonl").exists()


@pytest.mark.parametrize("foreign", [["9" * 15], ["9" * 14 + "8", "9" * 15], ["9" * 14 + "8"]])
async def test_the_largest_numbers_do_not_let_the_folder_grow(tmp_path: Path, foreign: list[str]) -> None:
    for number in foreign:
        (tmp_path / f"requests-{number}.jsonl").touch()
    bound = PARTS * 400
    with opened(tmp_path, bound) as log:
        for number in range(100):
            await log.record(f"{number}", [ROW])
            assert size_of(tmp_path) <= bound
    files = [entry.path for entry in os.scandir(tmp_path)]
    assert max(map(os.path.getsize, files)) <= 400
    assert max(map(len, files)) == len(str(tmp_path / f"requests-{'9' * 15}.jsonl"))


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop", "unreadable"])
async def test_a_file_that_cannot_be_read_any_more_gets_no_feedback(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as log:
        await log.record("a", [ROW])
        path = tmp_path / "requests-000001.jsonl"
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "loop":
            path.symlink_to(path)
        else:

            def refuse(*_: object) -> None:
                raise PermissionError(errno.EACCES, "Permission denied")

            monkeypatch.setattr("paceline.apps.model_server.trace_log.LineReader", refuse)
        with pytest.raises(NotFound):
            await log.rate(feedback(1.0))


async def test_a_row_that_was_changed_in_its_file_gets_no_feedback(tmp_path: Path) -> None:
    with opened(tmp_path) as log:
        await log.record("a", [ROW])
        path = tmp_path / "requests-000001.jsonl"
        path.write_bytes(b"?" * path.stat().st_size)
        with pytest.raises(NotFound):
            await log.rate(feedback(1.0))


async def test_the_folder_stays_below_its_bound_and_requests_go_first(tmp_path: Path) -> None:
    bound = PARTS * 400
    with opened(tmp_path, bound) as log:
        for number in range(200):
            await log.record(f"r{number}", [ROW])
            if number < 4:
                await log.rate(feedback(1.0, f"r{number}"))
            assert size_of(tmp_path) <= bound
        with pytest.raises(NotFound, match="older than"):
            await log.rate(feedback(1.0, "r5"))
    assert len(rows(tmp_path, "rated")) == 4
    assert rows(tmp_path, "requests")[-1]["id"] == "r199"


async def test_a_disk_that_refuses_costs_no_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as log:
        await log.record("a", [ROW])
        with monkeypatch.context() as full:

            def refuse(*_: object) -> None:
                raise OSError(28, "No space left on device")

            full.setattr(log, "_append", refuse)
            await log.record("b", [ROW])
            with pytest.raises(Unavailable, match="No space left"):
                await log.rate(feedback(1.0))
        assert "requests cannot be written" in caplog.text
        assert not (await log.rate(feedback(1.0)))["duplicate"]


async def test_a_request_that_is_too_large_for_the_folder_is_no_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, PARTS * 400) as log:
        await log.record("a", [ROW | {"completion": "x" * 400}, ROW])
        assert "is not kept as a trace" in caplog.text
        with pytest.raises(NotFound):
            await log.rate(feedback(1.0))
        assert not (await log.rate(feedback(1.0, index=1)))["duplicate"]
    assert [row["choice"] for row in rows(tmp_path, "requests")] == [1]


async def test_with_a_storage_key_rows_are_encrypted_and_training_reads_them(
    tmp_path: Path, given_key: StorageKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as log:
        await log.record("a", [ROW, ROW | {"completion": "planted"}])
        await log.rate(feedback(0.25, index=1))
    with opened(tmp_path) as log:  # a restart finds the choices again
        await log.rate(feedback(0.5))
        with pytest.raises(Conflict, match=r"has the score 0\.25 already"):
            await log.rate(feedback(1.0, index=1))
    assert not any(text in stored(tmp_path) for text in (b"planted", b"1+1"))
    rated = open_rows(f"{tmp_path}/rated-*.jsonl", "train")
    assert [(rated[index]["completion"], rated[index]["final_reward"]) for index in range(2)] == [
        ("planted", 0.25),
        ("2", 0.5),
    ]
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(WrongKey, match=f"encrypted with the key {given_key.name.hex()}, and no key is given"):
        open_rows(f"{tmp_path}/rated-*.jsonl", "train")
    with pytest.raises(WrongKey, match="no key is given"):
        opened(tmp_path)


async def test_encrypted_rows_stay_below_the_bound(tmp_path: Path, given_key: StorageKey) -> None:
    with opened(tmp_path, 32_000) as log:
        for index in range(200):
            await log.record(f"{index}", [ROW | {"completion": "x" * 300}])
            assert size_of(tmp_path) <= 32_000
