"""Each tracker with the setting, the sender and the reader that its tests need."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tracker_servers import RUN_ID, RecordedRun

from paceline.apps.tracking.backends import tensorboard_run, wandb_run
from paceline.apps.tracking.backends.mlflow_run import MlflowRun
from paceline.apps.tracking.follower import Follower, Setting, Target, open_tracker
from paceline.apps.tracking.tracker import TrackedRun, Tracker
from paceline.spec.sections.system import TrackerSection

LINKS = {"page": "http://127.0.0.1:7080"}


class Backend(ABC):
    """A tracker with one recorded run, whose metrics have Paceline's names."""

    needs: ClassVar[tuple[str, ...]] = ()
    """Packages without which its tests are skipped; `make trackers` installs them."""
    setting: TrackerSection

    def __init__(self, run: RecordedRun, folder: Path):
        self.run, self.folder = run, folder

    def follower(self, *, only_now: bool = False) -> Follower:
        target = Target(RUN_ID, self.setting.kind, self.setting, self.folder, LINKS, only_now)
        return Follower(target, self.run.records(), self.open, first_backoff_s=0.05, poll_s=0.05)

    def open(self, setting: Setting, run: TrackedRun, folder: Path) -> Tracker:
        return open_tracker(setting, run, folder)

    @property
    def cursor(self) -> Path:
        return self.folder / f"{self.setting.kind}.json"

    def rewind(self, sequence: int) -> None:
        """Set the cursor back, as a crash between the tracker's write and the cursor's leaves it."""
        content = {"sequence": sequence, "time_s": 0.0, "done": False, "ended": ""}
        self.cursor.write_text(json.dumps(json.loads(self.cursor.read_text()) | content))

    @abstractmethod
    def rewards(self) -> list[tuple[int, float]]:
        """Return (step, reward) of every entry that the tracker has."""

    @abstractmethod
    def warnings(self) -> list[str]: ...

    @abstractmethod
    def sample_texts(self) -> list[str]:
        """Return the texts in the tables of samples."""


class FileBackend(Backend):
    """A tracker whose files on this machine say where to resume."""

    @abstractmethod
    def truncate(self) -> None:
        """Cut off the end of its file."""

    @abstractmethod
    def position(self) -> int: ...


class TensorBoard(FileBackend):
    setting = TrackerSection(kind="tensorboard")

    def values(self, name: str) -> list[tuple[int, Any]]:
        found = tensorboard_run.events(self.folder / "tensorboard")
        return [(step, values[name]) for step, values in found if name in values]

    def rewards(self) -> list[tuple[int, float]]:
        return self.values("train/reward")

    def warnings(self) -> list[str]:
        return [text.strip() for _, text in self.values("warnings")]

    def sample_texts(self) -> list[str]:
        return [line.strip() for _, text in self.values("train/samples") for line in text.splitlines()]

    def truncate(self) -> None:
        (path,) = (self.folder / "tensorboard").glob(tensorboard_run.EVENT_FILES)
        path.write_bytes(path.read_bytes()[:-20])

    def position(self) -> int:
        return tensorboard_run.recorded_position(self.folder / "tensorboard")


class WandB(FileBackend):
    """Offline files of W&B, read by W&B's reader."""

    needs = ("wandb",)
    setting = TrackerSection(kind="wandb", project="mine", offline=True)

    def files(self) -> list[Path]:
        found = (self.folder / "wandb").glob("wandb/offline-run-*/run-*.wandb")
        return sorted(found, key=lambda path: path.stat().st_mtime)

    def records(self, kind: str) -> list[dict[str, Any]]:
        return [record[kind] for path in self.files() for record in wandb_run.read(path) if kind in record]

    def rewards(self) -> list[tuple[int, float]]:
        lines = [record["item"] for record in self.records("history")]
        return [(line["train/global_step"], line["train/reward"]) for line in lines if "train/reward" in line]

    def warnings(self) -> list[str]:
        return [alert["text"].removeprefix("step 3: ") for alert in self.records("alert")]

    def sample_texts(self) -> list[str]:
        tables = (self.folder / "wandb").glob("wandb/offline-run-*/files/media/table/samples_*.table.json")
        return [str(cell) for path in tables for line in json.loads(path.read_text())["data"] for cell in line]

    def truncate(self) -> None:
        (path,) = self.files()
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def position(self) -> int:
        return wandb_run.offline_position(self.folder / "wandb")


class Mlflow(Backend):
    """A real MLflow server at a port; each test has a separate project."""

    needs = ("mlflow", "sqlalchemy", "alembic")

    def __init__(self, run: RecordedRun, folder: Path, port: int, proxy: int | None = None):
        """Send to the port of a `proxy`, if given, and read from the server's `port`."""
        super().__init__(run, folder)
        self.server = f"http://127.0.0.1:{port}"
        self._timeout_s = 60 if proxy is None else 1
        self.setting = TrackerSection(kind="mlflow", project=folder.name, url=f"http://127.0.0.1:{proxy or port}")

    def open(self, setting: Setting, run: TrackedRun, folder: Path) -> Tracker:
        assert isinstance(setting, TrackerSection)
        return MlflowRun(setting, run, timeout_s=self._timeout_s)

    def only_run(self) -> tuple[Any, Any]:
        """Return a client and the only run of the project."""
        import mlflow

        client = mlflow.MlflowClient(tracking_uri=self.server)
        experiment = client.get_experiment_by_name(self.setting.project)
        (found,) = client.search_runs([experiment.experiment_id])
        return client, found

    def rewards(self) -> list[tuple[int, float]]:
        client, run = self.only_run()
        return [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "train/reward")]

    def warnings(self) -> list[str]:
        tags = self.only_run()[1].data.tags
        return [text.removeprefix("step 3: ") for name, text in tags.items() if name.startswith("paceline.warning.")]

    def sample_texts(self) -> list[str]:
        client, run = self.only_run()
        path = client.download_artifacts(run.info.run_id, "samples/step-00000000.json", str(self.folder))
        return [str(cell) for line in json.loads(Path(path).read_text())["data"] for cell in line]


BACKENDS: dict[str, type[Backend]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": Mlflow}


def skip_without(backend: type[Backend]) -> None:
    for package in backend.needs:
        pytest.importorskip(package, reason=f"{package} is not installed; `make trackers` installs it")
