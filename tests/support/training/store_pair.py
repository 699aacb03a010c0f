"""A writer and a reader of one weight store, and what the reader must have read."""

from __future__ import annotations

import queue
from collections.abc import Callable

import torch
from torch import nn

from paceline.groups import Version
from paceline.learner.collectives import broadcast_bytes
from paceline.learner.weights.device_snapshot import local_slices
from paceline.learner.weights.gather import plan_tensors
from paceline.weights.store.object_store import WeightStore
from paceline.weights.store.offers import Stored
from paceline.weights.store.rank_board import make_board
from paceline.weights.store.reader import StoreReader
from paceline.weights.store.store_format import StoreOffer
from paceline.weights.store.store_layout import CHUNK_ELEMENTS
from paceline.weights.store.writer import StoreWriter

DEADLINE_S = 60.0


BF16 = torch.bfloat16


class Tied(nn.Module):
    """A matrix under two names, one that never changes, a scalar, and a tensor without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(5000, 8) * 0.02)
        self.head = self.embedding
        self.frozen = nn.Parameter(torch.randn(7, 3), requires_grad=False)
        self.norm = nn.Parameter(torch.ones(8))
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("empty", torch.empty(0, 4))
        self.register_buffer("counter", torch.arange(5))


class Pair:
    """A writer of one rank, and readers, on one store."""

    def __init__(
        self,
        url: str,
        session: int = 1,
        anchor_interval: int = 100,
        chunk_elements: int = CHUNK_ELEMENTS,
        model: nn.Module | None = None,
    ) -> None:
        self.store = WeightStore(url)
        self.session = session
        self.model = Tied() if model is None else model
        self.stored: queue.Queue[Stored] = queue.Queue()
        self.held: Version | None = None
        self.writer = StoreWriter(
            store=self.store,
            board=make_board("127.0.0.1", "127.0.0.1", broadcast_bytes),
            run_id="run",
            rank=0,
            world_size=1,
            algorithm="xxh3_64",
            anchor_interval=anchor_interval,
            any_rank=lambda fact: fact,
            on_stored=self.stored.put,
            oldest_held=lambda: self.held,
            threads=2,
            chunk_elements=chunk_elements,
        )

    def reader(self) -> StoreReader:
        return StoreReader(self.store, "run")

    def step(self, step: int, change: bool = True) -> Stored:
        """Changes a few elements, writes the version and waits for it."""
        if change:
            with torch.no_grad():
                self.model.embedding[step % 50, step % 8] += 1.0
        self.put(Version(self.session, step))
        return self.told(lambda stored: stored.version.step == step)

    def put(self, version: Version) -> None:
        self.writer.put(version, local_slices(self.model, BF16), plan_tensors(self.model, BF16))

    def told(self, wanted: Callable[[Stored], bool]) -> Stored:
        """The next thing the writer says that is wanted; a snapshot is told after its version's delta."""
        while True:
            stored = self.stored.get(timeout=DEADLINE_S)
            if wanted(stored):
                return stored

    def with_snapshot(self, step: int) -> Stored:
        """Waits until the version has a snapshot."""
        return self.told(lambda stored: stored.snapshot_version.step == step)

    def expected(self) -> dict[str, torch.Tensor]:
        return {
            name: tensor.detach().to(BF16 if tensor.is_floating_point() else tensor.dtype).clone()
            for name, tensor in self.model.state_dict().items()
        }


def offer(pair: Pair, stored: Stored) -> StoreOffer:
    return StoreOffer(
        "run",
        1,
        "member",
        stored.version,
        pair.store.url,
        "xxh3_64",
        stored.manifest,
        stored.snapshot_version,
        stored.snapshot,
        stored.snapshot_bytes,
    )


def check(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(tensors) == list(expected)
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype
        assert tensors[name].shape == tensor.shape
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0)
    assert tensors["head"].data_ptr() == tensors["embedding"].data_ptr()
