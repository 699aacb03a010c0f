"""Locking of pages, with a recording runtime in place of CUDA's."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from paceline.host.page_lock import PageLocks, TorchRuntime, merged

PAGE = mmap.PAGESIZE


class Recorder:
    """The two calls, answered with `code`."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.calls: list[tuple[str, int, int]] = []
        self.threads: set[threading.Thread] = set()

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        self.calls.append(("lock", address, size_bytes))
        self.threads.add(threading.current_thread())
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unlock", address, 0))
        return 0


def test_ranges_become_whole_pages_that_do_not_overlap() -> None:
    assert merged([]) == []
    assert merged([(5 * PAGE + 1, 5 * PAGE + 2), (0, 1)]) == [(0, PAGE), (5 * PAGE, 6 * PAGE)]
    assert merged([(10, PAGE + 10), (PAGE + 20, PAGE + 30), (2 * PAGE, 3 * PAGE)]) == [(0, 3 * PAGE)]
    assert merged([(0, 9 * PAGE), (PAGE, 2 * PAGE)]) == [(0, 9 * PAGE)]


def test_every_range_is_locked_once_and_all_are_unlocked() -> None:
    runtime = Recorder()
    locks = PageLocks(runtime)
    for _ in range(2):
        locks.lock([(0, 10), (4 * PAGE, 5 * PAGE)])
    assert runtime.calls == [("lock", 0, PAGE), ("lock", 4 * PAGE, PAGE)]
    assert locks.num_bytes == 2 * PAGE
    locks.unlock()
    assert sorted(runtime.calls[2:]) == [("unlock", 0, 0), ("unlock", 4 * PAGE, 0)]
    assert locks.num_bytes == 0


def test_no_page_is_locked_twice() -> None:
    runtime = Recorder()
    locks = PageLocks(runtime)
    locks.lock([(2 * PAGE, 3 * PAGE), (5 * PAGE, 6 * PAGE)])
    locks.lock([(0, 9 * PAGE)])
    locks.lock([(0, 10), (8 * PAGE, 10 * PAGE)])
    assert runtime.calls[2:] == [
        ("lock", 0, 2 * PAGE),
        ("lock", 3 * PAGE, 2 * PAGE),
        ("lock", 6 * PAGE, 3 * PAGE),
        ("lock", 9 * PAGE, PAGE),
    ]
    assert locks.num_bytes == 10 * PAGE


def test_a_refusal_is_logged_once_and_not_retried(caplog: pytest.LogCaptureFixture) -> None:
    runtime = Recorder(code=2)
    locks = PageLocks(runtime)
    for _ in range(2):
        locks.lock([(0, 10)])
    assert runtime.calls == [("lock", 0, PAGE)]
    assert "CUDA refuses to lock 4096 bytes" in caplog.text
    assert "(error 2)" in caplog.text
    assert (len(caplog.records), locks.num_bytes) == (1, 0)


def test_a_refusal_is_the_last_error_of_a_thread_that_has_ended() -> None:
    runtime = Recorder(code=712)  # cudaErrorHostMemoryAlreadyRegistered
    PageLocks(runtime).lock([(0, 10)])
    (thread,) = runtime.threads
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_the_gpu_is_that_of_the_caller() -> None:
    """A thread begins with the first GPU, where its first call would take memory for a context."""
    chosen = threading.local()
    chosen.device = 3
    registered = []

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        chosen.device = index
        yield

    class Runtime(Recorder):
        def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
            registered.append(chosen.device)
            return super().cudaHostRegister(address, size_bytes, flags)

    runtime = Runtime()
    cuda = SimpleNamespace(current_device=lambda: getattr(chosen, "device", 0), device=device, cudart=lambda: runtime)
    locks = PageLocks(TorchRuntime(cuda))
    locks.lock([(0, 10)])
    locks.unlock()
    assert registered == [3]
    assert [name for name, *_ in runtime.calls] == ["lock", "unlock"]
