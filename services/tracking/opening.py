"""The choice of a run's tracker."""

from __future__ import annotations

from pathlib import Path

from paceline.spec.sections.system import TrackerSection
from services.tracking.tracker import TrackedRun, Tracker


def open_tracker(setting: TrackerSection, run: TrackedRun, folder: Path) -> Tracker:
    """Return the tracker of a run. `folder` is for its files. Raises NotFound when its library is not installed."""
    match setting.kind:
        case "wandb":
            from services.tracking.backends.wandb_run import WandbRun

            return WandbRun(setting, run, folder)
        case "trackio":
            from services.tracking.backends.trackio_run import TrackioRun

            return TrackioRun(setting, run)
        case "mlflow":
            from services.tracking.backends.mlflow_run import MlflowRun

            return MlflowRun(setting, run)
        case "tensorboard":
            from services.tracking.backends.tensorboard_run import TensorboardRun

            return TensorboardRun(folder)
    raise ValueError(f"no tracker is called {setting.kind!r}")
