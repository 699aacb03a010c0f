"""The same chain of versions in object stores: fsspec's memory, and an S3 server (moto) on loopback."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest
from store_pair import Pair, check, offer

from paceline.errors import NotFound, Unavailable
from paceline.groups import Version
from paceline.weights.store.object_store import WeightStore
from paceline.weights.store.reader import Damaged

SERVER = """
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
input()
"""
LARGE_BYTES = (64 << 20) + 12345
"""More than a store writes or reads in one request."""


@pytest.fixture(scope="module")
def s3_server() -> Iterator[int]:
    """The port of an S3 server that is empty."""
    for package in ("s3fs", "moto"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install s3fs 'moto[server]'")
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdin is not None
        assert server.stdout is not None
        with server.stdin, server.stdout:
            line = server.stdout.readline()
            assert line, "the server ended"
            yield int(line)
    finally:
        server.kill()
        server.wait()


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store without an object."""
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/weights"
    port = request.getfixturevalue("s3_server")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    import s3fs

    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(bucket)
    return f"s3://{bucket}/weights"


@pytest.fixture
def pair(url: str) -> Iterator[Pair]:
    pair = Pair(url, anchor_interval=4)
    yield pair
    pair.writer.close()


def test_a_chain_is_bit_identical_and_a_late_reader_catches_up(pair: Pair) -> None:
    reader, late = pair.reader(), pair.reader()
    check(reader.fetch(offer(pair, pair.step(0))), pair.expected())
    for step in range(1, 7):
        newest = pair.step(step)
        check(reader.fetch(offer(pair, newest)), pair.expected())
    assert newest.snapshot_version == Version(1, 4)
    check(late.fetch(offer(pair, newest)), pair.expected())


def test_what_is_damaged_or_gone_is_refused_and_repaired(pair: Pair) -> None:
    reader = pair.reader()
    reader.fetch(offer(pair, pair.step(0)))
    pair.step(1)
    name = "000001-00000001/delta.0.safetensors"
    data = bytearray(pair.store.read(name))
    data[-1] ^= 1
    pair.store.write(name, [bytes(data)])
    stored = pair.step(2)
    with pytest.raises(Damaged, match="000001-00000001"):
        reader.fetch(offer(pair, stored))
    pair.store.remove([name])
    with pytest.raises(Damaged, match="has no 000001-00000001"):
        reader.fetch(offer(pair, stored))
    pair.writer.put_snapshot()
    check(reader.fetch(offer(pair, pair.with_snapshot(2))), pair.expected())


def test_old_objects_are_pruned_and_those_of_an_earlier_session_go(pair: Pair, url: str) -> None:
    for step in range(9):
        pair.step(step)
    pair.with_snapshot(8)
    pair.step(9)  # its job begins once that of the snapshot, pruning included, is over
    pair.writer.close()
    names = pair.store.names()
    assert not [name for name in names if name < "000001-00000004"]
    assert "000001-00000008/anchor.json" in names
    again = Pair(url, session=2)
    try:
        again.step(0)
        again.step(1)
    finally:
        again.writer.close()
    assert {name[:6] for name in again.store.names()} == {"000002"}


def test_objects_come_back_whole_in_whatever_pieces(url: str) -> None:
    store = WeightStore(url)
    data = os.urandom(1 << 20) * 65
    large = data[:LARGE_BYTES]
    store.write("folder/large", [large[:100], large[100:]])
    assert store.read("folder/large", len(large)) == large
    store.write("folder/large", [b"replaced"])
    assert store.read("folder/large", 8) == b"replaced"
    assert store.read("folder/large") == b"replaced"
    assert store.names() == ["folder/large"]
    store.remove(["folder/large", "folder/never-was"])
    assert store.names() == []
    with pytest.raises(NotFound, match="has no folder/large"):
        store.read("folder/large", 8)


def test_a_server_that_is_away_is_said_to_be_unavailable(s3_server: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # the client library's time-outs are not tested here
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()  # else the client would be one that has the server's address
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # taken, and not listening
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        store = WeightStore("s3://nobody/weights")
        with pytest.raises(Unavailable, match="s3://nobody/weights: x cannot be read"):
            store.read("x", 1)
        with pytest.raises(Unavailable, match="s3://nobody/weights: x cannot be written"):
            store.write("x", [b"1"])
