"""Segments of host memory: the same bytes in every process, one generation at a time, however a reader ends."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from paceline.errors import Unavailable, WireError
from paceline.host.page_lock import PageLocks
from paceline.weights.hosts.segment import FOOTER, MAGIC, HostSegment

SIZE_BYTES = 3 * mmap.PAGESIZE + 100
BUCKET_BYTES = mmap.PAGESIZE

READER = """
import sys
from paceline.weights.hosts.segment import HostSegment
segment = HostSegment.open(sys.argv[1])
with segment.reading(int(sys.argv[2])):
    print(sum(segment.memory()), segment.num_buckets, segment.digest(0, int(sys.argv[2])), flush=True)
    sys.stdin.readline()
"""


@contextmanager
def reader_of(segment: HostSegment, generation: int) -> Iterator[subprocess.Popen[str]]:
    """Another process that reads `generation` until its stdin ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", READER, segment.path, str(generation)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.communicate()


def test_another_process_sees_bytes_and_digests_of_a_generation() -> None:
    segment = HostSegment.create(SIZE_BYTES, BUCKET_BYTES)
    generation = segment.begin()
    segment.flat()[:] = 3
    segment.publish(0, b"digest")
    segment.complete()
    with reader_of(segment, generation) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == f"{3 * SIZE_BYTES} 4 b'digest'\n"


def test_a_segment_that_is_read_is_not_begun_anew_until_the_reader_has_finished() -> None:
    segment = HostSegment.create(SIZE_BYTES, BUCKET_BYTES)
    generation = segment.begin()
    with reader_of(segment, generation) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        with pytest.raises(Unavailable, match="generation 1 is still read;"):
            segment.begin()
        assert segment.generation == generation
    assert segment.begin() == generation + 1


def test_a_reader_that_is_killed_or_stopped_for_good_has_finished() -> None:
    segment = HostSegment.create(SIZE_BYTES, BUCKET_BYTES)
    generation = segment.begin()
    with reader_of(segment, generation) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        reader.send_signal(signal.SIGSTOP)
        with pytest.raises(Unavailable):
            segment.begin()
        reader.kill()
        reader.wait()
        assert segment.begin() == generation + 1


def test_the_writers_own_process_can_read_too() -> None:
    segment = HostSegment.create(SIZE_BYTES, BUCKET_BYTES)
    generation = segment.begin()
    with segment.reading(generation):
        with segment.reading(generation), pytest.raises(Unavailable):
            segment.begin()
        with pytest.raises(Unavailable):
            segment.begin()
    assert segment.begin() == 2


def test_a_reader_that_comes_too_late_is_refused() -> None:
    segment = HostSegment.create(SIZE_BYTES, BUCKET_BYTES)
    old, new = segment.begin(), segment.begin()
    overwritten = "generation 1 of the segment was overwritten: the segment has 2 now"
    with pytest.raises(Unavailable, match=overwritten), segment.reading(old):
        pass
    with segment.reading(new):
        pass


def test_buckets_are_published_one_by_one_and_forgotten_with_the_generation() -> None:
    segment = HostSegment.create(SIZE_BYTES, BUCKET_BYTES)
    first = segment.begin()
    assert [segment.digest(i, first) for i in range(4)] == [None] * 4
    segment.publish(2, b"a" * 32)
    segment.publish(3, b"b")
    assert [segment.digest(i, first) for i in range(4)] == [None, None, b"a" * 32, b"b"]
    assert segment.complete_generation == 0
    segment.complete()
    assert segment.complete_generation == first
    second = segment.begin()
    assert [segment.digest(i, second) for i in range(4)] == [None] * 4
    assert segment.complete_generation == first
    for bucket, digest in ((4, b"a"), (-1, b"a"), (0, b""), (0, b"a" * 33)):
        with pytest.raises(ValueError, match=f"bucket {bucket} of 4 cannot have a digest of {len(digest)} bytes"):
            segment.publish(bucket, digest)


def test_bytes_are_received_into_the_memory_itself() -> None:
    segment = HostSegment.create(SIZE_BYTES, BUCKET_BYTES)
    flat = segment.flat()
    near, far = socket.socketpair()
    with near, far, segment.memory()[-100:] as last:
        far.sendall(b"x" * 100)
        assert len(last) == 100
        assert near.recv_into(last) == 100
    assert flat[-100:].tolist() == [ord("x")] * 100
    assert flat.data_ptr() % mmap.PAGESIZE == 0


def test_a_descriptor_that_was_passed_is_the_same_memory_with_locks_of_its_own() -> None:
    segment = HostSegment.create(SIZE_BYTES, BUCKET_BYTES)
    generation = segment.begin()
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far:
        socket.send_fds(near, [b"s"], [segment.fd])
        (passed,) = socket.recv_fds(far, 1, 1)[1]
    other = HostSegment.attach(passed)
    os.close(passed)
    assert other.identity == segment.identity
    segment.flat()[5] = 77
    assert other.flat()[5] == 77
    with other.reading(generation), pytest.raises(Unavailable):
        segment.begin()
    assert segment.begin() == other.generation == 2


def test_tensors_outlive_both_ends() -> None:
    segment = HostSegment.create(SIZE_BYTES, BUCKET_BYTES)
    path, segment.flat()[:] = segment.path, 5
    other = HostSegment.open(path)
    flat = other.flat()
    segment.close()
    other.close()
    del segment, other
    assert not os.path.exists(path)
    assert torch.equal(flat, torch.full_like(flat, 5))


def test_pages_are_locked_where_the_weights_lie_until_the_segment_is_closed() -> None:
    calls: list[tuple[int, ...]] = []

    class Runtime:
        def cudaHostRegister(self, *arguments: int) -> int:
            calls.append(arguments)
            return 0

        def cudaHostUnregister(self, *arguments: int) -> int:
            calls.append(arguments)
            return 0

    segment = HostSegment.create(SIZE_BYTES, BUCKET_BYTES)
    segment._locks = PageLocks(Runtime())
    address = segment.flat().data_ptr()
    assert segment.page_lock([(100, 200)]) == mmap.PAGESIZE
    assert segment.page_lock() == 4 * mmap.PAGESIZE
    del segment  # as after closing: another mapping may get the same address
    second = address + mmap.PAGESIZE
    assert calls[:2] == [(address, mmap.PAGESIZE, 0), (second, 3 * mmap.PAGESIZE, 0)]
    assert sorted(calls[2:]) == [(address,), (second,)]


def test_the_size_cannot_change_under_a_reader() -> None:
    segment = HostSegment.create(SIZE_BYTES, BUCKET_BYTES)
    for size_bytes in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size_bytes)


@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/self/fd/1/../../../etc/passwd", "", "x" * 1000])
def test_a_path_that_is_no_segment_is_refused(path: str) -> None:
    with pytest.raises(Unavailable, match="is offered as a segment of memory, but is not one"):
        HostSegment.open(path)


def test_other_files_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"cannot be opened \(No such file or directory\)"):
        HostSegment.open(f"/proc/{os.getpid()}/fd/99999")
    cut_off = "can be truncated while it is read"
    with open(tmp_path / "plain", "wb+") as plain, pytest.raises(Unavailable, match=cut_off):
        HostSegment.attach(plain.fileno())


def sealed(content: bytes, size_bytes: int) -> int:
    fd = os.memfd_create("x", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    os.pwrite(fd, content, size_bytes - len(content))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


@pytest.mark.parametrize(
    ("footer", "message"),
    [
        (b"", "its last bytes are"),
        (FOOTER.pack(MAGIC, 1, 1, 1 << 40, 1 << 40, 0, 0), "its footer has 1099511627776 in 1 buckets"),
        (FOOTER.pack(MAGIC, 1, 1 << 31, 1 << 31, 1, 0, 0), "in 2147483648 buckets of 1"),
        (FOOTER.pack(MAGIC, 1, 1, 100, 0, 0, 0), "in 1 buckets of 0"),
    ],
)
def test_a_footer_that_lies_is_refused(footer: bytes, message: str) -> None:
    fd = sealed(footer, 2 * mmap.PAGESIZE)
    with pytest.raises(Unavailable, match=message):
        HostSegment.attach(fd)
    os.close(fd)


def test_a_later_format_is_named() -> None:
    fd = sealed(FOOTER.pack(MAGIC, 2, 1, 100, 100, 0, 0), 2 * mmap.PAGESIZE)
    with pytest.raises(WireError, match="format 2, but this Paceline reads 1"):
        HostSegment.attach(fd)
    os.close(fd)


@pytest.mark.parametrize(("size_bytes", "bucket_bytes"), [(0, 1), (1, 0), (-1, 1), (1 << 40, 1)])
def test_impossible_sizes_are_refused(size_bytes: int, bucket_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"a segment cannot have {size_bytes} bytes in buckets of {bucket_bytes}"):
        HostSegment.create(size_bytes, bucket_bytes)
