"""One of two ranks whose folders of checkpoints are the same (`shared`) or different. It leaves its results as a file.

Arguments: the folder for results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from paceline.errors import CheckpointFault, PacelineError
from paceline.files.storage import Folder
from paceline.host.process import end_process
from paceline.learner.checkpoints import checkpoint
from paceline.services.learner.training.checkpoints import SessionCheckpoints
from paceline.spec import CheckpointingSection
from paceline.v1 import worker_pb2

CPU = torch.device("cpu")


def main(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    own = out / f"host-{rank}"
    met = {
        "shared": said(lambda: check_folder(out / "shared")),
        "own": said(lambda: check_folder(own)),
        "failing": said(lambda: check_failing(out / "failing", rank)),
        "away": said(lambda: check_failing(out / "away", 1)),
        "taken": said(lambda: check_folder(out / "taken")),
        "written": said(lambda: save(own)),
    }
    (out / f"rank.{rank}.json").write_text(json.dumps(met))
    end_process()


def said(work: Callable[[], None]) -> str:
    try:
        work()
    except CheckpointFault as error:
        return f"{type(error).__name__} {error.path}: {error}"
    except PacelineError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def check_folder(directory: Path) -> None:
    assignment = worker_pb2.RunAssignment(run_id="grpo-1", session=2, directory=str(directory))
    session = SessionCheckpoints(assignment, CheckpointingSection(), lambda _: None, lambda _: None)
    session.check_folder(CPU, lambda _: None)
    session.close()


def check_failing(directory: Path, failing: int) -> None:
    """Run `check_folder` with a store that cannot be read or cleared any more if `failing` is 1."""
    if failing:

        def fail(*_: object) -> bool:
            raise OSError("503 Slow Down")

        with patch.multiple(Folder, exists=fail, delete=fail):
            check_folder(directory)
    else:
        check_folder(directory)


def save(directory: Path) -> None:
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(2, 2)
    checkpoint.save(directory, session=2, step=1, model=model, optimizer=torch.optim.AdamW(model.parameters()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
