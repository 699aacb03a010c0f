"""The speed at which new weights reach rollout workers, against the best that the machine could do.

    python benchmarks/weights.py [--sizes 1M,10M,50M,100M] [--receivers 1,2] [--rounds 7] [--json]

Collective channel: bringing one version to all receivers, until they have compared its checksums, against a raw gloo
broadcast of the same bytes; and the pause that the sampler sees against one copy of the weights in memory; in turns in
one run. Receivers are processes with a native engine each. Sizes that do not fit in three quarters of the free memory are skipped and said so.

Delta channel: bytes and seconds of a version over Adam steps, and whether each of them is read back bit for bit
(benchmarks/weights/delta.py says what the weights and the gradients are). `--sizes ""` leaves the collective channel out.
Results: docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import psutil
from weights import collective, delta
from weights.models import SHAPES

MEMORY_SHARE = 0.75
COPIES = 3
"""Copies of a model in each receiver: the engine's, the arriving one, the raw broadcast's."""


def main() -> None:
    """Parses, measures, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="1M,10M,50M,100M", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--receivers", default="1,2", help="numbers of receivers, 1 to 8")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--delta-sizes", default="50M", help="sizes for the delta channel; empty for none")
    parser.add_argument("--lrs", default="1e-6,2e-6,3e-6", help="learning rates for the delta channel")
    parser.add_argument("--versions", type=int, default=50, help="deltas at each learning rate")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": _machine()}
    with tempfile.TemporaryDirectory(prefix="paceline-weights-") as name:
        result |= _collective(Path(name), options)
        result |= _delta(Path(name), options)
    result["load_average_after"] = os.getloadavg()[0]
    if options.json:
        json.dump(result, sys.stdout)
        print()


def _collective(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for size in filter(None, options.sizes.split(",")):
        for receivers in map(int, options.receivers.split(",")):
            needed = _bytes(size) * (2 + COPIES * receivers)
            if needed > psutil.virtual_memory().available * MEMORY_SHARE:
                print(f"{size} to {receivers}: skipped, needs {needed / 1e9:.1f} GB", file=sys.stderr)
                continue
            row = collective.measure(directory, size, receivers, options.rounds)
            rows.append(row)
            print(
                f"{size:>5} {row['bytes'] / 1e6:8.1f} MB to {receivers}: raw {row['raw_s']:.3f} s, transfer "
                f"{row['transfer_s']:.3f} s ({row['fraction_of_raw']:.0%} of raw, {row['gigabytes_per_s']:.2f} GB/s), "
                f"publish {row['publish_s']:.3f} s, pause {row['pause_s'] * 1e3:.1f} ms ({row['pause_over_memcpy']:.2f} × memcpy)",
                file=sys.stderr,
            )
    large = [row for row in rows if row["bytes"] >= 100e6]
    return {
        "collective": rows,
        "collective_fraction_of_raw": min((row["fraction_of_raw"] for row in large), default=None),
        "sampler_pause_over_memcpy": max((row["pause_over_memcpy"] for row in large), default=None),
    }


def _delta(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for size in filter(None, options.delta_sizes.split(",")):
        for lr in map(float, options.lrs.split(",")):
            row = delta.measure(directory, size, lr, options.versions)
            rows.append(row)
            print(
                f"{size:>5} {row['bytes'] / 1e6:8.1f} MB at lr {lr:.0e}: {row['versions']} versions bit-identical, payload "
                f"{row['payload_fraction_mean']:.2%} of the model (at most {row['payload_fraction_max']:.2%}), written "
                f"{row['write_s']:.3f} s after staging, read in {row['read_s']:.3f} s",
                file=sys.stderr,
            )
    fractions = [row["payload_fraction_mean"] for row in rows]
    return {
        "delta": rows,
        "delta_payload_fraction_mean": sum(fractions) / len(fractions) if fractions else None,
    }


def _bytes(size: str) -> int:
    hidden, layers, vocabulary = SHAPES[size]
    return 2 * (vocabulary * hidden + layers * 12 * hidden * hidden)


def _machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "load_average_before": os.getloadavg()[0],
        "torch": version("torch"),
    }


if __name__ == "__main__":
    main()
