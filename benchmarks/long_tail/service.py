"""Starts a service with the timed stand-ins in place: `python service.py python -m paceline.services.rollout.main …`."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path


def main() -> None:
    """Put the stand-ins in, and run the module that the rest of the command line names."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    _, module, *arguments = sys.argv[2:]
    if module == "paceline.services.rollout.main":
        stand_in = importlib.import_module("long_tail.engine").TimedEngine
        importlib.import_module("paceline.services.rollout.run").create_engine = stand_in
    elif module == "paceline.services.learner.main":
        stand_in = importlib.import_module("long_tail.trainer").TimedTrainer
        importlib.import_module("paceline.services.learner.training.run").Trainer = stand_in
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
