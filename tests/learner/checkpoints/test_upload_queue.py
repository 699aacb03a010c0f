"""The queue of checkpoints for an object store: in order, whole, bounded, and waiting while the store does not answer."""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.files.names import CHECKPOINT_MANIFEST
from paceline.files.storage import Folder
from paceline.learner.checkpoints.checkpoint import Checkpoint
from paceline.learner.checkpoints.manifest import CheckpointManifest, hash_files, write_manifest
from paceline.learner.checkpoints.upload_queue import UploadQueue

PATIENCE_S = 60.0


class Store:
    """An object store that can stop answering, and a rank's queue for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = Folder(f"memory://{uuid.uuid4().hex}/checkpoints")
        self.away = threading.Event()
        self.written: list[str] = []
        self.stored: list[str] = []
        self.warnings: list[str] = []
        put, write = Folder.put, Folder.write

        def checked(call: Callable[..., None]) -> Callable[..., None]:
            def called(folder: Folder, name: str, content: object) -> None:
                if folder.local is None and self.away.is_set():
                    raise RuntimeError("nobody listens")
                call(folder, name, content)
                if folder.local is None:
                    self.written.append(f"{folder.name}/{name}")

            return called

        monkeypatch.setattr(Folder, "put", checked(put))
        monkeypatch.setattr(Folder, "write", checked(write))
        self.warned = threading.Semaphore(0)
        self.queue = UploadQueue(self.folder, 0, self._on_stored, self._warn, pauses_s=(0.01, 0.01))

    def _warn(self, message: str) -> None:
        self.warnings.append(message)
        self.warned.release()

    def _on_stored(self, checkpoint: Checkpoint) -> None:
        self.stored.append(str(checkpoint.path))

    def add(self, name: str, others: tuple[str, ...] = (), size: int = 100) -> Folder:
        """Queue a checkpoint of two files; `others` are files of other ranks that its manifest lists."""
        folder = Folder(self.queue.spool / name)
        folder.make()
        for file in ("__0_0.distcp", ".metadata"):
            folder.write(file, b"x" * size)
        files = hash_files(folder)
        session, step = map(int, name.split("-"))
        more = tuple(files[0].model_copy(update={"path": other}) for other in others)
        manifest = CheckpointManifest(
            session=session,
            step=step,
            chain_hash="c",
            world_size=1,
            num_threads=1,
            torch_version="",
            files=files + more,
        )
        self.queue.add(folder, Checkpoint(folder, write_manifest(folder, manifest), manifest))
        return folder

    def wait_warned(self) -> str:
        assert self.warned.acquire(timeout=PATIENCE_S)
        return self.warnings[-1]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("PACELINE_SPOOL", str(tmp_path))
    made = Store(monkeypatch)
    yield made
    made.queue.close()


def test_checkpoints_that_waited_are_uploaded_in_order_each_with_its_manifest_last(
    store: Store, tmp_path: Path
) -> None:
    store.away.set()
    for name in ("1-2", "1-4"):
        store.add(name)
    store.wait_warned()
    assert store.queue.names == ["1-2", "1-4"]
    assert store.queue.away_s > 0
    store.away.clear()
    assert store.queue.wait_stored(PATIENCE_S)
    files = (".metadata", "__0_0.distcp", CHECKPOINT_MANIFEST)
    assert store.written == [f"{name}/{file}" for name in ("1-2", "1-4") for file in files]
    assert store.stored == [f"{store.folder}/{name}" for name in ("1-2", "1-4")]
    store.queue.close()
    away, back = store.warnings
    assert "cannot be written now (RuntimeError: nobody listens): training goes on" in away
    assert "answers again after" in back
    assert not list(tmp_path.rglob("*.distcp"))


def test_the_manifest_waits_for_the_files_of_other_ranks(store: Store) -> None:
    store.add("1-2", others=("__1_0.distcp",))
    assert not store.queue.wait_stored(0.05)
    assert not (store.folder / "1-2").exists(CHECKPOINT_MANIFEST)
    (store.folder / "1-2").write("__1_0.distcp", b"x" * 100)
    assert store.queue.wait_stored(PATIENCE_S)
    assert (store.folder / "1-2").exists(CHECKPOINT_MANIFEST)


def test_the_oldest_are_beyond_the_quota_and_the_newest_never_is(store: Store) -> None:
    store.away.set()
    folders = [store.add(f"1-{step}", size=1000) for step in (2, 4, 6)]
    each = store.queue.size_bytes // 3
    fitting = [store.queue.fitting(quota) for quota in (0, each, 2 * each + 9, 10 * each)]
    assert fitting == [1, 1, 2, 3]
    store.wait_warned()
    store.queue.drop(["1-2", "1-4"])  # one of them is being uploaded
    assert store.queue.names == ["1-6"]
    assert [folder.exists() for folder in folders] == [False, False, True]
    store.away.clear()
    assert store.queue.wait_stored(PATIENCE_S)
    assert store.stored == [f"{store.folder}/1-6"]


def test_a_manifest_that_was_changed_on_the_disk_is_not_uploaded(store: Store) -> None:
    store.away.set()
    folder = store.add("1-2")
    store.wait_warned()
    folder.write(CHECKPOINT_MANIFEST, b"{}")
    store.written.clear()
    store.away.clear()
    assert not store.queue.wait_stored(0.2)
    assert store.written == ["1-2/.metadata", "1-2/__0_0.distcp"]
    assert not (store.folder / "1-2").exists(CHECKPOINT_MANIFEST)


def test_what_an_earlier_session_left_is_removed(store: Store, tmp_path: Path) -> None:
    left = store.queue.spool / "1-2" / "__0_0.distcp"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"x")
    UploadQueue(store.folder, 0, lambda _: None, store.warnings.append).close()
    assert not left.exists()
    assert hashlib.sha256(store.folder.url.encode()).hexdigest()[:16] in str(left)
