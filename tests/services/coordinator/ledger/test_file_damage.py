"""A damaged SQLite file gives one sentence with the remedy, whoever opens it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from command_line import paceline
from exchange_drivers import Learner, MakeWorld, Reward, Rollout, fill
from ledger_files import opened

from paceline.errors import Conflict, LedgerFault
from paceline.services.coordinator.ledger import file_check, row_checksums
from paceline.services.coordinator.ledger.backup import back_up
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.main import main as coordinator

HELP = "restore a backup, or what `sqlite3 .recover` can read (docs/operate/operations.md)"


@pytest.fixture
def folder(make_world: MakeWorld, tmp_path: Path) -> Path:
    """A folder with a run of one trained step, after its coordinator has ended."""
    world = make_world()
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    fill(rollout, reward, 4)
    learner.train(0)
    with world.ledger.transaction():
        world.ledger.add_event(world.run_id, "state", {"state": "running"})
    world.ledger.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    copy = tmp_path / "copy"
    copy.mkdir()
    copy.joinpath("ledger.sqlite").write_bytes(world.path.read_bytes())
    segments = world.path.with_name("ledger.sqlite-segments")
    (copy / segments.name).mkdir()
    for segment in segments.iterdir():
        (copy / segments.name / segment.name).write_bytes(segment.read_bytes())
    return copy


def change(folder: Path, statement: str) -> None:
    """Change a row without its checksum, as the disk would."""
    with contextlib.closing(opened(folder / "ledger.sqlite")) as db:
        assert db.execute(statement).rowcount > 0


def zero_header(folder: Path) -> None:
    with (folder / "ledger.sqlite").open("r+b") as file:
        file.write(bytes(100))


def truncate(folder: Path) -> None:
    with (folder / "ledger.sqlite").open("r+b") as file:
        file.truncate(3 * 4096 + 17)


def smash_groups(folder: Path) -> None:
    path = folder / "ledger.sqlite"
    with contextlib.closing(opened(path)) as db:
        page = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'groups'").fetchone()[0]
    with path.open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(b"\xff" * 4096)


def damage_spec(folder: Path) -> None:
    change(folder, "UPDATE runs SET spec_yaml = replace(spec_yaml, 'num_prompts_per_step', '-um_prompts_per_step')")


def damage_text(folder: Path) -> None:
    change(folder, "UPDATE groups SET functions = CAST(x'fe' AS TEXT)")


def damage_term(folder: Path) -> None:
    change(folder, "UPDATE meta SET value = x'ff' WHERE key = 'term'")


def damage_schema(folder: Path) -> None:
    """SQLite's message then quotes bytes that are not text."""
    path = folder / "ledger.sqlite"
    data = bytearray(path.read_bytes())
    data[data.index(b"run_id TEXT NOT NULL")] |= 0x80
    path.write_bytes(data)


DAMAGES: list[Callable[[Path], None]] = [
    *(zero_header, truncate, smash_groups, damage_text, damage_term),
    damage_schema,
]
COMMANDS = {
    "samples": ["samples", "test-1", "--step", "0"],
    "backup": ["ledger", "backup", "{folder}/copy.sqlite"],
    "verify": ["ledger", "verify", "test-1"],
}


@pytest.mark.parametrize(
    ("damage", "at_rest"),
    [*((damage, "plain") for damage in DAMAGES), *((damage, "encrypted") for damage in DAMAGES[:-1])],
    indirect=["at_rest"],
)
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_a_command_says_that_the_file_is_damaged(
    folder: Path, command: list[str], damage: Callable[[Path], None]
) -> None:
    damage(folder)
    arguments = [part.format(folder=folder) for part in command]
    result = paceline(*arguments, "--directory", folder)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), result.exception
    assert "damaged" in result.output or "malformed" in result.output or "checksum" in result.output
    assert HELP in result.output
    assert not (folder / "copy.sqlite").exists()


def test_a_copy_of_damaged_rows_is_not_made_in_silence(folder: Path) -> None:
    change(folder, "UPDATE events SET json = '{}'")
    with (
        contextlib.closing(Ledger(folder / "ledger.sqlite", read_only=True)) as ledger,
        pytest.raises(LedgerFault, match="table events, row run_id 'test-1', sequence 1"),
    ):
        back_up(ledger, folder / "copy.sqlite")
    assert sorted(path.name for path in folder.glob("copy*")) == []


def damage_message(folder: Path) -> None:
    change(folder, "UPDATE runs SET message = CAST(x'fe' AS TEXT)")


@pytest.mark.parametrize("damage", [zero_header, damage_message, damage_schema])
def test_up_says_that_the_file_is_damaged(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(folder)
    result = paceline("up", "--directory", folder)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), result.exception
    assert "damaged" in result.output
    assert HELP in result.output


@pytest.mark.parametrize("damage", [zero_header, damage_spec, damage_schema])
def test_a_coordinator_says_that_the_file_is_damaged(folder: Path, damage: Callable[[Path], None]) -> None:
    """It does not follow a spec that differs from the submitted one."""
    damage(folder)
    with pytest.raises(Conflict, match=r"damaged.*restore a backup, or what `sqlite3 .recover` can read"):
        Ledger(folder / "ledger.sqlite")
    result = CliRunner().invoke(coordinator, ["--directory", str(folder), "--port", "0"])
    assert result.exit_code == 1
    assert "unknown key" not in result.output
    assert HELP in result.output


def test_a_run_that_is_over_keeps_nobody_from_others(folder: Path) -> None:
    with contextlib.closing(Ledger(folder / "ledger.sqlite")) as ledger:
        ledger.update_run("test-1", state="succeeded")
    damage_spec(folder)
    Ledger(folder / "ledger.sqlite").close()


def test_a_coordinator_that_meets_a_broken_page_says_so(folder: Path) -> None:
    smash_groups(folder)
    with contextlib.closing(Ledger(folder / "ledger.sqlite")) as ledger:

        def update() -> None:
            with ledger.transaction():
                ledger.db.execute("UPDATE groups SET tokens = 1")

        with pytest.raises(
            LedgerFault, match="is damaged: database disk image is malformed; restore a backup, or what"
        ):
            update()


@pytest.mark.parametrize(
    ("damage", "at_rest"),
    [*((damage, "plain") for damage in DAMAGES), *((damage, "encrypted") for damage in DAMAGES[:-1])],
    indirect=["at_rest"],
)
def test_a_backup_serves_after_damage(folder: Path, damage: Callable[[Path], None]) -> None:
    """It is restored as docs/operate/operations.md says, beside the segments of the damaged ledger."""
    path, copy = folder / "ledger.sqlite", folder / "backup.sqlite"
    assert paceline("ledger", "backup", copy, "--directory", folder).exit_code == 0
    damage(folder)
    assert paceline("ledger", "verify", "--directory", folder).exit_code == 1
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    copy.rename(path)
    result = paceline("ledger", "verify", "--directory", folder)
    assert "all records agree" in result.output, result.output
    with contextlib.closing(Ledger(path)) as ledger:
        assert ledger.was_restored
        assert ledger.payload("test-1", 0) is not None
    assert "all records agree" in paceline("ledger", "verify", "--directory", folder).output


@pytest.mark.parametrize("damage", [damage_spec, smash_groups, damage_schema])
def test_repair_leaves_a_damaged_file_as_it_is(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(folder)
    result = paceline("ledger", "verify", "--repair", "--directory", folder)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), result.exception
    assert HELP in result.output


def test_verify_of_all_runs(folder: Path) -> None:
    result = paceline("ledger", "verify", "--json", "--directory", folder)
    assert result.exit_code == 0, result.output
    assert '"test-1": {' in result.output


def test_a_start_reads_each_row_of_runs_once_however_many_are_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(Ledger(folder / "ledger.sqlite")) as ledger:
        ledger.update_run("test-1", state="succeeded")
    columns = ", ".join(name for name in row_checksums.tables()["runs"].columns if name != "run_id")
    others = ", ".join(sorted(row_checksums.UNSEALED["runs"]))
    with contextlib.closing(opened(folder / "ledger.sqlite")) as db:
        for number in range(600):
            db.execute(
                f"INSERT INTO runs (run_id, {columns}, {others}, seal) SELECT 'copy-{number}', {columns}, {others}, seal FROM runs"
                " WHERE run_id = 'test-1'"
            )
    computed = 0
    checksum = row_checksums.checksum

    def count(*values: object) -> int:
        nonlocal computed
        computed += 1
        return checksum(*values)

    monkeypatch.setattr(row_checksums, "checksum", count)
    Ledger(folder / "ledger.sqlite").close()
    assert 601 <= computed < 700


@pytest.mark.parametrize(("limit_s", "expected"), [(60.0, LedgerFault), (-1.0, ValueError)])
def test_the_search_for_damage_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch, limit_s: float, expected: type[Exception]
) -> None:
    monkeypatch.setattr(file_check, "EXPLAIN_S", limit_s)
    monkeypatch.setattr(file_check, "PROGRESS", 1)
    damage_spec(folder)
    with (
        contextlib.closing(Ledger(folder / "ledger.sqlite", read_only=True)) as ledger,
        pytest.raises(expected),
        file_check.explained(ledger.db, ledger.path),
    ):
        raise ValueError("due to the damage")
