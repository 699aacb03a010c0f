"""The delta channel's codec on one core: nanoseconds of an element of the model, and how far two threads get.

Two versions, one Adam step apart (`benchmarks/weight_cases/delta.py` says what the weights are), are cut into the store's
chunks. Coding includes the comparison, decoding the overwrites in place. The time is that of the thread, not of the clock, so
other work on the machine disturbs it by caches and memory only; the median over the rounds is reported.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from paceline.weights.format.delta_codec import decode, encode
from paceline.weights.store.store_layout import RankLayout
from paceline.weights.store.version_source import chunk_bits, whole_slices
from weight_cases.delta import WARM_UP, Trained

Pair = tuple[Any, Any]


def measure(size: str, lr: float, rounds: int) -> dict[str, Any]:
    """Measures at one learning rate. Raises AssertionError when a bit differs."""
    trained = Trained(size, lr, seed=0)
    for _ in range(WARM_UP):
        trained.step()
    versions = []
    for _ in range(2):
        slices, _ = whole_slices(trained.wire())
        layout = RankLayout(tuple(part.block for part in slices))
        versions.append([chunk_bits(slices, layout, chunk) for chunk in range(len(layout.chunks))])
        trained.step()
    pairs = list(zip(*versions, strict=True))
    elements = sum(len(base_N) for base_N, _ in pairs)
    coded = [encode(*pair) for pair in pairs]
    for (base_N, new_N), data in zip(pairs, coded, strict=True):
        np.testing.assert_array_equal(applied(base_N.copy(), data), new_N)
    held = [base_N.copy() for base_N, _ in pairs]
    encode_s = [seconds(lambda: [encode(*pair) for pair in pairs]) for _ in range(rounds)]
    decode_s = []
    for _ in range(rounds):
        for kept_N, (base_N, _) in zip(held, pairs, strict=True):
            kept_N[:] = base_N
        decode_s.append(seconds(lambda: [applied(*each) for each in zip(held, coded, strict=True)]))
    return {
        "size": size,
        "elements": elements,
        "lr": lr,
        "changed_fraction": sum(int((a != b).sum()) for a, b in pairs) / elements,
        "codec_fraction": sum(len(data or b"") for data in coded) / (2 * elements),
        "encode_ns_per_element": statistics.median(encode_s) / elements * 1e9,
        "decode_ns_per_element": statistics.median(decode_s) / elements * 1e9,
        "two_threads_speedup": _speedup(pairs),
    }


def applied(held_N: Any, data: bytes | None) -> Any:
    """Change the held bits in place, as a reader does."""
    if data is not None:
        positions_K, values_K = decode(data, held_N)
        held_N[positions_K] = values_K
    return held_N


def seconds(work: Callable[[], object]) -> float:
    """Seconds of this thread."""
    started_s = time.thread_time()
    work()
    return time.thread_time() - started_s


def _speedup(pairs: list[Pair]) -> float:
    """How much faster two threads code than one, by the clock: 2 where neither core has other work."""
    taken_s = []
    for threads in (1, 2):
        with ThreadPoolExecutor(threads) as pool:
            started_s = time.perf_counter()
            list(pool.map(lambda pair: encode(*pair), pairs))
            taken_s.append(time.perf_counter() - started_s)
    return taken_s[0] / taken_s[1]
