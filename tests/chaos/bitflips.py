"""Counts the single-bit flips of a ledger's SQLite file that `paceline ledger verify` finds.

    make bitflips BITFLIPS="--flips 300 --seed 1"

A small run is driven to its end in this process: leases, groups, scores, batches, receipts of two ranks and two sessions,
evaluations, dropped groups, a checkpoint on the disk. Then one random bit of the file is flipped at a time, and the run
verified. A flip counts when a table reads otherwise than before, or SQLite says that the file is damaged; others hit bytes that
hold nothing, and further ones are made instead. Printed as one JSON object: `flips`, `found`, `missed`, `tracebacks`,
`found_share`, `changed_nothing` (made besides), and where those that were not found are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sqlite3
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "support"))

from exchange_drivers import Learner, Reward, Rollout, World, fill, make_spec

from paceline.errors import PacelineError
from services.coordinator.audit.verify import verify
from services.coordinator.ledger.ledger import Ledger

STEPS = 30
Content = dict[str, list[tuple[Any, ...]]]


def make_ledger(directory: Path) -> World:
    """A run that has ended; the ledger is closed."""
    grpo = {"max_num_steps": STEPS, "val_period": 4, "num_prompts_per_step": 4}
    world = World(directory, make_spec(directory, grpo=grpo))
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world, world_size=2)
    rollout.hand_back(rollout.lease(2)[0], error="bad prompt")
    for step in range(STEPS):
        rollout.hold(step)
        fill(rollout, reward, 8)
        if learner.train(step) is None:
            raise RuntimeError(f"step {step} has no batch")
        if step == STEPS // 2:
            _add_checkpoint(world, directory / "checkpoint", step + 1)
            learner = Learner(world, world_size=2)
            learner.train(step)
        if step % 4 == 3:
            world.begin_evaluation(step + 1)
            rollout.hold(step + 1, session=1)
            fill(rollout, reward, 3)
        with world.ledger.transaction():
            metrics = {"step": step, "reward": 0.5, "loss": 0.25, "tokens": 36.0}
            world.ledger.add_event(world.run_id, "step", metrics)
    world.end()
    with world.ledger.transaction():
        world.ledger.update_run(world.run_id, state="succeeded")
        world.ledger.add_event(world.run_id, "state", {"state": "succeeded"})
    world.close()
    return world


def _add_checkpoint(world: World, folder: Path, step: int) -> None:
    import hashlib

    folder.mkdir()
    (folder / "weights").write_bytes(b"w" * 1000)
    digest = hashlib.sha256(b"w" * 1000).hexdigest()
    manifest = json.dumps({"files": [{"path": "weights", "size_bytes": 1000, "sha256": digest}]}).encode()
    (folder / "manifest.json").write_bytes(manifest)
    with world.ledger.transaction():
        world.ledger.db.execute(
            "INSERT INTO checkpoints (run_id, session, step, path, sha256, chain) VALUES (?, 1, ?, ?, ?, ?)",
            (world.run_id, step, str(folder), hashlib.sha256(manifest).hexdigest(), world.row["chain"]),
        )


def content(path: Path) -> Content | None:
    """Every row of every table, in the table's own order; None when SQLite cannot read it, or says that it is damaged."""
    tables: Content = {}
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        db.text_factory = lambda raw: ("text", raw)
        try:
            if db.execute("PRAGMA integrity_check").fetchall() != [(("text", b"ok"),)]:
                return None
            names = [
                name[1].decode()
                for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            ]
            for name in names:
                tables[name] = sorted(db.execute(f"SELECT * FROM {name} NOT INDEXED").fetchall(), key=repr)
        except (sqlite3.Error, ValueError, TypeError):
            return None
    return tables


def count_flips(directory: Path, flips: int, seed: int) -> dict[str, Any]:
    """Flips bits of a new ledger in `directory`, one at a time, and counts what verify says."""
    (directory / "run").mkdir(parents=True)
    world = make_ledger(directory / "run")
    path, rng = world.path, random.Random(seed)
    whole = path.read_bytes()
    before = content(path)
    counts: Counter[str] = Counter()
    missed: list[str] = []
    while counts.total() - counts["changed_nothing"] < flips:
        place, bit = rng.randrange(len(whole)), rng.randrange(8)
        changed = bytearray(whole)
        changed[place] ^= 1 << bit
        _put(path, bytes(changed))
        counts[outcome := _outcome(path, world.run_id, before)] += 1
        if outcome in ("missed", "tracebacks"):
            missed.append(f"byte {place}, bit {bit}: {_difference(before, content(path))}")
    _put(path, whole)
    return {
        "flips": flips,
        **{name: counts[name] for name in ("found", "missed", "tracebacks", "changed_nothing")},
        "found_share": counts["found"] / flips,
        "not_found_at": missed,
        "size_bytes": len(whole),
    }


def _put(path: Path, data: bytes) -> None:
    """The file as it is on the disk, without what a reader has left beside it."""
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    path.write_bytes(data)


def _outcome(path: Path, run_id: str, before: Content | None) -> str:
    after = content(path)
    try:
        with contextlib.closing(Ledger(path, read_only=True)) as ledger:
            found = bool(verify(ledger, run_id).problems)
    except PacelineError:
        found = True  # one sentence, and exit status 1
    except Exception:
        traceback.print_exc()
        return "tracebacks"
    if found:
        return "found" if after != before else "changed_nothing"
    return "missed" if after != before else "changed_nothing"


def _difference(before: Content | None, after: Content | None) -> str:
    """The rows that read otherwise."""
    if before is None or after is None:
        return "SQLite finds it"
    return "; ".join(
        f"{name}: {row}" for name in before for row in after.get(name, []) if row not in before[name]
    )


def main() -> None:
    """Parse, count, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paceline-bitflips-") as directory:
        print(json.dumps(count_flips(Path(directory), arguments.flips, arguments.seed)))


if __name__ == "__main__":
    main()
