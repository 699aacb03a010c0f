"""A link: the two-rank process group that carries weights from the learner (rank 0) to one rollout member (rank 1).

The promise: forming, sending and receiving each end by their deadline or raise; and what a link's failure can touch is
that link alone. Learnt from gloo: `abort()` frees nothing, an operation ends at its own time-out, and a sender can
report success while the receiver got nothing. So every operation gets a time-out, a link that failed once is dropped
and never used again, and only the receiver's own acknowledgement, which does not travel here, proves anything.

Torch is imported when a link is formed, not before.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from paceline.errors import Unavailable
from paceline.weights.manifest import WeightManifest
from paceline.weights.plain_network import check_plain
from paceline.weights.shared_memory_link import SharedLink

if TYPE_CHECKING:
    import torch

SENDER, MEMBER = 0, 1
IN_FLIGHT = 2
"""Buckets under way at one time: one on the wire while the next is prepared."""

CONNECT_TIMEOUT = timedelta(seconds=20)
"""The longest attempt to reach the rendezvous, which listens before it is offered. Torch cannot be interrupted in it.

Never shorter, whatever the wait for the peer: before it connects, torch asks the resolver for the host's name (`getnameinfo`
in c10d's socket.cpp), also for a numeric address and within the same time-out. One lost answer of a name server takes
5 s (resolv.conf(5), `timeout`), which failed every link whose wait was not longer.
"""


class WeightLink:
    """One formed group of two. Used by one thread at a time; after an error it is only good for dropping."""

    def __init__(self, group: Any, rank: int, max_wait_s: float) -> None:
        self._group = group
        self._peer = 1 - rank
        self._max_wait_s = max_wait_s

    def send(
        self,
        flat: torch.Tensor,
        manifest: WeightManifest,
        on_bucket: Callable[[int], None] | None = None,
    ) -> None:
        """Send `flat` ([total_bytes] uint8 in host memory) bucket by bucket; `on_bucket` gets the number of bytes sent.

        Returning proves nothing about the other side. Raises Unavailable when a bucket took longer than max_wait_s.
        """

        def start(begin: int, end: int) -> tuple[Any, torch.Tensor]:
            bucket = flat[begin:end]
            return self._group.send([bucket], self._peer, 0), bucket

        self._run(manifest, start, on_bucket)

    def receive(
        self,
        flat: torch.Tensor,
        manifest: WeightManifest,
        on_bucket: Callable[[int], None] | None = None,
    ) -> None:
        """Fill `flat` ([total_bytes] uint8 in host memory); `on_bucket` gets the bytes received so far."""

        def start(begin: int, end: int) -> tuple[Any, torch.Tensor]:
            bucket = flat[begin:end]
            return self._group.recv([bucket], self._peer, 0), bucket

        self._run(manifest, start, on_bucket)

    def _run(
        self,
        manifest: WeightManifest,
        start: Callable[[int, int], tuple[Any, torch.Tensor]],
        on_bucket: Callable[[int], None] | None,
    ) -> None:
        under_way: deque[tuple[int, Any, torch.Tensor]] = deque()
        for begin, end in manifest.buckets():
            if len(under_way) == IN_FLIGHT:
                self._finish(under_way.popleft(), on_bucket)
            work, bucket = start(begin, end)
            under_way.append((end, work, bucket))
        while under_way:
            self._finish(under_way.popleft(), on_bucket)

    def _finish(
        self, started: tuple[int, Any, torch.Tensor], on_bucket: Callable[[int], None] | None
    ) -> None:
        end, work, _ = started
        try:
            work.wait(timedelta(seconds=self._max_wait_s))
        except RuntimeError as error:
            raise Unavailable(f"weights stopped before byte {end}: {first_line(error)}") from error
        if on_bucket is not None:
            on_bucket(end)


POLL_S = 0.05
"""Longest pause between two checks for the other side."""


def serve_rendezvous(bind_host: str, port: int, max_wait_s: float) -> tuple[Any, int]:
    """Start the rendezvous where links are formed, on one address only. Return its TCP store and its port (`port` 0: a
    free one)."""
    import torch.distributed as dist

    family = socket.AF_INET6 if ":" in bind_host else socket.AF_INET
    # Left to itself the store listens on every interface.
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((bind_host, port))
        listener.listen(512)
    except OSError:
        listener.close()
        raise
    bound_port = int(listener.getsockname()[1])
    store = dist.TCPStore(  # type: ignore[attr-defined]
        reachable_from_here(bind_host),
        bound_port,
        is_master=True,
        wait_for_workers=False,
        timeout=CONNECT_TIMEOUT,
        master_listen_fd=listener.detach(),
    )
    store.set_timeout(timedelta(seconds=max_wait_s))
    return store, bound_port


def form_link(
    *,
    backend: str,
    store_host: str,
    store_port: int,
    prefix: str,
    rank: int,
    max_wait_s: float,
    host: str = "127.0.0.1",
    allow_plaintext: bool = False,
    given_up: Callable[[], bool] = lambda: False,
) -> WeightLink | SharedLink:
    """Meet the other rank under `prefix` and forms the group of two. Blocks up to about max_wait_s.

    `host` is this side's address as the peer reaches it (gloo). A prefix serves once. `given_up` is asked while the
    peer is waited for. Raises Unavailable when it did not come, or nobody waits any more; InvalidInput for a link beyond this host
    without `allow_plaintext`, where this process has certificates. Forming with a peer that stopped in the middle may outlast
    max_wait_s, so call it from a thread that can be left behind.
    """
    import torch.distributed as dist

    if backend == "gloo":
        remedy = "let the host's agent bring them (weights.backend auto)"
        check_plain("a link by gloo", (store_host, host), allowed=allow_plaintext, remedy=remedy)

    timeout = timedelta(seconds=max_wait_s)
    try:
        client = dist.TCPStore(  # type: ignore[attr-defined]
            store_host, store_port, is_master=False, timeout=CONNECT_TIMEOUT
        )
        client.set_timeout(timeout)
        store = dist.PrefixStore(prefix, client)  # type: ignore[attr-defined]
        # Both say they are here before either starts: a peer that is away then costs a wait with a deadline and
        # not a half-formed group.
        store.set(f"here/{rank}", "1")
        _await_peer(store, f"here/{1 - rank}", max_wait_s, given_up)
        if backend == "gloo":
            return WeightLink(_gloo(store, rank, timeout, host), rank, max_wait_s)
        if backend == "shared":
            return SharedLink(store, max_wait_s)
    except RuntimeError as error:
        raise Unavailable(f"no link {prefix!r}: {first_line(error)}") from error
    raise ValueError(f"weight backend {backend!r} is neither 'gloo' nor 'shared'")


def _await_peer(store: Any, key: str, max_wait_s: float, given_up: Callable[[], bool]) -> None:
    deadline_s, pause_s = time.monotonic() + max_wait_s, 0.001
    # Asked for again and again: a wait inside the store could not be given up, and would hold a thread and a connection.
    while not store.check([key]):
        if given_up():
            raise Unavailable("given up while the other side was waited for")
        if time.monotonic() > deadline_s:
            raise Unavailable(f"the other side did not come within {max_wait_s} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S)


def _gloo(store: Any, rank: int, timeout: timedelta, host: str) -> Any:
    import torch.distributed as dist

    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, rank, 2, options)


def reachable_from_here(bind_host: str) -> str:
    """Return the address under which this machine reaches what it bound to `bind_host`."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(bind_host, bind_host)


def first_line(error: BaseException) -> str:
    """Return the error's message without the native stack trace that torch appends."""
    return (str(error).strip() or repr(error)).splitlines()[0]
