"""Checkpoints of one rank: training continues as if it had not stopped, and a checkpoint that is not whole is refused."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch
from tiny_policy import CPU, make_batch, make_spec, save_tiny_policy

from paceline.errors import Conflict, NotFound, Unavailable
from paceline.files.storage import Folder
from paceline.learner.checkpoints import checkpoint
from paceline.learner.checkpoints.checkpoint import Checkpoint
from paceline.learner.checkpoints.manifest import hash_files, read_manifest, write_manifest
from paceline.learner.checkpoints.verification import verify
from paceline.learner.step.trainer import Trainer


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def written(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A checkpoint after one step; tests that damage it work on a copy."""
    trainer = trained(policy, 1)
    return save(trainer, tmp_path_factory.mktemp("checkpoints"), step=1)


@pytest.fixture
def copied(written: Checkpoint, tmp_path: Path) -> Checkpoint:
    return written._replace(path=Path(shutil.copytree(written.path, tmp_path / written.path.name)))


def trained(policy: Path, steps: int) -> Trainer:
    trainer = Trainer(make_spec(policy), CPU)
    train(trainer, 0, steps)
    return trainer


def train(trainer: Trainer, start: int, end: int) -> None:
    for step in range(start, end):
        trainer.train_step(make_batch(), step)


def save(trainer: Trainer, directory: Path | str, step: int, session: int = 1) -> Checkpoint:
    saved = checkpoint.save(
        directory,
        session=session,
        step=step,
        model=trainer.model,
        optimizer=trainer.optimizer,
        chain_hash="c4a1",
    )
    assert saved is not None
    return saved


def names(directory: Path | str) -> list[str]:
    return [folder.name for _, folder in checkpoint.list_positions(directory)]


def load(saved: Checkpoint, trainer: Trainer) -> checkpoint.CheckpointManifest:
    return checkpoint.load(
        saved.path, expected_sha256=saved.manifest_sha256, model=trainer.model, optimizer=trainer.optimizer
    )


def assert_same_weights(one: Trainer, other: Trainer) -> None:
    expected = one.model.state_dict()
    for name, tensor in other.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_resumed_training_is_bit_identical_to_uninterrupted(policy: Path, tmp_path: Path) -> None:
    uninterrupted = trained(policy, 4)
    saved = save(trained(policy, 2), tmp_path, step=2)
    resumed = Trainer(make_spec(policy), CPU)
    manifest = load(saved, resumed)
    assert (manifest.session, manifest.step, manifest.chain_hash) == (1, 2, "c4a1")
    assert (manifest.world_size, manifest.num_threads) == (1, torch.get_num_threads())
    train(resumed, 2, 4)
    assert_same_weights(uninterrupted, resumed)


def test_writing_a_checkpoint_changes_nothing_even_before_the_first_step(policy: Path, tmp_path: Path) -> None:
    """torch would count an optimizer step that was never made, and shift its bias correction for good."""
    untouched = trained(policy, 2)
    saving = trained(policy, 0)
    saved = save(saving, tmp_path, step=0)
    train(saving, 0, 2)
    assert_same_weights(untouched, saving)
    resumed = Trainer(make_spec(policy), CPU)
    load(saved, resumed)
    train(resumed, 0, 2)
    assert_same_weights(untouched, resumed)


def test_generator_goes_on_where_it_was(policy: Path, tmp_path: Path) -> None:
    trainer = trained(policy, 1)
    torch.manual_seed(7)
    saved = save(trainer, tmp_path, step=1)
    expected = torch.rand(3)
    torch.manual_seed(8)
    load(saved, trainer)
    assert torch.equal(torch.rand(3), expected)


def cut(path: Path) -> None:
    data = (path / "__0_0.distcp").read_bytes()
    (path / "__0_0.distcp").write_bytes(data[:-1])


def flip(path: Path) -> None:
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "__0_0.distcp").write_bytes(data)


def remove(path: Path) -> None:
    (path / "__0_0.distcp").unlink()


def add(path: Path) -> None:
    (path / "__1_0.distcp").write_bytes(b"")


def edit_manifest(path: Path) -> None:
    document = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(document | {"step": 99}))


def garble_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut, r"file '__0_0.distcp' has \d+ bytes, not \d+"),
        (flip, "file '__0_0.distcp' has SHA-256"),
        (remove, "file '__0_0.distcp' is missing"),
        (add, "file '__1_0.distcp' is not in its manifest"),
        (edit_manifest, "its manifest has SHA-256 .* not the expected"),
        (garble_manifest, "its manifest cannot be read"),
    ],
)
def test_damaged_checkpoint_is_refused_with_the_reason(
    damage: Callable[[Path], None], reason: str, copied: Checkpoint, policy: Path
) -> None:
    damage(copied.path)
    trainer = Trainer(make_spec(policy), CPU)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    with pytest.raises(Conflict, match=reason):
        load(copied, trainer)
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_torn_and_missing_checkpoints_are_not_found(copied: Checkpoint, policy: Path) -> None:
    trainer = Trainer(make_spec(policy), CPU)
    (copied.path / "manifest.json").unlink()
    with pytest.raises(NotFound, match="the checkpoint was never completely written"):
        load(copied, trainer)
    with pytest.raises(NotFound, match="no such folder"):
        load(copied._replace(path=copied.path / "elsewhere"), trainer)


def vouched_for(path: Path) -> str:
    """Return the hash of a new manifest of the folder's files, as an attacker could write and register it."""
    manifest, _ = read_manifest(Folder(path))
    (path / "manifest.json").unlink()
    return write_manifest(Folder(path), manifest.model_copy(update={"files": hash_files(Folder(path))}))


def test_foreign_metadata_is_refused_before_it_can_run(copied: Checkpoint, policy: Path, tmp_path: Path) -> None:
    """`.metadata` is a pickle that would create a file. It is not opened; if its hash is vouched for, it is not run."""
    mark = tmp_path / "it-ran"
    program = b"cbuiltins\nexec\n(V" + f"open({str(mark)!r}, 'w').close()".encode() + b"\ntR."
    (copied.path / ".metadata").write_bytes(program)
    with pytest.raises(Conflict, match=r"file '\.metadata' has"):
        load(copied, Trainer(make_spec(policy), CPU))
    believed = copied._replace(manifest_sha256=vouched_for(copied.path))
    with pytest.raises(Conflict, match=r"file '\.metadata': the pickle names builtins\.exec"):
        load(believed, Trainer(make_spec(policy), CPU))
    assert not mark.exists()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the pickle cannot be decoded: EOFError"),
        (b"N.", "the pickle cannot be decoded: AttributeError"),
        (b"cos\nsystem\n(Vtrue\ntR.", r"the pickle names os\.system"),
        (b"ctorch\nload\n(V/etc/passwd\ntR.", r"the pickle names torch\.load"),
        (b"ctorch\nserialization.load\n(V/etc/passwd\ntR.", r"the pickle names torch\.serialization\.load"),
    ],
)
def test_what_is_no_metadata_is_refused(copied: Checkpoint, policy: Path, data: bytes, reason: str) -> None:
    (copied.path / ".metadata").write_bytes(data)
    believed = copied._replace(manifest_sha256=vouched_for(copied.path))
    with pytest.raises(Conflict, match=rf"1-1 refused: file '\.metadata': {reason}"):
        load(believed, Trainer(make_spec(policy), CPU))


def test_metadata_cannot_lead_out_of_the_checkpoint(copied: Checkpoint, policy: Path) -> None:
    data = (copied.path / ".metadata").read_bytes()
    (copied.path / ".metadata").write_bytes(data.replace(b"__0_0.distcp", b"../../passwd"))
    believed = copied._replace(manifest_sha256=vouched_for(copied.path))
    with pytest.raises(Conflict, match=r"the pickle refers to '\.\./\.\./passwd', which is not a file of this"):
        load(believed, Trainer(make_spec(policy), CPU))


def test_checkpoint_of_another_model_is_refused(written: Checkpoint, tmp_path: Path) -> None:
    wider = Trainer(make_spec(save_tiny_policy(tmp_path / "wider", intermediate_size=64)), CPU)
    with pytest.raises(Conflict, match=r"refused: it does not fit the model .*: rank 0: Size mismatch"):
        load(written, wider)


def test_failure_to_write_leaves_no_checkpoint(policy: Path, tmp_path: Path) -> None:
    trainer = trained(policy, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # as on a full disk, writing fails half-way
    try:
        with pytest.raises(Unavailable, match="could not be written: rank 0: "):
            save(trainer, tmp_path, step=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert checkpoint.list_positions(tmp_path) == []
    saved = save(trainer, tmp_path, step=1)
    assert checkpoint.list_positions(tmp_path) == [((1, 1), saved.path)]


def test_torn_and_foreign_folders_are_no_checkpoints(copied: Checkpoint) -> None:
    directory = Path(copied.path).parent
    assert checkpoint.list_positions(directory / "nowhere") == []
    assert checkpoint.list_positions(directory) == [((1, 1), Folder(copied.path))]
    torn = directory / "2-5"
    torn.mkdir()
    (torn / "__0_0.distcp").write_bytes(b"half")
    (directory / "notes").mkdir()
    assert names(directory) == ["1-1"]


def test_prune_keeps_what_it_is_told_and_what_may_be_in_the_making(policy: Path, tmp_path: Path) -> None:
    trainer = trained(policy, 1)
    for session, step in ((1, 9), (1, 10), (2, 3), (2, 4)):
        save(trainer, tmp_path, step=step, session=session)
    for name in ("1-11", "2-5"):
        (tmp_path / name).mkdir()
    assert names(tmp_path) == ["1-9", "1-10", "2-3", "2-4"]
    keep = [str(tmp_path / name) for name in ("1-10", "2-3")]
    assert checkpoint.prune(tmp_path, []) == []
    assert checkpoint.prune(tmp_path, keep) == [str(tmp_path / "1-9"), str(tmp_path / "1-11")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-10", "2-3", "2-4", "2-5"]
    assert checkpoint.prune(tmp_path, keep) == []


def test_a_store_without_renames_or_folders_holds_checkpoints_too(policy: Path) -> None:
    store = "memory://test-checkpoints/run-1"
    trainer = trained(policy, 1)
    saved = save(trainer, store, step=1)
    assert str(saved.path) == f"{store}/1-1"
    train(trainer, 1, 2)
    later = save(trainer, store, step=2)
    resumed = Trainer(make_spec(policy), CPU)
    load(saved, resumed)
    train(resumed, 1, 2)
    for name, tensor in resumed.model.state_dict().items():
        assert torch.equal(tensor, trainer.model.state_dict()[name]), name
    assert names(store) == ["1-1", "1-2"]

    with fsspec.open(f"{store}/1-1/__0_0.distcp", "ab") as file:
        file.write(b"!")
    with pytest.raises(Conflict, match=r"1-1 refused: file '__0_0.distcp' has \d+ bytes, not \d+"):
        load(saved, resumed)
    assert checkpoint.prune(store, [str(later.path)]) == [f"{store}/1-1"]
    assert names(store) == ["1-2"]


def test_torn_one_of_the_same_name_is_written_anew_and_a_complete_one_never(policy: Path, tmp_path: Path) -> None:
    trainer = trained(policy, 1)
    (tmp_path / "1-1").mkdir()
    (tmp_path / "1-1" / "__7_0.distcp").write_bytes(b"half")
    saved = save(trainer, tmp_path, step=1)
    assert verify(saved.path, saved.manifest_sha256).manifest == saved.manifest
    with pytest.raises(Conflict, match="exists and is complete"):
        save(trainer, tmp_path, step=1)


def test_a_synchronised_reference_is_state_and_goes_on_where_it_was(policy: Path, tmp_path: Path) -> None:
    loss_fn = {
        "reference_policy_kl_penalty": 0.3,
        "reference_policy_sync_steps": 2,
        "reference_policy_sync_mix": 0.25,
    }

    def make() -> Trainer:
        return Trainer(make_spec(policy, loss_fn=loss_fn), CPU)

    def reference(trainer: Trainer) -> dict[str, torch.Tensor]:
        assert trainer.synced_reference is not None
        return {name: value.clone() for name, value in trainer.synced_reference.state_dict().items()}

    trainer = make()
    before = reference(trainer)
    train(trainer, 0, 1)
    assert all(torch.equal(value, before[name]) for name, value in reference(trainer).items())
    train(trainer, 1, 2)
    weights, mixed = trainer.model.state_dict(), reference(trainer)
    for name, value in mixed.items():
        torch.testing.assert_close(value, 0.25 * weights[name] + 0.75 * before[name])
    assert any(not torch.equal(value, before[name]) for name, value in mixed.items())
    train(trainer, 2, 3)
    saved = checkpoint.save(
        tmp_path,
        session=1,
        step=3,
        model=trainer.model,
        optimizer=trainer.optimizer,
        reference=trainer.synced_reference,
    )
    assert saved is not None
    resumed = make()
    checkpoint.load(
        saved.path,
        expected_sha256=saved.manifest_sha256,
        model=resumed.model,
        optimizer=resumed.optimizer,
        reference=resumed.synced_reference,
    )
    train(trainer, 3, 5)
    train(resumed, 3, 5)
    assert_same_weights(trainer, resumed)
    after = reference(resumed)
    assert all(torch.equal(value, after[name]) for name, value in reference(trainer).items())
