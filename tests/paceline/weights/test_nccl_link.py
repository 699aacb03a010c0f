"""NCCL links by their contract: a fake library that forms, moves bytes, fails and aborts as NCCL documents it."""

from __future__ import annotations

import ctypes
import glob
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from paceline.errors import Conflict, Unavailable
from paceline.weights.manifest import TensorPlan, WeightManifest
from paceline.weights.nccl_library import UNIQUE_ID_BYTES, LoadedNccl
from paceline.weights.nccl_link import RECEIVER, SENDER, NcclLink, form_nccl_link

MANIFEST = WeightManifest.plan([TensorPlan("t", "uint8", (1000,), None)], bucket_bytes=300)


class Fabric:
    """What the two sides share: who has begun, and bytes under way."""

    def __init__(self) -> None:
        self.begun: set[int] = set()
        self.sent: list[bytes] = []
        self.waiting: list[tuple[FakeMemory, int, int]] = []
        self.dead = False


class FakeMemory:
    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)

    def pointer(self) -> int:
        return 0


class FakeNccl:
    """One side. Calls return at once; `done` tells; a peer's end is an error, and `abort` frees without it."""

    def __init__(self, fabric: Fabric, memory: FakeMemory, version: int = 22907) -> None:
        self._fabric, self._memory, self._version = fabric, memory, version
        self.calls: list[str] = []
        self.aborted = 0

    def version(self) -> int:
        return self._version

    def unique_id(self) -> bytes:
        return bytes(UNIQUE_ID_BYTES)

    def begin(self, unique_id: bytes, rank: int, ranks: int) -> Any:
        assert (len(unique_id), ranks) == (UNIQUE_ID_BYTES, 2)
        self.calls.append("begin")
        self._fabric.begun.add(rank)
        return object()

    def done(self, communicator: Any) -> bool:
        if self._fabric.dead:
            raise Unavailable("NCCL: remote process exited or there was a network error")
        while self._fabric.waiting and self._fabric.sent:
            memory, begin, end = self._fabric.waiting.pop(0)
            memory.data[begin:end] = self._fabric.sent.pop(0)
        return len(self._fabric.begun) == 2

    def send(self, communicator: Any, pointer: int, size_bytes: int, peer: int, stream: int) -> None:
        assert (peer, stream) == (RECEIVER, 7)
        self._fabric.sent.append(bytes(self._memory.data[pointer : pointer + size_bytes]))

    def receive(self, communicator: Any, pointer: int, size_bytes: int, peer: int, stream: int) -> None:
        assert (peer, stream) == (SENDER, 7)
        self._fabric.waiting.append((self._memory, pointer, pointer + size_bytes))

    def abort(self, communicator: Any) -> None:
        self.aborted += 1


class FakeStream:
    def __init__(self, fabric: Fabric, receives: bool) -> None:
        self._fabric, self._receives = fabric, receives

    def handle(self) -> int:
        return 7

    def is_idle(self) -> bool:
        return not (self._fabric.waiting if self._receives else self._fabric.sent)


class Pair:
    def __init__(self, versions: tuple[int, int] = (22907, 22907), max_wait_s: float = 30.0) -> None:
        self.fabric, self.store, self.max_wait_s = Fabric(), dist.HashStore(), max_wait_s  # type: ignore[attr-defined]
        self.memory = FakeMemory(bytes(i % 251 for i in range(1000))), FakeMemory(bytes(1000))
        self.library = tuple(FakeNccl(self.fabric, self.memory[rank], versions[rank]) for rank in (0, 1))

    def form(self, rank: int) -> NcclLink:
        stream = FakeStream(self.fabric, receives=rank == RECEIVER)
        return form_nccl_link(self.library[rank], self.store, rank, stream, self.max_wait_s)

    def both(self) -> list[Any]:
        """Results or errors of both sides' forming."""
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(self.form, rank) for rank in (SENDER, RECEIVER)]
            return [future.exception() or future.result() for future in futures]


def test_a_version_passes_bucket_by_bucket() -> None:
    pair = Pair()
    sender, receiver = pair.both()
    arrived: list[int] = []
    sending = threading.Thread(target=sender.send, args=(pair.memory[0], MANIFEST))
    sending.start()
    receiver.receive(pair.memory[1], MANIFEST, arrived.append)
    sending.join(30)
    assert pair.memory[1].data == pair.memory[0].data
    assert arrived == [300, 600, 900, 1000]
    for link in (sender, receiver):
        link.close()
        link.close()
    assert [library.aborted for library in pair.library] == [1, 1]


def test_another_version_is_refused_by_both_before_either_begins() -> None:
    pair = Pair(versions=(22907, 23007))
    for error in pair.both():
        assert isinstance(error, Conflict)
        assert "22907" in str(error)
        assert "23007" in str(error)
    assert [library.calls for library in pair.library] == [[], []]


def test_a_side_that_never_comes_costs_a_deadline() -> None:
    pair = Pair(max_wait_s=0.05)
    with pytest.raises(Unavailable, match="no NCCL link"):
        pair.form(RECEIVER)
    assert pair.library[RECEIVER].calls == []


def test_a_side_that_stops_in_the_middle_of_forming_is_aborted() -> None:
    pair = Pair(max_wait_s=1.0)
    pair.store.set("nccl/1", "22907")  # it said its version, and no more
    with pytest.raises(Unavailable, match="did not form"):
        pair.form(SENDER)
    assert pair.library[SENDER].aborted == 1


@pytest.mark.parametrize("dead", [True, False])
def test_a_peer_that_dies_or_stops_ends_this_link_only(dead: bool) -> None:
    pair, other = Pair(max_wait_s=2.0), Pair()
    sender, _ = pair.both()
    pair.fabric.dead = dead
    with pytest.raises(Unavailable, match="remote process exited" if dead else "bytes 0 to 300 did not pass"):
        sender.send(pair.memory[0], MANIFEST)
    assert pair.library[SENDER].aborted == 1
    with pytest.raises(Unavailable, match="has ended"):
        sender.send(pair.memory[0], MANIFEST)
    assert all(isinstance(link, NcclLink) for link in other.both())


def test_a_machine_without_nccl_says_so() -> None:
    if is_available():
        assert LoadedNccl().version() > 20000
    else:
        with pytest.raises(Unavailable, match="no NCCL is installed"):
            LoadedNccl()


def is_available() -> bool:
    try:
        ctypes.CDLL("libnccl.so.2")
    except OSError:
        return bool(glob.glob(f"{sysconfig.get_paths()['purelib']}/nvidia/nccl/lib/libnccl.so.2"))
    return True
