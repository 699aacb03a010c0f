"""How fast new weights reach rollout workers, against what the machine could do at best.

    python benchmarks/weights.py [--sizes 1M,10M,50M,100M] [--receivers 1,2] [--rounds 7] [--json]

Collective channel: bringing one version to all receivers, until they have compared its checksums, against a raw gloo
broadcast of the same bytes; and the pause that the sampler sees against one copy of the weights in memory; in turns in
one run. Receivers are processes with a native engine each. Sizes that do not fit in half of the free memory are skipped and said so.
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
from weights import collective
from weights.models import SHAPES

COPIES = 3
"""Of a model in each receiver: the engine's, the one that arrives, the raw broadcast's."""


def main() -> None:
    """Parses, measures, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="1M,10M,50M,100M", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--receivers", default="1,2", help="numbers of receivers, 1 to 8")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": _machine()}
    with tempfile.TemporaryDirectory(prefix="paceline-weights-") as name:
        result |= _collective(Path(name), options)
    result["load_average_after"] = os.getloadavg()[0]
    if options.json:
        json.dump(result, sys.stdout)
        print()


def _collective(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for size in options.sizes.split(","):
        for receivers in map(int, options.receivers.split(",")):
            needed = _bytes(size) * (2 + COPIES * receivers)
            if needed > psutil.virtual_memory().available / 2:
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
