"""The choice of a run's tracker."""

from __future__ import annotations

import hashlib
from pathlib import Path

from paceline.apps.tracking.tracker import TrackedRun, Tracker
from paceline.spec.sections.system import LoggerSection, TrackerSection, WebhookSection

Setting = TrackerSection | WebhookSection


def named(logger: LoggerSection) -> dict[str, Setting]:
    """Return the trackers and the webhooks of a spec by the names of their cursors."""
    found: dict[str, Setting] = {tracker.kind: tracker for tracker in logger.trackers}
    for webhook in logger.webhooks:
        address = webhook.url or f"${webhook.url_variable}"
        found[f"webhook-{hashlib.sha256(address.encode()).hexdigest()[:8]}"] = webhook
    return found


def open_tracker(setting: Setting, run: TrackedRun, folder: Path) -> Tracker:
    """Return the tracker of a run. `folder` is for its files. Raises NotFound when its library is not installed."""
    if isinstance(setting, WebhookSection):
        from paceline.apps.tracking.backends.webhook import Webhook

        return Webhook(setting, run)
    match setting.kind:
        case "wandb":
            from paceline.apps.tracking.backends.wandb_run import WandbRun

            return WandbRun(setting, run, folder)
        case "mlflow":
            from paceline.apps.tracking.backends.mlflow_run import MlflowRun

            return MlflowRun(setting, run)
        case "tensorboard":
            from paceline.apps.tracking.backends.tensorboard_run import TensorboardRun

            return TensorboardRun(folder)
    raise ValueError(f"no tracker is called {setting.kind!r}")
