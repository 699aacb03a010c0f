"""Exports that cannot be written, and their orders."""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exchange_drivers import make_spec
from model_shapes import spec_of
from safetensors.torch import load_file
from tiny_models import tiny_qwen3

from paceline.errors import Conflict, Unavailable
from paceline.files.storage import Folder
from paceline.learner.checkpoints.model_folder import ModelFolder
from paceline.learner.weights.stream import Weight, export_weights
from paceline.models.export_origin import Origin, origin_of
from paceline.models.loading import resolved_dtype
from paceline.services.learner.context import ExportOrder, Orders, Place
from paceline.services.learner.training import exports
from paceline.services.learner.training.exports import RunExports

ORIGIN = Origin(run_id="test-1", session=2, step=3, chain="c4a1", spec_sha256="5bec")


class Bench:
    """Exports of a tiny model on the only rank of a learner."""

    def __init__(self, directory: Path) -> None:
        self.rank = SimpleNamespace(place=Place(0, 1, torch.device("cpu")), orders=Orders())
        rank: Any = self.rank
        self.model = tiny_qwen3()
        self.model.save_pretrained(directory / "policy")
        spec = make_spec(directory)
        policy = spec.policy.model_copy(update={"model_name": str(directory / "policy")})
        self.exports = RunExports("test-1", directory, spec.model_copy(update={"policy": policy}), rank)
        self._directory = directory

    def left_over(self) -> list[str]:
        return [path.name for path in (self._directory / "exports").iterdir()]

    def ordered(self) -> Future[str]:
        future = self.rank.orders.ask_export(ExportOrder("now", False))
        self.exports.carry_out_orders(self.model, ORIGIN)
        return future


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def no_space(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def refused(*_: Any, **__: Any) -> Any:
    raise Conflict("exports/now exists and is not an export")


def no_device_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("module", "name", "failure", "words"),
    [
        (Weight, "rows", no_device_memory, "could not be written: OutOfMemoryError: CUDA out of memory"),
        (ModelFolder, "add", no_space, "could not be written: OSError: .* No space left"),
        (ModelFolder, "finish", refused, "exports/now exists and is not an export"),
    ],
)
def test_an_export_that_cannot_be_written_fails_whoever_asked_for_it_alone(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    failure: Callable[..., Any],
    words: str,
) -> None:
    with monkeypatch.context() as context:
        context.setattr(module, name, failure)
        with pytest.raises(Unavailable if "could not" in words else Conflict, match=words):
            bench.ordered().result(0)
    assert not bench.left_over()
    path = Path(bench.ordered().result(0))
    assert path.name == "now"
    exported = load_file(path / "model.safetensors")
    assert all(torch.equal(tensor, bench.model.state_dict()[name]) for name, tensor in exported.items())
    assert origin_of(Folder(path)) == ORIGIN


@pytest.mark.parametrize(
    ("sections", "on_cpu", "on_gpu"),
    [
        ({}, "float32", "bfloat16"),
        ({"policy": {"generation_precision": "bfloat16"}}, "bfloat16", "bfloat16"),
        ({"policy": {"precision": "bfloat16"}}, "float32", "bfloat16"),
        ({"checkpointing": {"export_dtype": "float16"}}, "float16", "float16"),
        ({"algorithm": "sft"}, "float32", "bfloat16"),
        ({"algorithm": "sft", "policy": {"precision": "bfloat16"}}, "bfloat16", "bfloat16"),
    ],
)
def test_an_export_has_the_type_that_was_evaluated(sections: dict[str, Any], on_cpu: str, on_gpu: str) -> None:
    precision = spec_of(**sections).export_precision
    assert (resolved_dtype(precision, "cpu"), resolved_dtype(precision, "cuda")) == (on_cpu, on_gpu)


def test_a_failed_write_still_goes_through_every_collective(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks gather to the end, so rank 0 has to as well."""
    names: list[str] = []
    rows = Weight.rows

    def noted(weight: Weight, *rest: Any) -> Any:
        names.extend(
            name for name, other in bench.model.state_dict().items() if other.data_ptr() == weight.tensor.data_ptr()
        )
        return rows(weight, *rest)

    monkeypatch.setattr(Weight, "rows", noted)
    monkeypatch.setattr(ModelFolder, "add", no_space)
    with pytest.raises(Unavailable, match="No space left"):
        bench.ordered().result(0)
    assert names == list(export_weights(bench.model))


def test_what_leaves_the_ranks_at_different_points_ends_the_session(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.rank.place.world_size = 2
    monkeypatch.setattr(exports, "broadcast_bytes", lambda data: data)
    monkeypatch.setattr(Weight, "rows", no_device_memory)
    with pytest.raises(torch.OutOfMemoryError):
        bench.ordered()


def test_rank_0_alone_removes_what_a_killed_export_left(tmp_path: Path) -> None:
    left_over = tmp_path / "exports" / ".now.partial-4194305"
    left_over.mkdir(parents=True)
    bench = Bench(tmp_path)
    rank: Any = SimpleNamespace(**{**vars(bench.rank), "place": replace(bench.rank.place, rank=1)})
    RunExports("test-1", tmp_path, make_spec(tmp_path), rank).remove_left_overs()
    assert left_over.exists()
    bench.exports.remove_left_overs()
    assert not left_over.exists()
