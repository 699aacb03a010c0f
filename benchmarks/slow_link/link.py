"""A long and narrow link: carries packets between TUN devices in two network namespaces, each direction late and at a rate.

    python link.py NAMESPACE_A NAMESPACE_B --one-way-ms 10 --mbit 200

Needs root and /dev/net/tun, but no queueing discipline of the kernel. Each direction has a queue of `QUEUE_S` at its rate and
drops what comes beyond. A line `up` says that both devices, named `DEVICE`, are there; addresses are the caller's affair.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import fcntl
import os
import queue
import struct
import threading
import time

DEVICE = "slow0"
QUEUE_S = 0.2
LARGEST_PACKET = 65535
CLONE_NEWNET, TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x40000000, 0x400454CA, 1, 0x1000


def enter(namespace: str) -> None:
    """Makes a network namespace that of the calling thread, and of the threads and processes that it starts."""
    descriptor = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"the network namespace {namespace} cannot be entered")
    finally:
        os.close(descriptor)


class Direction:
    """Packets of one direction: read from `source`, written to `target` when they would have arrived."""

    def __init__(self, source: int, target: int, one_way_s: float, bytes_per_s: float) -> None:
        self._source = source
        self._target = target
        self._one_way_s = one_way_s
        self._bytes_per_s = bytes_per_s
        self._under_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def start(self) -> None:
        """Carries packets until the process ends."""
        for work in (self._take, self._deliver):
            threading.Thread(target=work, daemon=True).start()

    def _take(self) -> None:
        free_s = 0.0  # when all that was taken has left
        while True:
            packet = os.read(self._source, LARGEST_PACKET)
            now_s = time.monotonic()
            begins_s = max(now_s, free_s)
            if begins_s - now_s > QUEUE_S:
                continue
            free_s = begins_s + len(packet) / self._bytes_per_s
            self._under_way.put((free_s + self._one_way_s, packet))

    def _deliver(self) -> None:
        while True:
            due_s, packet = self._under_way.get()
            time.sleep(max(0.0, due_s - time.monotonic()))
            try:
                os.write(self._target, packet)
            except OSError as error:
                if error.errno != errno.EIO:  # the other end is not up yet, so the packet is lost
                    raise


def tun_device(namespace: str) -> int:
    """Creates the device in a namespace; the descriptor that reads what goes out there."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    enter(namespace)
    try:
        descriptor = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    finally:
        ctypes.CDLL(None).setns(home, CLONE_NEWNET)
        os.close(home)
    return descriptor


def main() -> None:
    """Carries packets until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("namespaces", nargs=2)
    parser.add_argument("--one-way-ms", type=float, required=True)
    parser.add_argument("--mbit", type=float, required=True)
    options = parser.parse_args()
    one, other = map(tun_device, options.namespaces)
    for ends in ((one, other), (other, one)):
        Direction(*ends, options.one_way_ms / 1e3, options.mbit * 1e6 / 8).start()
    print("up", flush=True)
    os.read(0, 1)


if __name__ == "__main__":
    main()
