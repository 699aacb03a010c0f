"""Exports that find no memory, and their orders."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exchange_drivers import make_spec
from tiny_models import tiny_qwen3

from learner.collectives import FailedElsewhere
from learner.weights import gather
from paceline.errors import Unavailable
from services.learner.orders import ExportOrder, Orders
from services.learner.training import exports
from services.learner.training.exports import Rank0RunExports, RunExports


class Bench:
    """Exports of a tiny model on the only rank of a learner."""

    def __init__(self, directory: Path) -> None:
        self.rank = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"), orders=Orders())
        rank: Any = self.rank
        self.exports = Rank0RunExports("test-1", directory, make_spec(directory), rank)
        self.model = tiny_qwen3()

    def ordered(self) -> Future[str]:
        future = self.rank.orders.ask_export(ExportOrder("now", False))
        self.exports.carry_out_orders(self.model, 0)
        return future


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench whose model counts as sharded, so that an export gathers a copy."""
    monkeypatch.setattr(gather, "_is_whole_in_host_memory", lambda tensor: False)
    return Bench(tmp_path)


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise MemoryError("no room")


def no_device_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("module", "name", "failure", "words"),
    [
        (
            gather,
            "_allocate",
            out_of_memory,
            r"no memory for a copy of the whole model \(MemoryError: no room\)",
        ),
        (gather, "_gather", no_device_memory, "could not be written: OutOfMemoryError: CUDA out of memory"),
        (exports, "export_policy", out_of_memory, "could not be written: MemoryError: no room"),
    ],
)
def test_an_export_without_memory_fails_whoever_asked_for_it_alone(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    failure: Callable[..., Any],
    words: str,
) -> None:
    with monkeypatch.context() as context:
        context.setattr(module, name, failure)
        with pytest.raises(Unavailable, match=words):
            bench.ordered().result(0)
    monkeypatch.setattr(exports, "export_policy", lambda path, *_, **__: path.mkdir(parents=True))
    assert bench.ordered().result(0).endswith("exports/now"), "the next one is written"


def test_a_model_that_is_whole_in_host_memory_is_exported_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, written = Bench(tmp_path), []
    monkeypatch.setattr(gather, "_allocate", lambda *_: pytest.fail("it took memory for a copy"))
    monkeypatch.setattr(exports, "export_policy", lambda path, tensors, *_, **__: written.append(tensors))
    bench.ordered().result(0)
    state = bench.model.state_dict()
    assert written[0].keys() == state.keys()
    assert all(tensor.data_ptr() == state[name].data_ptr() for name, tensor in written[0].items())
    assert not any(tensor.requires_grad for tensor in written[0].values())


def test_an_export_asks_for_memory_before_it_takes_any(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "available_bytes", lambda: 100)
    monkeypatch.setattr(gather, "_allocate", lambda *_: pytest.fail("it took memory that is not there"))
    with pytest.raises(Unavailable, match=r"this host has 0 MB left\); `paceline export` makes one"):
        bench.ordered().result(0)


def test_what_leaves_the_ranks_at_different_points_ends_the_session(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.rank.world_size = 2
    monkeypatch.setattr(exports, "broadcast_bytes", lambda data: data)
    monkeypatch.setattr(gather, "_gather", no_device_memory)
    with pytest.raises(torch.OutOfMemoryError):
        bench.ordered()


def test_a_rank_whose_peer_has_no_memory_goes_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed_elsewhere(*_: Any, **__: Any) -> Any:
        raise FailedElsewhere("another rank cannot do its part")

    bench.rank.world_size = 2
    monkeypatch.setattr(exports, "broadcast_bytes", lambda data: data)
    monkeypatch.setattr(gather, "succeed_on_all_ranks", failed_elsewhere)
    with pytest.raises(FailedElsewhere):
        bench.ordered().result(0)


def test_rank_0_alone_removes_what_a_killed_export_left(tmp_path: Path) -> None:
    left_over = tmp_path / "exports" / ".now.partial-4194305"
    left_over.mkdir(parents=True)
    bench = Bench(tmp_path)
    rank: Any = bench.rank
    RunExports("test-1", tmp_path, make_spec(tmp_path), rank).remove_left_overs()
    assert left_over.exists()
    bench.exports.remove_left_overs()
    assert not left_over.exists()
