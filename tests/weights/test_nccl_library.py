"""NCCL's interface by its contract: a library that accepts the documented calls, and a machine without one."""

from __future__ import annotations

import ctypes
import glob
import sysconfig
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import Unavailable
from paceline.weights.nccl_library import IN_PROGRESS, SUCCESS, UINT8, UNIQUE_ID_BYTES, LoadedNccl

REMOTE_ERROR = 6
ID = bytes(range(UNIQUE_ID_BYTES))


class Recorded:
    """A C library that records its calls. `state` is the communicator's, `result` a call's result."""

    def __init__(self) -> None:
        self.state, self.result = IN_PROGRESS, SUCCESS
        self.calls: list[tuple[Any, ...]] = []

    def library(self) -> SimpleNamespace:
        return SimpleNamespace(
            ncclGetErrorString=self._text(),
            ncclGetVersion=lambda found: self._set(found, 22907),
            ncclGetUniqueId=lambda made: self._fill(made),
            ncclCommInitRankConfig=self._begin,
            ncclCommGetAsyncError=lambda communicator, state: self._set(state, self.state),
            ncclSend=lambda *given: self._transfer("send", *given),
            ncclRecv=lambda *given: self._transfer("receive", *given),
            ncclCommAbort=lambda communicator: self._note("abort", communicator.value),
        )

    def _text(self) -> Any:
        def text(result: int) -> bytes:
            return b"remote process exited" if result == REMOTE_ERROR else b"invalid usage"

        return text

    def _set(self, reference: Any, value: int) -> int:
        reference._obj.value = value
        return self.result

    def _fill(self, reference: Any) -> int:
        ctypes.memmove(reference, ID, UNIQUE_ID_BYTES)
        return self.result

    def _begin(self, communicator: Any, ranks: int, unique_id: Any, rank: int, config: Any) -> int:
        # ncclConfig_t of NCCL 2.14: size_t size, unsigned magic, unsigned version, int blocking.
        fields = bytes(config._obj)
        assert len(fields) == 24
        size = int.from_bytes(fields[:8], "little")
        magic, version, blocking = (int.from_bytes(fields[at : at + 4], "little") for at in (8, 12, 16))
        communicator._obj.value = 77
        return self._note("begin", bytes(unique_id), rank, ranks, size, magic, version, blocking)

    def _transfer(self, name: str, memory: Any, size: Any, kind: int, peer: int, handle: Any, stream: Any) -> int:
        return self._note(name, memory.value, size.value, kind, peer, handle.value, stream.value)

    def _note(self, *call: Any) -> int:
        self.calls.append(call)
        return self.result


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    made = Recorded()
    monkeypatch.setattr(ctypes, "CDLL", lambda path: made.library())
    return made


def test_a_communicator_is_begun_without_blocking_and_bytes_go_by_address(recorded: Recorded) -> None:
    nccl = LoadedNccl()
    assert nccl.version() == 22907
    assert nccl.unique_id() == ID
    communicator = nccl.begin(ID, 1, 2)
    assert not nccl.done(communicator)
    recorded.state = SUCCESS
    assert nccl.done(communicator)
    nccl.send(communicator, 1 << 40, 5 << 32, peer=0, stream=9)
    nccl.receive(communicator, 64, 8, peer=0, stream=0)
    nccl.abort(communicator)
    assert recorded.calls == [
        ("begin", ID, 1, 2, 24, 0xCAFEBEEF, 21400, 0),
        ("send", 1 << 40, 5 << 32, UINT8, 0, 77, 9),
        ("receive", 64, 8, UINT8, 0, 77, None),
        ("abort", 77),
    ]


def test_a_peer_that_died_is_an_error_of_the_poll_and_can_be_aborted(recorded: Recorded) -> None:
    nccl = LoadedNccl()
    communicator = nccl.begin(ID, 0, 2)
    recorded.state = REMOTE_ERROR
    with pytest.raises(Unavailable, match="NCCL: remote process exited"):
        nccl.done(communicator)
    nccl.abort(communicator)
    assert recorded.calls[-1] == ("abort", 77)


def test_a_call_under_way_is_no_error_and_any_other_result_is(recorded: Recorded) -> None:
    nccl = LoadedNccl()
    recorded.result = IN_PROGRESS
    communicator = nccl.begin(ID, 0, 2)
    nccl.send(communicator, 64, 8, peer=1, stream=3)
    recorded.result = 5
    for call in (
        nccl.version,
        nccl.unique_id,
        lambda: nccl.begin(ID, 0, 2),
        lambda: nccl.abort(communicator),
    ):
        with pytest.raises(Unavailable, match="NCCL: invalid usage"):
            call()
    with pytest.raises(Unavailable, match="NCCL: invalid usage"):
        nccl.receive(communicator, 64, 8, peer=1, stream=3)


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
