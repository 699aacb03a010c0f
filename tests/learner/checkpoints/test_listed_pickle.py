"""Objects from another rank that torch unpickles: checkpoint plans and errors, and no code that runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.distributed_c10d as collectives
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan

from paceline.errors import Conflict
from paceline.learner.checkpoints import checkpoint


class Attribute:
    """Reads an attribute when it is unpickled, as Python 3.11.2 writes members of enums."""

    def __init__(self, thing: Any, name: str):
        self.thing, self.name = thing, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.thing, self.name)


class Command:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def exchanged(thing: Any) -> Any:
    """Return the object as another rank decodes it."""
    assert checkpoint, "whoever reads checkpoints restricts what ranks say"
    tensor, size = collectives._object_to_tensor(thing, torch.device("cpu"), None)
    return collectives._tensor_to_object(tensor, int(size), None)


def test_nothing_runs_that_another_rank_names(tmp_path: Path) -> None:
    with pytest.raises(Conflict, match=r"the pickle names posix\.mkdir"):
        exchanged([Command(tmp_path / "made")])
    assert not (tmp_path / "made").exists()
    with pytest.raises(Conflict, match=r"builtins\.eval"):
        exchanged(eval)


def test_plans_and_errors_pass() -> None:
    planner = DefaultSavePlanner()
    planner.set_up_planner({"weight": torch.zeros(2, 3), "step": 4}, is_coordinator=True)
    plan = planner.create_local_plan()
    assert exchanged(plan) == plan
    failed = exchanged(CheckpointException("rank 1", {1: (OSError("disk"), Conflict("damaged"))}))  # type: ignore[dict-item]
    assert isinstance(failed, CheckpointException)
    assert [type(error) for error in failed.failures[1]] == [OSError, Conflict]


def test_a_listed_enum_may_be_named_by_its_attribute_and_nothing_else() -> None:
    assert exchanged(Attribute(LoadItemType, "TENSOR")) is LoadItemType.TENSOR
    for thing, name in ((LoadItemType, "__class__"), (LoadPlan, "__init__"), ("text", "format")):
        with pytest.raises(Conflict, match="attribute that is not a member of an enum"):
            exchanged(Attribute(thing, name))
