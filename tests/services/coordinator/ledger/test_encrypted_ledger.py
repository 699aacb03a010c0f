"""An encrypted ledger keeps the promises of a plain one, and its files show no content."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from exchange_drivers import COMMITTED, Learner, MakeWorld, Reward, Rollout, World, fill
from ledger_files import both_forms, opened

from paceline.groups import Completion
from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.ledger.backup import back_up
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.v1 import exchange_pb2 as pb

PROMPT = "planted prompt größer 0"
TEXT = "planted completion größer"
TOKENS = np.arange(40_001, 40_009, dtype=np.int32)
SYSTEM = "planted column"


class Planting(Rollout):
    """A worker whose completions contain a text and tokens that the test searches for."""

    def completions(self, lease: pb.Lease, length: int = 4) -> list[Completion]:
        found = super().completions(lease, len(TOKENS))
        return [
            replace(each, text=TEXT, token_ids=np.concatenate([TOKENS, each.token_ids[len(TOKENS) :]]))
            for each in found
        ]


def planted(make_world: MakeWorld, tmp_path: Path) -> World:
    """Two trained steps, a scored group and a returned prefix, all of planted texts."""
    path = tmp_path / "planted.jsonl"
    rows = [{"prompt": f"{PROMPT}{number}", "answer": SYSTEM} for number in range(7)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    world = make_world(data={"train": str(path)}, async_grpo={"max_trajectory_age_steps": 2})
    rollout, reward, learner = Planting(world), Reward(world), Learner(world)
    for step in range(2):
        rollout.hold(step)
        fill(rollout, reward, 2)
        assert learner.train(step) is not None
    rollout.hold(2)
    first, second = rollout.lease(4)
    assert rollout.finish(first) == COMMITTED
    rollout.return_lease(second, [replace(each, finish_reason="abort") for each in rollout.completions(second)])
    return world


def needles() -> Iterator[tuple[str, bytes]]:
    """Return what must not be found, in every form that a file could contain."""
    for text in (PROMPT, TEXT, SYSTEM):
        for name, data in (
            ("UTF-8", text.encode()),
            ("UTF-16", text.encode("utf-16-le")),
            ("JSON", json.dumps(text)[1:-1].encode()),
        ):
            yield f"{text!r} as {name}", data
    for dtype in ("<i4", "<i8"):
        yield f"tokens as {dtype}", TOKENS.astype(dtype).tobytes()


def found_in(folder: Path) -> dict[str, set[str]]:
    """Return the files of the folder that contain a needle, by needle."""
    found: dict[str, set[str]] = {}
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            for name, needle in needles():
                if needle in data:
                    found.setdefault(name, set()).add(path.name)
    return found


@both_forms
def test_no_file_shows_what_is_in_the_ledger(make_world: MakeWorld, tmp_path: Path, at_rest: str) -> None:
    """Includes its log and shared memory, a backup, and a restored backup."""
    world = planted(make_world, tmp_path)
    folder = world.path.parent
    found = [found_in(folder)]  # while the log exists
    back_up(world.ledger, folder / "backup.sqlite")
    with contextlib.closing(Ledger(folder / "backup.sqlite")) as backup:
        with backup.transaction():
            backup.update_run(world.run_id, message=TEXT)
        found.append(found_in(folder))
    world.ledger.close()
    world.ledger = Ledger(world.path)
    (folder / "train.jsonl").unlink()  # the drivers' own
    found.append(found_in(folder))
    names = {path.name for path in folder.rglob("*") if path.is_file()}
    assert {"backup.sqlite", "00000001.seg"} <= names
    if at_rest == "encrypted":
        assert found == [{}, {}, {}]
        return
    assert {"ledger.sqlite-wal", "00000001.seg"} <= set().union(*found[0].values())
    assert {"backup.sqlite", "backup.sqlite-wal"} <= set().union(*found[1].values())
    forms = {name.rpartition(" as ")[2] for name in found[0]}
    assert {"UTF-8", "JSON", "<i4"} <= forms


def test_batches_and_their_chain_are_the_same_in_both_forms(
    make_world: MakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains = []
    for key in ("", "ab" * 32):
        monkeypatch.setenv("PACELINE_STORAGE_KEY", key)
        world = planted(make_world, tmp_path)
        rows = world.ledger.db.execute(
            "SELECT group_id, header_size, header_crc, arrays_size, arrays_crc FROM payloads ORDER BY group_id, kind"
        )
        chains.append((world.row["chain"], [tuple(row) for row in rows]))
        world.ledger.close()
        with contextlib.closing(Ledger(world.path, read_only=True)) as reader:
            assert verify(reader, world.run_id).problems == []
        world.check = False
        world.ledger = Ledger(world.path)
    assert chains[0] == chains[1]


WRITER = """
import sys
from pathlib import Path
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.ledger.segments import Record
ledger = Ledger(Path(sys.argv[1]))
with ledger.transaction():
    ledger.add_run("a-1", "name: a", "a-1")
for number in range(1_000_000):
    content = b"%d " % number * 500
    (location,) = ledger.payloads.append([Record.of(content[:50], content)])
    with ledger.transaction():
        ledger.add_payload("a-1", number, "result", location)
    print(number, flush=True)
"""


@pytest.mark.parametrize("acknowledgements", [1, 25, 60])
@pytest.mark.parametrize("at_rest", ["encrypted"], indirect=True)
@pytest.mark.usefixtures("at_rest")
def test_what_was_acknowledged_before_a_kill_is_there(tmp_path: Path, acknowledgements: int) -> None:
    """The process is killed in the middle of its writes; the next one continues from them."""
    path = tmp_path / "ledger.sqlite"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for number in range(acknowledgements):
            assert writer.stdout.readline() == f"{number}\n"
        writer.send_signal(signal.SIGKILL)
        seen = number + len(writer.stdout.read().split())  # acknowledged meanwhile
    with contextlib.closing(Ledger(path)) as ledger:
        assert ledger.term == 2
        (written,) = ledger.db.execute("SELECT COUNT(*) FROM payloads").fetchone()
        assert written in (seen + 1, seen + 2)
        for number in range(written):
            payload = ledger.payload("a-1", number)
            assert payload is not None
            header, arrays = payload.read()
            assert bytes(arrays) == b"%d " % number * 500
            assert header == arrays[:50]
        (line,) = ledger.db.execute("PRAGMA integrity_check").fetchall()
        assert tuple(line) == ("ok",)
        assert ledger.db.execute("PRAGMA cipher_integrity_check").fetchall() == []


@pytest.mark.parametrize("at_rest", ["encrypted"], indirect=True)
def test_a_changed_page_is_found(make_world: MakeWorld, tmp_path: Path) -> None:
    world = planted(make_world, tmp_path)
    world.check = False
    with world.ledger.transaction():
        for number in range(200):
            world.ledger.add_event(world.run_id, "step", {"step": number, "text": "x" * 200})
    world.ledger.close()
    pages = world.path.stat().st_size // 4096
    content = bytearray(world.path.read_bytes())
    content[(pages - 3) * 4096 + 1000] ^= 1  # in the events, which were written last
    world.path.write_bytes(content)
    with contextlib.closing(Ledger(world.path, read_only=True)) as reader:
        assert any("malformed" in problem for problem in verify(reader, world.run_id).problems)
    with contextlib.closing(opened(world.path)) as db:
        assert db.execute("PRAGMA cipher_integrity_check").fetchall() != []
    world.ledger = Ledger(tmp_path / "other.sqlite")  # the fixture closes it at the end
